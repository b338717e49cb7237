"""Quantised keys and values: known numbers, what may not be lost, and the kernel's bits."""

from __future__ import annotations

import math

import pytest
import torch

from pagedraft.kernels.kv_quant import KV_DTYPES, TINY, dequantize_kv, quantize_kv
from pagedraft.kernels.write_kv import write_kv, write_kv_ref
from pagedraft.tests.compare import assert_same_bits
from pagedraft.tests.inputs import randn
from pagedraft.tests.kernels.write_kv_inputs import Case, Inputs

INT8, FP8 = torch.int8, torch.float8_e4m3fn
DTYPES = {"int8": INT8, "fp8": FP8}
INF, NAN = math.inf, math.nan
# Values of a head (the rest is 0) -> scale and the first stored values.
KNOWN = {
    "ties to even": (INT8, [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5], 1, [127, 0, 2, 2, 0, -2, -2]),
    "largest is kept": (INT8, [3.7, -3.7], 3.7 / 127, [127, -127]),
    "all zero": (INT8, [0.0, -0.0], 0, [0, 0]),
    "fp8 ties to even": (FP8, [448, 17, 19, -17, -19], 1, [448, 16, 20, -16, -20]),
    "fp8 below its normal numbers": (FP8, [448, 2**-9, 1.5 * 2**-9], 1, [448, 2**-9, 2**-8]),
    "fp8, all zero": (FP8, [0.0], 0, [0]),
}


@pytest.mark.parametrize(("dtype", "values", "scale", "stored"), KNOWN.values(), ids=KNOWN)
def test_known_numbers(dtype, values, scale, stored):
    got, got_scale = quantize_kv(head(values), dtype)
    assert got[: len(stored)].float().tolist() == stored
    assert got_scale == torch.tensor(scale, dtype=torch.float32)


def head(values: list[float], head_dim: int = 16) -> torch.Tensor:
    x_D = torch.zeros(head_dim)
    x_D[: len(values)] = torch.tensor(values)
    return x_D


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_error_is_at_most_half_a_step(dtype):
    x_TD = randn(50, 64, seed=3)
    stored, scale_T = quantize_kv(x_TD, dtype)
    error_TD = (dequantize_kv(stored, scale_T) - x_TD).abs()
    # e4m3 has 3 bits behind the point: half a step is 2^-4 of a value, or of 2^-6 if smaller.
    fp8_step_TD = torch.maximum(x_TD.abs(), 2.0**-6 * scale_T[:, None]) / 8
    step_TD = scale_T[:, None] if dtype == INT8 else fp8_step_TD
    assert bool((error_TD <= step_TD / 2 * 1.00001).all())
    assert float(error_TD.max()) > 0


# What one head holds besides ones -> whether its scale is NaN.
SPECIAL = {
    "NaN in the first column": ([NAN], True),
    "NaN in the last column": ([1.0] * 15 + [NAN], True),
    "negative NaN": ([-NAN, 2.0], True),
    "infinity": ([1.0, INF], True),
    "minus infinity": ([1.0, -INF, 5.0], True),
    "NaN among zeros": ([0.0] * 15 + [NAN], True),
    "just too small": ([TINY / 2] * 16, False),
    "just large enough": ([TINY] * 8 + [TINY / 2] * 8, False),
    "below fp32's normal numbers": ([1e-40] * 16, False),
    "largest fp32 number": ([3.4e38, -3.4e38], False),
    "zeros": ([0.0] * 16, False),
}


def run_head(op, values: list[float], dtype: torch.dtype, device: torch.device) -> Inputs:
    """Write two tokens, of which key and value head 1 of the first hold ``values``."""
    case = Case(2, 2, 2, 16, cache_dtype=dtype, num_freqs=0)
    inputs = Inputs(case, device)
    heads_TXD = inputs.qkv_TC.view(2, 6, 16)
    heads_TXD[0, 3] = heads_TXD[0, 5] = head(values).to(device)
    inputs.run(op)
    return inputs


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("path", ["triton", "cpu", "reference"])
def test_special_values(path, dtype, name, device, request):
    values, is_lost = SPECIAL[name]
    if path == "cpu":
        request.getfixturevalue("cpu_path")
    inputs = run_head(write_kv_ref if path == "reference" else write_kv, values, dtype, device)
    stored, scale = quantize_kv(head(values), dtype)
    k_scale_TG, v_scale_TG = (inputs.written(s).cpu() for s in inputs.scales.values())
    for_head_TG = torch.tensor([[False, True], [False, False]])
    assert torch.equal(k_scale_TG.isnan(), for_head_TG & is_lost)
    assert torch.equal(v_scale_TG.isnan(), for_head_TG & is_lost)
    torch.testing.assert_close(k_scale_TG[0, 1], scale, rtol=0, atol=0, equal_nan=True)
    assert_same_bits(inputs.written(inputs.caches[0])[0, 1].cpu(), stored)
    assert_same_bits(inputs.written(inputs.caches[1])[0, 1].cpu(), stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("cache_dtype", DTYPES.values(), ids=DTYPES)
def test_kernel_has_the_bits_of_the_reference(cache_dtype, interleaved, dtype, device):
    case = Case(9, 3, 3, 24, 8, dtype, cache_dtype, num_freqs=8, interleaved=interleaved)
    inputs, reference = Inputs(case, device), Inputs(case, device)
    assert_same_bits(inputs.run(), reference.run(write_kv_ref))
    assert_same_bits(inputs.caches[0], reference.caches[0])
    assert_same_bits(inputs.caches[1], reference.caches[1])
    assert_same_bits(inputs.scales["k_scale_NGB"], reference.scales["k_scale_NGB"])
    assert_same_bits(inputs.scales["v_scale_NGB"], reference.scales["v_scale_NGB"])


def test_teeth_a_step_more_or_less_is_seen():
    stored, _ = quantize_kv(randn(3, 16), INT8)
    with pytest.raises(AssertionError, match="bits differ in 1 of"):
        assert_same_bits(stored, stored + (torch.arange(48).view(3, 16) == 7).to(INT8))


def test_dtypes_have_one_byte_and_their_largest_value():
    assert [dtype.itemsize for dtype in KV_DTYPES] == [1, 1]
    assert KV_DTYPES[FP8] == torch.finfo(FP8).max
    assert KV_DTYPES[INT8] == torch.iinfo(INT8).max
