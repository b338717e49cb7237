"""The Triton kernels of paged_attention: one launch that walks all keys, or units and combine.

A unit is what one partial result covers: a segment or a section of keys. Names and what a program
does with its keys: paged_attention_reduce.py; the tree of keys: paged_attention_config.py; grids:
paged_attention_launch.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedraft.kernels.online_softmax import empty_state, merge, normalize
from pagedraft.kernels.paged_attention_reduce import (
    find_queries,
    find_row,
    reduce_keys,
    window_start,
)


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
    _, _, num_queries, first_position, _ = find_queries(rows, shape)
    start = tl.where(num_queries > 0, window_start(first_position, shape), 0)
    end = tl.where(num_queries > 0, first_position + num_queries, 0)
    if acc_ptr is None:
        state, place = reduce_keys(q_ptr, pools, rows, start, end, scales, shape, True)
        _store_out(state, out_ptr, sinks_ptr, place, scale, shape)
    else:
        # Registers are short: the total waits in memory while a section is reduced.
        partials = (acc_ptr, stats_ptr, 1)
        first = start // shape.section
        last = tl.maximum(first, tl.cdiv(end, shape.section) - 1)
        for section in range(first, last + 1):
            left = tl.maximum(start, section * shape.section)
            right = tl.minimum(end, (section + 1) * shape.section)
            state, place = reduce_keys(q_ptr, pools, rows, left, right, scales, shape, True)
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
    row, _, num_queries, first_position, row_position = find_queries(rows, shape)
    unit = window_start(row_position, shape) // UNIT + tl.program_id(2)
    start = tl.maximum(unit * UNIT, window_start(first_position, shape))
    end = tl.minimum(unit * UNIT + UNIT, first_position + num_queries)
    if shared_ptr is not None:
        shared_end = tl.load(shared_ptr + row) // UNIT * UNIT
        start = start if IS_PREFIX else tl.maximum(start, shared_end)
        end = tl.minimum(end, shared_end) if IS_PREFIX else end
    if (start >= end) | (num_queries == 0):
        return
    HAS_SEGMENTS: tl.constexpr = shape.segment < UNIT
    state, place = reduce_keys(q_ptr, pools, rows, start, end, scales, shape, HAS_SEGMENTS)
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
    row = find_row(starts_ptr, num_rows + 1, token, 1, 0)  # num_rows: a token of no row
    row_start = tl.load(starts_ptr + row)
    end = tl.load(starts_ptr + row + 1, mask=row < num_rows, other=0)
    kv_len = tl.load(lens_ptr + row, mask=row < num_rows, other=0)
    position = kv_len - end + token
    first_unit = window_start(kv_len - end + row_start, shape) // UNIT
    begin = window_start(position, shape) // UNIT
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
