"""What CPU attention reads and hides in a step: pieces of rows in groups, and their indices.

The query heads that share a KV head are packed into rows: row i of a span is query i // (H / G),
head i % (H / G). Spans are cut into pieces, and pieces of like shape run as a group: a batch of
matrices, longest contexts first.

Keys are cut into tiles at absolute multiples of TILE, and values into segments of 1, 2 or 4 tiles,
longer ones for queries that are further on (SEGMENTS): what a query is multiplied with, and in
which order its sums run, follows from its position. The matrices that have an i-th tile are the
first ones of their batch, so that nobody is padded to another row's context.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pagedraft.kernels.paged_attention_cpu_tiles import SEGMENTS, TILE

MAX_PIECE_SCORES = 2**19
MAX_GROUP_SCORES = 2**17
MAX_RUN_SIZE = 2**17  # elements of its keys, and of its scores
LONG_ROWS = 64  # packed rows of a piece, whatever its context: else keys are gathered too often
_HIDDEN, _SEEN = np.float32("-inf"), np.float32(0.0)


class Geometry(NamedTuple):
    """Sizes that an index depends on; query_stride counts heads from one token's to the next's."""

    num_heads: int
    query_stride: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def unit(self) -> int:
        """Keys that are gathered as one: a block, or the part of it that fills a tile."""
        return min(self.block_size, TILE)


class Shape(NamedTuple):
    """What the pieces of a group share: padded packed rows, and tiles of a segment."""

    num_packed: int
    segment: int


class Piece(NamedTuple):
    """Packed query rows of one row of the batch that are attended together.

    row: of the block table; token: first of its span; position: of that token in the context.
    first, num_packed: packed rows of the span. first_tile, num_tiles: of the keys that they see,
    from a segment's edge on. first_key, end: keys that any query of the *span* sees; other slots
    may hold anything.
    """

    shape: Shape
    row: int
    token: int
    position: int
    first: int
    num_packed: int
    first_tile: int
    num_tiles: int
    first_key: int
    end: int


def cut_pieces(
    starts: Sequence[int],
    kv_lens: Sequence[int],
    window: int | None,
    geometry: Geometry,
    sizes: Sequence[int],
) -> list[Piece]:
    """Cut spans into pieces of at most the largest of ``sizes`` packed rows, at SEGMENTS' limits.

    Rows without queries or without context give none.
    """
    pieces = []
    for row, end in enumerate(kv_lens):
        token, span = starts[row], starts[row + 1] - starts[row]
        position = end - span
        reach = end if window is None else window
        first_key = max(0, position - reach + 1)
        step = _piece_rows(end - first_key, geometry, sizes)
        num_rows = span * geometry.heads_per_kv if end else 0
        first = 0
        while first < num_rows:
            query = position + first // geometry.heads_per_kv
            limit, segment = next(part for part in SEGMENTS if query < part[0])
            last = min(num_rows, first + step, (limit - position) * geometry.heads_per_kv)
            shape = Shape(sizes[bisect_left(sizes, last - first)], segment)
            first_tile = max(0, query - reach + 1) // (segment * TILE) * segment
            end_tile = (position + (last - 1) // geometry.heads_per_kv) // TILE + 1
            own = (first, last - first, first_tile, end_tile - first_tile)
            pieces.append(Piece(shape, row, token, position, *own, first_key, end))
            first = last
    return pieces


def _piece_rows(num_keys: int, geometry: Geometry, sizes: Sequence[int]) -> int:
    """Packed rows of a piece: whole queries if they fit, fewer for long contexts."""
    most = MAX_PIECE_SCORES // (geometry.num_kv_heads * (num_keys + 2 * TILE))
    size = max((size for size in sizes if size <= max(LONG_ROWS, most)), default=sizes[0])
    heads = geometry.heads_per_kv
    return size // heads * heads or size


def group_pieces(pieces: list[Piece], num_kv_heads: int) -> list[list[Piece]]:
    """Group pieces of one shape, longest first; MAX_GROUP_SCORES bounds groups of several."""
    groups: list[list[Piece]] = []
    shape, limit = None, 0
    for piece in sorted(pieces, key=lambda p: (p.shape, p.num_tiles), reverse=True):
        if piece.shape == shape and len(groups[-1]) < limit:
            groups[-1].append(piece)
        else:
            shape = piece.shape
            scores = num_kv_heads * shape.num_packed * piece.num_tiles * TILE
            limit = MAX_GROUP_SCORES // scores
            groups.append([piece])
    return groups


class Run(NamedTuple):
    """Tiles first to end of a group, which its first ``num_pieces`` pieces have (or pad).

    has_hidden: some of their queries do not see some of the keys.
    """

    first: int
    end: int
    num_pieces: int
    has_hidden: bool = True


def cut_runs(pieces: list[Piece], window: int | None, geometry: Geometry) -> list[Run]:
    """Cut a group's tiles into runs of whole segments whose keys and scores stay in cache."""
    num_packed, segment = pieces[0].shape
    matrix = TILE * max(geometry.head_dim, num_packed)
    most = MAX_RUN_SIZE // (geometry.num_kv_heads * matrix)
    runs: list[Run] = []
    num_pieces = len(pieces)
    for tile in range(0, pieces[0].num_tiles, segment):
        while pieces[num_pieces - 1].num_tiles <= tile:
            num_pieces -= 1
        first, _, num_before, _ = runs[-1] if runs else (0, 0, 0, False)
        end = tile + segment
        if num_before == num_pieces and (end - first) * num_pieces <= most:
            runs[-1] = Run(first, end, num_pieces)
        else:
            runs.append(Run(tile, end, num_pieces))
    if window is not None:
        return runs
    return [
        run._replace(has_hidden=any(_is_cut(piece, run, geometry) for piece in pieces))
        for run in runs
    ]


