"""Quantised CPU weights: their values, a row's bits, the self-test, and the slower formats."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedraft.kernels import linear_cpu_quant, linear_cpu_rows
from pagedraft.kernels.linear import linear, linear_ref, pack_linear
from pagedraft.kernels.linear_cpu_quant import CpuQuantWeight, find_row_multiple, pack, run, unpack
from pagedraft.kernels.linear_cpu_quant_formats import FORMATS, QuantFormat
from pagedraft.kernels.weight_quant import (
    ZERO_STEPS,
    QuantWeight,
    dequantize_weight,
    quantize_weight,
)
from pagedraft.tests.compare import assert_no_worse, assert_same_bits
from pagedraft.tests.inputs import num_threads, randn

# Name: (kind, group or None, outputs, inputs, format that is forced).
CASES = {
    "int8": ("int8", None, 96, 576, "int8_2x8"),
    "int8_odd": ("int8", None, 37, 75, "int8_2x8"),
    "int8_one_output": ("int8", None, 1, 64, "int8_2x8"),
    "int8_7_bits": ("int8", None, 96, 576, "int8_3x7"),
    "int8_codes": ("int8", None, 37, 75, "fp16_codes"),
    "int8_groups": ("int8", 32, 40, 64, "dense"),
    "int4_groups_of_32": ("int4", 32, 96, 576, "int4_bf16"),
    "int4_groups_of_64": ("int4", 64, 64, 128, "int4_bf16"),
    "int4_groups_of_128": ("int4", 128, 40, 1536, "int4_bf16"),
    "int4_odd_outputs": ("int4", 32, 37, 96, "int4_bf16"),
    "int4_one_output": ("int4", 32, 1, 32, "int4_bf16"),
    "int4_dense": ("int4", 32, 37, 96, "dense"),
    "fp8": ("fp8", None, 37, 75, "fp16_codes"),
    "fp8_groups": ("fp8", 32, 40, 64, "dense"),
}
# Against PyTorch in fp32, or in bf16: the largest error, as a factor of PyTorch's.
FP32_FACTORS = {"int8_3x7": 8.0, "fp16_codes": 2.0, "dense": 2.0}
BF16_FACTORS = {"int8_2x8": 0.1, "int4_bf16": 2.0}
ROW_COUNTS = (1, 2, 3, 4, 5, 7, 9, 17, 32, 37, 64, 121)


def quantised(name: str, **changes: Any) -> QuantWeight:
    kind, group, num_out, num_in, _ = CASES[name]
    weight = quantize_weight(randn(num_out, num_in, seed=1), kind, group)
    return QuantWeight(**(vars(weight) | changes))


def has_vnni() -> bool:
    """Whether the processor adds products of 8 bits in 32: with it no format may be refused."""
    file = Path("/proc/cpuinfo")
    return file.exists() and "vnni" in file.read_text()


def force(monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    """Let the case's format be the only one; skip what this processor cannot multiply."""
    kind, *_, format = CASES[name]
    monkeypatch.setitem(linear_cpu_quant.ORDER, kind, (format,))
    may_saturate = format == "int8_2x8" and not has_vnni()
    if may_saturate and "products are wrong" in pack(quantised(name), None).reason:
        pytest.skip("sums of two products of 8 bits saturate on this processor")
    return format


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The cases, each with its format forced."""
    format = force(monkeypatch, request.param)
    if format == "int4_bf16" and FORMATS[format].refuse(quantised(request.param)):
        pytest.skip("int4 products have no fast code for this processor")
    return request.param


@pytest.fixture
def packed(case: str) -> CpuQuantWeight:
    weight = pack(quantised(case), randn(CASES[case][2], seed=2))
    assert weight.format == CASES[case][4], weight.reason
    return weight


def exact_linear(*tensors: torch.Tensor | None) -> torch.Tensor:
    """y in fp64."""
    return linear_ref(*(None if t is None else t.double() for t in tensors))


def bf16_linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, *terms: torch.Tensor) -> torch.Tensor:
    """y of a bf16 model's linear, the other terms added in fp32."""
    return sum(terms, linear_ref(x_TI.bfloat16(), weight_OI.bfloat16()).float())


def test_values_are_those_of_the_codes(case: str, packed: CpuQuantWeight) -> None:
    wanted_OI = dequantize_weight(quantised(case))
    out_OI = unpack(packed)
    if packed.format != "int4_bf16":
        assert_same_bits(out_OI, wanted_OI)
    else:  # factors in bf16: each of scale and (8 - zero) scale is half a unit off
        bound_OI = 2.0**-9 * 16 * quantised(case).scale_CO.amax(0)[:, None]
        assert bool(((out_OI - wanted_OI).abs() <= bound_OI).all())


