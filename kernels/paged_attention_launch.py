"""How paged_attention is launched: tiles, the tree of keys, pieces and scratch.

The tree: keys are cut at absolute multiples of SEGMENT and SECTION. A segment is reduced tile by
tile, the segments of a section are merged in order, then the sections in order. A launch may walk
the whole tree in one program, or let programs store the states of segments or of sections, which
``combine_kernel`` merges: by the same functions, in the same order, with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from pagedraft.kernels.paged_attention_triton import (
    combine_kernel,
    paged_attention_kernel,
    paged_units_kernel,
)
from pagedraft.kernels.score_rules import ScoreRules

SEGMENT = 256  # keys; together with SECTION and block_n part of every query's bits
SECTION = 2048
LOG2_E = 1.4426950408889634
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


@lru_cache(maxsize=256)
def attention_config(
    group: int, head_dim: int, element_size: int, max_query_len: int, is_hip: bool, is_wide: bool
) -> AttentionConfig:
    """Return the tile; block_n never depends on the span (exactness).

    is_wide: spans of more than 32 packed rows run in tiles of 64 rows and 4 warps, which sm_90
    compiles to HGMMA: only where its sums were seen to be HMMA's (wide_tiles). Otherwise no tile
    compiles to HGMMA, which takes 64 rows and a multiple of 4 warps.
    8 warps for 32 rows where 4 spill: head dims above 128, and long spans with masked columns.
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
    if block_m == 32 and (block_d > 128 or (num_rows > 32 and block_d != head_dim)):
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


class PagedRows(NamedTuple):
    """Where a batch's keys and queries lie; see paged_attention for the tensors."""

    block_table_RM: torch.Tensor
    query_starts_R1: torch.Tensor
    kv_lens_R: torch.Tensor
    max_query_len: int
    max_kv_len: int


class KVPool(NamedTuple):
    """Pool tensors of one layer; factors [N, G, B] fp32 of a quantised pool, else None."""

    k_NGBD: torch.Tensor
    v_NGBD: torch.Tensor
    k_scale_NGB: torch.Tensor | None = None
    v_scale_NGB: torch.Tensor | None = None


def shape_of(
    q_THD: torch.Tensor, pool: KVPool, max_query_len: int, rules: ScoreRules, is_wide: bool
) -> tuple[AttentionShape, dict[str, object]]:
    """Return the kernels' shape and compile options."""
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads, block_size = pool.k_NGBD.shape[1:3]
    group = num_heads // num_kv_heads
    is_hip = torch.version.hip is not None
    config = attention_config(group, head_dim, q_THD.element_size(), max_query_len, is_hip, is_wide)
    shape = AttentionShape(
        group=group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_d=triton.next_power_of_2(head_dim),
        block_size=block_size,
        window=rules.window or 0,
        block_m=config.block_m,
        block_n=config.block_n,
        is_one_tile=max_query_len <= config.block_m // group,
    )
    options = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": False,  # both ways must round alike
        **({"matrix_instr_nonkdim": 16} if is_hip else {}),  # one MFMA shape for every tile
    }
    return shape, options


def scales_of(rules: ScoreRules) -> tuple[float, float | None]:
    """Return (scale, tanh_scale) of softmax_step."""
    if rules.soft_cap is None:
        return rules.scale * LOG2_E, None
    return rules.soft_cap * LOG2_E, 2.0 * LOG2_E * rules.scale / rules.soft_cap


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


class SharedPrefixes(NamedTuple):
    """Runs of neighbouring rows that begin with the same blocks; P runs hold all rows in order.

    query_starts_P1: int32, first token of each run, then the number of tokens.
    num_keys_P: int32, keys that all rows of a run share, 0 for a run of one row.
    num_keys_R: int32, the same for each row.
    kv_lens_P: int32, num_keys_P + the run's tokens: every query of a run stands behind its keys.
    block_table_PM: int32, blocks of each run's keys.
    max_query_len, max_keys: the largest run in tokens and in shared keys.
    num_saved_keys: what reading each run's keys once saves, in keys of all rows.
    """

    query_starts_P1: torch.Tensor
    num_keys_P: torch.Tensor
    num_keys_R: torch.Tensor
    kv_lens_P: torch.Tensor
    block_table_PM: torch.Tensor
    max_query_len: int
    max_keys: int
    num_saved_keys: int


LAUNCH_BYTES = 8 << 20  # what a launch's 2 us would move on an H200; a prefix pass adds two


def split_for_prefix(
    q_THD: torch.Tensor, pool: KVPool, split: Split, shared: SharedPrefixes, max_kv_len: int
) -> Split | None:
    """Return the pieces to launch with a prefix pass, or None where reading once saves too little.

    Keys saved are weighed against the partial results that a launch without pieces would not need.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    token_bytes = 2 * pool.k_NGBD.shape[1] * head_dim * pool.k_NGBD.element_size()
    unit = split.unit or (SECTION if shared.max_keys >= 2 * SECTION else SEGMENT)
    num_units = triton.cdiv(max_kv_len, unit)
    scratch_bytes = 0 if split.unit else 8 * num_tokens * num_heads * num_units * (head_dim + 2)
    if shared.num_saved_keys * token_bytes < 2 * LAUNCH_BYTES + scratch_bytes:
        return None
    return split if split.unit else Split(unit, num_units)


class _Launch(NamedTuple):
    """What all launches of one call share."""

    q_THD: torch.Tensor
    pool: KVPool
    rules: ScoreRules
    is_wide: bool
    acc: torch.Tensor
    stats: torch.Tensor


def new_partials(q_THD: torch.Tensor, num_units: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the weighted values and for (row maximum, row sum) of each query, head and unit."""
    num_tokens, num_heads, head_dim = q_THD.shape
    shape = (num_tokens, num_heads, num_units)
    acc = torch.empty(*shape, head_dim, dtype=torch.float32, device=q_THD.device)
    return acc, torch.empty(*shape, 2, dtype=torch.float32, device=q_THD.device)


