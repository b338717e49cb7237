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


# Shared memory for the stages of one program: all of gfx942's, sm_86's less some for the rest.
STAGE_BYTES, STAGE_BYTES_HIP = 96 * 1024, 64 * 1024


@lru_cache(maxsize=256)
def linear_config(
    num_rows: int, num_in: int, num_out: int, element_size: int, is_hip: bool = False
) -> LinearConfig:
    """Return the tile for ``num_rows`` rows; block_i never depends on them (exactness).

    No tile compiles to HGMMA, whose sums may differ from HMMA's: on sm_90 that takes 64 rows and a
    multiple of 4 warps, so 64-row tiles have 2.
    Few rows: 32 outputs a program give 128 programs for 4096 outputs, about one a multiprocessor;
    stages keep 32 KB of weights under way for 16 rows. Two steps a trip where that needs no mask:
    38 to 62 weight bytes a warp instruction on sm_90 for 16 rows, one step gives 31. Two warps for
    32x32, where four would do each other's products in trips of two steps. Thresholds follow from
    offline compiles, not from a GPU run.
    """
    if element_size == 4:
        block, warps, stages = (16 if num_rows <= 16 else 32, 32, 32), 4, 2
    elif num_rows <= 16:
        block, warps, stages = ((16, 32, 64), 2, 6) if num_out <= 8192 else ((16, 64, 64), 2, 4)
    elif num_rows <= 32 or num_in % 16:  # 64-row tiles spill without 16-byte loads
        block, warps, stages = ((32, 32, 64), 2, 6) if num_out <= 8192 else ((32, 64, 64), 4, 3)
    elif num_rows <= 64:
        block, warps, stages = ((64, 32, 64), 2, 4) if num_out <= 8192 else ((64, 64, 64), 2, 3)
    else:  # 64x128 spills without 16-byte stores
        block, warps, stages = (64, 64 if num_out % 16 else 128, 64), 2, 3
    block_t, block_o, block_i = block
    is_pair = element_size == 2 and num_in % (2 * block_i) == 0 and num_rows <= 64
    unroll = 2 if is_pair else 1
    group_t = 1 if num_rows <= block_t else 8
    stage_bytes = (block_t + block_o) * block_i * unroll * element_size
    stages = min(stages, 1 + (STAGE_BYTES_HIP if is_hip else STAGE_BYTES) // stage_bytes)
    return LinearConfig(LinearTile(num_out, num_in, *block, unroll, group_t), warps, stages)
