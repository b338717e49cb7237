"""The kernel of ``linear`` for quantised weights.

**Shapes**: as in ``linear.py`` and ``weight_quant.py``.
**Cost**: codes are read once for every ``block_t`` rows; for few rows they are all that matters.
**Grid**: a program owns BLOCK_O outputs x BLOCK_T rows and walks all inputs, NUM_SLICES slices of
SLICE_BYTES bytes of codes a step. A slice is a warp's: each code becomes a number once, and a warp
reads only its own inputs of x. Weights are the left operand: the right one may have 8 columns.
**Exactness**: a slice's products add up step after step; then (slice 0 + 2) + (1 + 3). Neither
depends on the number of rows. Codes, less their zero point, are exact in 16 bits: one factor an
output multiplies the finished sum; factors of groups multiply each step's product, in one fma.
Products in batches run as HMMA for every tile, never as HGMMA.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from pagedraft.kernels.weight_quant import ZERO_STEPS

NUM_SLICES = 4
SLICE_BYTES = 32
_SLICES = tl.constexpr(NUM_SLICES)
_BYTES = tl.constexpr(SLICE_BYTES)
_ZERO_STEPS = tl.constexpr(ZERO_STEPS)
# Four bytes in $4: their low halves into $0 and $1, their high ones into $2 and $3, each times 8 in
# the low byte of a 16-bit float whose high byte is MAGIC: that float is a power of two plus it.
SPLIT_BYTES = """{
    .reg .b32 halves;
    shl.b32 halves, $4, 3;
    and.b32 halves, halves, 0x78787878;
    prmt.b32 $0, halves, MAGIC, 0x4140;
    prmt.b32 $1, halves, MAGIC, 0x4342;
    shr.b32 halves, $4, 1;
    and.b32 halves, halves, 0x78787878;
    prmt.b32 $2, halves, MAGIC, 0x4140;
    prmt.b32 $3, halves, MAGIC, 0x4342;
}"""
_SPLIT_TO_BF16 = tl.constexpr(SPLIT_BYTES.replace("MAGIC", "0x43434343"))
_SPLIT_TO_FP16 = tl.constexpr(SPLIT_BYTES.replace("MAGIC", "0x64646464"))


@dataclass(frozen=True)
class QuantTile:
    """Everything that a kernel is compiled for.

    group: inputs that share a factor, 0 for one factor an output.
    unroll: steps an iteration.
    is_even: the inputs are whole iterations.
    is_nvidia: codes of 4 bits are split by PTX.
    """

    is_int4: bool
    group: int
    block_t: int
    block_o: int
    unroll: int
    is_even: bool
    has_bias: bool
    has_residual: bool
    is_nvidia: bool

    @property
    def step(self) -> int:
        """Inputs of one step."""
        return NUM_SLICES * SLICE_BYTES * (2 if self.is_int4 else 1)

    @property
    def slice_groups(self) -> int:
        """Groups that a slice's inputs of one step lie in."""
        return 2 if self.is_int4 and self.group == SLICE_BYTES else 1


@triton.jit
def _split_bytes(codes, zero, dtype: tl.constexpr, IS_NVIDIA: tl.constexpr):
    """(low, high) half of each byte times ZERO_STEPS, less its output's zero point in such steps,
    as exact ``dtype`` numbers."""
    # Where low bytes count from: 2^7 of bf16 and 2^10 of fp16 have low bits worth 1, 2, 4, ...
    origin: tl.constexpr = 0 if dtype == tl.float32 else 128 if dtype == tl.bfloat16 else 1024
    bits: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
    if dtype == tl.float32:
        low = (codes & 15).to(dtype) * _ZERO_STEPS
        high = (codes >> 4).to(dtype) * _ZERO_STEPS
    else:
        if IS_NVIDIA:
            asm: tl.constexpr = _SPLIT_TO_BF16 if dtype == tl.bfloat16 else _SPLIT_TO_FP16
            low, high = tl.inline_asm_elementwise(
                asm, "=&r,=&r,=&r,=r,r", [codes], (tl.uint16, tl.uint16), is_pure=True, pack=4
            )
        else:
            low = codes.to(tl.uint16) << 3 & 0x78 | bits
            high = codes.to(tl.uint16) >> 1 & 0x78 | bits
        low, high = low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)
    zero_point = zero.to(dtype) + origin
    return low - zero_point, high - zero_point


@triton.jit
def _load_step(ptrs, mask, IS_MASKED: tl.constexpr):
    if IS_MASKED:
        values = tl.load(ptrs, mask=mask, other=0.0)
    else:
        values = tl.load(ptrs)
    return values


