"""Tiles of the linear kernels: plain functions of shapes, never of what is in the tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import triton

from pagedraft.kernels.normed import SQUARE_COLUMNS


@dataclass(frozen=True)
class LinearTile:
    """What the compiler must know: sizes of the weight and of one program's tile.

    num_out, num_in: rows and columns of the weight; block_t x block_o: rows of x x rows of the
    weight that a program multiplies, block_i inputs a step; unroll: steps a trip of the loop;
    group_t: row tiles that follow one another on one weight tile, 1 where there is one row tile.
    """

    num_out: int
    num_in: int
    block_t: int
    block_o: int
    block_i: int
    unroll: int
    group_t: int

    @property
    def num_tiles_o(self) -> int:
        """Tiles over the rows of the weight."""
        return triton.cdiv(self.num_out, self.block_o)

    @property
    def num_p(self) -> int:
        """Sums of squares of a normed row of ``num_in`` columns."""
        return triton.cdiv(self.num_in, SQUARE_COLUMNS)

    @property
    def levels_p(self) -> int:
        """log2 of that, rounded up: how often halving adds them."""
        return (self.num_p - 1).bit_length()


class LinearConfig(NamedTuple):
    """Tile and compile options of one launch."""

    tile: LinearTile
    num_warps: int
    num_stages: int

    @property
    def num_trips(self) -> int:
        """Trips of the loop over the inputs."""
        return triton.cdiv(self.tile.num_in, self.tile.block_i * self.tile.unroll)


@lru_cache(maxsize=256)
def _config(
    num_in: int,
    num_out: int,
    block: tuple[int, int, int],
    group_t: int,
    unroll: int,
    num_warps: int,
    num_stages: int,
) -> LinearConfig:
    return LinearConfig(LinearTile(num_out, num_in, *block, unroll, group_t), num_warps, num_stages)


def linear_config(num_rows: int, num_in: int, num_out: int, element_size: int) -> LinearConfig:
    """Return the tile for ``num_rows`` rows; block_i never depends on them (exactness).

    No tile compiles to HGMMA, whose sums may differ from HMMA's: on sm_90 that takes 64 rows and a
    multiple of 4 warps, so 64-row tiles have 2. At most 64 KB of shared memory (gfx942).
    Few rows: 32 outputs a program give 128 programs for 4096 outputs, about one a multiprocessor;
    two steps a trip where that needs no mask, for fewer instructions a weight byte (KERNELS.md);
    stages keep 32 KB of weights under way. Thresholds follow from offline compiles, not from a GPU
    run.
    """
    sizes = num_in, num_out
    if element_size == 4:
        block_t = 16 if num_rows <= 16 else 32
        return _config(*sizes, (block_t, 32, 32), 1 if num_rows <= block_t else 8, 1, 4, 2)
    block_o = 32 if num_out <= 8192 else 64
    unroll = 2 if num_in % 128 == 0 else 1
    if num_rows <= 16:
        warps, stages = (2, 6) if block_o == 32 else (4, 4)
        return _config(*sizes, (16, block_o, 64), 1, unroll, warps, stages)
    # 64-row tiles spill without 16-byte loads, 64x128 also without 16-byte stores (sm_80, sm_90).
    if num_rows <= 32 or num_in % 16:
        group_t = 1 if num_rows <= 32 else 8
        return _config(*sizes, (32, block_o, 64), group_t, unroll, 4, 5 if block_o == 32 else 3)
    if num_rows <= 64:
        return _config(*sizes, (64, block_o, 64), 1, 1, 2, 6 if block_o == 32 else 4)
    return _config(*sizes, (64, 64 if num_out % 16 else 128, 64), 8, 1, 2, 3)
