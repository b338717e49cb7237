"""Toy kernels for the compile check, one for each verdict it can reach."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def good_kernel(x_ptr, y_ptr, size, stride, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    x = tl.load(x_ptr + offs * stride, mask=mask, other=0.0)
    tl.store(y_ptr + offs * stride, x + 1.0, mask=mask)


@triton.jit
def break_kernel(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    for start in range(0, size, BLOCK):
        x = tl.load(x_ptr + start + offs)
        tl.store(y_ptr + start + offs, x + 1.0)
        if start >= BLOCK:
            break


@triton.jit
def product_kernel(a_ptr, b_ptr, y_ptr, num_steps, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tile = offs[:, None] * BLOCK + offs[None, :]  # [BLOCK, BLOCK]
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for step in range(num_steps):
        a = tl.load(a_ptr + step * BLOCK * BLOCK + tile)
        b = tl.load(b_ptr + step * BLOCK * BLOCK + tile)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    tl.store(y_ptr + tile, acc)


def good(x: torch.Tensor) -> torch.Tensor:
    """Return x + 1 (x contiguous)."""
    y = torch.empty_like(x)
    good_kernel[(triton.cdiv(x.numel(), 512),)](x, y, x.numel(), 1, BLOCK=512)
    return y


def broken(x: torch.Tensor) -> torch.Tensor:
    """Return x + 1 for 32 elements, by a loop with a ``break``."""
    y = torch.empty_like(x)
    break_kernel[(1,)](x, y, x.numel(), BLOCK=16)
    return y


def product(size: int, dtype: torch.dtype, precision: str = "ieee", **options: int) -> None:
    """Sum eight products of square tiles."""
    x = torch.empty(8, size, size, dtype=dtype)
    y = torch.empty(size, size)
    product_kernel[(1,)](x, x, y, 8, BLOCK=size, PRECISION=precision, **options)


def calls():
    """Yield what ``python -m pagedraft.bench.static --calls`` compiles."""
    from pagedraft.bench.record import Call

    yield Call("toy", "divisible", lambda: good(torch.empty(1024)))
    yield Call("toy", "odd", lambda: good(torch.empty(1023)))
    yield Call("toy", "broken", lambda: broken(torch.empty(32)))
    yield Call("toy", "wide", lambda: product(128, torch.float16, num_stages=4))
    yield Call("linear", "spills", lambda: product(128, torch.float16, num_warps=1, num_stages=1))
    yield Call("toy", "raises", lambda: torch.empty(4).view(3))
    yield Call("toy", "nothing", lambda: None)
    yield Call("toy", "option", lambda: product(32, torch.float16, no_such_option=1))
    yield Call("toy", "tf32", lambda: product(32, torch.float32, "tf32"))
    yield Call("toy", "ieee", lambda: product(32, torch.float32, "ieee"))