@triton.jit
def _group_values(ptr, first_i, size, num_groups, offs, tile: tl.constexpr):
    """(first, last): values of those groups of each slice in the step that begins at input first_i.

    size: values of a group. Both [SLICES, outputs], 0 past the last group; a slice's inputs lie in
    one group or in two.
    """
    SLICE: tl.constexpr = tile.step // _SLICES
    offs_c = (first_i + tl.arange(0, _SLICES) * SLICE) // tile.group
    offsets = offs_c[:, None] * size + offs[None, :]
    first = tl.load(ptr + offsets, mask=(offs_c < num_groups)[:, None], other=0)
    if tile.slice_groups == 1:
        last = first
    else:
        mask = (offs_c < num_groups - 1)[:, None]
        last = tl.load(ptr + offsets + size, mask=mask, other=0)
    return first, last


@triton.jit
def _add_scaled(acc, part, scale):
    """acc + part * scale, rounded once; scale [SLICES, BLOCK_O]."""
    return tl.fma(part, tl.broadcast_to(scale.to(tl.float32)[:, :, None], part.shape), acc)


@triton.jit
def _add_int4(acc, x_ptrs, codes, mask, scales, zeros, offs_k, offs_o, tile: tl.constexpr):
    """acc + the products of a step: group by group, low halves, then high ones.

    scales, zeros: of a slice's first and last group; a zero point is a byte of its word.
    """
    GROUPS: tl.constexpr = tile.slice_groups
    HALF: tl.constexpr = tile.group // 2
    IS_MASKED: tl.constexpr = GROUPS > 1 or not tile.is_even
    for number in tl.static_range(GROUPS):
        # Inputs of the slice's other group count as 0.
        mask_x = mask & (offs_k // HALF % GROUPS == number)
        x_low = _load_step(x_ptrs, mask_x[:, :, None], IS_MASKED)  # [SLICES, BYTES, BLOCK_T]
        x_high = _load_step(x_ptrs + HALF, mask_x[:, :, None], IS_MASKED)
        zero_point = zeros[number] >> (offs_o % 4 * 8)[None, :] & 255
        low, high = _split_bytes(codes, zero_point[:, :, None], x_low.dtype, tile.is_nvidia)
        part = tl.dot(low, x_low, input_precision="ieee")
        part = tl.dot(high, x_high, part, input_precision="ieee")
        acc = _add_scaled(acc, part, scales[number])
    return acc


@triton.jit
def _offsets(num_rows, num_out, row_bytes, stride_xt, tile_t, tile_o, tile: tl.constexpr):
    """(offs_o, bytes of a slice, inputs they hold, offsets in x, offsets in the codes)."""
    BLOCK_T: tl.constexpr = tile.block_t
    BLOCK_O: tl.constexpr = tile.block_o
    # Rows and outputs past the end read the last one again, and are not stored.
    offs_t = tl.minimum(tl.arange(0, BLOCK_T), num_rows - 1 - tile_t * BLOCK_T)
    offs_o = tl.minimum(tl.arange(0, BLOCK_O), num_out - 1 - tile_o * BLOCK_O)
    offs_k = (tl.arange(0, _SLICES) * _BYTES)[:, None] + tl.arange(0, _BYTES)[None, :]
    offs_i = offs_k
    if tile.is_int4:  # byte j of a group holds input j
        offs_i = offs_k // (tile.group // 2) * tile.group + offs_k % (tile.group // 2)
    offs_x = offs_t[None, None, :] * stride_xt + offs_i[:, :, None]  # [SLICES, BYTES, BLOCK_T]
    offs_w = offs_o[None, :, None] * row_bytes + offs_k[:, None, :]  # [SLICES, BLOCK_O, BYTES]
    return offs_o, offs_k, offs_i, offs_x, offs_w


@triton.jit
def _store(
    acc, scale_ptr, bias_ptr, residual_ptr, y_ptr, num_rows, num_out, stride_rt, tile: tl.constexpr
):
    """Store the sum of the slices, (0 + 2) + (1 + 3), times an output's factor, plus terms."""
    BLOCK_T: tl.constexpr = tile.block_t
    BLOCK_O: tl.constexpr = tile.block_o
    tile_t, tile_o = tl.program_id(0), tl.program_id(1)
    first_t, first_o = (tile_t * BLOCK_T).to(tl.int64), (tile_o * BLOCK_O).to(tl.int64)
    first, second = tl.split(tl.reshape(acc, [2, 2, BLOCK_O, BLOCK_T]).permute(1, 2, 3, 0))
    first, second = tl.split((first + second).permute(1, 2, 0))
    values = tl.trans(first + second)  # [BLOCK_T, BLOCK_O]
    if tile.is_int4:  # codes came in steps of an eighth
        values *= 1.0 / _ZERO_STEPS
    offs_t, offs_o = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_O)
    mask_o = offs_o < num_out - tile_o * BLOCK_O
    mask = (offs_t < num_rows - tile_t * BLOCK_T)[:, None] & mask_o[None, :]
    bias = tl.zeros([BLOCK_O], dtype=tl.float32)
    if tile.has_bias:
        bias = tl.load(bias_ptr + first_o + offs_o, mask=mask_o, other=0.0).to(tl.float32)
    bias = tl.broadcast_to(bias[None, :], values.shape)
    if tile.group == 0:
        scale = tl.load(scale_ptr + first_o + offs_o, mask=mask_o, other=0.0).to(tl.float32)
        values = tl.fma(values, tl.broadcast_to(scale[None, :], values.shape), bias)
    else:
        values += bias
    if tile.has_residual:
        ptrs = residual_ptr + first_t * stride_rt + first_o
        ptrs += offs_t[:, None] * stride_rt + offs_o[None, :]
        values += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    y_ptrs = y_ptr + first_t * num_out + first_o + (offs_t[:, None] * num_out + offs_o[None, :])
    tl.store(y_ptrs, values.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def channel_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    num_rows,
    num_out,
    num_in,
    stride_xt,
    stride_rt,
    tile: tl.constexpr,
):
    """Codes of 8 bits with one factor an output."""
    BLOCK_T: tl.constexpr = tile.block_t
    BLOCK_O: tl.constexpr = tile.block_o
    UNROLL: tl.constexpr = tile.unroll
    STEP: tl.constexpr = tile.step
    tile_t, tile_o = tl.program_id(0), tl.program_id(1)
    _, _, offs_i, offs_x, offs_w = _offsets(
        num_rows, num_out, num_in, stride_xt, tile_t, tile_o, tile
    )
    x_base = x_ptr + (tile_t * BLOCK_T).to(tl.int64) * stride_xt
    codes_base = codes_ptr + (tile_o * BLOCK_O).to(tl.int64) * num_in
    acc = tl.zeros([_SLICES, BLOCK_O, BLOCK_T], dtype=tl.float32)
    for start in range(0, num_in, STEP * UNROLL):
        for number in tl.static_range(UNROLL):
            mask = start + number * STEP + offs_i < num_in
            x = _load_step(x_base + offs_x, mask[:, :, None], not tile.is_even)
            codes = _load_step(codes_base + offs_w, mask[:, None, :], not tile.is_even)
            acc = tl.dot(codes.to(x.dtype), x, acc, input_precision="ieee")
            x_base += STEP
            codes_base += STEP
    _store(acc, scale_ptr, bias_ptr, residual_ptr, y_ptr, num_rows, num_out, stride_rt, tile)


