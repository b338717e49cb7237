"""Causal attention of query spans over a paged KV cache: prefill, decode and verify in one op.

Shapes: q_THD [T, H, D] fp32, fp16 or bf16; k_cache_NGBD, v_cache_NGBD [N, G, B, D] contiguous, of
    the same dtype, or int8 or fp8 (e4m3) with one factor a token and KV head in k_scale_NGB,
    v_scale_NGB [N, G, B] fp32; H a multiple of G, D a multiple of 8 up to 256, B a power of two
    from 8 to 128; block_table_RM, query_starts_R1, kv_lens_R int32; sinks_H [H] fp32. Row r owns
    queries query_starts[r] to query_starts[r + 1], the last of its kv_lens[r] context tokens. Slots
    outside a row's context or left of its window, and the table entries of whole blocks there, may
    hold anything and enter no result. starts, lens and sinks contiguous, the table in its rows.
Returns: out_THD; zeros for rows without context and for tokens past query_starts[R].
Units: lengths and window in tokens; block table in blocks; max_query_len and max_kv_len are upper
    bounds of any row and set grids only.
Cost: 2 T H D itemsize + 2 sum_r keys[r] G (D kv_itemsize + scale_itemsize) bytes; 4 H D flops for
    each visible (query, key) pair. Bandwidth-bound below about 200 query heads a KV head.
Grid: a program owns one KV head and the queries of one row that fill its tiles when packed with
    their H / G heads; split, it owns some segments or sections of the keys, and a second launch
    merges these. A row's tiles are found by search in query_starts, so that the grid grows with
    T / tile + R and not with R * longest span; where one program holds a row, its id is the row.
Source: Dao, FlashAttention-2, arXiv 2307.08691; Kwon et al., PagedAttention, arXiv 2309.06180;
    sinks: Xiao et al., arXiv 2309.17453, in gpt-oss's form; shared prefixes: Juravsky et al.,
    Hydragen, arXiv 2402.05099.

Exactness: every query's keys are reduced in one fixed tree (paged_attention_config.py), whose cuts
are absolute positions. Nothing else that a launch chooses enters a query's sums: hidden tiles,
segments and sections change no bit, and so neither do span, batch, chunk, split, bounds or a shared
prefix. Block sizes give the same bits too: what a tile loads does not depend on them. That holds
for finite keys and values: a NaN or an infinity in a span reaches the span's earlier queries.

Kernels: paged_attention_triton.py, over paged_attention_reduce.py and online_softmax.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange

from pagedraft.kernels.check import check_contiguous, check_dtype, check_shape
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.dispatch import implementation
from pagedraft.kernels.kv_quant import KV_DTYPES
from pagedraft.kernels.paged_attention_cpu import AttentionPlan, fill_plan, paged_attention_cpu
from pagedraft.kernels.paged_attention_cpu_tiles import find_row_counts
from pagedraft.kernels.paged_attention_launch import (
    KVPool,
    PagedRows,
    SharedPrefixes,
    launch,
    wide_tiles,
)
from pagedraft.kernels.score_rules import ScoreRules, check_rules

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
BLOCK_SIZES = (8, 16, 32, 64, 128)  # tokens; what the tests cover


def paged_attention_ref(
    q_THD: torch.Tensor,
    k_cache_NGBD: torch.Tensor,
    v_cache_NGBD: torch.Tensor,
    block_table_RM: torch.Tensor,
    query_starts_R1: torch.Tensor,
    kv_lens_R: torch.Tensor,
    scale: float | None = None,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    k_scale_NGB: torch.Tensor | None = None,
    v_scale_NGB: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend row by row in plain PyTorch, in the dtype of ``q_THD``."""
    scale = q_THD.shape[2] ** -0.5 if scale is None else scale
    k_cache_NGBD, v_cache_NGBD = (
        cache if factor is None else cache.to(q_THD.dtype) * factor[..., None].to(q_THD.dtype)
        for cache, factor in ((k_cache_NGBD, k_scale_NGB), (v_cache_NGBD, v_scale_NGB))
    )
    num_kv_heads, block_size = k_cache_NGBD.shape[1:3]
    out_THD = torch.zeros_like(q_THD)
    starts, kv_lens = query_starts_R1.tolist(), kv_lens_R.tolist()
    for row, kv_len in enumerate(kv_lens):
        span = slice(starts[row], starts[row + 1])
        q = rearrange(q_THD[span], "l (g h) d -> g h l d", g=num_kv_heads)
        if kv_len == 0 or q.shape[2] == 0:
            continue
        query = torch.arange(kv_len - q.shape[2], kv_len, device=q.device)
        first_key = 0 if window is None else max(0, kv_len - q.shape[2] - window + 1)
        key = torch.arange(first_key, kv_len, device=q.device)
        first_block = first_key // block_size
        blocks = block_table_RM[row, first_block : -(-kv_len // block_size)].long()
        keys = slice(first_key - first_block * block_size, kv_len - first_block * block_size)
        k, v = (
            rearrange(cache[blocks], "m g b d -> g 1 (m b) d")[:, :, keys]
            for cache in (k_cache_NGBD, v_cache_NGBD)
        )
        scores = q @ k.mT * scale
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        is_hidden = key > query[:, None]
        if window is not None:
            is_hidden |= key <= query[:, None] - window
        scores = scores.masked_fill(is_hidden, float("-inf"))
        if sinks_H is not None:
            sinks = rearrange(sinks_H, "(g h) -> g h 1 1", g=num_kv_heads).to(scores.dtype)
            scores = torch.cat((scores, sinks.expand(*scores.shape[:3], 1)), -1)
        weights = scores.softmax(-1)[..., : len(key)]
        out_THD[span] = rearrange(weights @ v, "g h l d -> l (g h) d")
    return out_THD


def _check_pool(q_THD: torch.Tensor, pool: KVPool) -> None:
    """Raise on a bad pool; cheap comparisons first, for this runs once a layer."""
    scales = (pool.k_scale_NGB, pool.v_scale_NGB)
    if pool.k_NGBD.ndim != 4 or 0 in pool.k_NGBD.shape[:2]:
        shape = tuple(pool.k_NGBD.shape)
        raise ValueError(f"k_cache_NGBD: expected blocks and heads [N, G, B, D], got shape {shape}")
    is_quantized = pool.k_NGBD.dtype in KV_DTYPES
    for name, cache in (("k_cache_NGBD", pool.k_NGBD), ("v_cache_NGBD", pool.v_NGBD)):
        check_dtype(name, cache, *((pool.k_NGBD.dtype,) if is_quantized else (q_THD.dtype,)))
        if cache.ndim != 4 or cache.shape != pool.k_NGBD.shape:
            check_shape(name, cache, (*pool.k_NGBD.shape[:3], q_THD.shape[-1]))
        check_contiguous(name, cache)
    for name, scale in zip(("k_scale_NGB", "v_scale_NGB"), scales, strict=True):
        if (scale is not None) != is_quantized:
            wanted = "a tensor" if is_quantized else "None"
            raise ValueError(f"{name}: expected {wanted} with a {pool.k_NGBD.dtype} cache")
        if scale is not None:
            check_shape(name, scale, tuple(pool.k_NGBD.shape[:3]))
            check_dtype(name, scale, torch.float32)
            check_contiguous(name, scale)
    num_heads, head_dim = q_THD.shape[1:]
    _, num_kv_heads, block_size, cache_dim = pool.k_NGBD.shape
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"k_cache_NGBD: expected blocks of 8 to 128 tokens, got {block_size}")
    if head_dim % 8 or not 8 <= head_dim <= 256 or head_dim != cache_dim:
        raise ValueError(
            f"q_THD: expected a head dim of the cache, a multiple of 8 up to 256, got {head_dim}"
        )
    if num_heads % num_kv_heads:
        raise ValueError(f"q_THD: expected a multiple of {num_kv_heads} heads, got {num_heads}")


def _check(
    q_THD: torch.Tensor, pool: KVPool, rows: PagedRows, rules: ScoreRules, out_THD: torch.Tensor
) -> None:
    """Raise on bad arguments."""
    check_dtype("q_THD", q_THD, *FLOATS)
    if q_THD.ndim != 3:
        check_shape("q_THD", q_THD, (None, None, None))
    _check_pool(q_THD, pool)
    check_rules(rules, q_THD.shape[1])
    if out_THD.shape != q_THD.shape or out_THD.dtype != q_THD.dtype:
        raise ValueError(
            f"out: expected {tuple(q_THD.shape)} {q_THD.dtype}, "
            f"got {tuple(out_THD.shape)} {out_THD.dtype}"
        )
    check_contiguous("out", out_THD)
    check_shape("kv_lens_R", rows.kv_lens_R, (None,))
    num_rows = rows.kv_lens_R.shape[0]
    check_dtype("kv_lens_R", rows.kv_lens_R, torch.int32)
    check_dtype("query_starts_R1", rows.query_starts_R1, torch.int32)
    check_dtype("block_table_RM", rows.block_table_RM, torch.int32)
    check_shape("query_starts_R1", rows.query_starts_R1, (num_rows + 1,))
    check_shape("block_table_RM", rows.block_table_RM, (num_rows, None))
    check_contiguous("kv_lens_R", rows.kv_lens_R)
    check_contiguous("query_starts_R1", rows.query_starts_R1)
    if rows.block_table_RM.shape[1] > 1 and rows.block_table_RM.stride(1) != 1:
        strides = rows.block_table_RM.stride()
        raise ValueError(f"block_table_RM: expected rows without gaps, got strides {strides}")
    for name, bound in zip(("max_query_len", "max_kv_len"), rows[3:], strict=True):
        if bound < 0:
            raise ValueError(f"{name}: expected a bound of at least 0, got {bound}")


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
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    k_scale_NGB: torch.Tensor | None = None,
    v_scale_NGB: torch.Tensor | None = None,
    shared: SharedPrefixes | None = None,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Attend; see the module docstring. ``scale`` defaults to D^-0.5; ``out`` may be given.

    window, soft_cap, sinks_H: see ScoreRules.
    shared: leading blocks that rows have in common, so that the kernels may read them once.
    plan: an empty AttentionPlan a step, which the layers of the step share: the first one fills it
    and the others leave out what it knows, argument checks included. Only the CPU path uses it.
    """
    if out is None:
        out = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    scale = q_THD.shape[-1] ** -0.5 if scale is None else scale
    rules = ScoreRules(scale, window, soft_cap, sinks_H)
    kv_scales = None if k_scale_NGB is None else (k_scale_NGB, v_scale_NGB)
    if plan is not None and plan.has(window, q_THD, k_cache_NGBD):
        return paged_attention_cpu(q_THD, k_cache_NGBD, v_cache_NGBD, plan, rules, out, kv_scales)
    pool = KVPool(k_cache_NGBD, v_cache_NGBD, k_scale_NGB, v_scale_NGB)
    rows = PagedRows(block_table_RM, query_starts_R1, kv_lens_R, max_query_len, max_kv_len)
    args = (q_THD, k_cache_NGBD, v_cache_NGBD, block_table_RM, query_starts_R1, kv_lens_R)
    _check(q_THD, pool, rows, rules, out)
    if q_THD.numel() == 0 or kv_lens_R.numel() == 0:
        return out.zero_()
    has_cpu = q_THD.dtype == torch.float32
    choice = implementation("paged_attention", q_THD.device, has_cpu=has_cpu)
    if choice == "cpu":
        plan = fill_plan(plan or AttentionPlan(), *args, window)
        return paged_attention_cpu(q_THD, k_cache_NGBD, v_cache_NGBD, plan, rules, out, kv_scales)
    if choice == "ref":
        kwargs = {"k_scale_NGB": k_scale_NGB, "v_scale_NGB": v_scale_NGB, **rules._asdict()}
        return out.copy_(paged_attention_ref(*args, **kwargs))
    return launch(q_THD.contiguous(), pool, rows, rules, out, shared)


def prepare_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Run the self-test that the first call with queries of this kind would run, if it has one.

    For load time: it takes up to a second, and on CUDA it must come before a graph is captured.
    """
    choice = implementation("paged_attention", device, has_cpu=dtype == torch.float32)
    if choice == "cpu":
        find_row_counts(head_dim, torch.get_num_threads())
    elif choice == "triton":
        wide_tiles(device, dtype, head_dim)


def paged_attention_cost(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    *,
    kv_itemsize: int | None = None,
    scale_itemsize: int = 0,
    window: int | None = None,
) -> Cost:
    """Lower bound of one call; row r has query_lens[r] queries, kv_lens[r] context tokens.

    kv_itemsize: bytes of a cache element (itemsize unless given); scale_itemsize: of the factor of
    a quantised cache's token and head. Tables and lengths are not counted.
    """
    kv_itemsize = itemsize if kv_itemsize is None else kv_itemsize
    num_keys = num_pairs = 0
    for span, kv_len in zip(query_lens, kv_lens, strict=True):
        if not span or not kv_len:
            continue
        # The query at position p sees min(p + 1, window) keys.
        limit = kv_len if window is None else min(window, kv_len)
        num_growing = max(0, min(limit, kv_len) - (kv_len - span) - 1)
        num_growing = min(span, num_growing)
        first = kv_len - span + 1
        num_pairs += num_growing * first + num_growing * (num_growing - 1) // 2
        num_pairs += (span - num_growing) * limit
        num_keys += min(kv_len, limit + span - 1)
    kv_bytes = 2 * num_keys * num_kv_heads * (head_dim * kv_itemsize + scale_itemsize)
    return Cost(
        bytes=2 * sum(query_lens) * num_heads * head_dim * itemsize + kv_bytes,
        flops=4 * num_heads * head_dim * num_pairs,
    )
