"""The Triton kernel of ``write_kv``; shapes and rules are told in write_kv.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pagedraft.kernels.kv_quant import quantize_heads


@triton.jit
def _load_heads(head_ptrs, offs_d, mask_h, mask_d):
    """Columns ``offs_d`` of heads that begin at ``head_ptrs``: [BLOCK_H, BLOCK_D] fp32."""
    mask = mask_h[:, None] & mask_d[None, :]
    return tl.load(head_ptrs[:, None] + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _norm_heads(x, q_norm_ptr, k_norm_ptr, offs_d, mask_d, is_q, scale_H):
    """Heads [BLOCK_H, BLOCK_D] scaled and weighted; their columns are ``offs_d``."""
    q_weight_D = tl.load(q_norm_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    k_weight_D = tl.load(k_norm_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    weight = tl.where(is_q[:, None], q_weight_D[None, :], k_weight_D[None, :])
    return x * scale_H[:, None] * weight


@triton.jit
def _rotate_halves(
    y, head_ptrs, mask_h, is_q, norm_H, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, R: tl.constexpr
):
    """Rotate the pairs (r, R + r) of heads ``y``; each column's partner is loaded and normed."""
    offs_d = tl.arange(0, y.shape[1])
    is_first, is_rotated = offs_d < R, offs_d < 2 * R
    partner_d = tl.where(is_first, offs_d + R, offs_d - R)
    partner = _load_heads(head_ptrs, partner_d, mask_h, is_rotated)
    if q_norm_ptr is not None:
        partner = _norm_heads(partner, q_norm_ptr, k_norm_ptr, partner_d, is_rotated, is_q, norm_H)
    offs_r = tl.where(is_first, offs_d, offs_d - R)
    cos_D = tl.load(cos_ptr + offs_r, mask=is_rotated, other=1.0)
    sin_D = tl.load(sin_ptr + offs_r, mask=is_rotated, other=0.0)
    sin_D = tl.where(is_first, -sin_D, sin_D)
    return y * cos_D[None, :] + partner * sin_D[None, :]


@triton.jit
def _rotate_interleaved(x, cos_ptr, sin_ptr, R: tl.constexpr, BLOCK_H: tl.constexpr):
    """Rotate the pairs (2r, 2r + 1) of heads, r < R."""
    PAIRS: tl.constexpr = x.shape[1] // 2
    offs_r = tl.arange(0, PAIRS)
    cos_R = tl.load(cos_ptr + offs_r, mask=offs_r < R, other=1.0)[None, :]
    sin_R = tl.load(sin_ptr + offs_r, mask=offs_r < R, other=0.0)[None, :]
    even, odd = tl.split(tl.reshape(x, (BLOCK_H, PAIRS, 2)))
    turned = tl.join(even * cos_R - odd * sin_R, odd * cos_R + even * sin_R)
    return tl.reshape(turned, (BLOCK_H, 2 * PAIRS))


@triton.jit
def _store_rows(cache_ptr, rows_H, values, offs_d, mask_d, mask_H, D: tl.constexpr):
    """Store heads at ``rows_H`` of a cache seen as [N * G * B, D]."""
    ptrs = cache_ptr + rows_H[:, None] * D + offs_d[None, :]
    values = values.to(cache_ptr.dtype.element_ty)
    tl.store(ptrs, values, mask=mask_H[:, None] & mask_d[None, :])


@triton.jit
def write_kv_kernel(
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
    k_scale_ptr,
    v_scale_ptr,
    stride_qkvt,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d, mask_h = offs_d < D, heads < H + 2 * G
    is_q, is_v = heads < H, heads >= H + G
    head_ptrs = qkv_ptr + token * stride_qkvt + heads * D
    x = _load_heads(head_ptrs, offs_d, mask_h, mask_d)
    y = x  # [BLOCK_H, BLOCK_D] fp32
    norm_H = tl.full((BLOCK_H,), 1.0, tl.float32)
    if q_norm_ptr is not None:
        norm_H = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
        y = _norm_heads(x, q_norm_ptr, k_norm_ptr, offs_d, mask_d, is_q, norm_H)
    if R > 0:
        angle = tl.load(positions_ptr + token).to(tl.int64) * R
        angles = (cos_ptr + angle, sin_ptr + angle)
        if IS_INTERLEAVED:
            y = _rotate_interleaved(y, *angles, R, BLOCK_H)
        else:
            norms = (q_norm_ptr, k_norm_ptr)
            y = _rotate_halves(y, head_ptrs, mask_h, is_q, norm_H, *norms, *angles, R)
    y = tl.where(is_v[:, None], x, y)

    _store_rows(q_ptr, token * H + heads, y, offs_d, mask_d, is_q, D)
    slot = tl.load(slots_ptr + token)
    is_stored = heads < tl.where(slot >= B, H + 2 * G, 0)  # none in block 0
    is_k, is_v = is_stored & (heads >= H) & (heads < H + G), is_stored & is_v
    first_row = slot // B * (G * B) + slot % B
    k_rows, v_rows = first_row + (heads - H) * B, first_row + (heads - H - G) * B
    if k_scale_ptr is not None:
        y, scale_H = quantize_heads(y, k_cache_ptr.dtype.element_ty, TOP)
        tl.store(k_scale_ptr + k_rows, scale_H, mask=is_k)
        tl.store(v_scale_ptr + v_rows, scale_H, mask=is_v)
    _store_rows(k_cache_ptr, k_rows, y, offs_d, mask_d, is_k, D)
    _store_rows(v_cache_ptr, v_rows, y, offs_d, mask_d, is_v, D)
