"""The tree of keys, tiles and splits of paged_attention: all from static sizes.

The tree: keys are cut at absolute multiples of SEGMENT and SECTION. A segment is reduced tile by
tile, the segments of a section are merged in order, then the sections in order. A launch may walk
the whole tree in one program, or let programs store the states of segments or of sections, which
``combine_kernel`` merges: by the same functions, in the same order, with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton

SEGMENT = 256  # keys; together with SECTION and block_n part of every query's bits
# (test_paged_attention_launch.py and test_shared_prefix.py count their multiples)
SECTION = 2048
# On the 132 multiprocessors of an H200: one program on each, from where on sections suffice, whose
# partial results are an eighth of the segments'; and what is resident at once, a wave.
MIN_PROGRAMS = 132
WAVE = 264


@dataclass(frozen=True)
class AttentionShape:
    """What the compiler must know: sizes of the model, the cache, the tiles and the tree.

    group: query heads a KV head; block_d: head_dim rounded up to a power of two; window: 0 if none;
    is_one_tile: no row has more queries than one tile holds.
    """

    group: int
    num_kv_heads: int
    head_dim: int
    block_d: int
    block_size: int
    window: int
    block_m: int
    block_n: int
    is_one_tile: bool
    segment: int = SEGMENT
    section: int = SECTION


class AttentionConfig(NamedTuple):
    """Tile and compile options of one launch: BLOCK_M packed rows x BLOCK_N keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def attention_config(
    group: int,
    head_dim: int,
    element_size: int,
    max_query_len: int,
    is_hip: bool,
    is_wide: bool,
    has_extras: bool = False,
) -> AttentionConfig:
    """Return the tile; block_n never depends on the span (exactness).

    is_wide: spans of more than 32 packed rows run in tiles of 64 rows and 4 warps, which sm_90
    compiles to HGMMA: only where its sums were seen to be HMMA's (wide_tiles). Otherwise no tile
    compiles to HGMMA, which takes 64 rows and a multiple of 4 warps.
    8 warps for 32 rows where 4 spill: head dims above 128, and, on NVIDIA, spans of more rows with
    masked columns or has_extras, a window or a one-byte pool.
    Keys and values of a tile take at most 32 KB; five stages hold two such tiles, because the block
    table's load is a stage of its own. Shared memory stays under 99 KB (sm_86), on AMD under 64 KB,
    in wide tiles under 114 KB, half of sm_90's. fp32 products run without tensor cores and spill in
    larger tiles. Thresholds follow from offline compiles, not from a GPU run.
    """
    is_fp32 = element_size == 4
    num_rows = group * max_query_len
    block_d = triton.next_power_of_2(head_dim)
    is_wide = is_wide and not is_fp32 and num_rows > 32 and block_d <= 128
    block_m = 16 if is_fp32 or num_rows <= 16 else 64 if is_wide else 32
    block_m = max(block_m, triton.next_power_of_2(group))
    num_warps = 4 if block_m <= 32 or (is_wide and block_m == 64) else 2
    needs_registers = num_rows > 32 and not is_hip and (has_extras or block_d != head_dim)
    if block_m == 32 and (block_d > 128 or needs_registers):
        num_warps = 8
    key_bytes = block_d * element_size
    block_n = max(16, min(32 if is_fp32 else 64, 2**14 // key_bytes))
    return AttentionConfig(block_m, block_n, num_warps, 2 if is_hip else 3 if is_fp32 else 5)


class Split(NamedTuple):
    """How a query's keys are shared out: ``unit`` keys a program, 0 if one program walks them all.

    num_units: partial results of a query.
    """

    unit: int
    num_units: int


WALK = Split(0, 0)


def split_of(
    num_programs: int, num_rows: int, max_query_len: int, max_kv_len: int, window: int | None
) -> Split:
    """Choose the units from static sizes.

    num_programs: row tiles x KV heads without a split; num_rows: packed rows of one tile that hold
    queries. One program walks all keys where there is one unit, and where the last wave of walks
    idles no longer than partial results would take: each is 8 (D + 2) bytes a row, written and
    read, beside the 4 SECTION D bytes of a section's 16-bit keys and values.
    """
    keys = max_kv_len if window is None else min(max_kv_len, window + max_query_len - 1)
    # A window may begin and end inside a unit.
    num_sections, num_segments = (
        triton.cdiv(keys, unit) + (keys < max_kv_len) for unit in (SECTION, SEGMENT)
    )
    if num_segments == 1:
        return WALK
    if num_programs * num_sections < MIN_PROGRAMS:
        return Split(SEGMENT, num_segments)
    idle = _idle_share(num_programs) - _idle_share(num_programs * num_sections)
    if num_sections == 1 or idle <= 2 * num_rows / SECTION:
        return WALK
    return Split(SECTION, num_sections)


def _idle_share(num_programs: int) -> float:
    """How much longer whole waves take than the programs' work spread evenly."""
    return triton.cdiv(num_programs, WAVE) * WAVE / num_programs - 1.0


def num_row_tiles(shape: AttentionShape, num_tokens: int, num_rows: int) -> int:
    """Grid bound on the tiles of all rows that needs no device value."""
    queries = shape.block_m // shape.group
    return num_rows if shape.is_one_tile else num_tokens // queries + num_rows


def split_for(
    shape: AttentionShape, num_tokens: int, num_rows: int, max_query_len: int, max_kv_len: int
) -> Split:
    """Return what a launch of these sizes chooses."""
    num_programs = num_row_tiles(shape, num_tokens, num_rows) * shape.num_kv_heads
    num_packed = min(shape.block_m, shape.group * max_query_len)
    return split_of(num_programs, num_packed, max_query_len, max_kv_len, shape.window or None)
