"""What paged attention is compared with: PyTorch, and FlashInfer and FlashAttention if installed.

A baseline takes a point and its inputs and returns a call whose outputs, laid one after another,
are out_THD. One that cannot do a point raises, which marks its own cell and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from einops import rearrange
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from pagedraft.bench.attention_cases import AttentionPoint
from pagedraft.bench.gate import Tensors
from pagedraft.kernels.kv_quant import dequantize_kv

Outputs = Sequence[torch.Tensor]
Run = Callable[[], Outputs]
WORKSPACE_BYTES = 128 << 20
FLASH_ATTN_BLOCK = 256  # FlashAttention 2 refuses blocks that 256 does not divide


def gathered_kv(t: Tensors, point: AttentionPoint) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (k, v) [rows, G, keys, D] of each row group, visible keys only, in q's dtype."""
    found = []
    for rows, _, span, kv_len in point.row_groups():
        first = point.first_key(span, kv_len)
        first_block = first // point.block_size
        last_block = -(-kv_len // point.block_size)
        table_RM = t["table"][rows, first_block:last_block].long()
        keys = slice(
            first - first_block * point.block_size, kv_len - first_block * point.block_size
        )
        pair = []
        for name in ("k", "v"):
            values = t[name][table_RM]
            if point.is_quantized:
                scale = t[f"{name}_scale"][table_RM]
                values = dequantize_kv(values, scale).to(t["q"].dtype)
            values = rearrange(values, "r m g b d -> r g (m b) d")
            pair.append(values[:, :, keys].contiguous())
        found.append(tuple(pair))
    return found


def _row_queries(t: Tensors, point: AttentionPoint) -> list[torch.Tensor]:
    """Return q [rows, H, span, D] of each row group."""
    return [
        rearrange(t["q"][tokens], "(r l) h d -> r h l d", l=span)
        for _, tokens, span, _ in point.row_groups()
    ]


def _is_visible(point: AttentionPoint, span: int, num_keys: int, device: torch.device):
    """Return [span, keys] of bool for the last ``span`` of ``num_keys`` gathered positions."""
    query = torch.arange(num_keys - span, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)
    is_visible = key <= query
    return is_visible if point.window is None else is_visible & (key > query - point.window)


def flash_sdpa(point: AttentionPoint, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """Return [rows, span, H, D] through the bias that PyTorch's FlashAttention takes."""
    span, num_keys = q.shape[2], k.shape[2]
    mask = None if span == 1 else causal_lower_right(span, num_keys)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def packed_sdpa(point: AttentionPoint, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """Return [rows, span, H, D] with the heads of a group packed into the queries.

    No fused kernel takes both a mask and shared KV heads.
    """
    span, num_keys = q.shape[2], k.shape[2]
    packed = rearrange(q, "r (g x) l d -> r g (x l) d", x=point.group)
    mask = None
    if span > 1 or (point.window or num_keys) < num_keys:
        mask = _is_visible(point, span, num_keys, q.device).repeat(point.group, 1)
    out = F.scaled_dot_product_attention(packed, k, v, attn_mask=mask)
    return rearrange(out, "r g (x l) d -> r l (g x) d", x=point.group)


def _sdpa(point: AttentionPoint, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    is_flash = q.is_cuda and point.window is None
    return (flash_sdpa if is_flash else packed_sdpa)(point, q, k, v)


def sdpa(point: AttentionPoint, t: Tensors) -> Run:
    """SDPA on KV gathered (and dequantized) beforehand: no paging cost."""
    triples = [
        (q, *kv) for q, kv in zip(_row_queries(t, point), gathered_kv(t, point), strict=True)
    ]
    return lambda: [_sdpa(point, *triple) for triple in triples]


def gather_sdpa(point: AttentionPoint, t: Tensors) -> Run:
    """Gather, dequantise and SDPA: what paging costs without a kernel for it."""
    queries = _row_queries(t, point)
    return lambda: [
        _sdpa(point, q, *kv) for q, kv in zip(queries, gathered_kv(t, point), strict=True)
    ]


@lru_cache(maxsize=1)
def _compiled_flex(point: AttentionPoint) -> Callable[..., torch.Tensor]:
    """Compile once a point, not once a copy of its buffers."""
    torch._dynamo.reset()  # a few recompiles in, it would fall back to materialised scores
    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=1)
def _flex_masks(point: AttentionPoint, device: torch.device) -> list[BlockMask]:
    masks = []
    for _, _, span, kv_len in point.row_groups():
        num_keys = kv_len - point.first_key(span, kv_len)
        window = point.window or num_keys

        def is_visible(_row, _head, query, key, first=num_keys - span, window=window):
            position = query + first
            return (key <= position) & (key > position - window)

        masks.append(create_block_mask(is_visible, None, None, span, num_keys, device=device))
    return masks


def flex(point: AttentionPoint, t: Tensors, attend: Callable | None = None) -> Run:
    """flex_attention, compiled unless ``attend`` is given, on KV gathered beforehand."""
    attend = attend or _compiled_flex(point)
    masks = _flex_masks(point, t["q"].device)
    calls = list(zip(_row_queries(t, point), gathered_kv(t, point), masks, strict=True))
    return lambda: [
        attend(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)
        for q, (k, v), mask in calls
    ]


def _refuse_quantized(point: AttentionPoint) -> None:
    if point.is_quantized:
        raise ValueError(f"cache: expected {point.dtype}, got {point.cache} with factors a token")


def flashinfer(point: AttentionPoint, t: Tensors) -> Run:
    """FlashInfer on the same pages: its decode wrapper for single queries, else prefill's."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

    _refuse_quantized(point)
    device = t["q"].device
    blocks = [-(-kv_len // point.block_size) for kv_len in point.kv_lens]
    pages = torch.cat([row[:count] for row, count in zip(t["table"], blocks, strict=True)])
    starts = F.pad(torch.tensor(blocks).cumsum(0), (1, 0)).to(device, torch.int32)
    last = torch.tensor([(n - 1) % point.block_size + 1 for n in point.kv_lens])
    layout = (starts, pages, last.to(device, torch.int32))
    sizes = (point.num_heads, point.num_kv_heads, point.head_dim, point.block_size)
    window = {} if point.window is None else {"window_left": point.window - 1}
    types = {"q_data_type": t["q"].dtype, "kv_data_type": t["k"].dtype, **window}
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    if max(point.query_lens) == 1:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(*layout, *sizes, **types)
    else:
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(t["starts"], *layout, *sizes, causal=True, **types)
    return lambda: [wrapper.run(t["q"], (t["k"], t["v"]))]


def flash_attn(point: AttentionPoint, t: Tensors) -> Run:
    """FlashAttention on KV copied into blocks of its own size, in order."""
    from flash_attn import flash_attn_with_kvcache

    _refuse_quantized(point)
    window = (-1, -1) if point.window is None else (point.window - 1, 0)
    calls = []
    for q, kv in zip(_row_queries(t, point), gathered_kv(t, point), strict=True):
        num_rows, num_keys = q.shape[0], kv[0].shape[2]
        padding = (0, 0, 0, 0, 0, -num_keys % FLASH_ATTN_BLOCK)
        k, v = (
            F.pad(x.transpose(1, 2), padding).unflatten(1, (-1, FLASH_ATTN_BLOCK)).flatten(0, 1)
            for x in kv
        )
        table_RM = torch.arange(len(k), device=q.device, dtype=torch.int32).view(num_rows, -1)
        lens_R = torch.full((num_rows,), num_keys, device=q.device, dtype=torch.int32)
        calls.append((q.transpose(1, 2), k, v, lens_R, table_RM))
    return lambda: [
        flash_attn_with_kvcache(
            *(q, k, v),
            cache_seqlens=lens_R,
            block_table=table_RM,
            causal=True,
            window_size=window,
        )
        for q, k, v, lens_R, table_RM in calls
    ]


BASELINES: dict[str, Callable[[AttentionPoint, Tensors], Run]] = {
    "sdpa": sdpa,
    "gather_sdpa": gather_sdpa,
    "flex": flex,
    "flashinfer": flashinfer,
    "flash_attn": flash_attn,
}
TITLES = {
    "sdpa": "SDPA, KV gathered before",
    "gather_sdpa": "gather + SDPA",
    "flex": "flex_attention, KV gathered before",
    "flashinfer": "FlashInfer, same pages",
    "flash_attn": f"FlashAttention, blocks of {FLASH_ATTN_BLOCK} in order",
}
