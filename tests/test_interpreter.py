"""The interpreter shim keeps its promises: fails loudly where an upgrade of Triton breaks one."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from pagedraft.kernels.dispatch import INTERPRETED

if not INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from triton.runtime.interpreter import InterpreterBuilder  # noqa: E402

from pagedraft.tests.compare import assert_no_worse, assert_same_bits  # noqa: E402
from pagedraft.tests.inputs import poisoned, randn  # noqa: E402
from pagedraft.tests.interpreter import ARITHMETIC_OPS, COMPARISONS  # noqa: E402

NARROW = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
EXTREMES = torch.tensor(
    [0.0, -0.0, 1.0, -1.5, 1.00390625, 1.01171875, 3.38e38, -3.4e38, 1e-40, 447.0, 480.0, 6e4, 1e5]
    + [2.0**-9, 2.0**-10, 1.5 * 2.0**-10, 2.0**-17, math.nan]
)


@triton.jit
def _cast_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(y_ptr + offs, x.to(y_ptr.dtype.element_ty), mask=offs < n)


@triton.jit
def _arithmetic_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + offs), tl.load(y_ptr + offs)
    tl.store(out_ptr + 0 * BLOCK + offs, x + y)
    tl.store(out_ptr + 1 * BLOCK + offs, x * y)
    tl.store(out_ptr + 2 * BLOCK + offs, x - y)
    tl.store(out_ptr + 3 * BLOCK + offs, -x)
    tl.store(out_ptr + 4 * BLOCK + offs, x * 2.5)
    tl.store(out_ptr + 5 * BLOCK + offs, tl.where(x < y, x, y))
    tl.store(out_ptr + 6 * BLOCK + offs, tl.maximum(x, y))
    tl.store(out_ptr + 7 * BLOCK + offs, tl.abs(x))
    tl.store(out_ptr + 8 * BLOCK + offs, (x / y).to(tl.bfloat16))
    tl.store(out_ptr + 9 * BLOCK + offs, tl.full((BLOCK,), 1.7, tl.bfloat16))
    tl.store(out_ptr + 10 * BLOCK + offs, tl.full((BLOCK,), 1.0, tl.bfloat16) * tl.sum(x, axis=0))
    tl.store(out_ptr + 11 * BLOCK + offs, tl.cumsum(x, axis=0))


@triton.jit
def _dot_kernel(x_ptr, y_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, cols, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    row0 = tl.program_id(0) * M
    x = tl.load(x_ptr + (row0 + rows)[:, None] * K + inner[None, :])
    y = tl.load(y_ptr + cols[:, None] * K + inner[None, :])
    acc = tl.zeros((M, N), dtype=tl.float32)
    acc = tl.dot(x, tl.trans(y), acc, input_precision="ieee")
    tl.store(out_ptr + (row0 + rows)[:, None] * N + cols[None, :], acc)


@triton.jit
def _atomic_kernel(x_ptr):
    tl.atomic_add(x_ptr + tl.arange(0, 16), tl.full((16,), 1.0, tl.bfloat16))


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = poisoned(len(x), dtype=dtype)
    _cast_kernel[(1,)](x, y, len(x), BLOCK=triton.next_power_of_2(len(x)))
    return y


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("source", [torch.float32, torch.float16], ids=str)
def test_rounding_is_torchs(dtype, source):
    x = torch.cat([EXTREMES, randn(512), randn(512, scale=100.0)]).to(source)
    limits = torch.finfo(dtype)
    saturated = x if dtype is torch.bfloat16 else x.float().clamp(limits.min, limits.max)
    is_nan = x.isnan()  # torch's own NaN bits differ between its vector and scalar code
    assert_same_bits(cast(x[~is_nan], dtype), saturated[~is_nan].to(dtype))
    assert bool(cast(x[is_nan], dtype).float().isnan().all())


@pytest.mark.parametrize("dtype", NARROW)
def test_widening_is_exact(dtype):
    x = torch.cat([EXTREMES[:5], randn(512)]).to(dtype)
    assert_same_bits(cast(x, torch.float32), x.float())


def test_fp32_to_fp16_rounds_to_nearest_even():
    x = torch.cat([randn(512), torch.tensor([1e-7, 65519.0, 2.0**-24, 1.00048828125])])
    assert_same_bits(cast(x, torch.float16), x.half())


def test_bf16_arithmetic_is_torchs():
    x, y = randn(64, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16, seed=1)
    out = poisoned(12, 64, dtype=torch.bfloat16)
    _arithmetic_kernel[(1,)](x, y, out, BLOCK=64)
    expected = [
        *(x + y, x * y, x - y, -x, x * 2.5, torch.minimum(x, y), torch.maximum(x, y), x.abs()),
        *((x.float() / y.float()).bfloat16(), torch.full_like(x, 1.7)),
        *(x.float().sum().bfloat16().expand(64), x.float().cumsum(0).bfloat16()),
    ]
    torch.testing.assert_close(out[:10], torch.stack(expected[:10]), rtol=0, atol=0)
    torch.testing.assert_close(out[10:], torch.stack(expected[10:]), rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dot_rows_do_not_depend_on_the_tile_height(dtype):
    x, y = randn(64, 128, dtype=dtype), randn(32, 128, dtype=dtype, seed=1)
    tall, flat = poisoned(64, 32), poisoned(64, 32)
    _dot_kernel[(1,)](x, y, tall, M=64, N=32, K=128)
    _dot_kernel[(4,)](x, y, flat, M=16, N=32, K=128)
    assert_same_bits(flat, tall)
    assert_no_worse(
        tall, exact=x.double() @ y.double().T, same_dtype=x.float() @ y.float().T, factor=4.0
    )


def test_bf16_atomics_are_refused():
    with pytest.raises(Exception, match="atomics on bf16"):
        _atomic_kernel[(1,)](torch.zeros(16, dtype=torch.bfloat16))


def test_every_float_op_of_the_builder_is_known():
    patched = {f"create_{op}" for op in ARITHMETIC_OPS + COMPARISONS}
    conversions = {"create_fp_to_fp", "create_fp_to_si", "create_fp_to_ui"}
    conversions |= {"create_fp_ext", "create_fp_trunc"}
    found = {name for name in vars(InterpreterBuilder) if name.startswith("create_f")}
    assert found - patched - conversions == set()