def _is_cut(piece: Piece, run: Run, geometry: Geometry) -> bool:
    """Whether a run has keys behind a piece's first query."""
    query = piece.position + piece.first // geometry.heads_per_kv
    return (piece.first_tile + run.end) * TILE > query + 1


class Index(NamedTuple):
    """Where a group's keys, queries and outputs lie; R pieces, n tiles, U units a tile.

    units_nRGU: of the pool, seen as [N * G * B / unit, unit, D]. queries_RGP, outputs_RGP,
    heads_RGP: row of q, row of out, and head, of each packed row; padding repeats the last one.
    bias_RPnT: 0 where a packed row may see a key, else -inf.
    """

    pieces: list[Piece]
    runs: list[Run]
    units_nRGU: np.ndarray
    queries_RGP: np.ndarray
    outputs_RGP: np.ndarray
    heads_RGP: np.ndarray
    bias_RPnT: np.ndarray


def index_group(
    pieces: list[Piece], block_table_RM: np.ndarray, window: int | None, geometry: Geometry
) -> Index:
    """Index one group."""
    num_packed = pieces[0].shape.num_packed
    columns = np.array([piece[1:] for piece in pieces]).T[:, :, None]  # each [R, 1]
    _, token, position, first, own_packed, *_ = columns
    source_RP = first + np.minimum(np.arange(num_packed), own_packed - 1)
    query_RP = source_RP // geometry.heads_per_kv
    heads_G1 = np.arange(geometry.num_kv_heads)[:, None] * geometry.heads_per_kv
    heads_RGP = heads_G1 + (source_RP - query_RP * geometry.heads_per_kv)[:, None]
    token_R1P = (token + query_RP)[:, None]
    runs = cut_runs(pieces, window, geometry)
    return Index(
        pieces=pieces,
        runs=runs,
        units_nRGU=_units(columns, runs[-1].end, block_table_RM, geometry),
        queries_RGP=token_R1P * geometry.query_stride + heads_RGP,
        outputs_RGP=token_R1P * geometry.num_heads + heads_RGP,
        heads_RGP=heads_RGP,
        bias_RPnT=_bias(columns, position + query_RP, runs[-1].end, window),
    )


def _units(
    columns: np.ndarray, num_tiles: int, block_table_RM: np.ndarray, geometry: Geometry
) -> np.ndarray:
    """units_nRGU of Index; tiles that a piece does not have repeat units that it has."""
    row, *_, first_tile, _, first_key, end = columns
    num_kv_heads, unit, block_size = geometry.num_kv_heads, geometry.unit, geometry.block_size
    tile_nR = np.arange(num_tiles)[:, None] + first_tile[:, 0]
    key_nRU = tile_nR[:, :, None] * TILE + np.arange(0, TILE, unit)
    column_nRU = np.maximum(key_nRU // block_size, first_key // block_size)
    column_nRU = np.minimum(column_nRU, (end - 1) // block_size)
    block_nR1U = block_table_RM[row, column_nRU].astype(np.int64)[:, :, None]
    units_nRGU = block_nR1U * num_kv_heads + np.arange(num_kv_heads)[:, None]
    if block_size == unit:
        return units_nRGU
    return units_nRGU * (block_size // unit) + (key_nRU % block_size // unit)[:, :, None]


def _bias(
    columns: np.ndarray, position_RP: np.ndarray, num_tiles: int, window: int | None
) -> np.ndarray:
    """bias_RPnT of Index."""
    first_tile_R1 = columns[5]
    key_RW = first_tile_R1 * TILE + np.arange(num_tiles * TILE)
    ahead_RPW = key_RW.astype(np.int32)[:, None] - position_RP.astype(np.int32)[:, :, None]
    is_hidden_RPW = ahead_RPW > 0
    if window is not None:
        is_hidden_RPW |= ahead_RPW <= -window
    return np.where(is_hidden_RPW, _HIDDEN, _SEEN).reshape(*position_RP.shape, num_tiles, TILE)
