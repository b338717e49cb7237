"""Causal attention of query spans over a paged KV cache: prefill, decode and verify in one op.

Shapes: q_THD [T, H, D] fp32, fp16 or bf16; k_cache_NGBD, v_cache_NGBD [N, G, B, D]
    contiguous, same dtype, H a multiple of G, D a multiple of 8 up to 256, B a power of two from
    8 to 128; block_table_RM, query_starts_R1, kv_lens_R int32. Row r owns queries
    query_starts[r] to query_starts[r + 1], the last of its kv_lens[r] context tokens. Slots past a
    row's context and table entries past its blocks may hold anything and are not read.
Returns: out_THD; zeros for rows without context and for tokens past query_starts[R].
Units: lengths in tokens; block table in blocks; max_query_len and max_kv_len are upper bounds of
    any row and set grids only.
Cost: (2 T H D + sum_r 2 kv_lens[r] G D) * itemsize bytes; 4 H D flops for each visible (query, key)
    pair. Bandwidth-bound below about 200 query heads a KV head.
Grid: a program owns one KV head and the queries of one row that fill a tile when packed with their
    H / G heads; split, it owns one segment of the keys, and a second launch merges the segments.
    A row's tiles are found by search in query_starts, so that the grid grows with T / tile + R and
    not with R * longest span; where one tile holds every row, the program id is the row.
Source: Dao, FlashAttention-2, arXiv 2307.08691; Kwon et al., PagedAttention, arXiv 2309.06180.

Exactness: keys are cut at absolute multiples of SEGMENT; each segment is reduced on its own, and
segments are merged in order, in one program or in ``combine_kernel``, by the same helper. Nothing
else that a launch chooses enters a query's sums: fully hidden tiles and segments change no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from einops import rearrange

from pagedraft.kernels.check import check_contiguous, check_dtype, check_shape
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.dispatch import implementation
from pagedraft.kernels.paged_attention_cpu import AttentionPlan, fill_plan, paged_attention_cpu
from pagedraft.kernels.paged_attention_triton import (
    combine_kernel,
    paged_attention_kernel,
    paged_segments_kernel,
)
from pagedraft.kernels.score_rules import ScoreRules

SEGMENT = 256  # keys reduced on their own; enters every query's bits
LOG2_E = 1.4426950408889634


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


@dataclass(frozen=True)
class AttentionConfig:
    """Tile of one program: BLOCK_M packed query rows x BLOCK_N keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@lru_cache(maxsize=64)
