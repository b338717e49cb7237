"""Causal attention of query spans over a paged KV cache: prefill, decode and verify in one op."""

from __future__ import annotations

import torch
from einops import rearrange

from pagedraft.kernels.check import check_dtype, check_same_device, check_shape
from pagedraft.kernels.dispatch import implementation
from pagedraft.kernels.paged_attention_cpu import paged_attention_cpu


def paged_attention_ref(
    q_THD: torch.Tensor,
    k_cache_NGBD: torch.Tensor,
    v_cache_NGBD: torch.Tensor,
    block_table_RM: torch.Tensor,
    query_starts_R1: torch.Tensor,
    kv_lens_R: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend row by row in plain PyTorch, in the dtype of ``q_THD``."""
    num_kv_heads, block_size, head_dim = k_cache_NGBD.shape[1:]
    scale = head_dim**-0.5 if scale is None else scale
    out_THD = torch.zeros_like(q_THD)
    starts, kv_lens = query_starts_R1.tolist(), kv_lens_R.tolist()
    for row, kv_len in enumerate(kv_lens):
        span = slice(starts[row], starts[row + 1])
        q = rearrange(q_THD[span], "l (g h) d -> g h l d", g=num_kv_heads)
        if kv_len == 0 or q.shape[2] == 0:
            continue
        blocks = block_table_RM[row, : -(-kv_len // block_size)].long()
        k, v = (
            rearrange(cache[blocks], "m g b d -> g 1 (m b) d")[:, :, :kv_len]
            for cache in (k_cache_NGBD, v_cache_NGBD)
        )
        scores = q @ k.mT * scale
        key = torch.arange(kv_len, device=q.device)
        query = torch.arange(kv_len - q.shape[2], kv_len, device=q.device)
        scores = scores.masked_fill(key > query[:, None], float("-inf"))
        out_THD[span] = rearrange(scores.softmax(-1) @ v, "g h l d -> l (g h) d")
    return out_THD


def paged_attention(
    q_THD: torch.Tensor,
    k_cache_NGBD: torch.Tensor,
    v_cache_NGBD: torch.Tensor,
    block_table_RM: torch.Tensor,
    query_starts_R1: torch.Tensor,
    kv_lens_R: torch.Tensor,
    *,
    max_query_len: int,
    max_kv_len: int,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend; see the module docstring."""
    scale = q_THD.shape[-1] ** -0.5 if scale is None else scale
    out = torch.empty_like(q_THD) if out is None else out
    choice = implementation("paged_attention", q_THD.device, has_cpu=True)
    args = (q_THD, k_cache_NGBD, v_cache_NGBD, block_table_RM, query_starts_R1, kv_lens_R)
    if choice == "cpu":
        return paged_attention_cpu(*args, scale, out)
    return out.copy_(paged_attention_ref(*args, scale))
