"""What the layers of a step share in CPU attention: which queries, pool units and masks, buffers.

The query heads that share a KV head are packed into rows: row i of a span is query i // (H / G),
head i % (H / G). Spans are cut into pieces; pieces of one padded row count run as a group, a batch
of matrices, longest contexts first. Keys are cut into tiles at absolute multiples of TILE, so that
a key's place in its products depends on its position only. The matrices that have an i-th tile are
the first ones of their batch: nobody is padded to another row's context.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pagedraft.kernels.paged_attention_tiles import TILE

MAX_SCORES = 2**19  # of a group, to keep them in cache
LONG_ROWS = 64  # packed rows of a piece, whatever its context: else keys are gathered too often


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


class Piece(NamedTuple):
    """Packed query rows of one row of the batch that are attended together.

    row: of the block table; token: first of its span; position: of that token in the context.
    first, num_packed, size: first packed row, how many, and that padded.
    first_tile, num_tiles: of the keys that any of them sees.
    first_key, end: keys that any query of the whole span sees; other slots may hold anything.
    """

    row: int
    token: int
    position: int
    first: int
    num_packed: int
    size: int
    first_tile: int
    num_tiles: int
    first_key: int
    end: int


class Run(NamedTuple):
    """Tiles first to end of a group, which its first ``num_pieces`` pieces have."""

    first: int
    end: int
    num_pieces: int


class Index(NamedTuple):
    """Where a group's keys, queries and outputs lie; R pieces, n tiles, U units a tile.

    units_nRGU: of the pool, seen as [N * G * B / unit, unit, D].
    queries_RGP, heads_RGP: row of q, and head, of each packed row; padding repeats the last one.
    bias_RPnT: 0 where a packed row may see a key, else -inf.
    packed, outputs: packed rows that are no padding, and their (token, head).
    dead: (tile, piece, first key, end) inside tiles: keys outside a row's context or window.
    """

    pieces: list[Piece]
    runs: list[Run]
    units_nRGU: np.ndarray
    queries_RGP: np.ndarray
    heads_RGP: np.ndarray
    bias_RPnT: np.ndarray
    packed: np.ndarray
    outputs: np.ndarray
    dead: list[tuple[int, int, int, int]]


def cut_pieces(
    starts: Sequence[int],
    kv_lens: Sequence[int],
    window: int | None,
    geometry: Geometry,
    sizes: Sequence[int],
) -> list[Piece]:
    """Cut every row's packed queries into pieces of at most the largest of ``sizes`` rows.

    Rows without queries or without context give none.
    """
    heads = geometry.heads_per_kv
    pieces = []
    for row, end in enumerate(kv_lens):
        token, span = starts[row], starts[row + 1] - starts[row]
        position = end - span
        first_key = 0 if window is None else max(0, position - window + 1)
        step = _piece_rows(end - first_key, geometry, sizes)
        for first in range(0, span * heads if end else 0, step):
            num_packed = min(step, span * heads - first)
            size = sizes[bisect_left(sizes, num_packed)]
            query, last_query = first // heads, (first + num_packed - 1) // heads
            own_key = 0 if window is None else max(0, position + query - window + 1)
            first_tile = own_key // TILE
            num_tiles = (position + last_query) // TILE + 1 - first_tile
            own = (first, num_packed, size, first_tile, num_tiles)
            pieces.append(Piece(row, token, position, *own, first_key, end))
    return pieces


def _piece_rows(num_keys: int, geometry: Geometry, sizes: Sequence[int]) -> int:
    """Packed rows of a piece: whole queries if they fit, fewer for long contexts."""
    num_tiles = num_keys // TILE + 2
    most = max(LONG_ROWS, MAX_SCORES // (geometry.num_kv_heads * num_tiles * TILE))
    size = max((size for size in sizes if size <= most), default=sizes[0])
    heads = geometry.heads_per_kv
    return size // heads * heads or size


def group_pieces(pieces: list[Piece], num_kv_heads: int) -> list[list[Piece]]:
    """Group pieces of one size, longest first, at most MAX_SCORES scores a group."""
    groups: list[list[Piece]] = []
    size = limit = 0
    for piece in sorted(pieces, key=lambda p: (p.size, p.num_tiles), reverse=True):
        if piece.size == size and len(groups[-1]) < limit:
            groups[-1].append(piece)
        else:
            size = piece.size
            limit = MAX_SCORES // (num_kv_heads * size * piece.num_tiles * TILE)
            groups.append([piece])
    return groups


def cut_runs(num_tiles: Sequence[int], max_matrices: int) -> list[Run]:
    """Cut the tiles of pieces (most tiles first) into runs of at most so many matrices, or 1."""
    runs: list[Run] = []
    num_pieces = len(num_tiles)
    for tile in range(num_tiles[0]):
        while num_tiles[num_pieces - 1] <= tile:
            num_pieces -= 1
        last = runs[-1] if runs else Run(0, 0, 0)
        if last.num_pieces == num_pieces and (tile + 1 - last.first) * num_pieces <= max_matrices:
            runs[-1] = Run(last.first, tile + 1, num_pieces)
        else:
            runs.append(Run(tile, tile + 1, num_pieces))
    return runs


def index_group(
    pieces: list[Piece],
    block_table_RM: np.ndarray,
    window: int | None,
    geometry: Geometry,
    max_matrices: int,
) -> Index:
    """Index one group; ``max_matrices`` (of one KV head) bounds what a run gathers at once."""
    heads = geometry.heads_per_kv
    columns = np.array(pieces).T[:, :, None]  # each [R, 1]
    row, token, position, first, num_packed, _, first_tile, num_tiles, first_key, end = columns
    heads_G1 = np.arange(geometry.num_kv_heads)[:, None]
    packed_1P = np.arange(pieces[0].size)[None]
    source_RP = first + np.minimum(packed_1P, num_packed - 1)
    token_RP = token + source_RP // heads
    heads_RGP = heads_G1 * heads + (source_RP % heads)[:, None]
    outputs_RGP = token_RP[:, None] * geometry.num_heads + heads_RGP
    packed = np.flatnonzero(np.broadcast_to((packed_1P < num_packed)[:, None], outputs_RGP.shape))
    key_RW = first_tile * TILE + np.arange(pieces[0].num_tiles * TILE)
    ahead_RPW = key_RW[:, None] - (position + source_RP // heads)[:, :, None]
    is_hidden_RPW = ahead_RPW > 0
    if window is not None:
        is_hidden_RPW |= ahead_RPW <= -window
    bias_RPW = np.where(is_hidden_RPW, np.float32("-inf"), np.float32(0.0))
    start_Rt = key_RW[:, :: geometry.unit]  # first key of each unit
    column_Rt = np.clip(
        start_Rt // geometry.block_size,
        first_key // geometry.block_size,
        (end - 1) // geometry.block_size,
    )
    units_per_block = geometry.block_size // geometry.unit
    part_Rt = start_Rt % geometry.block_size // geometry.unit
    block_R1t = block_table_RM[row, column_Rt].astype(np.int64)[:, None]
    units_RGt = (block_R1t * geometry.num_kv_heads + heads_G1) * units_per_block
    units_RGt += part_Rt[:, None]
    return Index(
        pieces=pieces,
        runs=cut_runs(num_tiles[:, 0].tolist(), max_matrices),
        units_nRGU=np.moveaxis(
            units_RGt.reshape(*units_RGt.shape[:2], -1, TILE // geometry.unit), 2, 0
        ),
        queries_RGP=token_RP[:, None] * geometry.query_stride + heads_RGP,
        heads_RGP=heads_RGP,
        bias_RPnT=bias_RPW.reshape(*bias_RPW.shape[:2], -1, TILE),
        packed=packed,
        outputs=outputs_RGP.reshape(-1)[packed],
        dead=[edge for r, piece in enumerate(pieces) for edge in _dead_edges(r, piece)],
    )


def _dead_edges(index: int, piece: Piece) -> list[tuple[int, int, int, int]]:
    """(tile, piece, first key, end) of a piece's keys that no query of its row sees."""
    edges = []
    begin = piece.first_key - piece.first_tile * TILE
    if begin > 0:
        edges.append((0, index, 0, begin))
    last = piece.num_tiles - 1
    end = piece.end - (piece.first_tile + last) * TILE
    if end < TILE:
        edges.append((last, index, end, TILE))
    return edges