def attention_config(
    group: int, head_dim: int, element_size: int, max_query_len: int, is_hip: bool
) -> AttentionConfig:
    """Return the tile; block_n never depends on the span (exactness).

    No tile compiles to HGMMA, whose sums may differ from HMMA's: on sm_90 that takes 64 rows and a
    multiple of 4 warps, so a tile of 64 rows or more has 2. Keys and values of a tile take at most
    32 KB; five stages hold two such tiles, because the block table's load is a stage of its own.
    Shared memory stays under 99 KB (sm_86), on AMD under 64 KB. fp32 products run without tensor
    cores and spill in larger tiles. Thresholds follow from offline compiles, not from a GPU run.
    """
    is_fp32 = element_size == 4
    block_m = 16 if is_fp32 or group * max_query_len <= 16 else 32
    block_m = max(block_m, triton.next_power_of_2(group))
    key_bytes = triton.next_power_of_2(head_dim) * element_size
    block_n = max(16, min(32 if is_fp32 else 64, 2**14 // key_bytes))
    return AttentionConfig(
        block_m=block_m,
        block_n=block_n,
        num_warps=4 if block_m <= 32 else 2,
        num_stages=2 if is_hip else 3 if is_fp32 else 5,
    )


# Programs that one launch should have: four on each of the 132 multiprocessors of an H200.
TARGET_PROGRAMS = 528


def launch(
    q_THD: torch.Tensor,
    k_cache_NGBD: torch.Tensor,
    v_cache_NGBD: torch.Tensor,
    block_table_RM: torch.Tensor,
    query_starts_R1: torch.Tensor,
    kv_lens_R: torch.Tensor,
    max_query_len: int,
    max_kv_len: int,
    scale: float,
    out_THD: torch.Tensor,
    segments_per_program: int | None = None,
) -> torch.Tensor:
    """Run the kernels into ``out_THD``.

    segments_per_program: chosen from the sizes unless given; from all segments on, one launch
    walks them and merges on the way.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    _, num_kv_heads, block_size, _ = k_cache_NGBD.shape
    num_rows = kv_lens_R.shape[0]
    group = num_heads // num_kv_heads
    is_hip = torch.version.hip is not None
    config = attention_config(group, head_dim, q_THD.element_size(), max_query_len, is_hip)
    queries = config.block_m // group
    is_one_tile = max_query_len <= queries
    num_tiles = num_rows if is_one_tile else num_tokens // queries + num_rows
    num_segments = triton.cdiv(max_kv_len, SEGMENT)
    if segments_per_program is None:
        num_pieces = max(1, TARGET_PROGRAMS // (num_tiles * num_kv_heads))
        segments_per_program = triton.cdiv(num_segments, num_pieces)
    block_d = triton.next_power_of_2(head_dim)
    inputs = (q_THD.contiguous(), k_cache_NGBD, v_cache_NGBD)
    rows = (block_table_RM, query_starts_R1, kv_lens_R, num_rows)
    common = {
        "stride_table": block_table_RM.stride(0),
        "scale": scale * LOG2_E,
        "GROUP": group,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": block_d,
        "SEGMENT": SEGMENT,
        "IS_ONE_TILE": is_one_tile,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": False,  # both ways must round alike
        **({"matrix_instr_nonkdim": 16} if is_hip else {}),  # one MFMA shape for every tile
    }
    if segments_per_program >= num_segments:
        grid = (num_tiles, num_kv_heads)
        paged_attention_kernel[grid](*inputs, out_THD, *rows, num_tokens, **common)
        return out_THD
    shape = (num_tokens, num_heads, num_segments)
    acc = torch.empty(*shape, head_dim, dtype=torch.float32, device=q_THD.device)
    stats = torch.empty(*shape, 2, dtype=torch.float32, device=q_THD.device)
    grid = (num_tiles, num_kv_heads, triton.cdiv(num_segments, segments_per_program))
    sizes = (num_segments, segments_per_program)
    paged_segments_kernel[grid](*inputs, acc, stats, *rows, *sizes, **common)
    combine_kernel[num_tokens, num_heads](
        *(acc, stats, out_THD, query_starts_R1, kv_lens_R, num_rows, num_segments),
        *(scale * LOG2_E, num_heads, head_dim, block_d, SEGMENT),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out_THD


def _check(
    q_THD: torch.Tensor,
    k_cache_NGBD: torch.Tensor,
    v_cache_NGBD: torch.Tensor,
    block_table_RM: torch.Tensor,
    query_starts_R1: torch.Tensor,
    kv_lens_R: torch.Tensor,
    out_THD: torch.Tensor,
) -> None:
    """Raise on bad arguments; cheap comparisons first, for this runs once a layer."""
    check_dtype("q_THD", q_THD, torch.float32, torch.float16, torch.bfloat16)
    if q_THD.ndim != 3:
        check_shape("q_THD", q_THD, (None, None, None))
    for name, cache in (("k_cache_NGBD", k_cache_NGBD), ("v_cache_NGBD", v_cache_NGBD)):
        check_dtype(name, cache, q_THD.dtype)
        if cache.ndim != 4 or cache.shape != k_cache_NGBD.shape:
            check_shape(name, cache, (*k_cache_NGBD.shape[:3], q_THD.shape[-1]))
        check_contiguous(name, cache)
    num_heads, head_dim = q_THD.shape[1:]
    _, num_kv_heads, block_size, _ = k_cache_NGBD.shape
    if block_size not in (8, 16, 32, 64, 128):
        raise ValueError(f"k_cache_NGBD: expected blocks of 8 to 128 tokens, got {block_size}")
    if head_dim % 8 or not 8 <= head_dim <= 256 or head_dim != k_cache_NGBD.shape[3]:
        raise ValueError(
            f"q_THD: expected a head dim of the cache, a multiple of 8 up to 256, got {head_dim}"
        )
    if num_heads % num_kv_heads:
        raise ValueError(f"q_THD: expected a multiple of {num_kv_heads} heads, got {num_heads}")
    if out_THD.shape != q_THD.shape or out_THD.dtype != q_THD.dtype:
        raise ValueError(
            f"out: expected {tuple(q_THD.shape)} {q_THD.dtype}, "
            f"got {tuple(out_THD.shape)} {out_THD.dtype}"
        )
    check_contiguous("out", out_THD)
    num_rows = kv_lens_R.shape[0]
    check_dtype("kv_lens_R", kv_lens_R, torch.int32)
    check_dtype("query_starts_R1", query_starts_R1, torch.int32)
    check_dtype("block_table_RM", block_table_RM, torch.int32)
    check_shape("query_starts_R1", query_starts_R1, (num_rows + 1,))
    check_shape("block_table_RM", block_table_RM, (num_rows, None))


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
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Attend; see the module docstring. ``scale`` defaults to D^-0.5; ``out`` may be given.

    plan: an empty AttentionPlan a step, which the layers of the step share: the first one fills it
    and the others leave out what it knows, argument checks included. Only the CPU path uses it.
    """
    if out is None:
        out = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    scale = q_THD.shape[-1] ** -0.5 if scale is None else scale
    rules = ScoreRules(scale)
    if plan is not None and plan.has(rules.window):
        return paged_attention_cpu(q_THD, k_cache_NGBD, v_cache_NGBD, plan, rules, out)
    args = (q_THD, k_cache_NGBD, v_cache_NGBD, block_table_RM, query_starts_R1, kv_lens_R)
    _check(*args, out)
    if q_THD.numel() == 0 or kv_lens_R.numel() == 0:
        return out.zero_()
    has_cpu = q_THD.dtype == torch.float32
    choice = implementation("paged_attention", q_THD.device, has_cpu=has_cpu)
    if choice == "cpu":
        plan = fill_plan(plan or AttentionPlan(), *args, rules.window)
        return paged_attention_cpu(q_THD, k_cache_NGBD, v_cache_NGBD, plan, rules, out)
    if choice == "ref":
        return out.copy_(paged_attention_ref(*args, scale))
    return launch(q_THD.contiguous(), *args[1:], max_query_len, max_kv_len, scale, out)


def paged_attention_cost(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
) -> Cost:
    """Lower bound of one call; row r has query_lens[r] queries, kv_lens[r] context tokens."""
    rows = list(zip(query_lens, kv_lens, strict=True))
    num_elements = 2 * sum(query_lens) * num_heads + 2 * sum(kv_lens) * num_kv_heads
    num_pairs = sum(span * kv_len - span * (span - 1) // 2 for span, kv_len in rows)
    return Cost(
        bytes=num_elements * head_dim * itemsize, flops=4 * num_heads * head_dim * num_pairs
    )
