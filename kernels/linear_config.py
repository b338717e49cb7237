"""Tiles of the linear kernels: plain functions of shapes, never of what is in the tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearConfig:
    """Tile of one program: BLOCK_T rows x BLOCK_O outputs, BLOCK_I inputs a step."""

    block_t: int
    block_o: int
    block_i: int
    group_t: int
    num_warps: int
    num_stages: int


def linear_config(num_rows: int, num_in: int, num_out: int, element_size: int) -> LinearConfig:
    """Return the tile for ``num_rows`` rows; block_i never depends on them (exactness).

    No tile compiles to HGMMA, whose sums may differ from HMMA's: on sm_90 that takes 64 rows and a
    multiple of 4 warps, so 64-row tiles have 2. At most 64 KB of shared memory (gfx942).
    """
    if element_size == 4:
        return LinearConfig(16 if num_rows <= 16 else 32, 32, 32, 8, 4, 2)
    # 32 outputs a program give 128 programs for 4096 outputs: about one a multiprocessor.
    block_o = 32 if num_out <= 8192 else 64
    if num_rows <= 16:
        return LinearConfig(16, block_o, 64, 1, 4, 7)
    # 64-row tiles spill without 16-byte loads, 64x128 also without 16-byte stores (sm_80, sm_90).
    if num_rows <= 32 or num_in % 16:
        return LinearConfig(32, block_o, 64, 1 if num_rows <= 32 else 8, 4, 5)
    if num_rows <= 64:
        return LinearConfig(64, block_o, 64, 1, 2, 4)
    return LinearConfig(64, 64 if num_out % 16 else 128, 64, 8, 2, 3)
