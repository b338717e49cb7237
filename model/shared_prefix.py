"""Rows of a step that begin with the same blocks: found once a step, on the host.

Blocks are shared by forks and by prefix-cache hits. The attention kernels read the keys of such a
run once for all its rows, where that pays (paged_attention_launch.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pagedraft.kernels.paged_attention_config import SEGMENT
from pagedraft.kernels.paged_attention_launch import SharedPrefixes


class Run(NamedTuple):
    """Neighbouring rows ``first`` to ``end`` whose first ``num_keys`` keys are the same."""

    first: int
    end: int
    num_keys: int

    @property
    def num_saved_keys(self) -> int:
        """Keys that need not be read again."""
        return (self.end - self.first - 1) * self.num_keys


def find_runs(
    block_ids: Sequence[Sequence[int]], num_cached: Sequence[int], block_size: int
) -> list[Run]:
    """Cut the rows into runs, in order; each is extended while that saves more keys.

    block_ids: of each row. num_cached: tokens of each row that lie before its first query; later
    ones are no prefix of all its queries. Shared keys count in whole segments.
    """
    return _runs(
        num_cached, lambda first, row: _common_keys(block_ids[first], block_ids[row], block_size)
    )


def runs_of(num_cached: Sequence[int], common_R: Sequence[int]) -> list[Run]:
    """``find_runs`` where the keys that each row shares with the one before it are known.

    Three rows count as sharing what each shares with the next, which is all they share but for rare
    cases.
    """
    return _runs(num_cached, lambda first, row: min(common_R[first + 1 : row + 1]))


def _runs(num_cached: Sequence[int], common_keys: Callable[[int, int], int]) -> list[Run]:
    """common_keys(first, row): of the blocks that two rows of a run share."""
    runs: list[Run] = []
    for row in range(len(num_cached)):
        if runs:
            run = runs[-1]
            known = num_cached[run.first] if run.end - run.first == 1 else run.num_keys
            common = common_keys(run.first, row)
            common = min(common, known, num_cached[row]) // SEGMENT * SEGMENT
            longer = Run(run.first, row + 1, common)
            if longer.num_saved_keys > run.num_saved_keys:
                runs[-1] = longer
                continue
        runs.append(Run(row, row + 1, 0))
    return runs


def _common_keys(a: Sequence[int], b: Sequence[int], block_size: int) -> int:
    """Keys in the leading blocks that two rows share."""
    length = min(len(a), len(b))
    if not length or a[0] != b[0]:
        return 0
    differing = np.flatnonzero(np.asarray(a[:length]) != np.asarray(b[:length]))
    return int(differing[0] if len(differing) else length) * block_size


def shared_prefixes(
    block_table_RM: np.ndarray,
    query_starts_R1: np.ndarray,
    runs: Sequence[Run],
    device: torch.device,
) -> SharedPrefixes | None:
    """Lay the runs out for the kernels; None if no rows share anything."""
    if not any(run.num_keys for run in runs):
        return None
    firsts = [run.first for run in runs]
    starts_P1 = query_starts_R1[[*firsts, len(query_starts_R1) - 1]]
    num_keys_P = np.array([run.num_keys for run in runs])
    rows_a_run = [run.end - run.first for run in runs]

    def to_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(device, non_blocking=True)

    return SharedPrefixes(
        query_starts_P1=to_device(starts_P1),
        num_keys_P=to_device(num_keys_P),
        num_keys_R=to_device(np.repeat(num_keys_P, rows_a_run)),
        kv_lens_P=to_device(num_keys_P + np.diff(starts_P1)),
        block_table_PM=to_device(block_table_RM[firsts]),
        max_query_len=int(np.diff(starts_P1).max()),
        max_keys=int(num_keys_P.max()),
        num_saved_keys=sum(run.num_saved_keys for run in runs),
    )
