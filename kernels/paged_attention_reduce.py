"""What one program of paged_attention does, in Triton: find its queries, walk some of their keys.

Names: a program's tile is BLOCK_M packed rows, (query, head of the KV head's group) pairs of one
row of the batch. A position counts tokens of a row's context, and so does a key. ``shape`` is an
AttentionShape, ``rows`` (block table, query_starts, kv_lens, number of rows, table stride). The
kernels: paged_attention_triton.py; softmax states: online_softmax.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedraft.kernels.online_softmax import empty_state, merge, softmax_step


@triton.jit
def find_row(starts_ptr, num_entries, index, QUERIES: tl.constexpr, TILES_PER_ROW: tl.constexpr):
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
def find_queries(rows, shape: tl.constexpr):
    """Return (row, first token, number of queries, position of the first, of the row's first).

    Programs past the last row's tiles have no queries.
    """
    QUERIES: tl.constexpr = shape.block_m // shape.group
    _, starts_ptr, lens_ptr, num_rows, _ = rows
    tile = tl.program_id(0)
    if shape.is_one_tile:
        row = tile
        start = tl.load(starts_ptr + row)
        token = start
    else:
        row = find_row(starts_ptr, num_rows, tile, QUERIES, 1)
        start = tl.load(starts_ptr + row)
        token = start + (tile - start // QUERIES - row) * QUERIES
    end = tl.load(starts_ptr + row + 1)
    kv_len = tl.load(lens_ptr + row)
    num_queries = tl.maximum(tl.minimum(end - token, QUERIES), 0)
    return row, token, num_queries, kv_len - (end - token), kv_len - (end - start)


@triton.jit
def _load_queries(q_ptr, token, num_queries, first_position, shape: tl.constexpr):
    """Load a tile's packed rows.

    Returns ((q [BLOCK_M, BLOCK_D], position of each row), (base, index, mask)): row m of the tile
    is number base + index_m of all (token, head) pairs.
    """
    GROUP: tl.constexpr = shape.group
    offs_m, offs_d = tl.arange(0, shape.block_m), tl.arange(0, shape.block_d)
    query_m = offs_m // GROUP
    mask_m = query_m < num_queries
    base = token.to(tl.int64) * (shape.num_kv_heads * GROUP) + tl.program_id(1) * GROUP
    index_m = query_m * (shape.num_kv_heads * GROUP) + offs_m % GROUP
    q = tl.load(
        q_ptr + base * shape.head_dim + (index_m[:, None] * shape.head_dim + offs_d[None, :]),
        mask=mask_m[:, None] & (offs_d < shape.head_dim)[None, :],
        other=0.0,
    )
    return (q, first_position + query_m), (base, index_m, mask_m)


@triton.jit
def window_start(position, shape: tl.constexpr):
    """First key that the query at ``position`` sees."""
    start = position * 0
    if shape.window:
        start = tl.maximum(position - (shape.window - 1), 0)
    return start


@triton.jit
def _key_ranges(start, end, first_position, num_queries, shape: tl.constexpr):
    """Cut keys ``start`` to ``end`` into (window's edge, seen by all queries, causal edge).

    Returns the four limits: multiples of BLOCK_N, as ``start`` is, or ``end``.
    """
    BLOCK_N: tl.constexpr = shape.block_n
    edge = start
    if shape.window:
        edge = tl.cdiv(first_position + num_queries - shape.window, BLOCK_N) * BLOCK_N
        edge = tl.minimum(tl.maximum(edge, start), end)
    full_end = (first_position + 1) // BLOCK_N * BLOCK_N
    return start, edge, tl.minimum(tl.maximum(full_end, edge), end), end


@triton.jit
def _find_slots(table_ptr, key, begin, end, shape: tl.constexpr):
    """Slots of the keys ``key`` to ``key + BLOCK_N`` of one head, in a pool seen as [N * G * B].

    Returns (a base, int64; what each key adds to it [BLOCK_N]; whether it lies in begin..end). One
    block lookup a tile where a block holds whole tiles, else one a key.
    """
    BLOCK_SIZE: tl.constexpr = shape.block_size
    key_n = key + tl.arange(0, shape.block_n)
    mask_n = key_n < end
    if shape.window:
        mask_n &= key_n >= begin
    if shape.block_n <= BLOCK_SIZE:
        block = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
        base = (block * shape.num_kv_heads + tl.program_id(1)) * BLOCK_SIZE + key % BLOCK_SIZE
        slot_n = tl.arange(0, shape.block_n)
    else:
        block_n = tl.load(table_ptr + key_n // BLOCK_SIZE, mask=mask_n, other=0).to(tl.int64)
        base = tl.program_id(1).to(tl.int64) * BLOCK_SIZE
        slot_n = block_n * (shape.num_kv_heads * BLOCK_SIZE) + key_n % BLOCK_SIZE
    return base, slot_n, mask_n


@triton.jit
def _load_tile(pool_ptr, base, slot_n, mask_n, shape: tl.constexpr, IS_MASKED: tl.constexpr):
    """Load keys or values [BLOCK_N, BLOCK_D], zeros where the mask is off."""
    HEAD_DIM: tl.constexpr = shape.head_dim
    offs_d = tl.arange(0, shape.block_d)
    ptrs = pool_ptr + base * HEAD_DIM + (slot_n[:, None] * HEAD_DIM + offs_d[None, :])
    if shape.block_d != HEAD_DIM:
        tile = tl.load(ptrs, mask=mask_n[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    elif IS_MASKED:
        tile = tl.load(ptrs, mask=mask_n[:, None], other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def _attend(query, cache, key, begin, end, state, scales, shape, IS_MASKED: tl.constexpr):
    """Softmax state after the keys ``key`` to ``key + BLOCK_N`` that lie in begin..end.

    query: (q, position of each row); cache: pools of keys and values, their factors or None, the
    row's block table.
    """
    q, position_m = query
    k_ptr, v_ptr, k_factor_ptr, v_factor_ptr, table_ptr = cache
    base, slot_n, mask_n = _find_slots(table_ptr, key, begin, end, shape)
    keys = (_load_tile(k_ptr, base, slot_n, mask_n, shape, IS_MASKED), None)
    values = (_load_tile(v_ptr, base, slot_n, mask_n, shape, IS_MASKED), None)
    if k_factor_ptr is not None:
        keys = (keys[0], tl.load(k_factor_ptr + base + slot_n, mask=mask_n, other=0.0))
        values = (values[0], tl.load(v_factor_ptr + base + slot_n, mask=mask_n, other=0.0))
    is_visible = None
    if IS_MASKED:
        key_n = key + tl.arange(0, shape.block_n)[None, :]
        is_visible = key_n <= position_m[:, None]
        if shape.window:
            is_visible &= key_n > position_m[:, None] - shape.window
    return softmax_step(q, keys, values, state, is_visible, scales)


@triton.jit
def reduce_keys(q_ptr, pools, rows, start, end, scales, shape, HAS_SEGMENTS: tl.constexpr):
    """Softmax state of this program's queries over the keys ``start`` to ``end`` of one section.

    HAS_SEGMENTS: the keys may be those of several segments, which are merged in order. Returns
    (state, place of the queries); looks the queries up itself, so that no loop has to keep them.
    """
    FIRST_PART: tl.constexpr = 0 if shape.window else 1
    row, token, num_queries, first_position, _ = find_queries(rows, shape)
    query, place = _load_queries(q_ptr, token, num_queries, first_position, shape)
    cache = pools + (rows[0] + row.to(tl.int64) * rows[4],)
    first_key = start // shape.block_n * shape.block_n
    limits = _key_ranges(first_key, end, first_position, num_queries, shape)
    state, section = empty_state(query[0]), empty_state(query[0])
    for part in tl.static_range(FIRST_PART, 3):
        left, right = limits[part], limits[part + 1]
        # An edge has few tiles: a pipelined loop would cost more than it hides.
        for key in tl.range(left, right, shape.block_n, num_stages=None if part == 1 else 1):
            if HAS_SEGMENTS and key % shape.segment == 0:
                section = merge(section, state, scales[0])
                state = empty_state(query[0])
            state = _attend(query, cache, key, start, end, state, scales, shape, part != 1)
    if HAS_SEGMENTS:
        state = merge(section, state, scales[0])
    return state, place
