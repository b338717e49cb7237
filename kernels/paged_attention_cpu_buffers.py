"""The buffers of CPU attention: one set a step, as large as its largest group needs, and views.

A view takes a microsecond to make, as long as a small product takes: the views of all groups are
made once, before the first layer of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from pagedraft.kernels.paged_attention_cpu_plan import Geometry, Index, Piece, Run
from pagedraft.kernels.paged_attention_cpu_tiles import TILE, RowCounts

MAX_COPIED_QUERIES = 2**12  # elements; more queries are not copied for each tile
SINK_COLUMNS = 16  # one holds the sink's logit; keeps rows on 64-byte boundaries


class RunViews(NamedTuple):
    """A run of segments: what its keys, and later its values, pass through; scores of the keys.

    units_u: of the pool, in order. kv_uBD: fp32, ready; dead: views of it that hold nobody's keys.
    stored_uBD int8, scale_uB1, half_uBD int16: of a quantised pool, the last for fp8.
    products: (queries, keys, scores) of one batch each. scores_x: all scores of the run; scores:
    the same in the order of the logits; bias is added, if any of it is hidden.
    """

    units_u: torch.Tensor
    kv_uBD: torch.Tensor
    dead: list[torch.Tensor]
    stored_uBD: torch.Tensor | None
    scale_uB1: torch.Tensor | None
    half_uBD: torch.Tensor | None
    products: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    scores_x: torch.Tensor
    scores: torch.Tensor
    bias: torch.Tensor | None


class Rows(NamedTuple):
    """Whole rows of a group, from logits to outputs; X matrices, W keys and sink columns.

    logits_XPW, probs_XPW: of the softmax; one tensor, or two. logits: where each run's go.
    products: (outputs, probabilities, values, beta) of each run's segments.
    """

    logits_XPW: torch.Tensor
    probs_XPW: torch.Tensor
    logits: list[torch.Tensor]
    products: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]]]


@dataclass
class Group:
    """Pieces that run as one batch.

    queries: rows of q; q_xD: where they go. is_serial: its products must run on one thread.
    sink_rows: made by the first layer that has sinks.
    """

    index: Index
    queries: torch.Tensor
    q_xD: torch.Tensor
    out_XPD: torch.Tensor
    runs: list[RunViews]
    rows: Rows
    is_serial: bool
    sink_rows: Rows | None = None


def query_copies(index: Index, head_dim: int) -> tuple[int, int]:
    """(segments, tiles of one) that a group's queries are copied for: few, to save calls, or 1, 1.

    All segments of the longest run take one call then, else each tile.
    """
    if index.queries_RGP.size * head_dim > MAX_COPIED_QUERIES:
        return 1, 1
    segment = index.pieces[0].shape.segment
    return max(run.end - run.first for run in index.runs) // segment, segment


class Sizes(NamedTuple):
    """Elements that a group needs of each buffer."""

    keys: int
    scores: int
    queries: int
    logits: int


def group_sizes(index: Index, head_dim: int) -> Sizes:
    """See Sizes."""
    _, num_kv_heads, num_packed = index.queries_RGP.shape
    matrices = max((run.end - run.first) * run.num_pieces for run in index.runs) * num_kv_heads
    return Sizes(
        keys=matrices * TILE * head_dim,
        scores=matrices * TILE * num_packed,
        queries=index.queries_RGP.size * head_dim * math.prod(query_copies(index, head_dim)),
        logits=index.queries_RGP.size * index.runs[-1].end * TILE,
    )


class Buffers:
    """Flat buffers of a step, shared by its groups."""

    def __init__(self, sizes: list[Sizes], cache_dtype: torch.dtype) -> None:
        most = Sizes(*map(max, zip(*sizes, strict=True)))
        self.keys, self.scores, self.queries, self.logits = (torch.empty(size) for size in most)
        is_quantized = cache_dtype != torch.float32
        is_fp8 = cache_dtype == torch.float8_e4m3fn
        self.stored = torch.empty(most.keys, dtype=torch.int8) if is_quantized else None
        self.scale = torch.empty(most.keys) if is_quantized else None
        self.half = torch.empty(most.keys, dtype=torch.int16) if is_fp8 else None


def build_run(
    index: Index, run: Run, bias_RPnT: torch.Tensor, geometry: Geometry, buffers: Buffers
) -> RunViews:
    """Views of one run, whose keys lie in the order (segment, piece, KV head, key)."""
    num_kv_heads, head_dim, unit = geometry.num_kv_heads, geometry.head_dim, geometry.unit
    num_packed, segment = index.pieces[0].shape
    units_nRGU = index.units_nRGU[run.first : run.end, : run.num_pieces]
    units_SsRGU = units_nRGU.reshape(-1, segment, *units_nRGU.shape[1:])
    units_u = torch.from_numpy(units_SsRGU.transpose(0, 2, 3, 1, 4).reshape(-1))

    def view(buffer: torch.Tensor | None, width: int) -> torch.Tensor | None:
        if buffer is None:
            return None
        return buffer[: len(units_u) * unit * width].view(-1, unit, width)

    kv_uBD = view(buffers.keys, head_dim)
    kv_SRGWD = kv_uBD.view(-1, run.num_pieces, num_kv_heads, segment * TILE, head_dim)
    scores_x = buffers.scores[: len(units_u) * unit * num_packed]
    products, scores = _score_products(index, run, kv_uBD, scores_x, buffers)
    bias = bias_RPnT[: run.num_pieces, :, run.first : run.end]
    return RunViews(
        units_u=units_u,
        kv_uBD=kv_uBD,
        dead=_dead(kv_SRGWD, run, index.pieces),
        stored_uBD=view(buffers.stored, head_dim),
        scale_uB1=view(buffers.scale, 1),
        half_uBD=view(buffers.half, head_dim),
        products=products,
        scores_x=scores_x,
        scores=scores,
        bias=bias.unflatten(2, (-1, segment))[:, None] if run.has_hidden else None,
    )


def _dead(kv_SRGWD: torch.Tensor, run: Run, pieces: list[Piece]) -> list[torch.Tensor]:
    """Views of gathered keys outside the context or window of a piece's span."""
    width = kv_SRGWD.shape[3]
    views = []
    for index, piece in enumerate(pieces[: run.num_pieces]):
        first = (piece.first_tile + run.first) * TILE
        for part in range(kv_SRGWD.shape[0]):
            begin, end = piece.first_key - first, piece.end - first
            if begin > 0:
                views.append(kv_SRGWD[part, index, :, :begin])
            if end < width:
                views.append(kv_SRGWD[part, index, :, max(0, end) :])
            first += width
    return views


