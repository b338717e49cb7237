"""Paged attention on CPU tensors: the exactness rules of the Triton kernel at a usable speed.

Keys are cut into tiles at absolute multiples of TILE, values into segments of tiles. The scores of
a tile are one matrix product and a segment's share of the outputs is another, both of fixed depth
and width, with row counts that a self-test found to give a row the same bits
(paged_attention_cpu_tiles.py). Between them the scores of a row lie in one line for one softmax,
which adds keys by their place in a vector, then vector by vector; the outputs are added segment by
segment. Keys that a query does not see give zeros there, which change no bit: a query's result
depends on its own position and keys only, not on span, batch, chunk, padding, block size, threads.

What depends on the lengths alone (indices, masks, buffers, views) is planned once a step and shared
by all layers: paged_attention_cpu_plan.py, paged_attention_cpu_buffers.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from pagedraft.kernels.paged_attention_cpu_buffers import (
    SINK_COLUMNS,
    Buffers,
    Group,
    Rows,
    RunViews,
    Sizes,
    build_group,
    build_rows,
    group_sizes,
)
from pagedraft.kernels.paged_attention_cpu_plan import (
    Geometry,
    cut_pieces,
    group_pieces,
    index_group,
)
from pagedraft.kernels.paged_attention_cpu_tiles import TILE, find_row_counts, use_threads
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
    """What the layers of a step share on the CPU path: filled by the first layer of each window.

    layouts: what each window's plan was filled for; a layer of another layout fills it anew.
    """

    windows: dict[int | None, WindowPlan] = field(default_factory=dict)
    layouts: dict[int | None, tuple[object, ...]] = field(default_factory=dict)

    def has(self, window: int | None, q_THD: torch.Tensor, k_cache_NGBD: torch.Tensor) -> bool:
        """Whether it is filled for layers of this window with such queries and caches."""
        return self.layouts.get(window) == layout_of(q_THD, k_cache_NGBD)


def layout_of(q_THD: torch.Tensor, k_cache_NGBD: torch.Tensor) -> tuple[object, ...]:
    """What a plan depends on besides a step's lengths and its block table."""
    return q_THD.shape, q_THD.stride(), k_cache_NGBD.shape[1:], k_cache_NGBD.dtype


# Keys or values of all blocks, seen as units [N, B, D], and of a quantised cache scales [N, B, 1].
Pool = tuple[torch.Tensor, torch.Tensor | None]


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
    plan.layouts[window] = layout_of(q_THD, k_cache_NGBD)
    geometry = Geometry(num_heads, _query_stride(q_THD), num_kv_heads, head_dim, block_size)
    counts = find_row_counts(head_dim, torch.get_num_threads())
    starts, kv_lens = query_starts_R1.tolist(), kv_lens_R.tolist()
    pieces = cut_pieces(starts, kv_lens, window, geometry, counts.sizes)
    table = block_table_RM.numpy()
    indices = [
        index_group(group, table, window, geometry) for group in group_pieces(pieces, num_kv_heads)
    ]
    num_packed = sum(index.queries_RGP.size for index in indices)
    packed_xD = torch.empty(num_packed + 1, head_dim)
    packed_xD[-1] = 0.0
    outputs = np.full(num_tokens * num_heads, num_packed, dtype=np.int64)
    sizes = [group_sizes(index, head_dim) for index in indices] or [Sizes(0, 0, 0, 0)]
    buffers = Buffers(sizes, k_cache_NGBD.dtype)
    groups, first = [], 0
    for index in indices:
        last = first + index.outputs_RGP.size
        # Padding repeats a row, and may stand in for it.
        outputs[index.outputs_RGP.reshape(-1)] = np.arange(first, last)
        out_XPD = packed_xD[first:last].view(-1, index.outputs_RGP.shape[2], head_dim)
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


