"""Rotary positions for queries and keys, and the scatter of keys and values into the paged cache.

Shapes: qkv_TC [T, C] fp32, fp16 or bf16, C = (H + 2G) D: query heads, key heads, value heads;
    cos_PR, sin_PR [P, R] fp32 for positions 0..P-1, R = D/2 frequencies; positions_T [T] int32 or
    int64 in 0..P-1; slots_T [T] int64, slot = block * B + offset; caches [N, G, B, D] contiguous,
    of any float dtype; q_norm_D, k_norm_D [D] or None. Block 0 is the null block: padded rows
    carry slots inside it, and what it holds means nothing.
Returns: q_THD [T, H, D], rotated; on the CPU path a view of a wider buffer. The caches are written
    at slots_T: keys rotated, values as they came.
Units: slots count tokens of the pool, positions count tokens of a request's context.
Cost: T (2H + 4G) D * itemsize + T (8R + 12) bytes; about 6 T (H + G) D flops. Bandwidth-bound, at
    decode bound by the launch.
Grid: a program owns one token and BLOCK_H of its H + 2G heads.
Source: Su et al., RoFormer, arXiv 2104.09864, pairing column r with R + r as
    Llama does; norms of queries and keys: Henry et al., arXiv 2010.04245, in Qwen3's RMS form.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from einops import rearrange

from pagedraft.kernels.check import (
    check_contiguous,
    check_dtype,
    check_same_device,
    check_shape,
)
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.dispatch import implementation
from pagedraft.kernels.rms_norm import rms_norm_ref, rms_scale_cpu

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def rope_ref(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (r, R + r) of each head by its token's angles."""
    cos_T1R, sin_T1R = cos_TR[:, None], sin_TR[:, None]
    first, second = x_THD.chunk(2, dim=-1)
    return torch.cat(
        (first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R), dim=-1
    )


