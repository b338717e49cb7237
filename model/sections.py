"""Sections: several arrays in one piece of memory, so that one copy moves them all.

Each begins at a multiple of ALIGN bytes, as a tensor of its own would, so that kernels compiled for
aligned pointers take them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch

ALIGN = 16  # bytes

_NUMPY = {torch.int64: np.int64, torch.int32: np.int32}


class Sections:
    """Where arrays lie, one after another. sections: the dtype and number of entries of each.

    num_bytes: of all of them.
    """

    def __init__(self, sections: Iterable[tuple[torch.dtype, int]]) -> None:
        self.num_bytes = 0
        self._places: list[tuple[int, int, torch.dtype]] = []
        for dtype, size in sections:
            first, end = self.num_bytes, self.num_bytes + dtype.itemsize * size
            self._places.append((first, end, dtype))
            self.num_bytes = -(-end // ALIGN) * ALIGN

    def tensors(self, memory_x: torch.Tensor) -> list[torch.Tensor]:
        """The arrays in ``memory_x``, uint8, as tensors."""
        return [memory_x[first:end].view(dtype) for first, end, dtype in self._places]

    def arrays(self, memory_x: np.ndarray) -> list[np.ndarray]:
        """The arrays in ``memory_x``, uint8, on the host."""
        return [memory_x[first:end].view(_NUMPY[dtype]) for first, end, dtype in self._places]

    def moved(
        self, memory_x: np.ndarray, arrays: Sequence[np.ndarray], device: torch.device
    ) -> list[torch.Tensor]:
        """``arrays`` of ``memory_x`` on ``device``: the same memory on the CPU, else one copy."""
        if device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        return self.tensors(torch.from_numpy(memory_x).to(device, non_blocking=True))


@lru_cache(maxsize=256)  # the sizes of steps recur
def step_sections(
    num_tokens: int, num_rows: int, num_logits: int, num_columns: int = 0
) -> Sections:
    """A step's inputs: tokens, positions, slots, logit rows, starts, lengths and block table.

    num_columns: 0 leaves the block table without entries.
    """
    longs = [(torch.int64, size) for size in (num_tokens, num_tokens, num_tokens, num_logits)]
    ints = [(torch.int32, size) for size in (num_rows + 1, num_rows, num_rows * num_columns)]
    return Sections(longs + ints)
