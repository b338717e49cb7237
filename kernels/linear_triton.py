"""The kernel of ``linear`` for weights of the activations' dtype, and its launch.

Also what every kernel with that product shares (``linear_fused_triton.py``): the tile that a
program owns, the walk over the inputs, the factors of rows on their way through an RMSNorm.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pagedraft.kernels.check import check_shape
from pagedraft.kernels.linear_config import LinearConfig, linear_config
from pagedraft.kernels.normed import SQUARE_COLUMNS, Normed


@triton.jit
def first_of_tile(num_rows, tile: tl.constexpr):
    """Return (first row of x, first row of the weight) of this program.

    ``group_t`` row tiles share each weight tile, then the next one. The last of several row tiles
    starts so that it is full, and does rows of the one before again: with the same bits.
    """
    program = tl.program_id(0)
    if tile.group_t == 1:  # one row tile: no division
        first_t, tile_o = tl.program_id(1), program
    else:
        num_tiles_t, num_tiles_o = tl.cdiv(num_rows, tile.block_t), tile.num_tiles_o
        group = program // (tile.group_t * num_tiles_o)
        inside = program % (tile.group_t * num_tiles_o)
        size = tl.minimum(num_tiles_t - group * tile.group_t, tile.group_t)
        tile_t, tile_o = group * tile.group_t + inside % size, inside // size
        first_t = tl.minimum(tile_t * tile.block_t, num_rows - tile.block_t)
    return first_t, tile_o * tile.block_o


@triton.jit
def _rows(first_t, num_rows, tile: tl.constexpr):
    """Return the rows of the tile; past the end the last one again, so that no load is masked."""
    offs_t = tl.arange(0, tile.block_t)
    if tile.group_t == 1:
        offs_t = tl.minimum(offs_t, num_rows - 1 - first_t)
    return offs_t


@triton.jit
def row_sums(x, LEVELS: tl.constexpr):
    """Return the sums over the last axis of x [R, 2^LEVELS] by halving.

    Neighbours are added, then neighbouring sums: one order for every tile, where ``tl.sum`` has
    another for each layout.
    """
    ROWS: tl.constexpr = x.shape[0]
    for _ in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(x, [ROWS, x.shape[1] // 2, 2]))
        x = left + right
    return tl.reshape(x, [ROWS])


@triton.jit
def _squares(squares_ptr, first_t, num_rows, first_p, SIZE: tl.constexpr, tile: tl.constexpr):
    """Return a piece of the sums of squares, [BLOCK_T, SIZE] fp32, 0 past a row's last."""
    offs_t = _rows(first_t, num_rows, tile)
    offs_p = first_p + tl.arange(0, SIZE)
    base = squares_ptr + first_t.to(tl.int64) * tile.num_p
    ptrs = base + (offs_t[:, None] * tile.num_p + offs_p[None, :])
    return tl.load(ptrs, mask=(offs_p < tile.num_p)[None, :], other=0.0)


@triton.jit
def _late_sums(squares_ptr, first_t, num_rows, tile: tl.constexpr):
    """Return the sums of squares a row, those of ``row_sums``, in eight pieces: few registers."""
    LEVELS: tl.constexpr = tile.levels_p - 3
    SIZE: tl.constexpr = 1 << LEVELS
    BLOCK_T: tl.constexpr = tile.block_t
    total = tl.zeros([BLOCK_T], dtype=tl.float32)
    for half in range(2):
        part = tl.zeros([BLOCK_T], dtype=tl.float32)
        for quarter in range(2):
            first_p = (4 * half + 2 * quarter) * SIZE
            left = _squares(squares_ptr, first_t, num_rows, first_p, SIZE, tile)
            right = _squares(squares_ptr, first_t, num_rows, first_p + SIZE, SIZE, tile)
            part += row_sums(left, LEVELS) + row_sums(right, LEVELS)
        total += part
    return total


