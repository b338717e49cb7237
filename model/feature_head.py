"""A draft that reads its target's states: one layer, which sees the last token and what the target
made of those before it.

At position t it gets token x_t and f_{t-1}, the target's state at t - 1 after its final norm (zeros
at t = 0): a linear layer makes one vector of the two, a decoder layer with KV of its own and the
final norm make h_t of it. h_t is a guess of f_t, and the target's head turns it into logits of
x_{t+1}. So where the target has not been yet, h_t stands for f_t.

Source: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pagedraft.kernels.linear import linear, pack_linear
from pagedraft.model.batch import Span, StepBatch
from pagedraft.model.config import ModelConfig
from pagedraft.model.head import num_bytes
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer


class FeatureHead(Transformer):
    """The draft of kind "head" (draft_format.py).

    ``weights`` has "fuse" [E, 2 E] besides a Transformer's: columns of the state, then those of the
    token.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, Any], *, exact: bool = True) -> None:
        fuse = weights.pop("fuse")
        super().__init__(config, weights, exact=exact)
        self.fuse = pack_linear(fuse, dtype=self.dtype)
        self.weight_bytes += num_bytes(fuse)

    @property
    def row_multiple(self) -> int:
        """As a Transformer's, of all its linear layers."""
        return math.lcm(super().row_multiple, self.fuse.row_multiple)

    @torch.inference_mode()
    def forward(  # type: ignore[override]  # a head cannot run on tokens alone
        self, batch: StepBatch, cache: KVCache, features_TE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write KV into ``cache``; return fp32 logits [num_logits, V] and states [num_logits, E].

        features_TE: for each token, padding too, the state at the position before it, in the
            activations' dtype.
        """
        token_TE = self._embed(batch)
        if features_TE.shape != token_TE.shape or features_TE.dtype != token_TE.dtype:
            raise ValueError(
                f"features_TE: expected {token_TE.dtype} {tuple(token_TE.shape)}, "
                f"got {features_TE.dtype} {tuple(features_TE.shape)}"
            )
        both_TD = torch.cat((features_TE, token_TE), dim=1)
        fused_TE = linear(both_TD, self.fuse, exact=self.exact)
        rows = self._run_layers(fused_TE, batch, cache)
        logits_QV = self._logits(rows, batch)
        if rows is None:
            return logits_QV, fused_TE[:0]
        return logits_QV, self._states(rows)[: batch.num_logits]


def states_before(cache: KVCache, spans: Sequence[Span], num_rows: int) -> torch.Tensor:
    """What the target left for the tokens of ``spans``: the state before each, zeros at position 0.

    cache: the target's, which keeps states. num_rows: of the result [num_rows, E]; those behind the
    last token hold anything.
    """
    features_NBE = check_features(cache)
    slots_T = np.zeros(num_rows, dtype=np.int64)
    first_rows, row, size = [], 0, cache.block_size
    for span in spans:
        length = len(span.token_ids)
        before_t = np.arange(span.start - 1, span.start - 1 + length)
        if span.start == 0:
            first_rows.append(row)
            before_t[0] = 0
        first_block = before_t[0] // size
        blocks = np.array(span.block_ids[first_block : before_t[-1] // size + 1])
        slots_T[row : row + length] = blocks[before_t // size - first_block] * size
        slots_T[row : row + length] += before_t % size
        row += length
    device = features_NBE.device
    states_TE = features_NBE.flatten(0, 1)[torch.from_numpy(slots_T).to(device, non_blocking=True)]
    if first_rows:
        states_TE[torch.tensor(first_rows).to(device, non_blocking=True)] = 0.0
    return states_TE


def check_features(cache: KVCache) -> torch.Tensor:
    """The states of a target's pool; ValueError where it keeps none."""
    if cache.features_NBE is None:
        raise ValueError(
            "cache: a feature head drafts from its target's states, and the target's pool keeps "
            "none (features_dtype)"
        )
    return cache.features_NBE
