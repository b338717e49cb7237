"""Root-mean-square normalisation of each row, with or without a residual added first.

Shapes: x_TE, residual_TE [T, E] fp32, fp16 or bf16, rows contiguous; weight_E [E] of their dtype or
    fp32. Where a model stores the weight's distance from 1 (Gemma), it is ``one_plus(stored)``.
Returns: rms_norm -> y_TE; add_rms_norm -> (y_TE, sum_TE), where sum_TE = x_TE + residual_TE rounded
    to their dtype is what gets normed and is the residual of the next layer.
Units: ``eps`` is added to the mean of squares.
Cost: (2 T E + E) * itemsize bytes, with residual (4 T E + E); about 4 T E flops. Bandwidth-bound,
    at decode bound by the launch.
Grid: one program a row; the row is read once and summed in fp32, so its bits do not depend on T.
Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from pagedraft.kernels.check import check_dtype, check_same_device, check_shape
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.dispatch import implementation

MAX_EMBED_DIM = 16384
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def one_plus(weight_E: torch.Tensor) -> torch.Tensor:
    """Return 1 + weight_E in fp32, as every op that takes a norm's weight reads it.

    Formed once at load, not in each kernel: rounded to 16 bits it would lose what is stored.
    """
    return 1.0 + weight_E.float()


def rms_norm_ref(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Plain PyTorch in at least fp32, rounded once at the end."""
    wide_TE = x_TE.to(torch.promote_types(x_TE.dtype, torch.float32))
    scale_T1 = torch.rsqrt(wide_TE.square().mean(-1, keepdim=True) + eps)
    return (wide_TE * scale_T1 * weight_E).to(x_TE.dtype)


def add_rms_norm_ref(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch: the rounded sum is normed."""
    sum_TE = x_TE + residual_TE
    return rms_norm_ref(sum_TE, weight_E, eps), sum_TE


@lru_cache(maxsize=8)
def _constant(value: float) -> torch.Tensor:
    """A one-element fp32 tensor: small ops take it 2 us faster than a Python number."""
    with torch.inference_mode(False):
        return torch.full((1, 1), value)


def rms_scale_cpu(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) over the last axis, which is kept with size 1."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    per_column = 1.0 / x.shape[-1]
    return torch.addcmul(_constant(eps), scale, scale, value=per_column, out=scale).rsqrt_()


def rms_norm_cpu(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Five small fp32 ops, elementwise or along one row, so that a row does not depend on T."""
    return torch.mul(x_TE, rms_scale_cpu(x_TE, eps)).mul_(weight_E)


@triton.jit
def _store_normed(x_E, weight_ptr, y_row_ptr, offs_e, mask_e, E, eps):
    """Norm one row held in fp32 and store it."""
    scale = tl.rsqrt(tl.sum(x_E * x_E, axis=0) / E + eps)
    weight_E = tl.load(weight_ptr + offs_e, mask=mask_e, other=0.0).to(tl.float32)
    y_E = x_E * scale * weight_E
    tl.store(y_row_ptr + offs_e, y_E.to(y_row_ptr.dtype.element_ty), mask=mask_e)


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, y_ptr, stride_xt, stride_yt, eps, E: tl.constexpr, BLOCK_E: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    offs_e = tl.arange(0, BLOCK_E)
    mask_e = offs_e < E
    x_E = tl.load(x_ptr + row * stride_xt + offs_e, mask=mask_e, other=0.0)
    x_E = x_E.to(tl.float32)  # [BLOCK_E] fp32
    _store_normed(x_E, weight_ptr, y_ptr + row * stride_yt, offs_e, mask_e, E, eps)


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    stride_xt,
    stride_rt,
    stride_yt,
    eps,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_e = tl.arange(0, BLOCK_E)
    mask_e = offs_e < E
    x_E = tl.load(x_ptr + row * stride_xt + offs_e, mask=mask_e, other=0.0).to(tl.float32)
    residual_E = tl.load(residual_ptr + row * stride_rt + offs_e, mask=mask_e, other=0.0)
    sum_E = (x_E + residual_E.to(tl.float32)).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * stride_yt + offs_e, sum_E, mask=mask_e)
    sum_E = sum_E.to(tl.float32)  # [BLOCK_E] fp32
    _store_normed(sum_E, weight_ptr, y_ptr + row * stride_yt, offs_e, mask_e, E, eps)


@dataclass(frozen=True)
class RmsNormConfig:
    block_e: int
    num_warps: int


