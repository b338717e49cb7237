"""The Triton kernels of paged_attention: one launch that walks all keys, or units and combine.

Names: a program's tile is BLOCK_M packed rows, (query, head of the KV head's group) pairs of one
row of the batch. A position counts tokens of a row's context, and so does a key. A unit is what one
partial result covers: a segment or a section of keys. ``shape`` is an AttentionShape. Grids, splits
and the tree of keys: paged_attention_launch.py; softmax states: online_softmax.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedraft.kernels.online_softmax import empty_state, merge, normalize, softmax_step


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
def _find_queries(rows, shape: tl.constexpr):
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
        row = _find_row(starts_ptr, num_rows, tile, QUERIES, 1)
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
def _window_start(position, shape: tl.constexpr):
    """First key that the query at ``position`` sees."""
    start = position * 0
    if shape.window:
        start = tl.maximum(position - (shape.window - 1), 0)
    return start


@triton.jit
def _key_ranges(start, end, first_position, num_queries, shape: tl.constexpr):
    """Cut keys ``start`` to ``end`` into (window's edge, seen by all queries, causal edge).

    Returns the four limits; all but the last are multiples of BLOCK_N, as ``start`` is.
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
def _reduce(q_ptr, pools, rows, start, end, scales, shape, HAS_SEGMENTS: tl.constexpr):
    """Softmax state of this program's queries over the keys ``start`` to ``end`` of one section.

    HAS_SEGMENTS: the keys may be those of several segments, which are merged in order. Returns
    (state, place of the queries); looks the queries up itself, so that no loop has to keep them.
    """
    FIRST_PART: tl.constexpr = 0 if shape.window else 1
    row, token, num_queries, first_position, _ = _find_queries(rows, shape)
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


@triton.jit
def _load_partial(partials, unit, place, shape: tl.constexpr):
    """Load the states that _store_partial stored."""
    acc_ptr, stats_ptr, num_units = partials
    base, index_m, mask_m = place
    offs_d = tl.arange(0, shape.block_d)
    partial_m = (base + index_m) * num_units + unit
    m_i = tl.load(stats_ptr + 2 * partial_m, mask=mask_m, other=float("-inf"))
    l_i = tl.load(stats_ptr + 2 * partial_m + 1, mask=mask_m, other=0.0)
    mask_md = mask_m[:, None] & (offs_d < shape.head_dim)[None, :]
    acc_ptrs = acc_ptr + partial_m[:, None] * shape.head_dim + offs_d[None, :]
    l_i = tl.broadcast_to(l_i[:, None], [index_m.shape[0], 8])
    return m_i, l_i, tl.load(acc_ptrs, mask=mask_md, other=0.0)


@triton.jit
def _store_partial(state, partials, unit, place, shape: tl.constexpr):
    """Store finished states as the partial results of ``unit``, counted from the row's first."""
    acc_ptr, stats_ptr, num_units = partials
    base, index_m, mask_m = place
    m_i, l_i, acc = state
    offs_d = tl.arange(0, shape.block_d)
    partial_m = (base + index_m) * num_units + unit
    tl.store(stats_ptr + 2 * partial_m, m_i, mask=mask_m)
    tl.store(stats_ptr + 2 * partial_m + 1, tl.max(l_i, axis=1), mask=mask_m)
    mask_md = mask_m[:, None] & (offs_d < shape.head_dim)[None, :]
    acc_ptrs = acc_ptr + partial_m[:, None] * shape.head_dim + offs_d[None, :]
    tl.store(acc_ptrs, acc, mask=mask_md)


@triton.jit
def _store_out(state, out_ptr, sinks_ptr, place, scale, shape: tl.constexpr):
    """Normalise finished states and store the outputs."""
    m_i, l_i, acc = state
    base, index_m, mask_m = place
    offs_d = tl.arange(0, shape.block_d)
    sink = None
    if sinks_ptr is not None:
        head_m = (base + index_m) % (shape.num_kv_heads * shape.group)
        sink = tl.load(sinks_ptr + head_m, mask=mask_m, other=0.0) * 1.4426950408889634
    out = normalize(m_i, tl.max(l_i, axis=1), acc, sink, scale)
    mask_md = mask_m[:, None] & (offs_d < shape.head_dim)[None, :]
    out_ptrs = out_ptr + (base + index_m)[:, None] * shape.head_dim + offs_d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_md)


@triton.jit
def _zero_padding(out_ptr, starts_ptr, num_rows, num_tokens, shape: tl.constexpr):
    """Write zeros for the tokens of no row."""
    offs_d, heads = tl.arange(0, shape.block_d), tl.arange(0, shape.block_m)
    mask = (heads < shape.group)[:, None] & (offs_d < shape.head_dim)[None, :]
    zeros = tl.full([shape.block_m, shape.block_d], 0.0, out_ptr.dtype.element_ty)
    first = tl.load(starts_ptr + num_rows) + tl.program_id(0)
    for token in range(first, num_tokens, tl.num_programs(0)):
        index_m = (token + heads * 0).to(tl.int64) * (shape.num_kv_heads * shape.group)
        index_m += tl.program_id(1) * shape.group + heads
        tl.store(out_ptr + index_m[:, None] * shape.head_dim + offs_d[None, :], zeros, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "stride_table"])
