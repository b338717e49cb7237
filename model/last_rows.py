"""What the layers of a pass end in: the rows that the head reads, and the states that they are."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagedraft.kernels.normed import Normed, Rows
from pagedraft.kernels.rms_norm import rms_norm
from pagedraft.model.batch import StepBatch
from pagedraft.model.kv_cache import KVCache


class LastRows(NamedTuple):
    """Rows after the final norm, which may be yet to be finished, and ``sum_TE`` before it."""

    normed: Rows
    sum_TE: torch.Tensor

    def states(self, norm_weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        """The rows after the norm [T, E], at most one launch away."""
        if isinstance(self.normed, torch.Tensor):
            return self.normed
        return rms_norm(self.sum_TE, norm_weight_E, eps)

    def with_logits(self, batch: StepBatch) -> LastRows | None:
        """Of all tokens' rows those that need logits; None for none."""
        if batch.num_logits == 0:
            return None
        if batch.num_logits == batch.num_tokens:
            return self
        normed, rows_Q = self.normed, batch.logit_rows_Q
        if isinstance(normed, Normed):
            picked: Rows = Normed(normed.rows_TE[rows_Q], normed.squares_TP[rows_Q], normed.eps)
        else:
            picked = normed[rows_Q]
        return LastRows(picked, self.sum_TE[rows_Q])


def keep_states(states_TE: torch.Tensor, batch: StepBatch, cache: KVCache) -> None:
    """Store every token's state at its slot; those of padding go to the null block."""
    assert cache.features_NBE is not None
    cache.features_NBE.flatten(0, 1).index_copy_(0, batch.slots_T, states_TE)
