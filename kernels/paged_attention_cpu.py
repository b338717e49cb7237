"""Paged attention on CPU tensors: the exactness rules of the Triton kernel at a usable speed.

Keys are cut into tiles at absolute multiples of TILE. The scores of a tile are one matrix product
and its share of the outputs is another, both of fixed depth and width, with row counts that a
self-test found to give a row the same bits (paged_attention_tiles.py). Between them the scores of a
row lie in one line, tile after tile, for one softmax, which adds by a key's place in its tile
first, then tile by tile; the outputs are added tile by tile too. Tiles and rows that a query does
not see give zeros there, which change no bit: a query's result depends on its own position and
keys only, not on span, batch, chunk, padding, block size or threads.

What depends on the lengths alone (indices, masks, buffers, views) is planned once a step and shared
by all layers: paged_attention_plan.py, paged_attention_buffers.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from pagedraft.kernels.paged_attention_buffers import (
    SINK_COLUMNS,
    Buffers,
    Gather,
    Group,
    Rows,
    build_group,
    build_rows,
    group_sizes,
    max_matrices,
)
from pagedraft.kernels.paged_attention_plan import (
    Geometry,
    cut_pieces,
    group_pieces,
    index_group,
)
from pagedraft.kernels.paged_attention_tiles import TILE, find_row_counts, one_thread
from pagedraft.kernels.score_rules import ScoreRules


class WindowPlan(NamedTuple):
    """One window's part of a plan.

    packed_xD: the outputs of all groups, and one row of zeros for tokens of no row.
    outputs: row of ``packed_xD`` of each (token, head).
    """

    groups: list[Group]
    packed_xD: torch.Tensor
    outputs: torch.Tensor


@dataclass
class AttentionPlan:
    """What the layers of a step share on the CPU path: filled by the first layer of each window."""

    windows: dict[int | None, WindowPlan] = field(default_factory=dict)

    def has(self, window: int | None) -> bool:
        """Whether it is filled for layers of this window."""
        return window in self.windows


class Pool(NamedTuple):
    """Keys or values of all blocks, seen as units; scale_NB1 of a quantised cache."""

    stored_NBD: torch.Tensor
    scale_NB1: torch.Tensor | None


def fill_plan(
    plan: AttentionPlan,
    q_THD: torch.Tensor,
    k_cache_NGBD: torch.Tensor,
    v_cache_NGBD: torch.Tensor,
    block_table_RM: torch.Tensor,
    query_starts_R1: torch.Tensor,
    kv_lens_R: torch.Tensor,
    window: int | None,
) -> AttentionPlan:
    """Fill a step's plan for ``window`` from its lengths, its block table and the layout of q."""
    num_tokens, num_heads, head_dim = q_THD.shape
    _, num_kv_heads, block_size, _ = k_cache_NGBD.shape
    geometry = Geometry(num_heads, _query_stride(q_THD), num_kv_heads, head_dim, block_size)
    counts = find_row_counts(head_dim, torch.get_num_threads())
    starts, kv_lens = query_starts_R1.tolist(), kv_lens_R.tolist()
    pieces = cut_pieces(starts, kv_lens, window, geometry, counts.sizes)
    table = block_table_RM.numpy()
    most = max_matrices(geometry)
    indices = [
        index_group(group, table, window, geometry, most)
        for group in group_pieces(pieces, num_kv_heads)
    ]
    num_packed = sum(index.queries_RGP.size for index in indices)
    packed_xD = torch.empty(num_packed + 1, head_dim)
    packed_xD[-1] = 0.0
    outputs = np.full(num_tokens * num_heads, num_packed, dtype=np.int64)
    groups: list[Group] = []
    buffers = Buffers([group_sizes(index, head_dim) for index in indices], k_cache_NGBD.dtype)
    first = 0
    for index in indices:
        outputs[index.outputs] = first + index.packed
        last = first + index.queries_RGP.size
        out_XPD = packed_xD[first:last].view(-1, index.queries_RGP.shape[2], head_dim)
        groups.append(build_group(index, geometry, counts, buffers, out_XPD))
        first = last
    plan.windows[window] = WindowPlan(groups, packed_xD, torch.from_numpy(outputs))
    return plan


def _query_stride(q_THD: torch.Tensor) -> int:
    """Heads from one token's to the next's: q may be a view of a wider buffer."""
    head_dim = q_THD.shape[2]
    if q_THD.stride(0) % head_dim or q_THD.stride()[1:] != (head_dim, 1):
        return q_THD.shape[1]  # will be copied
    return q_THD.stride(0) // head_dim