def load(pool: Pool, run: RunViews) -> None:
    """Gather a run's keys or values as fp32, zeros where nobody's are."""
    stored_NBD, scale_NB1 = pool
    if scale_NB1 is None:
        torch.index_select(stored_NBD, 0, run.units_u, out=run.kv_uBD)
    else:
        stored_uBD = torch.index_select(stored_NBD, 0, run.units_u, out=run.stored_uBD)
        torch.index_select(scale_NB1, 0, run.units_u, out=run.scale_uB1)
        if run.half_uBD is not None:
            stored_uBD = fp8_as_fp16(stored_uBD, run.half_uBD)
            run.scale_uB1.mul_(256.0)
        torch.mul(stored_uBD, run.scale_uB1, out=run.kv_uBD)
    if run.dead:
        torch._foreach_zero_(run.dead)


def fp8_as_fp16(bytes_uBD: torch.Tensor, half_uBD: torch.Tensor) -> torch.Tensor:
    """Return e4m3 values / 256 as fp16: their bits at fp16's places, whose exponent starts 8 lower.

    20 times faster than torch's cast. A NaN becomes 480 / 256: a quantised pool tells it by its
    scale.
    """
    half_uBD.copy_(bytes_uBD).bitwise_left_shift_(7).bitwise_and_(-0x4080)
    return half_uBD.view(torch.float16)


def cap(scores_x: torch.Tensor, soft_cap: float) -> None:
    """Set scores, which hold x / soft_cap, to soft_cap * tanh(x / soft_cap)."""
    with use_threads(1):  # threads may cut between vectors, and the last elements take another tanh
        scores_x.tanh_().mul_(soft_cap)


def rows_with_sinks(group: Group, sinks_H: torch.Tensor) -> Rows:
    """The group's rows with the sinks' logits behind the keys'."""
    rows = group.sink_rows
    if rows is None:
        rows = build_rows(group.index, group.runs, group.out_XPD, None, SINK_COLUMNS)
        group.sink_rows = rows
    heads_RGP = torch.from_numpy(group.index.heads_RGP)
    rows.logits_XPW[:, :, -SINK_COLUMNS] = sinks_H[heads_RGP].flatten(0, 1)
    return rows


def attend_group(
    q_xD: torch.Tensor, keys: Pool, values: Pool, group: Group, rules: ScoreRules
) -> None:
    """Compute a group's packed outputs into its ``out_XPD``."""
    rows = group.rows if rules.sinks_H is None else rows_with_sinks(group, rules.sinks_H)
    torch.index_select(q_xD, 0, group.queries, out=group.q_xD)
    scale = rules.scale if rules.soft_cap is None else rules.scale / rules.soft_cap
    if math.frexp(scale)[0] != 0.5:
        # Some products scale an operand, some their result: alike for powers of two only.
        group.q_xD.mul_(scale)
        scale = 1.0
    for run, logits in zip(group.runs, rows.logits, strict=True):
        load(keys, run)
        for q_XPD, k_XDT, scores_XPT in run.products:
            scores_XPT.baddbmm_(q_XPD, k_XDT, beta=0, alpha=scale)
        if rules.soft_cap is not None:
            cap(run.scores_x, rules.soft_cap)
        if run.bias is None:
            logits.copy_(run.scores)
        else:
            torch.add(run.scores, run.bias, out=logits)
    torch.softmax(rows.logits_XPW, -1, out=rows.probs_XPW)
    for run, products in zip(group.runs, rows.products, strict=True):
        load(values, run)
        for out_XPD, probs_XPW, v_XWD, beta in products:
            out_XPD.baddbmm_(probs_XPW, v_XWD, beta=beta)


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
    keys = k_cache_NGBD.view(-1, unit, head_dim), None
    values = v_cache_NGBD.view(-1, unit, head_dim), None
    if kv_scales is not None:
        k_scale_NB1, v_scale_NB1 = (scale_NGB.view(-1, unit, 1) for scale_NGB in kv_scales)
        keys = keys[0].view(torch.int8), k_scale_NB1
        values = values[0].view(torch.int8), v_scale_NB1
    groups, packed_xD, outputs = plan.windows[rules.window]
    for group in groups:
        if group.is_serial:
            with use_threads(1):
                attend_group(q_xD, keys, values, group, rules)
        else:
            attend_group(q_xD, keys, values, group, rules)
    torch.index_select(packed_xD, 0, outputs, out=out_THD.view(-1, head_dim))
    return out_THD
