"""The buffers of CPU attention: one set a step, as large as its largest group needs, and views.

A view takes a microsecond to make, as long as a small product takes: the views of all groups are
made once, before the first layer of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagedraft.kernels.paged_attention_plan import Geometry, Index, Run
from pagedraft.kernels.paged_attention_tiles import TILE, RowCounts

MAX_KEYS_SIZE = 2**17  # elements that a run gathers at once, to keep them in cache
MAX_COPIED_QUERIES = 2**12  # elements; more queries are not copied for each tile
SINK_COLUMNS = 16  # one holds the sink's logit; keeps rows on 64-byte boundaries


class Gather(NamedTuple):
    """What a run's keys, and then its values, pass through; u units of B keys.

    units: of the pool, in order. kv_uBD: fp32, ready. dead: views of it that hold nobody's keys.
    stored_uBD int8, scale_uB1, half_uBD int16: of a quantised pool, the last for fp8.
    """

    units: torch.Tensor
    kv_uBD: torch.Tensor
    dead: list[torch.Tensor]
    stored_uBD: torch.Tensor | None
    scale_uB1: torch.Tensor | None
    half_uBD: torch.Tensor | None


class RunViews(NamedTuple):
    """A run's products; R pieces, X = R G matrices, n tiles.

    products: (queries, keys, scores) of one batch each. scores_x: all scores of the run.
    scores_RGPnT: the same in the order of the logits; bias_R1PnT is added to them.
    values: [X, TILE, D] of each tile.
    """

    gather: Gather
    products: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    scores_x: torch.Tensor
    scores_RGPnT: torch.Tensor
    bias_R1PnT: torch.Tensor
    values: list[torch.Tensor]


class Rows(NamedTuple):
    """Whole rows of a group, from logits to outputs.

    logits_XPW, probs_XPW: of the softmax; the same tensor if no tile of it is missing.
    logits: where each run's go. tiles: (outputs, probabilities, values, beta) of each run's tiles.
    """

    logits_XPW: torch.Tensor
    probs_XPW: torch.Tensor
    logits: list[torch.Tensor]
    tiles: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]]]


@dataclass
class Group:
    """Pieces that run as one batch.

    queries: rows of q; q_xD: where they go, once or for each tile of a run.
    heads_XP: of each packed row. is_serial: its products must run on one thread.
    sink_rows: made by the first layer that has sinks.
    """

    index: Index
    queries: torch.Tensor
    q_xD: torch.Tensor
    heads_XP: torch.Tensor
    out_XPD: torch.Tensor
    runs: list[RunViews]
    rows: Rows
    is_serial: bool
    sink_rows: Rows | None = None


def max_matrices(geometry: Geometry) -> int:
    """Matrices of one KV head that a run may gather at once."""
    return MAX_KEYS_SIZE // (geometry.num_kv_heads * TILE * geometry.head_dim)


def num_copies(index: Index, head_dim: int) -> int:
    """Copies of a group's queries: as many as the longest run has tiles, or one."""
    if index.queries_RGP.size * head_dim > MAX_COPIED_QUERIES:
        return 1
    return max(run.end - run.first for run in index.runs)


class Sizes(NamedTuple):
    """Elements that a group needs of each buffer."""

    keys: int
    scores: int
    queries: int
    logits: int


def group_sizes(index: Index, head_dim: int) -> Sizes:
    """See Sizes."""
    matrices = max((run.end - run.first) * run.num_pieces for run in index.runs)
    matrices *= index.queries_RGP.shape[1]
    num_rows = index.queries_RGP.size
    return Sizes(
        keys=matrices * TILE * head_dim,
        scores=matrices * index.queries_RGP.shape[2] * TILE,
        queries=num_rows * head_dim * num_copies(index, head_dim),
        logits=num_rows * index.runs[-1].end * TILE,
    )


class Buffers:
    """Flat buffers of a step, shared by its groups."""

    def __init__(self, sizes: list[Sizes], cache_dtype: torch.dtype) -> None:
        most = Sizes(
            *(max(column, default=0) for column in zip(Sizes(0, 0, 0, 0), *sizes, strict=True))
        )
        self.keys, self.scores, self.queries, self.logits = (torch.empty(size) for size in most)
        is_quantized = cache_dtype != torch.float32
        is_fp8 = cache_dtype == torch.float8_e4m3fn
        self.stored = torch.empty(most.keys, dtype=torch.int8) if is_quantized else None
        self.scale = torch.empty(most.keys) if is_quantized else None
        self.half = torch.empty(most.keys, dtype=torch.int16) if is_fp8 else None


def build_gather(index: Index, run: Run, geometry: Geometry, buffers: Buffers) -> Gather:
    """Views of one run's keys; the same ones hold its values later."""
    units_u = torch.from_numpy(index.units_nRGU[run.first : run.end, : run.num_pieces].reshape(-1))
    num_units, unit, head_dim = len(units_u), geometry.unit, geometry.head_dim

    def view(buffer: torch.Tensor | None, width: int) -> torch.Tensor | None:
        if buffer is None:
            return None
        return buffer[: num_units * unit * width].view(num_units, unit, width)

    kv_uBD = view(buffers.keys, head_dim)
    kv_nRGTD = kv_uBD.view(-1, run.num_pieces, geometry.num_kv_heads, TILE, head_dim)
    return Gather(
        units=units_u,
        kv_uBD=kv_uBD,
        dead=[
            kv_nRGTD[tile - run.first, piece, :, first:end]
            for tile, piece, first, end in index.dead
            if run.first <= tile < run.end
        ],
        stored_uBD=view(buffers.stored, head_dim),
        scale_uB1=view(buffers.scale, 1),
        half_uBD=view(buffers.half, head_dim),
    )