def write_kv_ref(
    qkv_TC: torch.Tensor,
    cos_PR: torch.Tensor,
    sin_PR: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    k_cache_NGBD: torch.Tensor,
    v_cache_NGBD: torch.Tensor,
    num_heads: int,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Plain PyTorch in at least fp32, rounded once at the end."""
    _, num_kv_heads, block_size, head_dim = k_cache_NGBD.shape
    wide_TC = qkv_TC.to(torch.promote_types(qkv_TC.dtype, torch.float32))
    heads = rearrange(wide_TC, "t (h d) -> t h d", d=head_dim)
    q_THD, k_TGD, v_TGD = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm_D is not None and k_norm_D is not None:
        q_THD, k_TGD = rms_norm_ref(q_THD, q_norm_D, eps), rms_norm_ref(k_TGD, k_norm_D, eps)
    cos_TR, sin_TR = cos_PR[positions_T], sin_PR[positions_T]
    block_T, offset_T = slots_T // block_size, slots_T % block_size
    k_TGD = rope_ref(k_TGD, cos_TR, sin_TR)
    k_cache_NGBD[block_T, :, offset_T] = k_TGD.to(k_cache_NGBD.dtype)
    v_cache_NGBD[block_T, :, offset_T] = v_TGD.to(v_cache_NGBD.dtype)
    return rope_ref(q_THD, cos_TR, sin_TR).to(qkv_TC.dtype)


class WritePlan(NamedTuple):
    """What the CPU path derives from a step's positions and slots, alike for all layers.

    cos_T11R, sin_T12R: factors of a head [2, R] and of its swapped halves, sign included.
    rows_TG: row of each token and KV head in a cache seen as [N * G * B, D].
    """

    cos_T11R: torch.Tensor
    sin_T12R: torch.Tensor
    rows_TG: torch.Tensor


def plan_write_kv(
    cos_PR: torch.Tensor,
    sin_PR: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    num_kv_heads: int,
    block_size: int,
) -> WritePlan:
    """Derive a step's WritePlan; see write_kv for the arguments."""
    cos_TR, sin_TR = cos_PR[positions_T], sin_PR[positions_T]
    head_starts_G = torch.arange(num_kv_heads, device=slots_T.device) * block_size
    block_starts_T = slots_T // block_size * (num_kv_heads * block_size)
    rows_TG = (block_starts_T + slots_T % block_size)[:, None] + head_starts_G
    return WritePlan(cos_TR[:, None, None], torch.stack((-sin_TR, sin_TR), 1)[:, None], rows_TG)


def write_kv_cpu(
    qkv_TC: torch.Tensor,
    plan: WritePlan,
    k_cache_NGBD: torch.Tensor,
    v_cache_NGBD: torch.Tensor,
    num_heads: int,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """About a dozen ops in fp32 for queries and keys at once, none of which mixes tokens."""
    head_dim = k_cache_NGBD.shape[3]
    num_tokens, num_rotated = qkv_TC.shape[0], num_heads + k_cache_NGBD.shape[1]
    start, stride = qkv_TC.storage_offset(), qkv_TC.stride(0)
    half = head_dim // 2
    x_TX2R = qkv_TC.as_strided(
        (num_tokens, num_rotated, 2, half), (stride, head_dim, half, 1), start
    )
    v_TGD = qkv_TC.as_strided(
        (num_tokens, num_rotated - num_heads, head_dim),
        (stride, head_dim, 1),
        start + num_rotated * head_dim,
    )
    if q_norm_D is not None and k_norm_D is not None:
        x_TXD = x_TX2R.flatten(2)
        x_TXD = x_TXD * rms_scale_cpu(x_TXD, eps)
        q_THD, k_TGD = x_TXD.split_with_sizes((num_heads, num_rotated - num_heads), 1)
        q_THD.mul_(q_norm_D)
        k_TGD.mul_(k_norm_D)
        x_TX2R = x_TXD.view(num_tokens, num_rotated, 2, half)
    rotated_TX2R = torch.mul(x_TX2R, plan.cos_T11R).addcmul_(x_TX2R.flip(2), plan.sin_T12R)
    q_THD, k_TGD = rotated_TX2R.view(num_tokens, num_rotated, head_dim).split_with_sizes(
        (num_heads, num_rotated - num_heads), 1
    )
    for cache_NGBD, x_TGD in ((k_cache_NGBD, k_TGD), (v_cache_NGBD, v_TGD)):
        if cache_NGBD.dtype != x_TGD.dtype:
            x_TGD = x_TGD.to(cache_NGBD.dtype)
        cache_NGBD.view(-1, head_dim).index_put_((plan.rows_TG,), x_TGD)
    return q_THD


@triton.jit
def _norm_heads(x1, x2, norm_ptr, offs_r, mask_r, scale_H, R: tl.constexpr):
    """The two halves of normed heads: scaled and weighted."""
    weight1_R = tl.load(norm_ptr + offs_r, mask=mask_r, other=0.0).to(tl.float32)
    weight2_R = tl.load(norm_ptr + R + offs_r, mask=mask_r, other=0.0).to(tl.float32)
    return x1 * scale_H[:, None] * weight1_R[None, :], x2 * scale_H[:, None] * weight2_R[None, :]


@triton.jit
def _store_heads(base_ptr, offs_H, x1, x2, offs_r, mask, R: tl.constexpr):
    """Store both halves of heads that begin at ``offs_H`` elements after ``base_ptr``."""
    ptrs = base_ptr + offs_H[:, None] + offs_r[None, :]
    tl.store(ptrs, x1.to(base_ptr.dtype.element_ty), mask=mask)
    tl.store(ptrs + R, x2.to(base_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _write_kv_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    stride_qkvt,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    B: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_r = tl.arange(0, BLOCK_R)
    mask_r = offs_r < R
    mask = (heads < H + 2 * G)[:, None] & mask_r[None, :]
    ptrs = qkv_ptr + token * stride_qkvt + heads[:, None] * (2 * R) + offs_r[None, :]
    x1 = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_H, BLOCK_R] fp32
    x2 = tl.load(ptrs + R, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_H, BLOCK_R] fp32

    is_q, is_v = heads < H, heads >= H + G
    n1, n2 = x1, x2
    if HAS_NORM:
        scale_H = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) / (2 * R) + eps)
        q1, q2 = _norm_heads(x1, x2, q_norm_ptr, offs_r, mask_r, scale_H, R)
        k1, k2 = _norm_heads(x1, x2, k_norm_ptr, offs_r, mask_r, scale_H, R)
        n1, n2 = tl.where(is_q[:, None], q1, k1), tl.where(is_q[:, None], q2, k2)

    position = tl.load(positions_ptr + token).to(tl.int64)
    cos_R = tl.load(cos_ptr + position * R + offs_r, mask=mask_r, other=0.0)[None, :]
    sin_R = tl.load(sin_ptr + position * R + offs_r, mask=mask_r, other=0.0)[None, :]
    y1 = n1 * cos_R - n2 * sin_R  # [BLOCK_H, BLOCK_R] fp32
    y2 = n2 * cos_R + n1 * sin_R  # [BLOCK_H, BLOCK_R] fp32

    mask_q = mask & is_q[:, None]
    mask_v = mask & is_v[:, None]
    mask_k = mask & (heads >= H)[:, None] & (heads < H + G)[:, None]
    slot = tl.load(slots_ptr + token).to(tl.int64)
    slot_start = (slot // B * (G * B) + slot % B) * (2 * R)
    _store_heads(q_ptr + token * (H * 2 * R), heads * (2 * R), y1, y2, offs_r, mask_q, R)
    k_offs = (heads - H) * (B * 2 * R)
    _store_heads(k_cache_ptr + slot_start, k_offs, y1, y2, offs_r, mask_k, R)
    v_offs = (heads - H - G) * (B * 2 * R)
    _store_heads(v_cache_ptr + slot_start, v_offs, x1, x2, offs_r, mask_v, R)


@dataclass(frozen=True)
class WriteKvConfig:
    block_h: int
    block_r: int
    num_warps: int


@lru_cache(maxsize=64)
def write_kv_config(num_all_heads: int, head_dim: int) -> WriteKvConfig:
    """About 1024 elements a program, so that one token of a large model still fills several SMs.

    Follows from counting registers of offline compiles; not yet measured on a GPU.
    """
    block_r = triton.next_power_of_2(head_dim // 2)
    block_h = min(triton.next_power_of_2(num_all_heads), max(1, 512 // block_r))
    return WriteKvConfig(block_h, block_r, num_warps=max(1, block_h * block_r // 128))


def _check(qkv_TC, tables, caches, num_heads, norms) -> None:
    cos_PR, sin_PR, positions_T, slots_T = tables
    k_cache_NGBD, v_cache_NGBD = caches
    check_shape("k_cache_NGBD", k_cache_NGBD, (None, None, None, None))
    check_shape("v_cache_NGBD", v_cache_NGBD, tuple(k_cache_NGBD.shape))
    check_contiguous("k_cache_NGBD", k_cache_NGBD)
    check_contiguous("v_cache_NGBD", v_cache_NGBD)
    _, num_kv_heads, _, head_dim = k_cache_NGBD.shape
    if head_dim % 8:
        raise ValueError(f"k_cache_NGBD: expected a head dim that 8 divides, got {head_dim}")
    check_shape("qkv_TC", qkv_TC, (None, (num_heads + 2 * num_kv_heads) * head_dim))
    check_dtype("qkv_TC", qkv_TC, *FLOATS)
    check_shape("cos_PR", cos_PR, (None, head_dim // 2))
    check_shape("sin_PR", sin_PR, tuple(cos_PR.shape))
    check_shape("positions_T", positions_T, (qkv_TC.shape[0],))
    check_dtype("positions_T", positions_T, torch.int32, torch.int64)
    check_shape("slots_T", slots_T, (qkv_TC.shape[0],))
    check_dtype("slots_T", slots_T, torch.int64)
    if (norms[0] is None) != (norms[1] is None):
        raise ValueError("q_norm_D, k_norm_D: expected both or neither, got one")
    named = dict(zip(("cos_PR", "sin_PR", "positions_T", "slots_T"), tables, strict=True))
    check_same_device(qkv_TC=qkv_TC, k_cache_NGBD=k_cache_NGBD, **named)


def write_kv(
    qkv_TC: torch.Tensor,
    cos_PR: torch.Tensor,
    sin_PR: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    k_cache_NGBD: torch.Tensor,
    v_cache_NGBD: torch.Tensor,
    num_heads: int,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    plan: WritePlan | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values at slots_T, return q_THD.

    plan: plan_write_kv of the same tables, positions and slots: what the layers of a step share on
    the CPU path. Given one, that path runs and leaves most checks to the plan.
    """
    if plan is not None and qkv_TC.shape == (
        plan.rows_TG.shape[0],
        (num_heads + 2 * k_cache_NGBD.shape[1]) * k_cache_NGBD.shape[3],
    ):
        norms, caches = (q_norm_D, k_norm_D), (k_cache_NGBD, v_cache_NGBD)
        return write_kv_cpu(qkv_TC.contiguous(), plan, *caches, num_heads, *norms, eps)
    tables, norms = (cos_PR, sin_PR, positions_T, slots_T), (q_norm_D, k_norm_D)
    caches = (k_cache_NGBD, v_cache_NGBD)
    _, num_kv_heads, block_size, head_dim = k_cache_NGBD.shape
    num_all_heads = num_heads + 2 * num_kv_heads
    choice = implementation("write_kv", qkv_TC.device, has_cpu=qkv_TC.dtype == torch.float32)
    _check(qkv_TC, tables, caches, num_heads, norms)
    if qkv_TC.stride(1) != 1:
        qkv_TC = qkv_TC.contiguous()
    if choice == "cpu":
        plan = plan_write_kv(*tables, num_kv_heads, block_size)
        return write_kv_cpu(qkv_TC, plan, *caches, num_heads, *norms, eps)
    if choice == "ref":
        return write_kv_ref(qkv_TC, *tables, *caches, num_heads, *norms, eps)
    num_tokens = qkv_TC.shape[0]
    q_THD = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv_TC.dtype, device=qkv_TC.device)
    config = write_kv_config(num_all_heads, head_dim)
    if num_tokens:
        _write_kv_kernel[(num_tokens, triton.cdiv(num_all_heads, config.block_h))](
            qkv_TC,
            *(table.contiguous() for table in tables),
            *(cos_PR if norm is None else norm for norm in norms),
            q_THD,
            *caches,
            qkv_TC.stride(0),
            eps,
            H=num_heads,
            G=num_kv_heads,
            B=block_size,
            R=head_dim // 2,
            BLOCK_H=config.block_h,
            BLOCK_R=config.block_r,
            HAS_NORM=q_norm_D is not None,
            num_warps=config.num_warps,
        )
    return q_THD


def write_kv_cost(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int
) -> Cost:
    """Lower bound of one call; angles in fp32, int32 positions, int64 slots."""
    elements = (2 * num_heads + 4 * num_kv_heads) * head_dim
    return Cost(
        bytes=num_tokens * (elements * itemsize + 8 * (head_dim // 2) + 12),
        flops=6 * num_tokens * (num_heads + num_kv_heads) * head_dim // 2,
    )
