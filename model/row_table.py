"""RowTable: the block table of the running requests, kept on the device and updated in place.

A step changes few entries: a row gets a block when its context crosses into one. So no step lays
out a whole table, and what one costs does not grow with contexts. Rows stay dense: a row that
leaves is replaced by the last one.

**Units**: entries are block ids, columns are blocks of a context in order. Entries right of what a
row has set are stale and may be anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class RowTable:
    """int32 [max_rows, max_blocks] on ``device``, and the same on the host.

    num_rows: rows in use, the first ones. num_set: how many entries of each row are set.
    host_RM, device_RM: the whole tables; that of the device as ``on_device`` left it.

    On a CPU both are one memory. Elsewhere changes are collected and moved by ``on_device``.
    """

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self.num_rows = 0
        self.host_RM = np.zeros((max_rows, max_blocks), dtype=np.int32)
        self.num_set = [0] * max_rows
        self._is_host = device.type == "cpu"
        self.device_RM = torch.from_numpy(self.host_RM)
        if not self._is_host:
            self.device_RM = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._changes: list[tuple[int, int, int]] = []  # row, first column, end

    def join(self) -> int:
        """Add a row without blocks; return its index."""
        if self.num_rows == len(self.num_set):
            raise ValueError(f"rows: expected at most {self.num_rows}")
        row = self.num_rows
        self.num_set[row] = 0
        self.num_rows += 1
        return row

    def leave(self, row: int) -> None:
        """Drop a row; the last one takes its place."""
        last = self.num_rows - 1
        if not 0 <= row <= last:
            raise ValueError(f"row: expected 0 to {last}, got {row}")
        count = self.num_set[row] = self.num_set[last]
        if row != last:
            self.host_RM[row, :count] = self.host_RM[last, :count]
            self._note(row, 0, count)
        self.num_rows = last

    def extend(self, row: int, block_ids: Sequence[int]) -> None:
        """Set what ``block_ids``, all blocks of the row, has more than the row had before.

        With fewer than before they are others: all are set.
        """
        first, end = self.num_set[row], len(block_ids)
        if end < first:
            first = 0
        if end != self.num_set[row]:
            self.host_RM[row, first:end] = block_ids[first:]
            self.num_set[row] = end
            self._note(row, first, end)

    def on_device(self, num_columns: int) -> torch.Tensor:
        """The first columns of all rows, as the steps launched from here on shall see them."""
        if self._changes:
            self._flush()
        return self.device_RM[: self.num_rows, :num_columns]

    def _note(self, row: int, first: int, end: int) -> None:
        if not self._is_host:
            self._changes.append((row, first, end))

    def _flush(self) -> None:
        """Move the changed entries in one copy and set them in one launch."""
        width = self.host_RM.shape[1]
        places = np.concatenate(
            [np.arange(row * width + first, row * width + end) for row, first, end in self._changes]
        )
        self._changes.clear()
        both = np.stack((places, self.host_RM.reshape(-1)[places]))
        place_n, value_n = torch.from_numpy(both).to(self.device_RM.device, non_blocking=True)
        self.device_RM.view(-1)[place_n] = value_n.int()