def load(pool: Pool, gather: Gather) -> None:
    """Gather a run's keys or values as fp32, zeros where nobody's are."""
    if pool.scale_NB1 is None:
        torch.index_select(pool.stored_NBD, 0, gather.units, out=gather.kv_uBD)
    else:
        torch.index_select(pool.stored_NBD, 0, gather.units, out=gather.stored_uBD)
        torch.index_select(pool.scale_NB1, 0, gather.units, out=gather.scale_uB1)
        stored_uBD = gather.stored_uBD
        if gather.half_uBD is not None:
            stored_uBD = _fp8_as_fp16(stored_uBD, gather.half_uBD)
            gather.scale_uB1.mul_(256.0)
        torch.mul(stored_uBD, gather.scale_uB1, out=gather.kv_uBD)
    if gather.dead:
        torch._foreach_zero_(gather.dead)


def _fp8_as_fp16(bytes_uBD: torch.Tensor, half_uBD: torch.Tensor) -> torch.Tensor:
    """Return e4m3 values / 256 as fp16: their bits at fp16's places, whose exponent starts 8 lower.

    20 times faster than torch's cast. A NaN becomes 480 / 256: a quantised pool tells it by its
    scale.
    """
    half_uBD.copy_(bytes_uBD).bitwise_left_shift_(7).bitwise_and_(-0x4080)
    return half_uBD.view(torch.float16)


def cap(scores_x: torch.Tensor, soft_cap: float) -> None:
    """Set scores, which hold x / soft_cap, to soft_cap * tanh(x / soft_cap)."""
    with one_thread():  # threads may cut between vectors, and the last elements take another tanh
        scores_x.tanh_().mul_(soft_cap)


def rows_with_sinks(group: Group, sinks_H: torch.Tensor) -> Rows:
    """The group's rows with the sinks' logits behind the keys'."""
    rows = group.sink_rows
    if rows is None:
        rows = build_rows(group.index, group.runs, group.out_XPD, None, SINK_COLUMNS)
        group.sink_rows = rows
    rows.logits_XPW[:, :, -SINK_COLUMNS] = sinks_H[group.heads_XP]
    return rows


def attend_group(
    q_xD: torch.Tensor, keys: Pool, values: Pool, group: Group, rules: ScoreRules
) -> None:
    """Compute a group's packed outputs into its ``out_XPD``."""
    rows = group.rows if rules.sinks_H is None else rows_with_sinks(group, rules.sinks_H)
    scale = rules.scale if rules.soft_cap is None else rules.scale / rules.soft_cap
    # Scaled here: some products would scale an operand, others their result.
    torch.index_select(q_xD, 0, group.queries, out=group.q_xD).mul_(scale)
    for run, logits_RGPnT in zip(group.runs, rows.logits, strict=True):
        load(keys, run.gather)
        for q_XPD, k_XDT, scores_XPT in run.products:
            scores_XPT.baddbmm_(q_XPD, k_XDT, beta=0)
        if rules.soft_cap is not None:
            cap(run.scores_x, rules.soft_cap)
        torch.add(run.scores_RGPnT, run.bias_R1PnT, out=logits_RGPnT)
    torch.softmax(rows.logits_XPW, -1, out=rows.probs_XPW)
    for run, tiles in zip(group.runs, rows.tiles, strict=True):
        load(values, run.gather)
        for out_XPD, probs_XPT, v_XTD, beta in tiles:
            out_XPD.baddbmm_(probs_XPT, v_XTD, beta=beta)


def paged_attention_cpu(
    q_THD: torch.Tensor,
    k_cache_NGBD: torch.Tensor,
    v_cache_NGBD: torch.Tensor,
    plan: AttentionPlan,
    rules: ScoreRules,
    out_THD: torch.Tensor,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attend on the CPU into ``out_THD``, fp32, as ``plan``, filled for the rules' window, says.

    kv_scales: (k_scale_NGB, v_scale_NGB) of a quantised cache.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    query_stride = _query_stride(q_THD)
    if q_THD.stride() != (query_stride * head_dim, head_dim, 1):
        q_THD = q_THD.contiguous()
    q_xD = q_THD.as_strided(((num_tokens - 1) * query_stride + num_heads, head_dim), (head_dim, 1))
    unit = min(k_cache_NGBD.shape[2], TILE)
    keys, values = (
        _as_pool(cache, None if kv_scales is None else kv_scales[i], unit)
        for i, cache in enumerate((k_cache_NGBD, v_cache_NGBD))
    )
    groups, packed_xD, outputs = plan.windows[rules.window]
    for group in groups:
        if group.is_serial:
            with one_thread():
                attend_group(q_xD, keys, values, group, rules)
        else:
            attend_group(q_xD, keys, values, group, rules)
    torch.index_select(packed_xD, 0, outputs, out=out_THD.view(-1, head_dim))
    return out_THD


def _as_pool(cache_NGBD: torch.Tensor, scale_NGB: torch.Tensor | None, unit: int) -> Pool:
    stored_NBD = cache_NGBD.view(-1, unit, cache_NGBD.shape[3])
    if scale_NGB is None:
        return Pool(stored_NBD, None)
    return Pool(stored_NBD.view(torch.int8), scale_NGB.view(-1, unit, 1))
