"""y = x Wt (+ bias) (+ residual); a row has the same bits whatever other rows run beside it.

**Shapes**: x [T, I] rows of I input features; weight [O, I]; bias [O]; residual [T, O]. On a GPU
all are fp16, bf16 or fp32 of one dtype (bias may be fp32); on the CPU path x and residual are fp32,
the weight packed (``kernels/linear_cpu.py``). Any T, O, I >= 1, also T = 0.
**Returns**: y [T, O] in x's dtype; products accumulate in fp32 and round once, after the epilogue.
**Cost**: O*I weight bytes dominate below about 100 rows (memory-bound); 2*T*O*I flops above.
**Grid**: a program owns BLOCK_T x BLOCK_O outputs and walks all of I in steps of BLOCK_I; programs
run in groups of GROUP_T row tiles, so that a group's weights stay in L2.
**Exactness**: every T uses the same BLOCK_I, the same order over I and the same MMA class, so a
row's bits do not depend on T. ``exact=False`` on a GPU calls ``torch.matmul`` and gives that up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from pagedraft.kernels import linear_cpu
from pagedraft.kernels.check import check_dtype, check_same_device, check_shape
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.dispatch import implementation

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# On AMD one MFMA shape for every tile: 32-row tiles would take another by themselves.
TARGET_OPTIONS: dict[str, Any] = {"matrix_instr_nonkdim": 16} if torch.version.hip else {}


@dataclass(frozen=True)
class PackedLinear:
    """The weight of a linear layer in the form its implementation reads.

    format: "plain" (a contiguous tensor, GPU and interpreter) or a format of ``linear_cpu``.
    weight: the tensor [O, I], or the packed CPU weight (which holds the bias too).
    dtype: the dtype of the weight that was packed.
    row_multiple: x with a multiple of this many rows needs no padding copy.
    """

    format: str
    num_in: int
    num_out: int
    weight: torch.Tensor | linear_cpu.CpuWeight
    bias_O: torch.Tensor | None
    dtype: torch.dtype
    row_multiple: int = 1


def pack_linear(weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> PackedLinear:
    """Pack ``weight_OI`` for the implementation that its device runs.

    Raises ValueError for a wrong shape or device, TypeError for a dtype that is not a float.
    """
    check_shape("weight_OI", weight_OI, (None, None))
    check_dtype("weight_OI", weight_OI, *FLOATS)
    num_out, num_in = weight_OI.shape
    if bias_O is not None:
        check_shape("bias_O", bias_O, (num_out,))
        check_dtype("bias_O", bias_O, weight_OI.dtype, torch.float32)
        check_same_device(weight_OI=weight_OI, bias_O=bias_O)
        bias_O = bias_O.contiguous()
    dtype = weight_OI.dtype
    if implementation("linear", weight_OI.device, has_cpu=True) != "cpu":
        return PackedLinear("plain", num_in, num_out, weight_OI.contiguous(), bias_O, dtype)
    weight = linear_cpu.pack(weight_OI, bias_O)
    return PackedLinear(weight.format, num_in, num_out, weight, bias_O, dtype, weight.row_multiple)


def dense_weight(packed: PackedLinear) -> torch.Tensor:
    """Return the weight [O, I] in its own dtype, unpacked where it was packed."""
    if isinstance(packed.weight, torch.Tensor):
        return packed.weight
    return linear_cpu.unpack(packed.weight).to(packed.dtype)


def linear_ref(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    residual_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return y [T, O] in x's dtype, accumulated in fp32 and rounded once."""
    y_TO = x_TI.float() @ weight_OI.float().T
    if bias_O is not None:
        y_TO = y_TO + bias_O.float()
    if residual_TO is not None:
        y_TO = y_TO + residual_TO.float()
    return y_TO.to(x_TI.dtype)


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


@dataclass(frozen=True)
class LinearConfig:
    """Tile of one program: BLOCK_T rows x BLOCK_O outputs, BLOCK_I inputs a step."""

    block_t: int
    block_o: int
    block_i: int
    group_t: int
    num_warps: int
    num_stages: int