@triton.jit(do_not_specialize=["num_rows"])
def group_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    num_rows,
    num_out,
    num_in,
    row_bytes,
    num_groups,
    num_words,
    stride_xt,
    stride_rt,
    tile: tl.constexpr,
):
    """Codes of 4 or 8 bits with a factor a group."""
    BLOCK_T: tl.constexpr = tile.block_t
    BLOCK_O: tl.constexpr = tile.block_o
    UNROLL: tl.constexpr = tile.unroll
    STEP: tl.constexpr = tile.step
    tile_t, tile_o = tl.program_id(0), tl.program_id(1)
    offs_o, offs_k, offs_i, offs_x, offs_w = _offsets(
        num_rows, num_out, row_bytes, stride_xt, tile_t, tile_o, tile
    )
    x_base = x_ptr + (tile_t * BLOCK_T).to(tl.int64) * stride_xt
    first_o = (tile_o * BLOCK_O).to(tl.int64)
    codes_base = codes_ptr + first_o * row_bytes
    scale_base, zero_base = scale_ptr + first_o, zero_ptr + first_o // 4
    acc = tl.zeros([_SLICES, BLOCK_O, BLOCK_T], dtype=tl.float32)
    scale, last_scale = _group_values(scale_base, 0, num_out, num_groups, offs_o, tile)
    for start in range(0, num_in, STEP * UNROLL):
        for number in tl.static_range(UNROLL):
            first_i = start + number * STEP
            mask = first_i + offs_i < num_in
            codes = _load_step(codes_base + offs_w, mask[:, None, :], not tile.is_even)
            # What the next step multiplies by is on its way while this one computes.
            next_scale, next_last_scale = _group_values(
                scale_base, first_i + STEP, num_out, num_groups, offs_o, tile
            )
            x_ptrs = x_base + offs_x
            if tile.is_int4:
                zeros = _group_values(zero_base, first_i, num_words, num_groups, offs_o // 4, tile)
                scales = scale, last_scale
                acc = _add_int4(acc, x_ptrs, codes, mask, scales, zeros, offs_k, offs_o, tile)
            else:
                x = _load_step(x_ptrs, mask[:, :, None], not tile.is_even)
                part = tl.dot(codes.to(x.dtype), x, input_precision="ieee")
                acc = _add_scaled(acc, part, scale)
            scale, last_scale = next_scale, next_last_scale
            x_base += STEP
            codes_base += _SLICES * _BYTES
    _store(acc, scale_ptr, bias_ptr, residual_ptr, y_ptr, num_rows, num_out, stride_rt, tile)