def paged_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_factor_ptr,
    v_factor_ptr,
    sinks_ptr,
    acc_ptr,
    stats_ptr,
    out_ptr,
    table_ptr,
    starts_ptr,
    lens_ptr,
    num_rows,
    num_tokens,
    stride_table,
    scale,
    tanh_scale,
    shape: tl.constexpr,
):
    """A program walks all keys of its queries.

    acc_ptr, stats_ptr: room for the total of several sections; None if there is only one.
    """
    rows = (table_ptr, starts_ptr, lens_ptr, num_rows, stride_table)
    pools, scales = (k_ptr, v_ptr, k_factor_ptr, v_factor_ptr), (scale, tanh_scale)
    _, _, num_queries, first_position, _ = _find_queries(rows, shape)
    start = _window_start(first_position, shape)
    end = tl.where(num_queries > 0, first_position + num_queries, start)
    if acc_ptr is None:
        state, place = _reduce(q_ptr, pools, rows, start, end, scales, shape, True)
        _store_out(state, out_ptr, sinks_ptr, place, scale, shape)
    else:
        # Registers are short: the total waits in memory while a section is reduced.
        partials = (acc_ptr, stats_ptr, 1)
        first = start // shape.section
        last = tl.maximum(first, tl.cdiv(end, shape.section) - 1)
        for section in range(first, last + 1):
            left = tl.maximum(start, section * shape.section)
            right = tl.minimum(end, (section + 1) * shape.section)
            state, place = _reduce(q_ptr, pools, rows, left, right, scales, shape, True)
            if section > first:
                total = _load_partial(partials, 0, place, shape)
                state = merge(total, state, scale)
            if section < last:
                _store_partial(state, partials, 0, place, shape)
                tl.debug_barrier()  # threads load what others of the program stored
            else:
                _store_out(state, out_ptr, sinks_ptr, place, scale, shape)
    _zero_padding(out_ptr, starts_ptr, num_rows, num_tokens, shape)


@triton.jit(do_not_specialize=["num_rows", "num_units", "stride_table"])
def paged_units_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_factor_ptr,
    v_factor_ptr,
    acc_ptr,
    stats_ptr,
    table_ptr,
    starts_ptr,
    lens_ptr,
    shared_ptr,
    num_rows,
    num_units,
    stride_table,
    scale,
    tanh_scale,
    shape: tl.constexpr,
    UNIT: tl.constexpr,
    IS_PREFIX: tl.constexpr,
):
    """A program walks one unit of keys, a segment or a section, and stores its states.

    shared_ptr: None, or how many keys of a row the prefix pass covers; IS_PREFIX is that pass.
    """
    rows = (table_ptr, starts_ptr, lens_ptr, num_rows, stride_table)
    pools, scales = (k_ptr, v_ptr, k_factor_ptr, v_factor_ptr), (scale, tanh_scale)
    row, _, num_queries, first_position, row_position = _find_queries(rows, shape)
    unit = _window_start(row_position, shape) // UNIT + tl.program_id(2)
    start = tl.maximum(unit * UNIT, _window_start(first_position, shape))
    end = tl.minimum(unit * UNIT + UNIT, first_position + num_queries)
    if shared_ptr is not None:
        shared_end = tl.load(shared_ptr + row) // UNIT * UNIT
        start = start if IS_PREFIX else tl.maximum(start, shared_end)
        end = tl.minimum(end, shared_end) if IS_PREFIX else end
    if (start >= end) | (num_queries == 0):
        return
    HAS_SEGMENTS: tl.constexpr = shape.segment < UNIT
    state, place = _reduce(q_ptr, pools, rows, start, end, scales, shape, HAS_SEGMENTS)
    _store_partial(state, (acc_ptr, stats_ptr, num_units), tl.program_id(2), place, shape)


@triton.jit(do_not_specialize=["num_rows", "num_units"])
def combine_kernel(
    acc_ptr,
    stats_ptr,
    sinks_ptr,
    out_ptr,
    starts_ptr,
    lens_ptr,
    num_rows,
    num_units,
    scale,
    shape: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Merge the units of one (token, head) in order, section by section."""
    token = tl.program_id(0)
    row = _find_row(starts_ptr, num_rows + 1, token, 1, 0)  # num_rows: a token of no row
    row_start = tl.load(starts_ptr + row)
    end = tl.load(starts_ptr + row + 1, mask=row < num_rows, other=0)
    kv_len = tl.load(lens_ptr + row, mask=row < num_rows, other=0)
    position = kv_len - end + token
    first_unit = _window_start(kv_len - end + row_start, shape) // UNIT
    begin = _window_start(position, shape) // UNIT
    num_heads: tl.constexpr = shape.num_kv_heads * shape.group
    index_1 = tl.arange(0, 1)
    place = (token.to(tl.int64) * num_heads + tl.program_id(1), index_1, index_1 >= 0)
    section = empty_state(tl.full([1, shape.block_d], 0.0, tl.float32))
    total = section
    for unit in tl.range(begin, tl.where(kv_len > 0, position // UNIT + 1, begin), num_stages=4):
        if unit * UNIT % shape.section == 0:
            total = merge(total, section, scale)
            section = empty_state(tl.full([1, shape.block_d], 0.0, tl.float32))
        partials = (acc_ptr, stats_ptr, num_units)
        partial = _load_partial(partials, unit - first_unit, place, shape)
        section = merge(section, partial, scale)
    total = merge(total, section, scale)
    _store_out(total, out_ptr, sinks_ptr, place, scale, shape)
