"""``linear`` with a quantised weight on a GPU: which tile runs, and the launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch.nn.functional import pad

from pagedraft.kernels.dispatch import INTERPRETED
from pagedraft.kernels.linear_quant_triton import (
    NUM_SLICES,
    SLICE_BYTES,
    QuantTile,
    channel_kernel,
    group_kernel,
)
from pagedraft.kernels.weight_quant import QuantWeight

SHARED_BYTES = 72 * 1024  # of copies under way; a program on sm_86 may use 99 KB
MAX_STAGES = 6


def quant_tile(
    num_rows: int,
    weight: QuantWeight,
    element_size: int,
    *,
    has_bias: bool = False,
    has_residual: bool = False,
) -> QuantTile:
    """Return the tile for ``num_rows`` rows of x; neither slices nor steps depend on them."""
    is_int4, is_hip = weight.format == "int4", torch.version.hip is not None
    group = 0 if weight.group == weight.num_in and not is_int4 else weight.group
    slice_groups = 2 if is_int4 and group == SLICE_BYTES else 1
    # MFMA has no 8 columns. Two groups a slice double x in shared memory; fp32 has no registers
    # for more, nor 64 rows (Triton 3.6 on sm_90) without 16-byte loads.
    least = 16 if is_hip else 8
    most = 16 if element_size == 4 else 32 if weight.num_in % 16 else 64 // slice_groups
    block_t = min(max(triton.next_power_of_2(num_rows), least), most)
    unroll = 2 if block_t * slice_groups <= 16 and element_size == 2 else 1
    step = NUM_SLICES * SLICE_BYTES * (2 if is_int4 else 1)
    return QuantTile(
        is_int4=is_int4,
        group=group,
        block_t=block_t,
        block_o=32,
        unroll=unroll,
        is_even=weight.num_in % (unroll * step) == 0,
        has_bias=has_bias,
        has_residual=has_residual,
        is_nvidia=not is_hip and not INTERPRETED,
    )


def quant_stages(tile: QuantTile, element_size: int) -> int:
    """Return the stages of the loop over steps: as many as SHARED_BYTES hold, 3 to MAX_STAGES.

    One program a multiprocessor, which 4096 outputs make, needs about 26 KB of weights under way at
    4.3 TB/s and 800 ns (a model). The least on AMD, which keeps what is under way in registers, and
    for fp32, whose operands pass through shared memory once more.
    """
    if torch.version.hip is not None or element_size == 4:
        return 2
    x_values = tile.block_t * tile.slice_groups * (2 if tile.is_int4 else 1)
    step_bytes = NUM_SLICES * SLICE_BYTES * (tile.block_o + x_values * element_size)
    return min(max(SHARED_BYTES // (tile.unroll * step_bytes) + 1, 3), MAX_STAGES)


def launch(
    x_TI: torch.Tensor,
    weight: QuantWeight,
    bias_O: torch.Tensor | None,
    residual_TO: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return y [T, O] = x Wt (+ bias) (+ residual) in ``out_dtype``.

    x is copied where the weight has an order of its own, or where its strides rule out 16-byte
    loads.
    """
    num_rows, num_in = x_TI.shape
    y_TO = x_TI.new_empty(num_rows, weight.num_out, dtype=out_dtype)
    if num_rows == 0:
        return y_TO
    if weight.order_I is not None:
        x_TI = x_TI.index_select(1, weight.order_I)
    if x_TI.stride(1) != 1 or x_TI.stride(0) % 16:
        x_TI = x_TI.contiguous()
    if residual_TO is not None and residual_TO.stride(1) != 1:
        residual_TO = residual_TO.contiguous()
    has_bias, has_residual = bias_O is not None, residual_TO is not None
    size = x_TI.element_size()
    tile = quant_tile(num_rows, weight, size, has_bias=has_bias, has_residual=has_residual)
    terms = bias_O if has_bias else weight.scale_CO, residual_TO if has_residual else y_TO
    strides = x_TI.stride(0), residual_TO.stride(0) if residual_TO is not None else 0
    options: dict[str, Any] = {"num_warps": NUM_SLICES, "num_stages": quant_stages(tile, size)}
    if torch.version.hip is not None:
        options["matrix_instr_nonkdim"] = 16  # one MFMA shape for every tile
    grid = (triton.cdiv(num_rows, tile.block_t), triton.cdiv(weight.num_out, tile.block_o))
    sizes = num_rows, weight.num_out, num_in
    operands = x_TI, weight.codes, weight.scale_CO
    if tile.group == 0:
        channel_kernel[grid](*operands, *terms, y_TO, *sizes, *strides, tile=tile, **options)
        return y_TO
    zero_words = zero_point_words(weight)
    counts = weight.codes.shape[1], weight.scale_CO.shape[0], zero_words.shape[1]
    group_kernel[grid](
        *operands, zero_words, *terms, y_TO, *sizes, *counts, *strides, tile=tile, **options
    )
    return y_TO


def zero_point_words(weight: QuantWeight) -> torch.Tensor:
    """Return the zero points, four to an int32 word, [C, ceil(O / 4)]: a copy where 4 does not
    divide O; without zero points something that no kernel reads.

    Words, because copies to shared memory are of 4 bytes at least.
    """
    if weight.zero_CO is None:
        return weight.scale_CO
    missing = -weight.num_out % 4
    zero_CO = pad(weight.zero_CO, (0, missing)) if missing else weight.zero_CO
    return zero_CO.contiguous().view(torch.int32)
