"""CPU formats of a linear layer: exact packing, a row's bits, the self-test and its fallbacks."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch

from pagedraft.kernels import linear_cpu, linear_cpu_rows
from pagedraft.kernels.linear import dense_weight, linear, linear_ref, pack_linear
from pagedraft.tests.compare import assert_no_worse, assert_same_bits
from pagedraft.tests.inputs import num_threads, randn

FP16, BF16 = torch.float16, torch.bfloat16
CPU_SHAPES = {
    "qkv": (96, 576),
    "down": (40, 1536),
    "odd": (37, 75),
    "one_output": (1, 64),
}
ROW_COUNTS = (1, 2, 3, 5, 7, 14, 17, 31, 32, 37, 64, 67, 121)
FORMAT_NAMES = tuple(linear_cpu.FORMATS)


def exact_linear(*tensors: torch.Tensor | None) -> torch.Tensor:
    """y in fp64."""
    return linear_ref(*(None if t is None else t.double() for t in tensors))


@pytest.fixture(params=FORMAT_NAMES)
def format_name(request: pytest.FixtureRequest) -> str:
    """The CPU formats, each forced."""
    return request.param


@pytest.fixture(params=CPU_SHAPES.values(), ids=CPU_SHAPES)
def cpu_weight(request: pytest.FixtureRequest, format_name: str) -> linear_cpu.CpuWeight:
    """A weight packed in a forced format, with bias."""
    num_out, num_in = request.param
    weight_OI = randn(num_out, num_in, dtype=FP16, seed=1)
    return linear_cpu.pack(weight_OI, randn(num_out, seed=2), (format_name,))


@pytest.mark.parametrize("num_rows", ROW_COUNTS)
def test_cpu_row_bits_do_not_depend_on_the_row_count(
    num_rows: int, format_name: str, cpu_weight: linear_cpu.CpuWeight
) -> None:
    assert cpu_weight.format == format_name, cpu_weight.reason
    x_TI = randn(180, linear_cpu.unpack(cpu_weight).shape[1], seed=3)
    wanted_TO = linear_cpu.run(x_TI, cpu_weight, None)
    out_TO = linear_cpu.run(x_TI[31 : 31 + num_rows], cpu_weight, None)
    assert_same_bits(out_TO, wanted_TO[31 : 31 + num_rows])


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 33])
@pytest.mark.parametrize("num_in", [96, 1536, 2048])
def test_bits_of_rows_that_cancel_do_not_depend_on_the_row_count(
    num_rows: int, num_in: int, format_name: str
) -> None:
    """There sums in another order differ most."""
    weight_OI = randn(40, num_in, dtype=FP16, seed=1)
    x_TI = randn(180, num_in, seed=3)
    linear_cpu_rows.cancel_halves(weight_OI, x_TI)
    weight = linear_cpu.pack(weight_OI, None, (format_name,))
    wanted_TO = linear_cpu.run(x_TI, weight, None)
    out_TO = linear_cpu.run(x_TI[31 : 31 + num_rows], weight, None)
    assert_same_bits(out_TO, wanted_TO[31 : 31 + num_rows])


def test_row_invariance_check_has_teeth() -> None:
    """A format that adds in another order for an odd row count needs an even number of rows."""

    weight_OI, x_TI = randn(8, 64), randn(linear_cpu_rows.MAX_TEST_ROWS, 64)

    def run(x_TI: torch.Tensor) -> torch.Tensor:
        halves = x_TI.split(x_TI.shape[1] // 2, 1), weight_OI.split(x_TI.shape[1] // 2, 1)
        in_two_TO = sum(x.double() @ w.double().T for x, w in zip(*halves, strict=True))
        odd = x_TI.shape[0] % 2 * 1e-6
        return (in_two_TO + odd).float()

    assert not linear_cpu_rows.rows_agree(run, x_TI, 1, range(1, 9))
    assert linear_cpu_rows.rows_agree(run, x_TI, 2, range(2, 9, 2))


@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 2.0**12, 2.0**-60])
@pytest.mark.usefixtures("cpu_path")
def test_bf16_weights_of_any_size_pack_exactly_as_fp16(scale: float) -> None:
    weight_OI = randn(40, 64, dtype=BF16, scale=scale)
    bias_O = randn(40, dtype=BF16, scale=scale)
    packed = pack_linear(weight_OI, bias_O)
    assert isinstance(packed.weight, linear_cpu.CpuWeight)
    assert packed.format == "fbgemm_fp16", packed.weight.reason
    assert_same_bits(dense_weight(packed), weight_OI)
    x_TI, residual_TO = randn(5, 64, seed=3), randn(5, 40, seed=4, scale=scale)
    arguments = (x_TI, weight_OI, bias_O, residual_TO)
    out_TO = linear(x_TI, packed, residual_TO=residual_TO)
    assert_no_worse(out_TO, exact=exact_linear(*arguments), same_dtype=linear_ref(*arguments))


@pytest.mark.usefixtures("cpu_path")
def test_bf16_weights_too_wide_for_fp16_fall_back_to_fp32() -> None:
    weight_OI = randn(40, 64, dtype=BF16)
    weight_OI[0, :2] = torch.tensor([1.2e5, 1.1e-30])
    packed = pack_linear(weight_OI)
    assert packed.format == "onednn_fp32"
    assert packed.weight.reason == "fbgemm_fp16: weights do not fit fp16"
    assert_same_bits(dense_weight(packed), weight_OI)


@pytest.fixture
def _nothing_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every format fails its self-test."""
    monkeypatch.setattr(linear_cpu, "find_row_multiple", lambda *_: (0, "forced"))


