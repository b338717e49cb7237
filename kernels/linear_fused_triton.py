"""A linear layer and what follows it in one launch: the gated activation, or residual and norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedraft.kernels.gated_mlp import Activation, gated
from pagedraft.kernels.linear_triton import (
    add_terms,
    config_of,
    first_of_tile,
    grid_of,
    launch_options,
    products,
    row_stride,
    row_sums,
    rows_of,
    store_tile,
    weight_pointers,
)
from pagedraft.kernels.normed import SQUARE_COLUMNS, Normed


@triton.jit
def _pair_pointers(w_ptr, first_f, tile: tl.constexpr):
    """Return pointers to the first inputs of gate row f, up row f, gate row f + 1, ...: [I, O]."""
    MLP_DIM: tl.constexpr = tile.num_out // 2
    outs_o = tl.arange(0, tile.block_o)
    offs_f = outs_o // 2
    if MLP_DIM % (tile.block_o // 2) != 0:
        offs_f = tl.minimum(offs_f, MLP_DIM - 1 - first_f)
    offs_o = offs_f * tile.num_in + (outs_o % 2).to(tl.int64) * (MLP_DIM * tile.num_in)
    offs_w = offs_o[None, :] + tl.arange(0, tile.block_i)[:, None]
    return w_ptr + first_f.to(tl.int64) * tile.num_in + offs_w


@triton.jit(do_not_specialize=["num_rows", "num_trips"])
def _gated_linear_kernel(
    x_ptr,
    squares_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    num_trips,
    stride_xt: tl.constexpr,
    eps,
    IS_GELU: tl.constexpr,
    tile: tl.constexpr,
):
    MLP_DIM: tl.constexpr = tile.num_out // 2
    BLOCK_F: tl.constexpr = tile.block_o // 2
    first_t, first_o = first_of_tile(num_rows, tile)
    first_f = first_o // 2
    w_ptrs = _pair_pointers(w_ptr, first_f, tile)
    acc = products(x_ptr, stride_xt, w_ptrs, squares_ptr, eps, first_t, num_rows, num_trips, tile)
    # Gate and up of one column are neighbours, and so in one thread.
    gate, up = tl.split(tl.reshape(acc, [acc.shape[0], BLOCK_F, 2]))
    if bias_ptr is not None:
        offs_f = tl.minimum(tl.arange(0, BLOCK_F), MLP_DIM - 1 - first_f)
        gate += tl.load(bias_ptr + first_f + offs_f).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + MLP_DIM + first_f + offs_f).to(tl.float32)[None, :]
    y = gated(gate, up, IS_GELU)
    store_tile(y_ptr, y, first_t, first_f, num_rows, MLP_DIM)


@triton.jit(do_not_specialize=["num_rows", "num_trips"])
def _linear_add_norm_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    norm_ptr,
    sum_ptr,
    rows_ptr,
    squares_ptr,
    num_rows,
    num_trips,
    stride_xt: tl.constexpr,
    stride_rt,
    tile: tl.constexpr,
):
    BLOCK_T: tl.constexpr = tile.block_t
    BLOCK_P: tl.constexpr = tile.block_o // 32
    NUM_P: tl.constexpr = (tile.num_out + 31) // 32
    first_t, first_o = first_of_tile(num_rows, tile)
    w_ptrs = weight_pointers(w_ptr, first_o, tile)
    acc = products(x_ptr, stride_xt, w_ptrs, None, 0.0, first_t, num_rows, num_trips, tile)
    acc = add_terms(acc, bias_ptr, residual_ptr, stride_rt, first_t, first_o, num_rows, tile)
    sums = acc.to(sum_ptr.dtype.element_ty)
    store_tile(sum_ptr, sums, first_t, first_o, num_rows, tile.num_out)
    outs_o = tl.arange(0, tile.block_o)
    mask_o = outs_o < tile.num_out - first_o
    wide = tl.where(mask_o[None, :], sums.to(tl.float32), 0.0)
    norm = tl.load(norm_ptr + first_o + outs_o, mask=mask_o, other=0.0).to(tl.float32)
    store_tile(rows_ptr, wide * norm[None, :], first_t, first_o, num_rows, tile.num_out)
    parts = row_sums(tl.reshape(wide * wide, [BLOCK_T * BLOCK_P, 32]), 5)
    parts = tl.reshape(parts, [BLOCK_T, BLOCK_P])
    store_tile(squares_ptr, parts, first_t, first_o // 32, num_rows, NUM_P)


def launch_gated(
    x: torch.Tensor | Normed,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    activation: Activation,
) -> torch.Tensor:
    """Return activation(gate) * up [T, F] of the rows of ``weight_OI`` [2F, I]: gates, then ups."""
    rows_TI, squares_TP, eps = rows_of(x)
    num_rows, num_out = rows_TI.shape[0], weight_OI.shape[0]
    y_TF = rows_TI.new_empty(num_rows, num_out // 2)
    if num_rows == 0:
        return y_TF
    config = config_of(rows_TI, num_out)
    _gated_linear_kernel[grid_of(num_rows, config)](
        *(rows_TI, squares_TP, weight_OI, bias_O, y_TF),
        *(num_rows, config.num_trips, row_stride(rows_TI), eps),
        *(activation == "gelu_tanh", config.tile),
        **launch_options(config, rows_TI.dtype),
    )
    return y_TF


def launch_add_norm(
    x_TI: torch.Tensor,
    weight_EI: torch.Tensor,
    bias_E: torch.Tensor | None,
    residual_TE: torch.Tensor,
    norm_weight_E: torch.Tensor,
    eps: float,
) -> tuple[Normed, torch.Tensor]:
    """Return (the normed rows before their factor, sum_TE = x Wt (+ bias) + residual)."""
    x_TI, _, _ = rows_of(x_TI)
    num_rows, num_out = x_TI.shape[0], weight_EI.shape[0]
    sum_TE, rows_TE = (x_TI.new_empty(num_rows, num_out) for _ in range(2))
    num_parts = triton.cdiv(num_out, SQUARE_COLUMNS)
    squares_TP = x_TI.new_empty(num_rows, num_parts, dtype=torch.float32)
    if num_rows:
        if residual_TE.stride(1) != 1:
            residual_TE = residual_TE.contiguous()
        config = config_of(x_TI, num_out)
        _linear_add_norm_kernel[grid_of(num_rows, config)](
            *(x_TI, weight_EI, bias_E, residual_TE, norm_weight_E, sum_TE, rows_TE, squares_TP),
            *(num_rows, config.num_trips, row_stride(x_TI), residual_TE.stride(0), config.tile),
            **launch_options(config, x_TI.dtype),
        )
    return Normed(rows_TE, squares_TP, eps), sum_TE
