"""``write_kv`` on the CPU: what a step's layers share, and some dozen fp32 ops a layer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from pagedraft.kernels.kv_quant import KV_DTYPES, TINY, quantize_kv
from pagedraft.kernels.rms_norm import rms_scale_cpu

# As tensors: a number divided by a tensor would be rounded twice, as a product with an inverse.
_TOPS = {dtype: torch.full((1, 1, 1), top) for dtype, top in KV_DTYPES.items()}


class WritePlan(NamedTuple):
    """What the CPU path derives from a step's positions and slots, alike for all layers.

    cos_T1PP: factors of a head's rotated columns seen as pairs: [T, 1, 1, R], or [T, 1, R, 1] where
        pairs are interleaved.
    sin_T1PP: factors of the same columns with each pair swapped, sign included: [T, 1, 2, R] or
        [T, 1, R, 2].
    rows_KG: row of each stored token and KV head in a cache seen as [N * G * B, D].
    stored_K: which tokens are stored; None: all.
    """

    cos_T1PP: torch.Tensor
    sin_T1PP: torch.Tensor
    rows_KG: torch.Tensor
    stored_K: torch.Tensor | None
    interleaved: bool

    def fits(self, shape: tuple[int, ...], num_columns: int, interleaved: bool) -> bool:
        """Whether this is the plan of a qkv_TC of ``shape``, which should have ``num_columns``."""
        return shape == (self.cos_T1PP.shape[0], num_columns) and interleaved == self.interleaved


def plan_write_kv(
    cos_PR: torch.Tensor,
    sin_PR: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    num_kv_heads: int,
    block_size: int,
    *,
    interleaved: bool = False,
) -> WritePlan:
    """Derive a step's WritePlan; see write_kv for the arguments."""
    cos_TR, sin_TR = cos_PR[positions_T], sin_PR[positions_T]
    pair_dim = 2 if interleaved else 1
    sin_TPP = torch.stack((-sin_TR, sin_TR), pair_dim)
    stored_K = None
    is_stored_T = slots_T >= block_size
    if not bool(is_stored_T.all()):
        stored_K = is_stored_T.nonzero().flatten()
        slots_T = slots_T[stored_K]
    head_starts_G = torch.arange(num_kv_heads, device=slots_T.device) * block_size
    block_starts_K = slots_T // block_size * (num_kv_heads * block_size)
    rows_KG = (block_starts_K + slots_T % block_size)[:, None] + head_starts_G
    cos_T1PP = cos_TR.unsqueeze(pair_dim)[:, None]
    return WritePlan(cos_T1PP, sin_TPP[:, None], rows_KG, stored_K, interleaved)


def write_kv_cpu(
    qkv_TC: torch.Tensor,
    plan: WritePlan,
    k_cache_NGBD: torch.Tensor,
    v_cache_NGBD: torch.Tensor,
    num_heads: int,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    k_scale_NGB: torch.Tensor | None = None,
    v_scale_NGB: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries and keys are rotated at once; no op mixes tokens. See write_kv."""
    _, num_kv_heads, _, head_dim = k_cache_NGBD.shape
    num_rotated = num_heads + num_kv_heads
    start, (stride, _) = qkv_TC.storage_offset(), qkv_TC.stride()
    shape = (qkv_TC.shape[0], num_rotated, head_dim)
    x_TXD = qkv_TC.as_strided(shape, (stride, head_dim, 1), start)
    v_TGD = qkv_TC.as_strided(
        (shape[0], num_kv_heads, head_dim),
        (stride, head_dim, 1),
        start + num_rotated * head_dim,
    )
    head_sizes = (num_heads, num_kv_heads)
    if q_norm_D is not None and k_norm_D is not None:
        x_TXD = x_TXD * rms_scale_cpu(x_TXD, eps)
        q_THD, k_TGD = x_TXD.split_with_sizes(head_sizes, 1)
        q_THD.mul_(q_norm_D)
        k_TGD.mul_(k_norm_D)
    q_THD, k_TGD = _rotate(x_TXD, plan).split_with_sizes(head_sizes, 1)
    if plan.stored_K is not None:
        k_TGD, v_TGD = k_TGD[plan.stored_K], v_TGD[plan.stored_K]
    if k_scale_NGB is not None and v_scale_NGB is not None:
        stored_KXD, scale_KX = _quantize(torch.cat((k_TGD, v_TGD), 1), k_cache_NGBD.dtype)
        k_TGD, v_TGD = stored_KXD.chunk(2, 1)
        k_scale_KG, v_scale_KG = scale_KX.chunk(2, 1)
        _store(k_scale_KG, k_scale_NGB, plan.rows_KG)
        _store(v_scale_KG, v_scale_NGB, plan.rows_KG)
    _store(k_TGD, k_cache_NGBD, plan.rows_KG)
    _store(v_TGD, v_cache_NGBD, plan.rows_KG)
    return q_THD


def _rotate(x_TXD: torch.Tensor, plan: WritePlan) -> torch.Tensor:
    """Rotate the first columns of each head, as many as the plan has factors for."""
    (num_tokens, num_heads, head_dim), pair_shape = x_TXD.shape, plan.sin_T1PP.shape[2:]
    num_columns = pair_shape.numel()
    if num_columns == 0:
        return x_TXD
    columns = x_TXD if num_columns == head_dim else x_TXD[..., :num_columns]
    pairs = columns.view(num_tokens, num_heads, *pair_shape)
    swapped = pairs.flip(3 if plan.interleaved else 2)
    rotated = torch.mul(pairs, plan.cos_T1PP).addcmul_(swapped, plan.sin_T1PP).flatten(2)
    if num_columns == head_dim:
        return rotated
    return torch.cat((rotated, x_TXD[..., num_columns:]), -1)


def _quantize(x_KXD: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of quantize_kv with half as many ops where no head is zero, tiny or not finite."""
    amax_KX1 = x_KXD.abs().amax(-1, keepdim=True)
    if amax_KX1.numel() == 0:
        return quantize_kv(x_KXD, dtype)
    smallest, largest = amax_KX1.aminmax()
    if not (smallest.item() >= TINY and largest.item() < math.inf):  # a NaN is neither
        return quantize_kv(x_KXD, dtype)
    top = _TOPS[dtype]
    scaled_KXD = torch.mul(x_KXD, top / amax_KX1)
    if dtype == torch.int8:
        scaled_KXD.round_()
    return scaled_KXD.to(dtype), (amax_KX1 / top).squeeze(-1)


def _store(values_KG: torch.Tensor, cache: torch.Tensor, rows_KG: torch.Tensor) -> None:
    """Scatter values of each stored token and head, [K, G, D] or [K, G], to rows of the pool."""
    rows = cache.view(-1, *values_KG.shape[2:])
    if rows.dtype != values_KG.dtype:
        values_KG = values_KG.to(rows.dtype)
    rows.index_put_((rows_KG,), values_KG)