@triton.jit
def _dot_steps(x_ptrs, w_ptrs, num_trips, tile: tl.constexpr):
    """Return x w, [BLOCK_T, BLOCK_O] fp32: one walk over the inputs, BLOCK_I at a time.

    The number of trips is a run-time number: known to the compiler, the loop would be unrolled
    whole, into more code than the instruction cache keeps.
    """
    IS_EVEN: tl.constexpr = tile.num_in % tile.block_i == 0
    BLOCK_T: tl.constexpr = tile.block_t
    BLOCK_O: tl.constexpr = tile.block_o
    acc = tl.zeros([BLOCK_T, BLOCK_O], dtype=tl.float32)
    BLOCK_I: tl.constexpr = tile.block_i
    UNROLL: tl.constexpr = tile.unroll
    offs_i = tl.arange(0, BLOCK_I)
    for trip in range(num_trips):
        for step in tl.static_range(UNROLL):
            if IS_EVEN:
                x = tl.load(x_ptrs + step * BLOCK_I)  # [BLOCK_T, BLOCK_I]
                w = tl.load(w_ptrs + step * BLOCK_I)  # [BLOCK_I, BLOCK_O]
            else:
                mask_i = offs_i < tile.num_in - trip * BLOCK_I
                x = tl.load(x_ptrs, mask=mask_i[None, :], other=0.0)
                w = tl.load(w_ptrs, mask=mask_i[:, None], other=0.0)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        x_ptrs += UNROLL * BLOCK_I
        w_ptrs += UNROLL * BLOCK_I
    return acc


@triton.jit
def products(
    x_ptr,
    stride_xt: tl.constexpr,
    w_ptrs,
    squares_ptr,
    eps,
    first_t,
    num_rows,
    num_trips,
    tile: tl.constexpr,
):
    """Return x Wt, [BLOCK_T, BLOCK_O] fp32; times each row's factor where it has squares.

    w_ptrs: pointers to the first inputs of the weight tile, [BLOCK_I, BLOCK_O].
    Small tiles load the squares before the walk, which hides the wait; large ones lack registers.
    """
    IS_EARLY: tl.constexpr = tile.block_t < 64 or tile.levels_p < 4
    if squares_ptr is not None and IS_EARLY:
        squares = _squares(squares_ptr, first_t, num_rows, 0, 1 << tile.levels_p, tile)
    offs_t = _rows(first_t, num_rows, tile)
    offs_x = offs_t[:, None] * stride_xt + tl.arange(0, tile.block_i)[None, :]
    x_ptrs = x_ptr + first_t.to(tl.int64) * stride_xt + offs_x
    acc = _dot_steps(x_ptrs, w_ptrs, num_trips, tile)
    if squares_ptr is not None:
        if IS_EARLY:
            sums_t = row_sums(squares, tile.levels_p)
        else:
            sums_t = _late_sums(squares_ptr, first_t, num_rows, tile)
        acc *= tl.rsqrt(sums_t / tile.num_in + eps)[:, None]
    return acc


@triton.jit
def add_terms(
    acc,
    bias_ptr,
    residual_ptr,
    stride_rt,
    first_t,
    first_o,
    num_rows,
    tile: tl.constexpr,
):
    """Return acc + bias + residual, of which either may be None."""
    rows_t, outs_o = tl.arange(0, tile.block_t), tl.arange(0, tile.block_o)
    mask_o = outs_o < tile.num_out - first_o
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + first_o + outs_o, mask=mask_o, other=0.0).to(tl.float32)[None, :]
    if residual_ptr is not None:
        mask = (rows_t < num_rows - first_t)[:, None] & mask_o[None, :]
        base = residual_ptr + first_t.to(tl.int64) * stride_rt + first_o
        ptrs = base + (rows_t[:, None] * stride_rt + outs_o[None, :])
        acc += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    return acc


@triton.jit
def weight_pointers(w_ptr, first_o, tile: tl.constexpr):
    """Return pointers to the first inputs of rows first_o.., [BLOCK_I, BLOCK_O]."""
    offs_o = tl.arange(0, tile.block_o)
    if tile.num_out % tile.block_o != 0:
        offs_o = tl.minimum(offs_o, tile.num_out - 1 - first_o)
    offs_w = offs_o[None, :] * tile.num_in + tl.arange(0, tile.block_i)[:, None]
    return w_ptr + first_o.to(tl.int64) * tile.num_in + offs_w