def test_factors_of_five_bits_and_integer_zero_points_keep_int4_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    force(monkeypatch, "int4_groups_of_32")
    scale_CO = torch.randint(16, 32, (18, 96), generator=torch.Generator().manual_seed(3)) / 512
    zero_CO = torch.arange(18 * 96, dtype=torch.int32).view(18, 96) % 17 * ZERO_STEPS
    weight = quantised("int4_groups_of_32", scale_CO=scale_CO, zero_CO=zero_CO.byte())
    assert_same_bits(unpack(pack(weight, None)), dequantize_weight(weight))


def test_zero_points_of_checkpoints_reach_16(monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, "int4_odd_outputs")
    zero_CO = torch.full((3, 37), 16 * ZERO_STEPS, dtype=torch.uint8)
    scale_CO = torch.full((3, 37), 0.25, dtype=torch.float16)
    weight = quantised("int4_odd_outputs", zero_CO=zero_CO, scale_CO=scale_CO)
    assert_same_bits(unpack(pack(weight, None)), dequantize_weight(weight))


def test_products_are_those_of_the_dequantised_weight(case: str, packed: CpuQuantWeight) -> None:
    x_TI, residual_TO = randn(9, CASES[case][3], seed=3), randn(9, CASES[case][2], seed=4)
    arguments = (x_TI, dequantize_weight(quantised(case)), randn(CASES[case][2], seed=2))
    reference = bf16_linear if packed.format in BF16_FACTORS else linear_ref
    assert_no_worse(
        run(x_TI, packed, residual_TO),
        exact=exact_linear(*arguments, residual_TO),
        same_dtype=reference(*arguments, residual_TO),
        factor=(BF16_FACTORS | FP32_FACTORS)[packed.format],
    )


def test_product_check_has_teeth(monkeypatch: pytest.MonkeyPatch) -> None:
    """One code that is off by one fails the bound of the widest format."""
    force(monkeypatch, "int4_groups_of_32")
    weight = quantised("int4_groups_of_32")
    broken = QuantWeight(**(vars(weight) | {"codes": weight.codes ^ 1}))
    x_TI, dense_OI = randn(9, 576, seed=3), dequantize_weight(weight)
    with pytest.raises(AssertionError, match="allowed"):
        assert_no_worse(
            run(x_TI, pack(broken, None), None),
            exact=exact_linear(x_TI, dense_OI),
            same_dtype=bf16_linear(x_TI, dense_OI),
            factor=BF16_FACTORS["int4_bf16"],
        )


@pytest.mark.parametrize("num_rows", ROW_COUNTS)
def test_row_bits_do_not_depend_on_the_row_count(
    num_rows: int, case: str, packed: CpuQuantWeight
) -> None:
    x_TI = randn(180, CASES[case][3], seed=3)
    wanted_TO = run(x_TI, packed, None)
    assert_same_bits(run(x_TI[31 : 31 + num_rows], packed, None), wanted_TO[31 : 31 + num_rows])


@pytest.mark.parametrize("num_rows", [linear_cpu_rows.MAX_ROWS - 1, linear_cpu_rows.MAX_ROWS + 5])
def test_row_bits_do_not_depend_on_long_runs(
    num_rows: int, case: str, packed: CpuQuantWeight
) -> None:
    x_TI = randn(num_rows, CASES[case][3], seed=3)
    out_TO = run(x_TI, packed, None)
    assert_same_bits(out_TO[:5], run(x_TI[:5], packed, None))
    assert_same_bits(out_TO[-1:], run(x_TI[-1:], packed, None))


@pytest.mark.parametrize("num_rows", [1, 5, 37])
@pytest.mark.parametrize("name", ["int8", "int8_7_bits", "int4_groups_of_32", "fp8"])
def test_row_bits_do_not_depend_on_threads(
    name: str, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, name)
    x_TI = randn(40, CASES[name][3], seed=3)
    with num_threads(1):
        wanted_TO = run(x_TI, pack(quantised(name), None), None)
    with num_threads(2):
        packed = pack(quantised(name), None)
        assert_same_bits(run(x_TI[:num_rows], packed, None), wanted_TO[:num_rows])


def test_row_bits_do_not_depend_on_large_neighbours(case: str, packed: CpuQuantWeight) -> None:
    """Nor on rows of zeros: a row is scaled by its own largest value."""
    x_TI = randn(6, CASES[case][3], seed=3)
    alone_TO = run(x_TI[2:3], packed, None)
    x_TI[:2], x_TI[4] = x_TI[:2] * 1e6, 0.0
    out_TO = run(x_TI, packed, None)
    assert_same_bits(out_TO[2:3], alone_TO)
    assert_same_bits(out_TO[4], randn(CASES[case][2], seed=2))