def build_run(
    index: Index, run: Run, bias_RPnT: torch.Tensor, geometry: Geometry, buffers: Buffers
) -> RunViews:
    """Views of one run."""
    num_pieces, num_kv_heads, num_packed = index.queries_RGP.shape
    num_tiles, head_dim = run.end - run.first, geometry.head_dim
    gather = build_gather(index, run, geometry, buffers)
    kv_nXTD = gather.kv_uBD.view(num_tiles, -1, TILE, head_dim)
    k_nXDT = kv_nXTD.transpose(2, 3)
    scores_nXPT = buffers.scores[: num_tiles * kv_nXTD.shape[1] * num_packed * TILE].view(
        num_tiles, -1, num_packed, TILE
    )
    copies = num_copies(index, head_dim)
    q_nXPD = buffers.queries[: copies * index.queries_RGP.size * head_dim].view(
        copies, -1, num_packed, head_dim
    )
    if run.num_pieces == num_pieces and num_tiles <= copies:
        batches = (q_nXPD[:num_tiles], k_nXDT, scores_nXPT)
        products = [tuple(operand.flatten(0, 1) for operand in batches)]
    else:
        q_XPD = q_nXPD[0, : kv_nXTD.shape[1]]
        products = [(q_XPD, k_nXDT[tile], scores_nXPT[tile]) for tile in range(num_tiles)]
    scores_nRGPT = scores_nXPT.view(num_tiles, run.num_pieces, num_kv_heads, num_packed, TILE)
    return RunViews(
        gather=gather,
        products=products,
        scores_x=scores_nXPT.view(-1),
        scores_RGPnT=scores_nRGPT.permute(1, 2, 3, 0, 4),
        bias_R1PnT=bias_RPnT[: run.num_pieces, None, :, run.first : run.end],
        values=list(kv_nXTD),
    )


def build_rows(
    index: Index,
    runs: list[RunViews],
    out_XPD: torch.Tensor,
    logits_x: torch.Tensor | None,
    num_columns: int = 0,
) -> Rows:
    """Views of a group's rows: logits, probabilities, outputs.

    logits_x: shared buffer; None to have own ones, with ``num_columns`` behind the keys.
    """
    num_pieces, num_kv_heads, num_packed = index.queries_RGP.shape
    num_keys = index.runs[-1].end * TILE
    shape = (num_pieces * num_kv_heads, num_packed, num_keys + num_columns)
    probs_XPW = torch.empty(shape) if logits_x is None else logits_x[: math.prod(shape)].view(shape)
    is_whole = num_columns == 0 and len({run.num_pieces for run in index.runs}) == 1
    # Tiles that a row does not have stay hidden, in memory that nobody else writes.
    logits_XPW = probs_XPW if is_whole else torch.full(shape, float("-inf"))
    logits, tiles = [], []
    for run, views in zip(index.runs, runs, strict=True):
        matrices = run.num_pieces * num_kv_heads
        logits.append(
            logits_XPW[:matrices, :, run.first * TILE : run.end * TILE].view(
                run.num_pieces, num_kv_heads, num_packed, -1, TILE
            )
        )
        probs = probs_XPW[:matrices, :, :num_keys].split(TILE, 2)[run.first : run.end]
        tiles.append(
            [
                (out_XPD[:matrices], probs_XPT, v_XTD, int(tile > 0))
                for tile, probs_XPT, v_XTD in zip(
                    range(run.first, run.end), probs, views.values, strict=True
                )
            ]
        )
    return Rows(logits_XPW, probs_XPW, logits, tiles)


def build_group(
    index: Index, geometry: Geometry, counts: RowCounts, buffers: Buffers, out_XPD: torch.Tensor
) -> Group:
    """All views of one group."""
    bias_RPnT = torch.from_numpy(index.bias_RPnT)
    runs = [build_run(index, run, bias_RPnT, geometry, buffers) for run in index.runs]
    copies = num_copies(index, geometry.head_dim)
    queries = torch.from_numpy(index.queries_RGP.reshape(-1)).repeat(copies)
    least = min(q_XPD.shape[0] for run in runs for q_XPD, _, _ in run.products)
    return Group(
        index=index,
        queries=queries,
        q_xD=buffers.queries[: len(queries) * geometry.head_dim].view(-1, geometry.head_dim),
        heads_XP=torch.from_numpy(index.heads_RGP.reshape(-1, index.heads_RGP.shape[2])),
        out_XPD=out_XPD,
        runs=runs,
        rows=build_rows(index, runs, out_XPD, buffers.logits),
        is_serial=least < counts.min_threaded,
    )