@triton.jit
def store_tile(y_ptr, values, first_t, first_o, num_rows, NUM_COLUMNS: tl.constexpr):
    """Store values [R, C] at row first_t, column first_o of y [T, NUM_COLUMNS], inside of it."""
    rows_t, outs_o = tl.arange(0, values.shape[0]), tl.arange(0, values.shape[1])
    mask = (rows_t < num_rows - first_t)[:, None] & (outs_o < NUM_COLUMNS - first_o)[None, :]
    base = y_ptr + first_t.to(tl.int64) * NUM_COLUMNS + first_o
    ptrs = base + (rows_t[:, None] * NUM_COLUMNS + outs_o[None, :])
    tl.store(ptrs, values.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_trips", "eps"])
def _linear_kernel(
    x_ptr,
    squares_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    num_rows,
    num_trips,
    stride_xt: tl.constexpr,
    stride_rt,
    eps,
    tile: tl.constexpr,
):
    first_t, first_o = first_of_tile(num_rows, tile)
    w_ptrs = weight_pointers(w_ptr, first_o, tile)
    acc = products(x_ptr, stride_xt, w_ptrs, squares_ptr, eps, first_t, num_rows, num_trips, tile)
    acc = add_terms(acc, bias_ptr, residual_ptr, stride_rt, first_t, first_o, num_rows, tile)
    store_tile(y_ptr, acc, first_t, first_o, num_rows, tile.num_out)


def config_of(x_TI: torch.Tensor, num_out: int) -> LinearConfig:
    """Return tile and options for a product of x and a weight of ``num_out`` rows."""
    num_rows, num_in = x_TI.shape
    is_hip = torch.version.hip is not None
    return linear_config(num_rows, num_in, num_out, x_TI.element_size(), is_hip)


def grid_of(num_rows: int, config: LinearConfig) -> tuple[int, int]:
    """Return the programs of a launch: one a tile."""
    return triton.cdiv(num_rows, config.tile.block_t) * config.tile.num_tiles_o, 1


def launch_options(config: LinearConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the compile options of a launch.

    A product of 16-bit tensors runs on tensor cores, what follows it without fusing multiply and
    add, which the compiler might do in one tile and not in another. On AMD one MFMA shape for every
    tile: 32-row tiles would take another by themselves.
    """
    options: dict[str, Any] = {"matrix_instr_nonkdim": 16} if torch.version.hip else {}
    options["enable_fp_fusion"] = dtype == torch.float32
    return {**options, "num_warps": config.num_warps, "num_stages": config.num_stages}


def rows_of(x: torch.Tensor | Normed) -> tuple[torch.Tensor, torch.Tensor | None, float]:
    """Return (rows, sums of squares if any, eps), copied where strides rule out 16-byte loads."""
    rows_TI, squares_TP, eps = x, None, 0.0
    if isinstance(x, Normed):
        rows_TI, squares_TP, eps = x.rows_TE, x.squares_TP.contiguous(), x.eps
        num_parts = triton.cdiv(rows_TI.shape[1], SQUARE_COLUMNS)
        check_shape("squares_TP", squares_TP, (rows_TI.shape[0], num_parts))
    if rows_TI.stride(1) != 1 or rows_TI.stride(0) % 16:
        rows_TI = rows_TI.contiguous()
    return rows_TI, squares_TP, eps


def row_stride(x_TI: torch.Tensor) -> int:
    """Return the distance of rows, a constant to the compiler: of packed ones for a lone row."""
    return x_TI.stride(0) if x_TI.shape[0] > 1 else x_TI.shape[1]


def launch(
    x: torch.Tensor | Normed,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    residual_TO: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return y [T, O] = x Wt (+ bias) (+ residual) in ``out_dtype``."""
    rows_TI, squares_TP, eps = rows_of(x)
    num_rows, num_out = rows_TI.shape[0], weight_OI.shape[0]
    y_TO = rows_TI.new_empty(num_rows, num_out, dtype=out_dtype)
    if num_rows == 0:
        return y_TO
    if residual_TO is not None and residual_TO.stride(1) != 1:
        residual_TO = residual_TO.contiguous()
    config = config_of(rows_TI, num_out)
    _linear_kernel[grid_of(num_rows, config)](
        *(rows_TI, squares_TP, weight_OI, bias_O, residual_TO, y_TO),
        *(num_rows, config.num_trips, row_stride(rows_TI)),
        *(0 if residual_TO is None else residual_TO.stride(0), eps, config.tile),
        **launch_options(config, rows_TI.dtype),
    )
    return y_TO