def _launch_units(
    call: _Launch, rows: PagedRows, unit: int, shared_keys: torch.Tensor | None, is_prefix: bool
) -> None:
    """Store the partial results of ``rows``; the prefix pass: of the keys that they share."""
    num_tokens, num_rows = call.q_THD.shape[0], rows.kv_lens_R.shape[0]
    shape, options = shape_of(call.q_THD, call.pool, rows.max_query_len, call.rules, call.is_wide)
    num_tiles = num_row_tiles(shape, num_tokens, num_rows)
    num_units = call.acc.shape[2]
    grid_units = triton.cdiv(rows.max_kv_len, unit) if is_prefix else num_units
    paged_units_kernel[num_tiles, shape.num_kv_heads, grid_units](
        *(call.q_THD, *call.pool, call.acc, call.stats, *rows[:3], shared_keys),
        *(num_rows, num_units, rows.block_table_RM.stride(0), *scales_of(call.rules)),
        *(shape, unit, is_prefix),
        **options,
    )


def launch(
    q_THD: torch.Tensor,
    pool: KVPool,
    rows: PagedRows,
    rules: ScoreRules,
    out_THD: torch.Tensor,
    shared: SharedPrefixes | None = None,
    split: Split | None = None,
    is_wide: bool | None = None,
) -> torch.Tensor:
    """Run the kernels into ``out_THD``.

    split, is_wide: chosen from the sizes and the device unless given; with a split, ``shared`` is
    used whatever it saves.
    """
    num_tokens, num_heads, _ = q_THD.shape
    num_rows = rows.kv_lens_R.shape[0]
    is_wide = wide_tiles(q_THD.device, q_THD.dtype) if is_wide is None else is_wide
    shape, options = shape_of(q_THD, pool, rows.max_query_len, rules, is_wide)
    num_tiles = num_row_tiles(shape, num_tokens, num_rows)
    if shared is not None and (rules.window is not None or shared.max_keys < SEGMENT):
        shared = None
    if split is None:
        split = split_for(shape, num_tokens, num_rows, rows.max_query_len, rows.max_kv_len)
        with_prefix = shared and split_for_prefix(q_THD, pool, split, shared, rows.max_kv_len)
        split, shared = (with_prefix, shared) if with_prefix else (split, None)
    scale, tanh_scale = scales_of(rules)
    if not split.unit:
        has_sections = rows.max_kv_len > SECTION
        total = new_partials(q_THD, 1) if has_sections else (None, None)
        paged_attention_kernel[num_tiles, shape.num_kv_heads](
            *(q_THD, *pool, rules.sinks_H, *total, out_THD, *rows[:3]),
            *(num_rows, num_tokens, rows.block_table_RM.stride(0), scale, tanh_scale, shape),
            **options,
        )
        return out_THD
    acc, stats = new_partials(q_THD, split.num_units)
    call = _Launch(q_THD, pool, rules, is_wide, acc, stats)
    if shared is not None:
        runs = PagedRows(
            *(shared.block_table_PM, shared.query_starts_P1, shared.kv_lens_P),
            *(shared.max_query_len, shared.max_keys),
        )
        _launch_units(call, runs, split.unit, shared.num_keys_P, True)
    shared_keys = None if shared is None else shared.num_keys_R
    _launch_units(call, rows, split.unit, shared_keys, False)
    combine_kernel[num_tokens, num_heads](
        *(acc, stats, rules.sinks_H, out_THD, *rows[1:3], num_rows, split.num_units),
        *(scale, shape, split.unit),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out_THD


@lru_cache(maxsize=16)
def wide_tiles(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether tiles of 64 rows give the bits of smaller ones on ``device``: tried once a process.

    Only for sm_90, where they compile to HGMMA. The first call runs kernels and reads their result;
    a captured graph must come later.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(device)[0] != 9 or dtype == torch.float32:
        return False
    generator = torch.Generator(device).manual_seed(0)
    shape, span, context = (48, 4, 64, 128), 64, 1500
    pool = KVPool(
        *(torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2))
    )
    q_THD = torch.randn(span, 16, 128, generator=generator, device=device).to(dtype)
    rows = PagedRows(
        torch.arange(48, dtype=torch.int32, device=device)[None],
        torch.tensor([0, span], dtype=torch.int32, device=device),
        torch.tensor([context], dtype=torch.int32, device=device),
        *(span, context),
    )
    narrow, wide = (
        launch(q_THD, pool, rows, ScoreRules(0.3), torch.empty_like(q_THD), None, WALK, is_wide)
        for is_wide in (False, True)
    )
    return torch.equal(narrow.view(torch.int16), wide.view(torch.int16))
