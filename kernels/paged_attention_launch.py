"""How paged_attention is launched: shapes for the compiler, scratch, prefix pass, combine."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from pagedraft.kernels.paged_attention_config import (
    SECTION,
    SEGMENT,
    WALK,
    AttentionShape,
    Split,
    attention_config,
    num_row_tiles,
    split_for,
)
from pagedraft.kernels.paged_attention_triton import (
    combine_kernel,
    paged_attention_kernel,
    paged_units_kernel,
)
from pagedraft.kernels.score_rules import ScoreRules

LOG2_E = 1.4426950408889634


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
    (_, num_heads, head_dim), (_, num_kv_heads, block_size, _) = q_THD.shape, pool.k_NGBD.shape
    has_extras = rules.window is not None or pool.k_scale_NGB is not None
    sizes = (num_heads // num_kv_heads, head_dim, q_THD.element_size(), max_query_len)
    is_hip = torch.version.hip is not None
    return _shape((*sizes, is_hip, is_wide, has_extras), num_kv_heads, block_size, rules.window)


@lru_cache(maxsize=1024)  # asked for up to three times a layer
def _shape(
    config_args: tuple, num_kv_heads: int, block_size: int, window: int | None
) -> tuple[AttentionShape, dict[str, object]]:
    """See shape_of; config_args: of attention_config."""
    config = attention_config(*config_args)
    group, head_dim, _, max_query_len, is_hip, *_ = config_args
    shape = AttentionShape(
        group=group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_d=triton.next_power_of_2(head_dim),
        block_size=block_size,
        window=window or 0,
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


LAUNCH_BYTES = 8 << 20  # about 2 us of an H200's memory, not measured: what a launch may cost


def split_for_prefix(
    q_THD: torch.Tensor, pool: KVPool, split: Split, shared: SharedPrefixes, max_kv_len: int
) -> Split | None:
    """Return the units to launch with a prefix pass, or None where reading once saves too little.

    Keys saved are weighed against the launches that it adds, two beside a walk, and against the
    partial results that a walk does not need.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    token_bytes = 2 * pool.k_NGBD.shape[1] * head_dim * pool.k_NGBD.element_size()
    unit = split.unit or (SECTION if shared.max_keys >= 2 * SECTION else SEGMENT)
    if shared.max_keys < unit:
        return None
    num_units = triton.cdiv(max_kv_len, unit)
    scratch_bytes = 0 if split.unit else 8 * num_tokens * num_heads * num_units * (head_dim + 2)
    if shared.num_saved_keys * token_bytes < 2 * LAUNCH_BYTES + scratch_bytes:
        return None
    return split if split.unit else Split(unit, num_units)


class LaunchChoice(NamedTuple):
    """What a call's sizes decide, beside grids; has_total: a walk keeps a total in memory."""

    shape: AttentionShape
    split: Split
    has_total: bool


def choose_launch(
    q_THD: torch.Tensor,
    pool: KVPool,
    num_rows: int,
    max_query_len: int,
    max_kv_len: int,
    rules: ScoreRules,
    is_wide: bool,
) -> LaunchChoice:
    """Return what a call without shared prefixes launches; no tensor is read."""
    shape, _ = shape_of(q_THD, pool, max_query_len, rules, is_wide)
    split = split_for(shape, q_THD.shape[0], num_rows, max_query_len, max_kv_len)
    return LaunchChoice(shape, split, split.unit == 0 and max_kv_len > SECTION)


class _Call(NamedTuple):
    """What all launches of one call share."""

    q_THD: torch.Tensor
    pool: KVPool
    rules: ScoreRules
    out_THD: torch.Tensor
    is_wide: bool


