"""The Triton kernels of paged_attention: one launch that walks all keys, or segments and combine.

Names: a tile is BLOCK_M packed rows, (query, head of the KV head's group) pairs of one row of the
batch; position counts tokens of a row's context; key counts them too. A softmax state is (row
maximum, row sum, weighted values). Shapes, grids and exactness: see paged_attention.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    """Return (row, first token, number of queries, position of the first, keys that the last sees).

    Tiles past the last row's have no queries and no keys, a row without context has no keys.
    """
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
    first_position = kv_len - (end - token)
    kv_end = tl.where((kv_len > 0) & (num_queries > 0), first_position + num_queries, 0)
    return row, token, num_queries, first_position, kv_end


@triton.jit
def _empty_state(q):
    """Softmax state of no keys: row maximum [M], row sum [M, 16], weighted values [M, D], fp32.

    All 16 columns of the row sum are equal.
    """
    m_i = tl.full([q.shape[0]], float("-inf"), tl.float32)
    l_i = tl.zeros([q.shape[0], 16], tl.float32)
    return m_i, l_i, tl.zeros([q.shape[0], q.shape[1]], tl.float32)


@triton.jit
def _merge(state_a, state_b, scale):
    """Softmax state b behind state a. An empty b leaves a's bits alone, an empty a gives b's."""
    m_a, l_a, acc_a = state_a
    m_b, l_b, acc_b = state_b
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
def _store_segment(state, acc_ptr, stats_ptr, segment_m, mask_m, HEAD_DIM: tl.constexpr):
    """Store a finished segment's state as partial result ``segment_m``."""
    m_i, l_i, acc = state
    offs_d = tl.arange(0, acc.shape[1])
    tl.store(stats_ptr + 2 * segment_m, m_i, mask=mask_m)
    tl.store(stats_ptr + 2 * segment_m + 1, tl.max(l_i, axis=1), mask=mask_m)
    acc_ptrs = acc_ptr + segment_m[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(acc_ptrs, acc, mask=mask_m[:, None] & (offs_d < HEAD_DIM)[None, :])


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
    """Load this program's queries, packed with the heads of one KV head.

    Returns (q, pointers of its keys, values and block table, (token, head) index of each packed
    row, its mask, its position, the first query's position, keys that the last query sees).
    """
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    row, token, num_queries, first_position, kv_end = _find_queries(
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
    head_start = head * (BLOCK_SIZE * HEAD_DIM)
    table_row_ptr = table_ptr + row.to(tl.int64) * stride_table
    cache = (k_ptr + head_start, v_ptr + head_start, table_row_ptr)
    return q, cache, index_m, mask_m, first_position + query_m, first_position, kv_end


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "stride_table"])
def paged_attention_kernel(
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
    SIZES: tl.constexpr = (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, HEAD_DIM, BLOCK_SIZE, BLOCK_N)
    total = _empty_state(q)
    state = _empty_state(q)
    full_end = tl.minimum(first_position + 1, kv_end) // BLOCK_N * BLOCK_N
    for key in range(0, full_end, BLOCK_N):
        if key % SEGMENT == 0:
            total = _merge(total, state, scale)
            state = _empty_state(q)
        state = _attend_tile(q, cache, key, kv_end, position_m, state, scale, SIZES, False)
    for key in range(full_end, kv_end, BLOCK_N):
        if key % SEGMENT == 0:
            total = _merge(total, state, scale)
            state = _empty_state(q)
        state = _attend_tile(q, cache, key, kv_end, position_m, state, scale, SIZES, True)
    m, l, acc = _merge(total, state, scale)
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


@triton.jit(do_not_specialize=["num_rows", "num_segments", "segments_per_program", "stride_table"])
def paged_segments_kernel(
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
    segments_per_program,
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
    SIZES: tl.constexpr = (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, HEAD_DIM, BLOCK_SIZE, BLOCK_N)
    start = tl.program_id(2) * segments_per_program * SEGMENT
    end = tl.minimum(start + segments_per_program * SEGMENT, kv_end)
    full_end = tl.maximum(tl.minimum(first_position + 1, end) // BLOCK_N * BLOCK_N, start)
    segment_m = index_m * num_segments + tl.program_id(2) * segments_per_program
    state = _empty_state(q)
    for key in range(start, full_end, BLOCK_N):
        if (key % SEGMENT == 0) & (key > start):
            _store_segment(state, acc_ptr, stats_ptr, segment_m, mask_m, HEAD_DIM)
            segment_m += 1
            state = _empty_state(q)
        state = _attend_tile(q, cache, key, kv_end, position_m, state, scale, SIZES, False)
    for key in range(full_end, end, BLOCK_N):
        if (key % SEGMENT == 0) & (key > start):
            _store_segment(state, acc_ptr, stats_ptr, segment_m, mask_m, HEAD_DIM)
            segment_m += 1
            state = _empty_state(q)
        state = _attend_tile(q, cache, key, kv_end, position_m, state, scale, SIZES, True)
    _store_segment(state, acc_ptr, stats_ptr, segment_m, mask_m & (start < kv_end), HEAD_DIM)


@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def combine_kernel(
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
    for segment in tl.range(0, tl.cdiv(num_keys, SEGMENT), num_stages=4):
        partial = index * num_segments + segment
        m_s = tl.load(stats_ptr + 2 * partial + one)
        l_s = tl.load(stats_ptr + 2 * partial + 1 + one)[:, None]
        acc_s = tl.load(acc_ptr + partial * HEAD_DIM + offs_d, mask=offs_d < HEAD_DIM, other=0.0)
        m, l, acc = _merge((m, l, acc), (m_s, l_s, acc_s), scale)
    out = acc / tl.where(l == 0.0, 1.0, l)
    out_ptrs = out_ptr + index * HEAD_DIM + offs_d
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=offs_d < HEAD_DIM)