def linear_config(num_rows: int, num_in: int, num_out: int, element_size: int) -> LinearConfig:
    """Return the tile for ``num_rows`` rows; block_i never depends on them (exactness).

    No tile compiles to HGMMA, whose sums may differ from HMMA's: on sm_90 that takes 64 rows and a
    multiple of 4 warps, so 64-row tiles have 2. At most 64 KB of shared memory (gfx942).
    """
    if element_size == 4:
        return LinearConfig(16 if num_rows <= 16 else 32, 32, 32, 8, 4, 2)
    # 32 outputs a program give 128 programs for 4096 outputs: about one a multiprocessor.
    block_o = 32 if num_out <= 8192 else 64
    if num_rows <= 16:
        return LinearConfig(16, block_o, 64, 1, 4, 7)
    # 64-row tiles spill without 16-byte loads, 64x128 also without 16-byte stores (sm_80, sm_90).
    if num_rows <= 32 or num_in % 16:
        return LinearConfig(32, block_o, 64, 1 if num_rows <= 32 else 8, 4, 5)
    if num_rows <= 64:
        return LinearConfig(64, block_o, 64, 1, 2, 4)
    return LinearConfig(64, 64 if num_out % 16 else 128, 64, 8, 2, 3)


def _launch(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    residual_TO: torch.Tensor | None,
) -> torch.Tensor:
    """Run the kernel; x is copied where its strides rule out 16-byte loads."""
    num_rows, num_in = x_TI.shape
    num_out = weight_OI.shape[0]
    y_TO = x_TI.new_empty(num_rows, num_out)
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


def _matmul(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    residual_TO: torch.Tensor | None,
) -> torch.Tensor:
    """The vendor's GEMM: its choice of kernel, and so a row's bits, may depend on T."""
    y_TO = torch.matmul(x_TI, weight_OI.T)
    for term in (bias_O, residual_TO):
        if term is not None:
            y_TO += term
    return y_TO


def linear(
    x_TI: torch.Tensor,
    packed: PackedLinear,
    *,
    residual_TO: torch.Tensor | None = None,
    exact: bool = True,
) -> torch.Tensor:
    """Return y [T, O] = x Wt (+ bias) (+ residual) in x's dtype.

    ``exact=False`` on a GPU may give a row other bits in another batch. Raises ValueError for wrong
    shapes or devices, TypeError for wrong dtypes.
    """
    if x_TI.ndim != 2 or x_TI.shape[1] != packed.num_in:
        check_shape("x_TI", x_TI, (None, packed.num_in))
    if residual_TO is not None:
        check_shape("residual_TO", residual_TO, (x_TI.shape[0], packed.num_out))
        check_dtype("residual_TO", residual_TO, x_TI.dtype)
    choice = implementation("linear", x_TI.device, has_cpu=True)
    if choice == "cpu" and isinstance(packed.weight, linear_cpu.CpuWeight):
        if x_TI.dtype != torch.float32:
            check_dtype("x_TI", x_TI, torch.float32)
        return linear_cpu.run(x_TI, packed.weight, residual_TO)
    weight_OI = dense_weight(packed)
    check_same_device(x_TI=x_TI, weight_OI=weight_OI, bias_O=packed.bias_O, residual_TO=residual_TO)
    if choice != "triton":
        check_dtype("x_TI", x_TI, *FLOATS)
        return linear_ref(x_TI, weight_OI, packed.bias_O, residual_TO)
    check_dtype("x_TI", x_TI, weight_OI.dtype)
    if x_TI.is_cuda and not exact:
        return _matmul(x_TI, weight_OI, packed.bias_O, residual_TO)
    return _launch(x_TI, weight_OI, packed.bias_O, residual_TO)


def linear_cost(
    num_rows: int,
    num_in: int,
    num_out: int,
    element_size: int,
    *,
    weight_size: int | None = None,
    has_residual: bool = False,
) -> Cost:
    """Return the least bytes and flops of one call; ``weight_size`` is the bytes of a weight."""
    weight_bytes = num_out * num_in * (weight_size or element_size)
    row_values = num_in + num_out * (2 if has_residual else 1)
    return Cost(
        bytes=weight_bytes + num_rows * row_values * element_size,
        flops=2 * num_rows * num_out * num_in,
    )