def new_partials(q_THD: torch.Tensor, num_units: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the weighted values and for (row maximum, row sum) of each query, head and unit."""
    num_tokens, num_heads, head_dim = q_THD.shape
    shape = (num_tokens, num_heads, num_units)
    acc = torch.empty(*shape, head_dim, dtype=torch.float32, device=q_THD.device)
    return acc, torch.empty(*shape, 2, dtype=torch.float32, device=q_THD.device)


def _launch_walk(call: _Call, rows: PagedRows) -> None:
    """Run one program a row tile and KV head over all keys."""
    num_tokens, num_rows = call.q_THD.shape[0], rows.kv_lens_R.shape[0]
    shape, options = shape_of(call.q_THD, call.pool, rows.max_query_len, call.rules, call.is_wide)
    total = new_partials(call.q_THD, 1) if rows.max_kv_len > SECTION else (None, None)
    paged_attention_kernel[num_row_tiles(shape, num_tokens, num_rows), shape.num_kv_heads](
        *(call.q_THD, *call.pool, call.rules.sinks_H, *total, call.out_THD, *rows[:3]),
        *(num_rows, num_tokens, rows.block_table_RM.stride(0), *scales_of(call.rules), shape),
        **options,
    )


def _launch_units(
    call: _Call,
    rows: PagedRows,
    unit: int,
    partials: tuple[torch.Tensor, torch.Tensor],
    shared_keys: torch.Tensor | None,
    *,
    is_prefix: bool,
) -> None:
    """Store the partial results of ``rows``; the prefix pass: of the keys that they share."""
    num_tokens, num_rows = call.q_THD.shape[0], rows.kv_lens_R.shape[0]
    shape, options = shape_of(call.q_THD, call.pool, rows.max_query_len, call.rules, call.is_wide)
    num_tiles, num_units = num_row_tiles(shape, num_tokens, num_rows), partials[0].shape[2]
    grid_units = triton.cdiv(rows.max_kv_len, unit) if is_prefix else num_units
    paged_units_kernel[num_tiles, shape.num_kv_heads, grid_units](
        *(call.q_THD, *call.pool, *partials, *rows[:3], shared_keys),
        *(num_rows, num_units, rows.block_table_RM.stride(0), *scales_of(call.rules)),
        *(shape, unit, is_prefix),
        **options,
    )


def _launch_split(
    call: _Call, rows: PagedRows, split: Split, shared: SharedPrefixes | None
) -> None:
    """Store partial results, those of shared keys once for all their rows, and merge them."""
    partials = new_partials(call.q_THD, split.num_units)
    if shared is not None:
        runs = PagedRows(
            *(shared.block_table_PM, shared.query_starts_P1, shared.kv_lens_P),
            *(shared.max_query_len, shared.max_keys),
        )
        _launch_units(call, runs, split.unit, partials, shared.num_keys_P, is_prefix=True)
    shared_keys = None if shared is None else shared.num_keys_R
    _launch_units(call, rows, split.unit, partials, shared_keys, is_prefix=False)
    num_tokens, num_heads, _ = call.q_THD.shape
    shape, _ = shape_of(call.q_THD, call.pool, rows.max_query_len, call.rules, call.is_wide)
    combine_kernel[num_tokens, num_heads](
        *(*partials, call.rules.sinks_H, call.out_THD, *rows[1:3]),
        *(rows.kv_lens_R.shape[0], split.num_units, scales_of(call.rules)[0], shape, split.unit),
        num_warps=1,
        enable_fp_fusion=False,
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
    if is_wide is None:
        is_wide = wide_tiles(q_THD.device, q_THD.dtype, q_THD.shape[2])
    if shared is not None and (rules.window is not None or shared.max_keys < SEGMENT):
        shared = None
    if split is None:
        sizes = (rows.kv_lens_R.shape[0], rows.max_query_len, rows.max_kv_len)
        split = choose_launch(q_THD, pool, *sizes, rules, is_wide).split
        with_prefix = shared and split_for_prefix(q_THD, pool, split, shared, rows.max_kv_len)
        split, shared = (with_prefix, shared) if with_prefix else (split, None)
    call = _Call(q_THD, pool, rules, out_THD, is_wide)
    if split.unit:
        _launch_split(call, rows, split, shared)
    else:
        _launch_walk(call, rows)
    return out_THD


@lru_cache(maxsize=64)
def wide_tiles(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether tiles of 64 rows give the bits of smaller ones on ``device``: tried once a process.

    Only for sm_90, where they compile to HGMMA. The first call runs kernels and reads their result;
    a captured graph must come later.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(device)[0] != 9 or dtype == torch.float32:
        return False
    generator = torch.Generator(device).manual_seed(0)
    num_blocks, num_queries, context = 24, 64, 1500

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, head_dim, generator=generator, device=device).to(dtype)

    pool = KVPool(randn(num_blocks, 4, 64), randn(num_blocks, 4, 64))
    q_THD = randn(num_queries, 16)
    rows = PagedRows(
        torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        torch.tensor([0, num_queries], dtype=torch.int32, device=device),
        torch.tensor([context], dtype=torch.int32, device=device),
        *(num_queries, context),
    )
    rules = ScoreRules(2.0 * head_dim**-0.5)
    narrow, wide = (
        launch(q_THD, pool, rows, rules, torch.empty_like(q_THD), None, WALK, is_wide)
        for is_wide in (False, True)
    )
    return torch.equal(narrow.view(torch.int16), wide.view(torch.int16))
