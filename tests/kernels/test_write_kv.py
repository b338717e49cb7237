"""write_kv against its reference, on the interpreted kernel and on the CPU path."""

from __future__ import annotations

import pytest
import torch

from pagedraft.kernels.dispatch import INTERPRETED
from pagedraft.kernels.write_kv import plan_write_kv, write_kv, write_kv_cost
from pagedraft.kernels.write_kv_cpu import write_kv_cpu
from pagedraft.tests.compare import assert_no_worse, assert_same_bits
from pagedraft.tests.inputs import num_threads
from pagedraft.tests.kernels.write_kv_inputs import CPU, Case, Inputs, check

F16, BF16, INT8, FP8 = torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
CASES = {
    "group of two": Case(),
    "one KV head": Case(heads=3, kv_heads=1),
    "demo model bf16": Case(5, 9, 3, 64, 64, BF16),
    "heads in several programs": Case(2, 12, 4, 128, 16, F16),
    "half dim 12 in a tile of 32": Case(head_dim=24, block_size=8),
    "head dim 80": Case(head_dim=80, dtype=BF16),
    "head dim 256": Case(2, 2, 1, 256, dtype=F16),
    "qk norm": Case(qk_norm=True),
    "qk norm, half dim 20, bf16": Case(head_dim=40, dtype=BF16, qk_norm=True),
    "block of 128": Case(block_size=128),
    "narrow cache": Case(cache_dtype=BF16),
    "no tokens": Case(tokens=0),
    "padding": Case(6, padding=3),
    "padding only": Case(2, padding=2),
    "quarter rotated": Case(head_dim=64, num_freqs=8),
    "Phi-2": Case(head_dim=80, dtype=F16, num_freqs=16),
    "StableLM: R no multiple of 4": Case(head_dim=80, dtype=BF16, num_freqs=10),
    "partial, norm over all of D": Case(head_dim=40, num_freqs=8, qk_norm=True),
    "no rotation": Case(num_freqs=0),
    "no rotation, norm": Case(num_freqs=0, qk_norm=True, dtype=BF16),
    "interleaved": Case(interleaved=True),
    "interleaved, half rotated": Case(head_dim=64, num_freqs=16, interleaved=True, dtype=BF16),
    "interleaved, norm": Case(head_dim=24, num_freqs=8, interleaved=True, qk_norm=True),
    "int8": Case(cache_dtype=INT8),
    "int8 from bf16, padded": Case(5, 9, 3, 64, 64, BF16, INT8, padding=2),
    "int8, norm, partial": Case(head_dim=40, cache_dtype=INT8, qk_norm=True, num_freqs=8),
    "int8, several programs": Case(2, 12, 4, 128, 16, F16, INT8),
    "int8, no tokens": Case(0, cache_dtype=INT8),
    "fp8": Case(cache_dtype=FP8),
    "fp8 from bf16, padded": Case(5, 9, 3, 64, 64, BF16, FP8, padding=2),
    "fp8, interleaved, head dim 80": Case(head_dim=80, cache_dtype=FP8, interleaved=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_write_kv(case, device):
    check(Inputs(case, device))


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cpu_path(case):
    check(Inputs(case, CPU))


@pytest.mark.parametrize("name", ["strided rows", "int32 positions"])
def test_layout(name, device):
    inputs, plain = Inputs(CASES["group of two"], device), Inputs(CASES["group of two"], device)
    if name == "strided rows":
        poison_TC = torch.full_like(inputs.qkv_TC, torch.nan)
        inputs.qkv_TC = torch.cat((inputs.qkv_TC, poison_TC), 1)[:, : poison_TC.shape[1]]
    else:
        cos_PR, sin_PR, positions_T, slots_T = inputs.tables
        inputs.tables = (cos_PR, sin_PR, positions_T.int(), slots_T)
    assert_same_bits(inputs.run(), plain.run())
    assert_same_bits(inputs.caches[0], plain.caches[0])


def planned_write_kv(inputs: Inputs, tokens: int) -> torch.Tensor:
    """The CPU path on the first ``tokens`` tokens."""
    case = inputs.case
    tables = (*inputs.tables[:2], *(table[:tokens] for table in inputs.tables[2:]))
    plan = plan_write_kv(*tables, case.kv_heads, case.block_size, interleaved=case.interleaved)
    args = (inputs.qkv_TC[:tokens], plan, *inputs.caches, case.heads, *inputs.norms)
    return write_kv_cpu(*args, **inputs.scales)


ROW_CASES = {
    "plain": Case(200, 9, 3, 64, 64),
    "norm": Case(200, head_dim=40, qk_norm=True),
    "partial": Case(200, head_dim=40, num_freqs=6),
    "interleaved": Case(200, head_dim=40, num_freqs=6, interleaved=True),
    "int8": Case(200, 9, 3, 64, 64, cache_dtype=INT8),
}


@pytest.mark.parametrize("case", ROW_CASES.values(), ids=ROW_CASES)
@pytest.mark.parametrize("tokens", [*range(1, 41), 199])
def test_cpu_rows_do_not_depend_on_their_number_or_threads(tokens, case):
    full, part = Inputs(case, CPU), Inputs(case, CPU)
    with num_threads(1):
        full_THD = planned_write_kv(full, case.tokens)
    with num_threads(3):
        part_THD = planned_write_kv(part, tokens)
    assert_same_bits(part_THD, full_THD[:tokens])
    assert_same_bits(part.values()[0][:tokens], full.values()[0][:tokens])
    assert_same_bits(part.values()[1][:tokens], full.values()[1][:tokens])


PLAN_CASES = ("group of two", "padding", "interleaved", "int8 from bf16, padded")


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("name", PLAN_CASES)
def test_plan_changes_nothing(name):
    case = CASES[name]._replace(dtype=torch.float32)
    planned, plain = Inputs(case, CPU), Inputs(case, CPU)
    sizes = (case.kv_heads, case.block_size)
    plan = plan_write_kv(*planned.tables, *sizes, interleaved=case.interleaved)
    assert_same_bits(planned.run(plan=plan), plain.run())
    assert_same_bits(planned.caches[0], plain.caches[0])
    assert_same_bits(planned.caches[1], plain.caches[1])
    planned.assert_only_slots_written()


@pytest.mark.usefixtures("cpu_path")
def test_plan_of_other_pairs_is_not_used():
    case = CASES["interleaved"]
    inputs, plain = Inputs(case, CPU), Inputs(case, CPU)
    halves = plan_write_kv(*inputs.tables, case.kv_heads, case.block_size)
    assert_same_bits(inputs.run(plan=halves), plain.run())


BAD = {
    "columns": ({"qkv_TC": torch.ones(3, 8)}, "qkv_TC: expected shape"),
    "slots": ({"slots_T": torch.ones(2, dtype=torch.int64)}, "slots_T: expected shape"),
    "one norm": ({"q_norm_D": torch.ones(32)}, "expected both or neither"),
    "v cache": ({"v_cache_NGBD": torch.ones(1, 2, 16, 32)}, "v_cache_NGBD: expected shape"),
    "wide table": ({"cos_PR": torch.ones(9, 17), "sin_PR": torch.ones(9, 17)}, "at most 16 col"),
    "scale of a float cache": ({"k_scale_NGB": torch.ones(5, 2, 16)}, "k_scale_NGB: expected None"),
}
BAD_QUANTISED = {
    "no scale": ({"v_scale_NGB": None}, "v_scale_NGB: expected a tensor .*int8, got None"),
    "scale shape": ({"k_scale_NGB": torch.ones(5, 2, 8)}, "k_scale_NGB: expected shape"),
    "scale dtype": ({"k_scale_NGB": torch.ones(5, 2, 16).half()}, "k_scale_NGB: expected dtype"),
    "two dtypes": ({"v_cache_NGBD": torch.ones(5, 2, 16, 32)}, "v_cache_NGBD: expected dtype int8"),
}


def arguments(inputs: Inputs) -> dict[str, object]:
    names = ("qkv_TC", "cos_PR", "sin_PR", "positions_T", "slots_T", "k_cache_NGBD", "v_cache_NGBD")
    values = (inputs.qkv_TC, *inputs.tables, *inputs.caches)
    return dict(zip(names, values, strict=True)) | inputs.scales | {"num_heads": 4}


@pytest.mark.parametrize(("change", "error"), BAD.values(), ids=BAD)
def test_bad_arguments(change, error):
    with pytest.raises(ValueError, match=error):
        write_kv(**arguments(Inputs(Case(), CPU)) | change)


@pytest.mark.parametrize(("change", "error"), BAD_QUANTISED.values(), ids=BAD_QUANTISED)
def test_bad_arguments_of_a_quantised_cache(change, error):
    with pytest.raises((ValueError, TypeError), match=error):
        write_kv(**arguments(Inputs(CASES["int8"], CPU)) | change)


TEETH = {
    "interleaved": {"interleaved": True},
    "rotated one column less": {"num_freqs": 31},
    "not rotated": {"num_freqs": 0},
}


@pytest.mark.parametrize("change", TEETH.values(), ids=TEETH)
def test_teeth_another_rotation_fails(change):
    inputs = Inputs(CASES["demo model bf16"], CPU)
    exact, same = (inputs.reference(dtype, dtype) for dtype in (torch.float64, BF16))
    broken = Inputs(inputs.case._replace(**change), CPU).reference(BF16, BF16)
    with pytest.raises(AssertionError, match="allowed"):
        assert_no_worse(broken[0], exact=exact[0], same_dtype=same[0])
    with pytest.raises(AssertionError, match="allowed"):
        assert_no_worse(broken[1], exact=exact[1], same_dtype=same[1])


COSTS = {
    "16 bits": ({}, 16 * 32 * 2 + 8 * 16 + 12, 6 * 6 * 16),
    "quarter rotated": ({"num_freqs": 4}, 16 * 32 * 2 + 8 * 4 + 12, 6 * 6 * 4),
    "int8": (
        {"cache_dtype": INT8},
        12 * 32 * 2 + 4 * 32 + 4 * 4 + 8 * 16 + 12,
        6 * 6 * 16 + 3 * 4 * 32,
    ),
}


@pytest.mark.parametrize(("options", "num_bytes", "flops"), COSTS.values(), ids=COSTS)
def test_cost(options, num_bytes, flops):
    assert write_kv_cost(3, 4, 2, 32, 2, **options) == (3 * num_bytes, 3 * flops)


@pytest.mark.skipif(not INTERPRETED, reason="counts interpreted launches")
@pytest.mark.parametrize(
    ("case", "num_loads"),
    [
        (Case(head_dim=24, qk_norm=True), 2),
        (Case(head_dim=24, interleaved=True), 1),
        (Case(5, cache_dtype=INT8, padding=3, num_freqs=0), 1),
    ],
    ids=["halves", "interleaved", "int8, padding in one slot"],
)
def test_one_launch_stays_inside_its_tensors_and_does_not_race(case, num_loads):
    from pagedraft.tests.sanitizer import sanitize

    inputs = Inputs(case, CPU)
    with sanitize() as launches:
        inputs.run()
    assert [launch.name for launch in launches] == ["write_kv_kernel"]
    num_bytes = inputs.qkv_TC.numel() * 4
    assert launches[0].bytes_loaded(inputs.qkv_TC, unique=True) == num_bytes
    assert launches[0].bytes_loaded(inputs.qkv_TC) == num_loads * num_bytes
