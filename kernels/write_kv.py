"""Rotary positions for queries and keys, and the scatter of keys and values into the paged cache.

Shapes: qkv_TC [T, C] fp32, fp16 or bf16, C = (H + 2G) D: query heads, key heads, value heads;
    cos_PR, sin_PR [P, R] fp32 for positions 0..P-1, R <= D/2 frequencies: the first 2R columns of
    a head are rotated, the others pass (R = 0 rotates nothing); positions_T [T] int32 or int64 in
    0..P-1; slots_T [T] int64, slot = block * B + offset; caches [N, G, B, D] contiguous, of any
    float dtype, or of a quantised one (kv_quant.KV_DTYPES) with k_scale_NGB, v_scale_NGB fp32;
    q_norm_D, k_norm_D [D] or None.
Returns: q_THD [T, H, D], rotated; on the CPU path a view of a wider buffer, without norm and
    rotation of qkv_TC itself. The caches are written at slots_T: keys rotated, values as they came.
    Block 0 is the null block, whose slots padded tokens carry: nothing is stored there.
Units: slots count tokens of the pool, positions count tokens of a request's context.
Cost: T (2H + 2G) D * itemsize + T 2G D * itemsize of the cache + T (8R + 12) bytes, 8 T G more for
    scales; 6 T (H + G) R flops. Bandwidth-bound, at decode bound by the launch.
Grid: a program owns one token and BLOCK_H of its H + 2G heads. It loads the halves of rotated heads
    a second time, swapped: they come from L1.
Source: Su et al., RoFormer, arXiv 2104.09864, pairing column r with R + r as Llama does, or 2r with
    2r + 1 as the paper and GPT-J do (interleaved); norms of queries and keys: Henry et al., arXiv
    2010.04245, in Qwen3's RMS form.

Exactness: in the Triton kernel products and sums are rounded one by one (no fused multiply-add) and
divisions to nearest, so that without norms its bits are the reference's. The CPU path fuses; each
token's bits are its own on both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from einops import rearrange

from pagedraft.kernels.check import (
    check_contiguous,
    check_dtype,
    check_same_device,
    check_shape,
)
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.dispatch import implementation
from pagedraft.kernels.kv_quant import KV_DTYPES, quantize_kv
from pagedraft.kernels.rms_norm import rms_norm_ref
from pagedraft.kernels.write_kv_cpu import WritePlan, plan_write_kv, write_kv_cpu
from pagedraft.kernels.write_kv_triton import write_kv_kernel

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


def rope_ref(
    x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """Rotate the pairs (r, R + r) of each head, or (2r, 2r + 1), by its token's angles."""
    layout = "t h (r pair)" if interleaved else "t h (pair r)"
    rotated, rest = x_THD.tensor_split([2 * cos_TR.shape[1]], dim=-1)
    first, second = rearrange(rotated, f"{layout} -> pair t h r", pair=2)
    cos_T1R, sin_T1R = cos_TR[:, None], sin_TR[:, None]
    turned = torch.stack((first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R))
    return torch.cat((rearrange(turned, f"pair t h r -> {layout}"), rest), dim=-1)


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
    *,
    interleaved: bool = False,
    k_scale_NGB: torch.Tensor | None = None,
    v_scale_NGB: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain PyTorch in at least fp32, rounded once at the end."""
    _, num_kv_heads, block_size, head_dim = k_cache_NGBD.shape
    wide_TC = qkv_TC.to(torch.promote_types(qkv_TC.dtype, torch.float32))
    heads = rearrange(wide_TC, "t (h d) -> t h d", d=head_dim)
    q_THD, k_TGD, v_TGD = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm_D is not None and k_norm_D is not None:
        q_THD, k_TGD = rms_norm_ref(q_THD, q_norm_D, eps), rms_norm_ref(k_TGD, k_norm_D, eps)
    cos_TR, sin_TR = cos_PR[positions_T], sin_PR[positions_T]
    q_THD, k_TGD = (rope_ref(x, cos_TR, sin_TR, interleaved=interleaved) for x in (q_THD, k_TGD))
    is_stored_T = slots_T >= block_size
    slots_K = slots_T[is_stored_T]
    where = (slots_K // block_size, slice(None), slots_K % block_size)
    for x_TGD, cache_NGBD, scale_NGB in (
        (k_TGD, k_cache_NGBD, k_scale_NGB),
        (v_TGD, v_cache_NGBD, v_scale_NGB),
    ):
        stored_KGD = x_TGD[is_stored_T]
        if scale_NGB is not None:
            stored_KGD, scale_NGB[where] = quantize_kv(stored_KGD, cache_NGBD.dtype)
        cache_NGBD[where] = stored_KGD.to(cache_NGBD.dtype)
    return q_THD.to(qkv_TC.dtype)


@dataclass(frozen=True)
class WriteKvConfig:
    block_h: int
    block_d: int
    num_warps: int


@lru_cache(maxsize=64)
def write_kv_config(num_all_heads: int, head_dim: int) -> WriteKvConfig:
    """About 1024 elements a program, so that one token of a large model still fills several SMs.

    Follows from counting registers of offline compiles; not yet measured on a GPU.
    """
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(num_all_heads), max(1, 1024 // block_d))
    return WriteKvConfig(block_h, block_d, num_warps=max(1, block_h * block_d // 256))


def _check(
    qkv_TC: torch.Tensor,
    tables: tuple[torch.Tensor, ...],
    caches: tuple[torch.Tensor, torch.Tensor],
    num_heads: int,
    norms: tuple[torch.Tensor | None, ...],
    scales: tuple[torch.Tensor | None, ...],
) -> None:
    _check_caches(*caches, scales)
    cos_PR, sin_PR, positions_T, slots_T = tables
    _, num_kv_heads, _, head_dim = caches[0].shape
    check_shape("qkv_TC", qkv_TC, (None, (num_heads + 2 * num_kv_heads) * head_dim))
    check_dtype("qkv_TC", qkv_TC, *FLOATS)
    check_shape("cos_PR", cos_PR, (None, None))
    check_shape("sin_PR", sin_PR, tuple(cos_PR.shape))
    if 2 * cos_PR.shape[1] > head_dim:
        raise ValueError(
            f"cos_PR: expected at most {head_dim // 2} columns, half the head dim, "
            f"got {cos_PR.shape[1]}"
        )
    check_shape("positions_T", positions_T, (qkv_TC.shape[0],))
    check_dtype("positions_T", positions_T, torch.int32, torch.int64)
    check_shape("slots_T", slots_T, (qkv_TC.shape[0],))
    check_dtype("slots_T", slots_T, torch.int64)
    check_dtype("cos_PR", cos_PR, torch.float32)
    check_dtype("sin_PR", sin_PR, torch.float32)
    if (norms[0] is None) != (norms[1] is None):
        raise ValueError("q_norm_D, k_norm_D: expected both or neither, got one")
    for name, norm_D in zip(("q_norm_D", "k_norm_D"), norms, strict=True):
        if norm_D is not None:
            check_shape(name, norm_D, (head_dim,))
    named = dict(zip(("cos_PR", "sin_PR", "positions_T", "slots_T"), tables, strict=True))
    check_same_device(qkv_TC=qkv_TC, k_cache_NGBD=caches[0], k_scale_NGB=scales[0], **named)


def _check_caches(
    k_cache_NGBD: torch.Tensor,
    v_cache_NGBD: torch.Tensor,
    scales: tuple[torch.Tensor | None, ...],
) -> None:
    check_shape("k_cache_NGBD", k_cache_NGBD, (None, None, None, None))
    check_shape("v_cache_NGBD", v_cache_NGBD, tuple(k_cache_NGBD.shape))
    check_dtype("v_cache_NGBD", v_cache_NGBD, k_cache_NGBD.dtype)
    check_contiguous("k_cache_NGBD", k_cache_NGBD)
    check_contiguous("v_cache_NGBD", v_cache_NGBD)
    head_dim = k_cache_NGBD.shape[3]
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"k_cache_NGBD: expected a head dim that 8 divides, up to {MAX_HEAD_DIM}, "
            f"got {head_dim}"
        )
    is_quantised = k_cache_NGBD.dtype in KV_DTYPES
    for name, scale_NGB in zip(("k_scale_NGB", "v_scale_NGB"), scales, strict=True):
        if (scale_NGB is not None) != is_quantised:
            wanted, got = ("a tensor", "None") if is_quantised else ("None", "a tensor")
            raise ValueError(
                f"{name}: expected {wanted} for a cache of {k_cache_NGBD.dtype}, got {got}"
            )
        if scale_NGB is not None:
            check_shape(name, scale_NGB, tuple(k_cache_NGBD.shape[:3]))
            check_dtype(name, scale_NGB, torch.float32)
            check_contiguous(name, scale_NGB)


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
    interleaved: bool = False,
    k_scale_NGB: torch.Tensor | None = None,
    v_scale_NGB: torch.Tensor | None = None,
    plan: WritePlan | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values at slots_T, return q_THD.

    plan: plan_write_kv of the same tables, positions, slots and ``interleaved``: what the layers of
    a step share on the CPU path. Given one, that path runs and leaves most checks to the plan.
    """
    caches, norms = (k_cache_NGBD, v_cache_NGBD), (q_norm_D, k_norm_D)
    scales = {"k_scale_NGB": k_scale_NGB, "v_scale_NGB": v_scale_NGB}
    _, num_kv_heads, block_size, head_dim = k_cache_NGBD.shape
    num_columns = (num_heads + 2 * num_kv_heads) * head_dim
    if plan is not None and plan.fits(qkv_TC.shape, num_columns, interleaved):
        return write_kv_cpu(qkv_TC.contiguous(), plan, *caches, num_heads, *norms, eps, **scales)
    tables = (cos_PR, sin_PR, positions_T, slots_T)
    choice = implementation("write_kv", qkv_TC.device, has_cpu=qkv_TC.dtype == torch.float32)
    _check(qkv_TC, tables, caches, num_heads, norms, tuple(scales.values()))
    if qkv_TC.stride(1) != 1:
        qkv_TC = qkv_TC.contiguous()
    args = (*caches, num_heads, *norms, eps)
    if choice == "cpu":
        plan = plan_write_kv(*tables, num_kv_heads, block_size, interleaved=interleaved)
        return write_kv_cpu(qkv_TC, plan, *args, **scales)
    if choice == "ref":
        return write_kv_ref(qkv_TC, *tables, *args, interleaved=interleaved, **scales)
    return _launch(qkv_TC, tables, *args, interleaved=interleaved, **scales)


