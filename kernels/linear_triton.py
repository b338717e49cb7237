"""The kernel of ``linear`` for weights of the activations' dtype, and its launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pagedraft.kernels.linear_config import linear_config

# On AMD one MFMA shape for every tile: 32-row tiles would take another by themselves.
TARGET_OPTIONS: dict[str, Any] = {"matrix_instr_nonkdim": 16} if torch.version.hip else {}


@triton.jit
def _grouped_tile(program, num_tiles_t, num_tiles_o, GROUP_T: tl.constexpr):
    """Return (row tile, output tile): GROUP_T row tiles share each output tile, then the next."""
    group = program // (GROUP_T * num_tiles_o)
    inside = program % (GROUP_T * num_tiles_o)
    size = tl.minimum(num_tiles_t - group * GROUP_T, GROUP_T)
    return group * GROUP_T + inside % size, inside // size


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    num_rows,
    num_out,
    num_in,
    stride_xt,
    stride_rt,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_EVEN_I: tl.constexpr,
    GROUP_T: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    num_tiles_t, num_tiles_o = tl.cdiv(num_rows, BLOCK_T), tl.cdiv(num_out, BLOCK_O)
    tile_t, tile_o = _grouped_tile(tl.program_id(0), num_tiles_t, num_tiles_o, GROUP_T)
    first_t, first_o = (tile_t * BLOCK_T).to(tl.int64), (tile_o * BLOCK_O).to(tl.int64)
    # Rows past the end read the last row again: loads need no mask, and nothing of it is stored.
    offs_t = tl.minimum(tl.arange(0, BLOCK_T), num_rows - 1 - tile_t * BLOCK_T)
    offs_o = tl.minimum(tl.arange(0, BLOCK_O), num_out - 1 - tile_o * BLOCK_O)
    offs_i = tl.arange(0, BLOCK_I)
    # One 64-bit base and 32-bit offsets inside the tile: half the registers of 64-bit pointers.
    x_base, w_base = x_ptr + first_t * stride_xt, w_ptr + first_o * num_in
    offs_x = offs_t[:, None] * stride_xt + offs_i[None, :]
    offs_w = offs_o[None, :] * num_in + offs_i[:, None]
    acc = tl.zeros([BLOCK_T, BLOCK_O], dtype=tl.float32)
    for start in range(0, num_in, BLOCK_I):
        if IS_EVEN_I:
            x = tl.load(x_base + offs_x)  # [BLOCK_T, BLOCK_I]
            w = tl.load(w_base + offs_w)  # [BLOCK_I, BLOCK_O]
        else:
            mask_i = start + offs_i < num_in
            x = tl.load(x_base + offs_x, mask=mask_i[None, :], other=0.0)
            w = tl.load(w_base + offs_w, mask=mask_i[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        x_base += BLOCK_I
        w_base += BLOCK_I
    rows_t, outs_o = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_O)
    mask_o = outs_o < num_out - tile_o * BLOCK_O
    mask = (rows_t < num_rows - tile_t * BLOCK_T)[:, None] & mask_o[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + first_o + outs_o, mask=mask_o, other=0.0)
        acc += bias[None, :].to(tl.float32)
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + first_t * stride_rt + first_o
        residual_ptrs += rows_t[:, None] * stride_rt + outs_o[None, :]
        acc += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
    y_ptrs = y_ptr + first_t * num_out + first_o + (rows_t[:, None] * num_out + outs_o[None, :])
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)


def launch(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    residual_TO: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Run the kernel; x is copied where its strides rule out 16-byte loads."""
    num_rows, num_in = x_TI.shape
    num_out = weight_OI.shape[0]
    y_TO = x_TI.new_empty(num_rows, num_out, dtype=out_dtype)
    if num_rows == 0:
        return y_TO
    if x_TI.stride(1) != 1 or x_TI.stride(0) % 16:
        x_TI = x_TI.contiguous()
    if residual_TO is not None and residual_TO.stride(1) != 1:
        residual_TO = residual_TO.contiguous()
    config = linear_config(num_rows, num_in, num_out, x_TI.element_size())
    grid = (triton.cdiv(num_rows, config.block_t) * triton.cdiv(num_out, config.block_o),)
    _linear_kernel[grid](
        x_TI,
        weight_OI,
        weight_OI if bias_O is None else bias_O,
        y_TO if residual_TO is None else residual_TO,
        y_TO,
        num_rows,
        num_out,
        num_in,
        x_TI.stride(0),
        0 if residual_TO is None else residual_TO.stride(0),
        HAS_BIAS=bias_O is not None,
        HAS_RESIDUAL=residual_TO is not None,
        IS_EVEN_I=num_in % config.block_i == 0,
        GROUP_T=config.group_t,
        BLOCK_T=config.block_t,
        BLOCK_O=config.block_o,
        BLOCK_I=config.block_i,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **TARGET_OPTIONS,
    )
    return y_TO
