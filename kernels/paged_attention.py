"""Causal attention of query spans over a paged KV cache: prefill, decode and verify in one op.

Shapes: q_THD [T, H, D] contiguous, fp32, fp16 or bf16; k_cache_NGBD, v_cache_NGBD [N, G, B, D]
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
segments are merged in order, in one program or in ``_combine_kernel``, by the same helper. Nothing
else that a launch chooses enters a query's sums: fully hidden tiles and segments change no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from einops import rearrange

from pagedraft.kernels.check import check_contiguous, check_dtype, check_shape
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.dispatch import implementation
from pagedraft.kernels.paged_attention_cpu import paged_attention_cpu

SEGMENT = 256
LOG2_E = 1.4426950408889634


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


@triton.jit
def _find_row(starts_ptr, num_entries, index, QUERIES: tl.constexpr, TILES_PER_ROW: tl.constexpr):
    """Last row whose first tile (QUERIES queries, TILES_PER_ROW 1) or token (1, 0) is <= index."""
    low = index * 0
    high = low + num_entries
    while high - low > 1:
        middle = (low + high) // 2
        is_after = tl.load(starts_ptr + middle) // QUERIES + middle * TILES_PER_ROW > index
        high = tl.where(is_after, middle, high)
        low = tl.where(is_after, low, middle)
    return low


@triton.jit
def _find_queries(starts_ptr, lens_ptr, num_rows, QUERIES: tl.constexpr, IS_ONE_TILE: tl.constexpr):
    """Return (row, first token, number of queries, first query's position) of a program's tile."""
    tile = tl.program_id(0)
    if IS_ONE_TILE:
        row = tile
        token = tl.load(starts_ptr + row)
    else:
        row = _find_row(starts_ptr, num_rows, tile, QUERIES, 1)
        start = tl.load(starts_ptr + row)
        token = start + (tile - start // QUERIES - row) * QUERIES
    end = tl.load(starts_ptr + row + 1)
    kv_len = tl.load(lens_ptr + row)
    num_queries = tl.maximum(tl.minimum(end - token, QUERIES), 0)
    num_queries = tl.where(kv_len > 0, num_queries, 0)
    return row, token, num_queries, kv_len - (end - token)


@triton.jit
def _merge(m_a, l_a, acc_a, m_b, l_b, acc_b, scale):
    """Softmax state b (row maximum, row sum, weighted values) behind state a; either may be empty.

    An empty b leaves the bits of a alone; an empty a gives those of b.
    """
    m = tl.maximum(m_a, m_b)
    finite = tl.where(m == float("-inf"), 0.0, m)
    weight_a = tl.exp2((m_a - finite) * scale)[:, None]
    weight_b = tl.exp2((m_b - finite) * scale)[:, None]
    return m, l_a * weight_a + l_b * weight_b, acc_a * weight_a + acc_b * weight_b


@triton.jit
def _attend_tile(q, cache, key, kv_end, position_m, state, scale, SIZES, IS_MASKED: tl.constexpr):
    """One online-softmax step over the keys ``key`` to ``key + BLOCK_N``.

    cache: pointers to one head's keys, its values and the row's block table.
    state: row maximum [BLOCK_M], row sum [BLOCK_M, 16], weighted values [BLOCK_M, BLOCK_D], fp32.
    """
    BLOCK_STRIDE: tl.constexpr = SIZES[0]
    HEAD_DIM: tl.constexpr = SIZES[1]
    BLOCK_SIZE: tl.constexpr = SIZES[2]
    BLOCK_N: tl.constexpr = SIZES[3]
    BLOCK_D: tl.constexpr = q.shape[1]
    k_ptr, v_ptr, table_ptr = cache
    m_i, l_i, acc = state
    offs_d, offs_n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    mask_d, mask_n = offs_d < HEAD_DIM, key + offs_n < kv_end
    if BLOCK_SIZE >= BLOCK_N:
        tile = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64) * BLOCK_STRIDE
        tile += key % BLOCK_SIZE * HEAD_DIM
        k_ptr += tile
        v_ptr += tile
        offs_kv = offs_n * HEAD_DIM
    else:
        block_n = tl.load(table_ptr + (key + offs_n) // BLOCK_SIZE, mask=mask_n, other=0)
        offs_kv = block_n.to(tl.int64) * BLOCK_STRIDE + (key + offs_n) % BLOCK_SIZE * HEAD_DIM
    k_ptrs = k_ptr + offs_d[:, None] + offs_kv[None, :]  # [BLOCK_D, BLOCK_N]
    v_ptrs = v_ptr + offs_kv[:, None] + offs_d[None, :]  # [BLOCK_N, BLOCK_D]
    if IS_MASKED or HEAD_DIM != BLOCK_D:
        k = tl.load(k_ptrs, mask=mask_d[:, None] & mask_n[None, :], other=0.0)
        v = tl.load(v_ptrs, mask=mask_n[:, None] & mask_d[None, :], other=0.0)
    else:
        k, v = tl.load(k_ptrs), tl.load(v_ptrs)
    scores = tl.dot(q, k, input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32
    if IS_MASKED:
        is_visible = (key + offs_n)[None, :] <= position_m[:, None]
        scores = tl.where(is_visible, scores, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, axis=1))
    finite = tl.where(m_new == float("-inf"), 0.0, m_new) if IS_MASKED else m_new
    weight = tl.exp2((m_i - finite) * scale)[:, None]
    p = tl.exp2((scores - finite[:, None]) * scale).to(v.dtype)
    # Row sums by a dot: tl.sum adds in another order when a tile's rows are spread over the warps.
    ones = tl.full([BLOCK_N, 16], 1.0, v.dtype)
    l_i = tl.dot(p, ones, l_i * weight, input_precision="ieee")
    acc = tl.dot(p, v, acc * weight, input_precision="ieee")
    return m_new, l_i, acc


@triton.jit
def _attend_segment(q, cache, start, kv_end, position_m, first_position, scale, SIZES):
    """Softmax state of one segment of keys: tiles that all queries see, then masked ones."""
    BLOCK_N: tl.constexpr = SIZES[3]
    SEGMENT: tl.constexpr = SIZES[4]
    m_i = tl.full([q.shape[0]], float("-inf"), tl.float32)
    l_i = tl.zeros([q.shape[0], 16], tl.float32)
    acc = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    state = (m_i, l_i, acc)
    end = tl.minimum(start + SEGMENT, kv_end)
    full_end = tl.maximum(tl.minimum(end, first_position + 1) // BLOCK_N * BLOCK_N, start)
    for key in range(start, full_end, BLOCK_N):
        state = _attend_tile(q, cache, key, kv_end, position_m, state, scale, SIZES, False)
    for key in range(full_end, end, BLOCK_N):
        state = _attend_tile(q, cache, key, kv_end, position_m, state, scale, SIZES, True)
    return state


@triton.jit
def _load_tile(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    starts_ptr,
    lens_ptr,
    num_rows,
    stride_table,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_ONE_TILE: tl.constexpr,
):
    """Find this program's queries; return (q, their (token, head) indices, mask, positions, ...)."""
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    row, token, num_queries, first_position = _find_queries(
        starts_ptr, lens_ptr, num_rows, QUERIES, IS_ONE_TILE
    )
    head = tl.program_id(1)
    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query_m = offs_m // GROUP
    mask_m = query_m < num_queries
    index_m = (token + query_m).to(tl.int64) * (NUM_KV_HEADS * GROUP)
    index_m += head * GROUP + offs_m % GROUP
    q = tl.load(
        q_ptr + index_m[:, None] * HEAD_DIM + offs_d[None, :],
        mask=mask_m[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    )  # [BLOCK_M, BLOCK_D]
    kv_end = tl.where(num_queries > 0, first_position + num_queries, 0)
    head_start = head * (BLOCK_SIZE * HEAD_DIM)
    table_row_ptr = table_ptr + row.to(tl.int64) * stride_table
    cache = (k_ptr + head_start, v_ptr + head_start, table_row_ptr)
    return q, cache, index_m, mask_m, first_position + query_m, first_position, kv_end


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "stride_table"])
def _attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    starts_ptr,
    lens_ptr,
    num_rows,
    num_tokens,
    stride_table,
    scale,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SEGMENT: tl.constexpr,
    IS_ONE_TILE: tl.constexpr,
):
    q, cache, index_m, mask_m, position_m, first_position, kv_end = _load_tile(
        q_ptr,
        k_ptr,
        v_ptr,
        table_ptr,
        starts_ptr,
        lens_ptr,
        num_rows,
        stride_table,
        GROUP,
        NUM_KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_M,
        BLOCK_D,
        IS_ONE_TILE,
    )
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M, 16], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    SIZES: tl.constexpr = (
        NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_N,
        SEGMENT,
    )
    for start in range(0, kv_end, SEGMENT):
        m_s, l_s, acc_s = _attend_segment(
            q, cache, start, kv_end, position_m, first_position, scale, SIZES
        )
        m, l, acc = _merge(m, l, acc, m_s, l_s, acc_s, scale)
    l_m = tl.max(l, axis=1)
    out = acc / tl.where(l_m == 0.0, 1.0, l_m)[:, None]
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    out_ptrs = out_ptr + index_m[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_d[None, :])
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    for first in range(
        tl.load(starts_ptr + num_rows) + tl.program_id(0) * QUERIES,
        num_tokens,
        tl.num_programs(0) * QUERIES,
    ):  # tokens of no row
        query_m = tl.arange(0, BLOCK_M) // GROUP
        is_padding = (query_m < QUERIES) & (first + query_m < num_tokens)
        index_m = (first + query_m).to(tl.int64) * (NUM_KV_HEADS * GROUP)
        index_m += tl.program_id(1) * GROUP + tl.arange(0, BLOCK_M) % GROUP
        zeros = tl.zeros([BLOCK_M, BLOCK_D], out_ptr.dtype.element_ty)
        out_ptrs = out_ptr + index_m[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(out_ptrs, zeros, mask=is_padding[:, None] & mask_d[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_segments", "stride_table"])
def _segment_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    acc_ptr,
    stats_ptr,
    table_ptr,
    starts_ptr,
    lens_ptr,
    num_rows,
    num_segments,
    stride_table,
    scale,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SEGMENT: tl.constexpr,
    IS_ONE_TILE: tl.constexpr,
):
    q, cache, index_m, mask_m, position_m, first_position, kv_end = _load_tile(
        q_ptr,
        k_ptr,
        v_ptr,
        table_ptr,
        starts_ptr,
        lens_ptr,
        num_rows,
        stride_table,
        GROUP,
        NUM_KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_M,
        BLOCK_D,
        IS_ONE_TILE,
    )
    SIZES: tl.constexpr = (
        NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_N,
        SEGMENT,
    )
    segment = tl.program_id(2)
    start = segment * SEGMENT
    m, l, acc = _attend_segment(q, cache, start, kv_end, position_m, first_position, scale, SIZES)
    mask_m = mask_m & (start < kv_end)
    mask_d = tl.arange(0, BLOCK_D) < HEAD_DIM
    partial_m = index_m * num_segments + segment
    tl.store(stats_ptr + 2 * partial_m, m, mask=mask_m)
    tl.store(stats_ptr + 2 * partial_m + 1, tl.max(l, axis=1), mask=mask_m)
    acc_ptrs = acc_ptr + partial_m[:, None] * HEAD_DIM + tl.arange(0, BLOCK_D)[None, :]
    tl.store(acc_ptrs, acc, mask=mask_m[:, None] & mask_d[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def _combine_kernel(
    acc_ptr,
    stats_ptr,
    out_ptr,
    starts_ptr,
    lens_ptr,
    num_rows,
    num_segments,
    scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Merge the segments of one (token, head) in order."""
    token, head = tl.program_id(0), tl.program_id(1)
    row = _find_row(starts_ptr, num_rows + 1, token, 1, 0)  # num_rows: a token of no row
    is_row = row < num_rows
    end = tl.load(starts_ptr + row + 1, mask=is_row, other=0)
    kv_len = tl.load(lens_ptr + row, mask=is_row, other=0)
    num_keys = tl.where(kv_len > 0, kv_len - end + token + 1, 0)
    index = token.to(tl.int64) * NUM_HEADS + head
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    one = tl.arange(0, 1)
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1, 1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    for segment in range(0, tl.cdiv(num_keys, SEGMENT)):
        partial = index * num_segments + segment
        m_s = tl.load(stats_ptr + 2 * partial + one)
        l_s = tl.load(stats_ptr + 2 * partial + 1 + one)[:, None]
        acc_s = tl.load(acc_ptr + partial * HEAD_DIM + offs_d, mask=offs_d < HEAD_DIM, other=0.0)
        m, l, acc = _merge(m, l, acc, m_s, l_s, acc_s, scale)
    out = acc / tl.where(l == 0.0, 1.0, l)
    out_ptrs = out_ptr + index * HEAD_DIM + offs_d
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=offs_d < HEAD_DIM)


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
    multiple of 4 warps, so a tile of 64 rows or more has 2. Shared memory stays under 99 KB
    (sm_86), on AMD under 64 KB. Thresholds follow from offline compiles, not from a GPU run.
    """
    key_bytes = triton.next_power_of_2(head_dim) * element_size
    block_m = 16 if group * max_query_len <= 16 else 32
    block_m = max(block_m, triton.next_power_of_2(group))
    return AttentionConfig(
        block_m=block_m,
        block_n=64 if key_bytes <= 256 else 32,
        num_warps=4 if block_m <= 32 else 2,
        num_stages=2 if is_hip or key_bytes > 256 else 3,
    )


# Programs of one launch from which on the keys are not split: two waves on the 132
# multiprocessors of an H200.
ENOUGH_PROGRAMS = 264


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
    split: bool | None = None,
) -> torch.Tensor:
    """Run the kernels into ``out_THD``; ``split`` overrides whether a second launch merges."""
    num_tokens, num_heads, head_dim = q_THD.shape
    _, num_kv_heads, block_size, _ = k_cache_NGBD.shape
    num_rows = kv_lens_R.shape[0]
    if num_tokens == 0 or num_rows == 0:
        return out_THD.zero_()
    group = num_heads // num_kv_heads
    is_hip = torch.version.hip is not None
    config = attention_config(group, head_dim, q_THD.element_size(), max_query_len, is_hip)
    queries = config.block_m // group
    is_one_tile = max_query_len <= queries
    num_tiles = num_rows if is_one_tile else num_tokens // queries + num_rows
    num_segments = triton.cdiv(max_kv_len, SEGMENT)
    if split is None:
        split = num_segments > 1 and num_tiles * num_kv_heads < ENOUGH_PROGRAMS
    options = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": False,  # both ways must round alike
        **({"matrix_instr_nonkdim": 16} if is_hip else {}),  # one MFMA shape for every tile
    }
    block_d = triton.next_power_of_2(head_dim)
    sizes = (group, num_kv_heads, head_dim, block_size)
    tile = (config.block_m, config.block_n, block_d, SEGMENT, is_one_tile)
    where = (block_table_RM, query_starts_R1, kv_lens_R, num_rows)
    stride_table, scale = block_table_RM.stride(0), scale * LOG2_E
    if not split:
        _attend_kernel[num_tiles, num_kv_heads](
            *(q_THD, k_cache_NGBD, v_cache_NGBD, out_THD, *where, num_tokens),
            *(stride_table, scale, *sizes, *tile),
            **options,
        )
        return out_THD
    num_segments = max(num_segments, 1)
    acc = torch.empty(
        num_tokens, num_heads, num_segments, head_dim, dtype=torch.float32, device=q_THD.device
    )
    stats = torch.empty(*acc.shape[:3], 2, dtype=torch.float32, device=q_THD.device)
    _segment_kernel[num_tiles, num_kv_heads, num_segments](
        *(q_THD, k_cache_NGBD, v_cache_NGBD, acc, stats, *where, num_segments),
        *(stride_table, scale, *sizes, *tile),
        **options,
    )
    _combine_kernel[num_tokens, num_heads](
        *(acc, stats, out_THD, query_starts_R1, kv_lens_R, num_rows, num_segments, scale),
        *(num_heads, head_dim, block_d, SEGMENT),
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
    for name, cache in (("k_cache_NGBD", k_cache_NGBD), ("v_cache_NGBD", v_cache_NGBD)):
        check_dtype(name, cache, q_THD.dtype)
        if cache.ndim != 4 or cache.shape != k_cache_NGBD.shape:
            check_shape(name, cache, (None, None, None, q_THD.shape[-1]))
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
    check_contiguous("q_THD", q_THD)
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
) -> torch.Tensor:
    """Attend; see the module docstring. ``scale`` defaults to D^-0.5; ``out`` may be given."""
    out = torch.empty_like(q_THD) if out is None else out
    args = (q_THD, k_cache_NGBD, v_cache_NGBD, block_table_RM, query_starts_R1, kv_lens_R)
    _check(*args, out)
    scale = q_THD.shape[-1] ** -0.5 if scale is None else scale
    choice = implementation("paged_attention", q_THD.device, has_cpu=True)
    if choice == "cpu":
        return paged_attention_cpu(*args, scale, out)
    if choice == "ref":
        return out.copy_(paged_attention_ref(*args, scale))
    return launch(*args, max_query_len, max_kv_len, scale, out)


def paged_attention_cost(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
) -> Cost:
    """Lower bound of one call whose row r has query_lens[r] queries and kv_lens[r] context tokens."""
    rows = list(zip(query_lens, kv_lens, strict=True))
    num_elements = 2 * sum(query_lens) * num_heads + 2 * sum(kv_lens) * num_kv_heads
    num_pairs = sum(span * kv_len - span * (span - 1) // 2 for span, kv_len in rows)
    return Cost(
        bytes=num_elements * head_dim * itemsize, flops=4 * num_heads * head_dim * num_pairs
    )
