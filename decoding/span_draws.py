"""What the rows of a step draw with, laid out by span: a request's numbers are gathered once.

The requests of a step are mostly those of the step before, and how they draw is fixed for their
life, so their numbers are kept from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch

from pagedraft.decoding.logit_rules import NEUTRAL
from pagedraft.decoding.sequence import Sequence
from pagedraft.kernels.sample_batch import SampleBatch


def changes_logits(sequence: Sequence) -> bool:
    """Whether its logits are edited in place, by what is before them, ahead of the draw."""
    return bool(sequence.processors) or sequence.rules.changes_logits


class _Numbers(NamedTuple):
    """How some sequences draw. by_field: arrays [R] by the field of SampleBatch that has them.

    is_edited: whether any of them ``changes_logits``.
    """

    sequences: list[Sequence]
    by_field: dict[str, np.ndarray]
    is_edited: bool


class SpanDraws:
    """Makes the SampleBatch of a step's spans; remembers the sequences of the last one."""

    def __init__(self) -> None:
        self._numbers = _Numbers([], {}, False)
        self._tensors: dict[torch.device, dict[str, torch.Tensor]] = {}  # of the same numbers

    def is_edited(self, sequences: Seq[Sequence]) -> bool:
        """Whether any of them ``changes_logits``: then its rows need more than ``batch`` gives."""
        return self._of(sequences).is_edited

    def batch(
        self, device: torch.device, sequences: Seq[Sequence], lengths_R: np.ndarray | None = None
    ) -> SampleBatch:
        """For ``lengths_R[r]`` rows of logits of each sequence, from its next position on.

        lengths_R: None is one row each.
        """
        by_field = self._of(sequences).by_field
        first_R = np.array([len(sequence.token_ids) for sequence in sequences])
        if lengths_R is None:
            fields: dict[str, Any] = dict(self._on(device))
            return SampleBatch(position_Q=_moved(first_R, device), **fields)
        first_R -= lengths_R.cumsum() - lengths_R
        row_Q = np.arange(len(first_R)).repeat(lengths_R)
        fields = {name: _moved(values_R[row_Q], device) for name, values_R in by_field.items()}
        position_Q = first_R[row_Q] + np.arange(len(row_Q))
        return SampleBatch(position_Q=_moved(position_Q, device), **fields)

    def _of(self, sequences: Seq[Sequence]) -> _Numbers:
        if self._numbers.sequences != sequences:  # compares identities
            self._numbers = _updated(self._numbers, [*sequences])
            self._tensors.clear()
        return self._numbers

    def _on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The numbers as tensors; only read, so one copy serves the steps of the same sequences."""
        tensors = self._tensors.get(device)
        if tensors is None:
            by_field = self._numbers.by_field
            tensors = {name: _moved(values, device) for name, values in by_field.items()}
            self._tensors[device] = tensors
        return tensors


def _updated(known: _Numbers, sequences: list[Sequence]) -> _Numbers:
    """``_gather(sequences)``, from what is known of those that kept their places where possible."""
    before = zip_longest(sequences, known.sequences[: len(sequences)])
    new = [row for row, (sequence, old) in enumerate(before) if sequence is not old]
    of_new = _gather([sequences[row] for row in new])
    if known.is_edited or known.by_field.keys() != of_new.by_field.keys():
        return _gather(sequences)
    by_field = {}
    for name, values_n in of_new.by_field.items():
        values_R = by_field[name] = np.resize(known.by_field[name], len(sequences))
        values_R[new] = values_n
    return _Numbers(sequences, by_field, of_new.is_edited)


def _gather(sequences: list[Sequence]) -> _Numbers:
    """Fields that are neutral for all sequences are left out."""
    rules = [sequence.rules for sequence in sequences]
    by_field: dict[str, np.ndarray] = {
        "temperature_Q": np.array([s.temperature for s in sequences], np.float32),
        "seed_Q": np.array([s.signed_seed for s in sequences], np.int64),
    }
    if any(row is not NEUTRAL and row.has_cut for row in rules):
        by_field["top_k_Q"] = np.array([row.top_k for row in rules], np.int32)
        by_field["top_p_Q"] = np.array([row.top_p for row in rules], np.float32)
        by_field["min_p_Q"] = np.array([row.min_p for row in rules], np.float32)
    if any(sequence.sample_index for sequence in sequences):
        by_field["sample_index_Q"] = np.array([s.sample_index for s in sequences], np.int64)
    return _Numbers(sequences, by_field, any(map(changes_logits, sequences)))


def _moved(values: Any, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