def test_a_nan_stays_in_its_row(case: str, packed: CpuQuantWeight) -> None:
    x_TI = randn(3, CASES[case][3], seed=3)
    wanted_TO = run(x_TI, packed, None)
    x_TI[1, 5] = float("nan")
    out_TO = run(x_TI, packed, None)
    assert bool(out_TO[1].isnan().all())
    assert_same_bits(out_TO[::2], wanted_TO[::2])


@pytest.mark.parametrize("name", ["int8", "int4_groups_of_32", "fp8"])
def test_order_of_inputs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, name)
    order_I = torch.randperm(CASES[name][3], generator=torch.Generator().manual_seed(5))
    packed, plain = pack(quantised(name, order_I=order_I), None), pack(quantised(name), None)
    x_TI = randn(5, CASES[name][3], seed=3)
    assert_same_bits(run(x_TI, packed, None), run(x_TI[:, order_I], plain, None))
    assert_same_bits(unpack(packed)[:, order_I], unpack(plain))


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("name", ["int8", "int4_groups_of_32", "fp8"])
def test_linear_takes_no_rows_and_strided_rows(name: str) -> None:
    num_out, num_in = CASES[name][2:4]
    packed = pack_linear(quantised(name), randn(num_out, seed=2))
    assert linear(randn(0, num_in), packed).shape == (0, num_out)
    wide_TI = randn(4, num_in + 3, seed=3)
    x_TI = wide_TI[:, 1 : 1 + num_in]
    assert_same_bits(linear(x_TI, packed), linear(x_TI.contiguous(), packed))
    assert_same_bits(linear(x_TI.T.contiguous().T, packed), linear(x_TI.contiguous(), packed))


def saturating(x_TI: torch.Tensor, handle: Any, form: QuantFormat) -> torch.Tensor:
    y_TO = form.run(x_TI, handle)
    return y_TO.clamp(max=y_TO.max() / 2)


def odd_counts_differ(x_TI: torch.Tensor, handle: Any, form: QuantFormat) -> torch.Tensor:
    """Sums in another order for odd row counts, as large as fp32 makes them, then rounded."""
    noise = x_TI.shape[0] % 2 * 2.0**-22
    y_TO = form.run(x_TI, handle)
    return (y_TO + noise * x_TI.abs().amax(1, keepdim=True)).bfloat16().float()


FAULTS = {
    "saturating": ("int8_2x8", "int8", saturating, "products are wrong"),
    "odd_counts_differ": ("int4_bf16", "int4", odd_counts_differ, ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_self_test_has_teeth(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, kind, broken, wanted = FAULTS[fault]
    form = FORMATS[name]
    monkeypatch.setitem(FORMATS, fault, form._replace(run=partial(broken, form=form)))
    multiple, reason = find_row_multiple(fault, kind, 8, 64, 64, 1)
    assert multiple == (0 if wanted else 2), reason
    assert reason.startswith(wanted)


@pytest.mark.parametrize(
    ("name", "wanted"), [("int8", "fp16_codes"), ("int4_odd_outputs", "dense")]
)
def test_missing_library_is_a_reason_not_an_error(
    name: str, wanted: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(weight: QuantWeight) -> Any:
        raise RuntimeError("no such product here\nsecond line")

    linear_cpu_quant._tell.cache_clear()
    absent = ["int8_2x8", "int8_3x7", "int4_bf16"]
    forms = {key: FORMATS[key]._replace(pack=missing) for key in absent}
    monkeypatch.setattr(linear_cpu_quant, "FORMATS", FORMATS | forms)
    monkeypatch.setattr(linear_cpu_quant, "find_row_multiple", find_row_multiple.__wrapped__)
    packed = pack(quantised(name), None)
    assert packed.format == wanted
    assert "no such product here" in packed.reason
    assert f"running {wanted}" in caplog.text


def test_processors_without_fast_int4_run_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    packed = pack(quantised("int4_odd_outputs"), None)
    assert packed.format == "dense"
    assert packed.reason == "int4_bf16: no fast code for DEFAULT processors"


def test_rows_are_padded_to_the_multiple(monkeypatch: pytest.MonkeyPatch) -> None:
    """A format that needs an even count never sees an odd one."""
    form, seen = FORMATS["int4_bf16"], []
    spy = form._replace(run=lambda x, handle: seen.append(len(x)) or form.run(x, handle))
    monkeypatch.setitem(FORMATS, "int4_bf16", spy)
    monkeypatch.setattr(linear_cpu_quant, "find_row_multiple", lambda *_: (2, ""))
    force(monkeypatch, "int4_odd_outputs")
    packed = pack(quantised("int4_odd_outputs"), None)
    assert run(randn(5, 96), packed, None).shape == (5, 37)
    assert (packed.row_multiple, seen) == (2, [6])
