"""Toy kernels for the compile check, one for each verdict it can reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


@triton.jit
def segments_kernel(a_ptr, b_ptr, y_ptr, num_steps, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """Like ``product_kernel``, but after four steps the sum is stored and starts anew."""
    offs = tl.arange(0, BLOCK)
    tile = offs[:, None] * BLOCK + offs[None, :]  # [BLOCK, BLOCK]
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for step in range(num_steps):
        a = tl.load(a_ptr + step * BLOCK * BLOCK + tile)
        b = tl.load(b_ptr + step * BLOCK * BLOCK + tile)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if step % 4 == 3:
            tl.store(y_ptr + step // 4 * BLOCK * BLOCK + tile, acc)
            tl.debug_barrier()  # keeps the branch: Triton 3.9 would turn it into predicates
            acc = tl.zeros((BLOCK, BLOCK), tl.float32)


FAULTS = ("narrow", "masked", "address", "cores", "two tiles")


@dataclass(frozen=True)
class ToyShape:
    """What the check reads of an attention kernel's sizes; see AttentionShape."""

    head_dim: int = 64
    block_d: int = 64
    block_n: int = 64
    window: int = 0
    segment: int = 256
    section: int = 2048
    is_one_tile: bool = True
    block_m: int = 16
    group: int = 4
    # What is wrong with it: a word of FAULTS or nothing.
    fault: str = ""


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, k_factor_ptr, table_ptr, out_ptr, num_keys, step_d, shape: tl.constexpr
):
    """Sum of q k v over paged keys, without a softmax: what is judged are loads and products."""
    BLOCK_N: tl.constexpr = shape.block_n * (2 if shape.fault == "two tiles" else 1)
    D: tl.constexpr = shape.head_dim
    offs_m, offs_n, offs_d = tl.arange(0, 16), tl.arange(0, BLOCK_N), tl.arange(0, D)
    q = tl.load(q_ptr + offs_m[:, None] * D + offs_d[None, :])
    acc = tl.zeros((16, D), tl.float32)
    for key in range(0, num_keys, BLOCK_N):
        block = tl.load(table_ptr + key // BLOCK_N)
        base = (
            block * (BLOCK_N * D)
            if shape.fault == "address"
            else block.to(tl.int64) * (BLOCK_N * D)
        )
        ptrs = offs_n[:, None] * D + offs_d[None, :] * (step_d if shape.fault == "narrow" else 1)
        if shape.fault == "masked":
            mask_d = (offs_d < D)[None, :]
            k = tl.load(k_ptr + base + ptrs, mask=mask_d, other=0.0)
        else:
            k = tl.load(k_ptr + base + ptrs)
        v = tl.load(v_ptr + base + ptrs)
        if shape.fault == "cores":
            acc += tl.sum(q, 0)[None, :] * tl.sum(k.to(tl.float32) * v, 0)[None, :]
        else:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            acc = tl.dot(scores.to(v.dtype), v, acc, input_precision="ieee")
    tl.store(out_ptr + offs_m[:, None] * D + offs_d[None, :], acc)


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


def attend(sizes: ToyShape, dtype: torch.dtype = torch.float16, **options: int) -> None:
    """Launch the toy attention over 8192 keys."""
    q, out = torch.empty(16, sizes.head_dim, dtype=dtype), torch.empty(16, sizes.head_dim)
    pool = torch.empty(128, 64, sizes.head_dim, dtype=dtype)
    table = torch.empty(128, dtype=torch.int32)
    attention_kernel[(1,)](q, pool, pool, None, table, out, 8192, 3, sizes, **options)


def attention_call(case: str, run: Callable[[], None], **floor: float):
    """Return a call of the toy attention, judged like the real one."""
    from pagedraft.bench.record import Call

    return Call("paged_attention", case, run, context=8192, **floor)


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
    good_shape, large = ToyShape(), ToyShape(head_dim=256, block_d=256)
    yield attention_call("attention", lambda: attend(good_shape))
    for fault in FAULTS:
        sizes = ToyShape(fault=fault)
        yield attention_call(f"attention {fault}", lambda sizes=sizes: attend(sizes))
    yield attention_call("attention spills", lambda: attend(large, num_warps=1))
    yield attention_call("slow", lambda: attend(good_shape, torch.bfloat16), min_kv_bytes=1000.0)