@pytest.mark.usefixtures("cpu_path", "_nothing_passes")
@pytest.mark.parametrize("num_rows", [0, 1, 5, 33])
def test_fixed_row_tiles_when_no_format_passes(
    num_rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    packed = pack_linear(randn(37, 75), randn(37))
    assert "running fixed tiles" in caplog.text
    assert packed.weight.row_tile == packed.row_multiple > 0
    assert "forced" in packed.weight.reason
    x_TI = randn(40, 75, seed=3)
    out_TO = linear(x_TI[7 : 7 + num_rows], packed)
    assert_same_bits(out_TO, linear(x_TI, packed)[7 : 7 + num_rows])


def test_missing_library_is_a_reason_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise RuntimeError("no FBGEMM here\nsecond line")

    form = linear_cpu.FORMATS["fbgemm_fp16"]._replace(pack=missing)
    monkeypatch.setitem(linear_cpu.FORMATS, "no_library", form)
    weight = linear_cpu.pack(randn(8, 16, dtype=FP16), None, ("no_library", "plain_fp32"))
    assert (weight.format, weight.reason) == ("plain_fp32", "no_library: no FBGEMM here")


@pytest.mark.usefixtures("cpu_path")
def test_cpu_path_pads_only_row_counts_that_are_no_multiple(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = pack_linear(randn(40, 64, dtype=FP16))
    seen = []
    form = linear_cpu.FORMATS[packed.format]
    spy = form._replace(run=lambda x, handle: seen.append(x) or form.run(x, handle))
    monkeypatch.setitem(linear_cpu.FORMATS, packed.format, spy)
    multiple = packed.row_multiple
    whole_TI, part_TI = randn(2 * multiple, 64), randn(2 * multiple + 1, 64)
    assert linear(whole_TI, packed).shape == (2 * multiple, 40)
    assert linear(part_TI, packed).shape == (2 * multiple + 1, 40)
    assert seen[0] is whole_TI
    assert seen[1].shape[0] % multiple == 0


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("num_rows", [23, 24, 25, 48, 100])
def test_long_runs_are_cut_at_what_the_self_test_saw(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No library is called with more than MAX_ROWS rows, and the bits are those of few."""
    monkeypatch.setattr(linear_cpu_rows, "MAX_ROWS", 24)
    packed = pack_linear(randn(40, 64, dtype=FP16), randn(40))
    form, seen = linear_cpu.FORMATS[packed.format], []
    spy = form._replace(run=lambda x, handle: seen.append(len(x)) or form.run(x, handle))
    monkeypatch.setitem(linear_cpu.FORMATS, packed.format, spy)
    x_TI, residual_TO = randn(num_rows, 64, seed=3), randn(num_rows, 40, seed=4)
    out_TO = linear_cpu.run(x_TI, packed.weight, residual_TO)
    assert sum(seen) >= num_rows
    assert max(seen) <= 24
    last_TO = linear_cpu.run(x_TI[-1:], packed.weight, residual_TO[-1:])
    assert_same_bits(out_TO[-1:], last_TO)


@pytest.mark.parametrize(
    "num_rows", [linear_cpu_rows.MAX_ROWS - 1, 3 * linear_cpu_rows.MAX_ROWS + 5]
)
def test_cpu_row_bits_do_not_depend_on_long_runs(num_rows: int, cpu_weight: Any) -> None:
    x_TI = randn(num_rows, linear_cpu.unpack(cpu_weight).shape[1], seed=3)
    out_TO = linear_cpu.run(x_TI, cpu_weight, None)
    assert_same_bits(out_TO[:20], linear_cpu.run(x_TI[:20], cpu_weight, None))
    assert_same_bits(out_TO[-7:], linear_cpu.run(x_TI[-7:], cpu_weight, None))


@pytest.mark.parametrize("num_rows", [1, 5, 37, 121])
def test_cpu_row_bits_do_not_depend_on_threads(num_rows: int, format_name: str) -> None:
    weight_OI, x_TI = randn(96, 576, dtype=FP16, seed=1), randn(121, 576, seed=3)
    with num_threads(2):
        weight = linear_cpu.pack(weight_OI, None, (format_name,))
        wanted_TO = linear_cpu.run(x_TI, weight, None)
        assert_same_bits(linear_cpu.run(x_TI[:num_rows], weight, None), wanted_TO[:num_rows])


def one_row_backwards(x_TI: torch.Tensor, handle: Any) -> torch.Tensor:
    """Sums input after input, for a single row from the last on, rounded to bf16."""
    terms = (x_TI[:, None] * handle[0]).unbind(2)
    return reduce(torch.add, terms[::-1] if len(x_TI) == 1 else terms).bfloat16().float()


def test_self_test_sees_a_sum_in_another_order_behind_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    form = linear_cpu.FORMATS["plain_fp32"]._replace(run=one_row_backwards)
    monkeypatch.setitem(linear_cpu.FORMATS, "backwards", form)
    assert linear_cpu.find_row_multiple("backwards", 8, 64, False, 1) == (2, "")


FAULTS = {
    "only_with_a_bias": (True, lambda x_TI, handle: handle[1] is not None and len(x_TI) == 4),
    "only_in_long_runs": (False, lambda x_TI, handle: len(x_TI) > 600),
}


@pytest.mark.parametrize("name", FAULTS)
def test_self_test_has_teeth(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_bias, is_faulty = FAULTS[name]

    def run(x_TI: torch.Tensor, handle: Any) -> torch.Tensor:
        y_TO = x_TI.double() @ handle[0].double().T + is_faulty(x_TI, handle) * 1e-6
        return y_TO.float()

    form = linear_cpu.FORMATS["plain_fp32"]._replace(run=run)
    monkeypatch.setitem(linear_cpu.FORMATS, name, form)
    assert linear_cpu.find_row_multiple(name, 8, 64, has_bias, 1)[0] != 1
    assert linear_cpu.find_row_multiple(name, 8, 64, not has_bias, 1)[0] == int(has_bias)