def _launch(
    qkv_TC: torch.Tensor,
    tables: tuple[torch.Tensor, ...],
    k_cache_NGBD: torch.Tensor,
    v_cache_NGBD: torch.Tensor,
    num_heads: int,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
    *,
    interleaved: bool,
    k_scale_NGB: torch.Tensor | None,
    v_scale_NGB: torch.Tensor | None,
) -> torch.Tensor:
    num_tokens = qkv_TC.shape[0]
    _, num_kv_heads, block_size, head_dim = k_cache_NGBD.shape
    num_all_heads = num_heads + 2 * num_kv_heads
    q_THD = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv_TC.dtype, device=qkv_TC.device)
    config = write_kv_config(num_all_heads, head_dim)
    if num_tokens:
        write_kv_kernel[(num_tokens, triton.cdiv(num_all_heads, config.block_h))](
            qkv_TC,
            *(table.contiguous() for table in tables),
            *(q_norm_D, k_norm_D, q_THD),
            *(k_cache_NGBD, v_cache_NGBD, k_scale_NGB, v_scale_NGB),
            qkv_TC.stride(0),
            eps,
            H=num_heads,
            G=num_kv_heads,
            B=block_size,
            D=head_dim,
            R=tables[0].shape[1],
            TOP=KV_DTYPES.get(k_cache_NGBD.dtype),
            BLOCK_H=config.block_h,
            BLOCK_D=config.block_d,
            IS_INTERLEAVED=interleaved,
            num_warps=config.num_warps,
            enable_fp_fusion=False,
        )
    return q_THD


def write_kv_cost(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    *,
    num_freqs: int | None = None,
    cache_dtype: torch.dtype | None = None,
) -> Cost:
    """Lower bound of one call; angles in fp32, int32 positions, int64 slots.

    num_freqs: R, D/2 unless given. cache_dtype: a quantised one; None: itemsize is the cache's too.
    """
    num_freqs = head_dim // 2 if num_freqs is None else num_freqs
    elements, stored = (2 * num_heads + 2 * num_kv_heads) * head_dim, 2 * num_kv_heads * head_dim
    row_bytes = elements * itemsize + 8 * num_freqs + 12
    row_flops = 6 * (num_heads + num_kv_heads) * num_freqs
    if cache_dtype is None:
        row_bytes += stored * itemsize
    else:
        row_bytes += stored * cache_dtype.itemsize + 2 * num_kv_heads * 4
        row_flops += 3 * stored  # largest magnitude, product, rounding
    return Cost(bytes=num_tokens * row_bytes, flops=num_tokens * row_flops)
