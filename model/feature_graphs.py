"""FeatureHeadRunner: a feature head's passes, replayed from CUDA graphs (graphs.py)."""

from __future__ import annotations

from typing import Any

import torch

from pagedraft.model.batch import StepBatch
from pagedraft.model.feature_head import FeatureHead
from pagedraft.model.graphs import GraphRunner, Run, on_device
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.padding import StepShape


class FeatureHeadRunner(GraphRunner):
    """Takes the place of ``FeatureHead.forward``.

    States go in and come out through memory that all graphs share, as logits do: read or copy both
    before the next pass.
    """

    target: FeatureHead

    def __init__(self, target: FeatureHead, *args: Any, **options: Any) -> None:
        super().__init__(target, *args, **options)
        most = max((shape.num_tokens for shape in self.shapes), default=0)
        sizes = 2, most, target.config.embed_dim
        # Zeros: graphs read the rows of padding, too.
        self._features_TE, self._states_TE = torch.zeros(
            sizes, dtype=target.activation_dtype, device=target.device
        )

    def forward(  # type: ignore[override]  # as FeatureHead's
        self, batch: StepBatch, cache: KVCache | None, features_TE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``FeatureHead.forward``."""
        self._check_cache(cache)
        recorded = self._pick(batch)
        if recorded is None:
            self.num_eager += 1
            moved = on_device(batch, self.device)
            return self.target.forward(moved, self.cache, features_TE)
        num_tokens = batch.num_tokens
        self._features_TE[:num_tokens] = features_TE[:num_tokens]
        logits_QV = self._replay(recorded, batch)
        if batch.num_logits in (0, num_tokens):
            return logits_QV, self._states_TE[: batch.num_logits]
        return logits_QV, self._states_TE[recorded.inputs.logit_rows_Q[: batch.num_logits]]

    def _pass_of(self, shape: StepShape, inputs: StepBatch, logits_TV: torch.Tensor) -> Run:
        features_TE = self._features_TE[: shape.num_tokens]
        states_TE = self._states_TE[: shape.num_tokens]

        def run() -> None:
            found_TV, found_TE = self.target.forward(inputs, self.cache, features_TE)
            logits_TV.copy_(found_TV)
            states_TE.copy_(found_TE)

        return run