def _score_products(
    index: Index, run: Run, kv_uBD: torch.Tensor, scores_x: torch.Tensor, buffers: Buffers
) -> tuple[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], torch.Tensor]:
    """(queries, keys, scores) of a run: one batch, or one a segment, or one a tile.

    Also all scores, [R, G, P, segments, tiles of one, TILE]; those of a batch lie together.
    """
    num_pieces, num_kv_heads, num_packed = index.queries_RGP.shape
    heads, head_dim = (run.num_pieces, num_kv_heads), kv_uBD.shape[2]
    num_segments, segment = query_copies(index, head_dim)
    size = num_segments * segment * index.queries_RGP.size * head_dim
    q_SXsPD = buffers.queries[:size].view(num_segments, -1, segment, num_packed, head_dim)
    own = index.pieces[0].shape.segment
    k_SXsDT = kv_uBD.view(-1, math.prod(heads), own, TILE, head_dim).transpose(3, 4)
    if segment < own:
        scores = scores_x.view(-1, own, *heads, num_packed, TILE)
        q_XPD, scores_nXPT = q_SXsPD[0, : math.prod(heads), 0], scores.flatten(2, 3).flatten(0, 1)
        k_nXDT = [k_SXsDT[part, :, tile] for part in range(len(k_SXsDT)) for tile in range(own)]
        products = [(q_XPD, *operands) for operands in zip(k_nXDT, scores_nXPT, strict=True)]
        return products, scores.permute(2, 3, 4, 0, 1, 5)
    scores = scores_x.view(-1, *heads, own, num_packed, TILE)
    if run.num_pieces == num_pieces:
        products = [
            (
                q_SXsPD[: len(k_SXsDT)].flatten(0, 2),
                k_SXsDT.flatten(0, 2),
                scores.flatten(0, 3),
            )
        ]
    else:
        q_xPD = q_SXsPD[0, : math.prod(heads)].flatten(0, 1)
        products = [
            (q_xPD, k_XsDT.flatten(0, 1), scores_RGsPT.flatten(0, 2))
            for k_XsDT, scores_RGsPT in zip(k_SXsDT, scores, strict=True)
        ]
    return products, scores.permute(1, 2, 4, 0, 3, 5)


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
    segment = index.pieces[0].shape.segment
    shape = (num_pieces * num_kv_heads, num_packed, index.runs[-1].end * TILE + num_columns)
    probs_XPW = torch.empty(shape) if logits_x is None else logits_x[: math.prod(shape)].view(shape)
    logits_XPW = probs_XPW
    if num_columns or index.runs[-1].num_pieces < num_pieces:
        # Keys that a row does not have stay hidden, in memory that nobody else writes.
        logits_XPW = torch.full(shape, float("-inf"))
    logits, products = [], []
    for run, views in zip(index.runs, runs, strict=True):
        num_matrices = run.num_pieces * num_kv_heads
        part = (slice(num_matrices), slice(None), slice(run.first * TILE, run.end * TILE))
        own = (run.num_pieces, num_kv_heads, num_packed, -1, segment, TILE)
        logits.append(logits_XPW[part].view(own))
        v_SXWD = views.kv_uBD.view(-1, num_matrices, segment * TILE, out_XPD.shape[2])
        probs = probs_XPW[part].split(segment * TILE, 2)
        betas = [int(run.first > 0), *[1] * (len(probs) - 1)]
        operands = zip([out_XPD[:num_matrices]] * len(probs), probs, v_SXWD, betas, strict=True)
        products.append(list(operands))
    return Rows(logits_XPW, probs_XPW, logits, products)


def build_group(
    index: Index, geometry: Geometry, counts: RowCounts, buffers: Buffers, out_XPD: torch.Tensor
) -> Group:
    """All views of one group."""
    bias_RPnT = torch.from_numpy(index.bias_RPnT)
    runs = [build_run(index, run, bias_RPnT, geometry, buffers) for run in index.runs]
    num_segments, segment = query_copies(index, geometry.head_dim)
    queries_XP = index.queries_RGP.reshape(-1, index.queries_RGP.shape[2])
    if segment > 1:
        queries_XP = queries_XP.repeat(segment, axis=0)
    queries = torch.from_numpy(np.concatenate([queries_XP.reshape(-1)] * num_segments))
    return Group(
        index=index,
        queries=queries,
        q_xD=buffers.queries[: len(queries) * geometry.head_dim].view(-1, geometry.head_dim),
        out_XPD=out_XPD,
        runs=runs,
        rows=build_rows(index, runs, out_XPD, buffers.logits),
        is_serial=index.runs[-1].num_pieces * geometry.num_kv_heads < counts.min_threaded,
    )