@lru_cache(maxsize=64)
def rms_norm_config(embed_dim: int) -> RmsNormConfig:
    """The whole row in one tile; 8 to 16 elements a thread keep 16-byte loads without spills.

    Thresholds follow from register counts of offline compiles, not from a GPU run.
    """
    block_e = triton.next_power_of_2(embed_dim)
    return RmsNormConfig(block_e, num_warps=min(16, max(1, block_e // 512)))


def _check(x_TE: torch.Tensor, weight_E: torch.Tensor, residual_TE: torch.Tensor | None) -> None:
    """Raise on bad arguments; plain comparisons first, for a check takes 1 to 2 us."""
    if (
        residual_TE is not None
        and x_TE.dtype == residual_TE.dtype == torch.float32
        and x_TE.ndim == 2
        and x_TE.shape == residual_TE.shape
        and weight_E.shape == x_TE.shape[1:]
    ):
        return
    check_dtype("x_TE", x_TE, *FLOATS)
    if x_TE.ndim != 2 or weight_E.shape != x_TE.shape[1:]:
        check_shape("x_TE", x_TE, (None, None))
        check_shape("weight_E", weight_E, (x_TE.shape[1],))
    if residual_TE is not None:
        check_dtype("residual_TE", residual_TE, x_TE.dtype)
        if residual_TE.shape != x_TE.shape:
            check_shape("residual_TE", residual_TE, tuple(x_TE.shape))


def _check_launch(x_TE: torch.Tensor, weight_E: torch.Tensor, residual_TE: torch.Tensor) -> None:
    if x_TE.shape[1] > MAX_EMBED_DIM:
        raise ValueError(f"x_TE: expected at most {MAX_EMBED_DIM} columns, got {x_TE.shape[1]}")
    check_same_device(x_TE=x_TE, weight_E=weight_E, residual_TE=residual_TE)


def _rows_contiguous(x_TE: torch.Tensor) -> torch.Tensor:
    return x_TE if x_TE.stride(-1) == 1 else x_TE.contiguous()


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x_TE / sqrt(mean(x_TE^2) + eps) * weight_E, row by row."""
    choice = implementation("rms_norm", x_TE.device, has_cpu=x_TE.dtype == torch.float32)
    _check(x_TE, weight_E, None)
    if choice == "cpu":
        return rms_norm_cpu(x_TE, weight_E, eps)
    if choice == "ref":
        return rms_norm_ref(x_TE, weight_E, eps)
    _check_launch(x_TE, weight_E, x_TE)
    x_TE = _rows_contiguous(x_TE)
    num_tokens, embed_dim = x_TE.shape
    y_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    config = rms_norm_config(embed_dim)
    if num_tokens:
        _rms_norm_kernel[(num_tokens,)](
            x_TE,
            weight_E,
            y_TE,
            x_TE.stride(0),
            y_TE.stride(0),
            eps,
            E=embed_dim,
            BLOCK_E=config.block_e,
            num_warps=config.num_warps,
        )
    return y_TE


def add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(sum_TE), sum_TE) with sum_TE = x_TE + residual_TE in their dtype."""
    choice = implementation("rms_norm", x_TE.device, has_cpu=x_TE.dtype == torch.float32)
    _check(x_TE, weight_E, residual_TE)
    if choice == "cpu":
        sum_TE = x_TE + residual_TE
        return rms_norm_cpu(sum_TE, weight_E, eps), sum_TE
    if choice == "ref":
        return add_rms_norm_ref(x_TE, residual_TE, weight_E, eps)
    _check_launch(x_TE, weight_E, residual_TE)
    x_TE, residual_TE = _rows_contiguous(x_TE), _rows_contiguous(residual_TE)
    num_tokens, embed_dim = x_TE.shape
    y_TE, sum_TE = (torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device) for _ in range(2))
    config = rms_norm_config(embed_dim)
    if num_tokens:
        _add_rms_norm_kernel[(num_tokens,)](
            x_TE,
            residual_TE,
            weight_E,
            y_TE,
            sum_TE,
            x_TE.stride(0),
            residual_TE.stride(0),
            y_TE.stride(0),
            eps,
            E=embed_dim,
            BLOCK_E=config.block_e,
            num_warps=config.num_warps,
        )
    return y_TE, sum_TE


def rms_norm_cost(
    num_tokens: int, embed_dim: int, itemsize: int, *, residual: bool = False
) -> Cost:
    """Lower bound of one call; ``residual`` for add_rms_norm."""
    num_rows = (4 if residual else 2) * num_tokens
    num_elements = num_tokens * embed_dim
    return Cost(
        bytes=(num_rows + 1) * embed_dim * itemsize,
        flops=(5 if residual else 4) * num_elements,
    )
