"""What an estimate is made from: texts that the target wrote, and a model that reads them again."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from pagedraft.decoding.logit_rules import NEUTRAL, LogitRules
from pagedraft.decoding.sequence import Sequence
from pagedraft.model.batch import Span, StepBatch, build_step_batch
from pagedraft.model.feature_head import FeatureHead, states_before
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Observe, Transformer

BLOCK_SIZE = 64
CHUNK_TOKENS = 512  # fed at once where no logits are needed
LOGIT_ROWS = 64  # fed at once where all are: [64, V] fp32 is 12 MB for 49k tokens


@dataclass(frozen=True)
class Text:
    """A prompt, and what the target drew after it.

    max_tokens: where the output would have ended without a stop; at least its length.
    temperature, seed, rules: of the draws, as in Sequence.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    rules: LogitRules = NEUTRAL

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("prompt_ids: expected at least one token, got none")
        if self.max_tokens < len(self.output_ids):
            raise ValueError(
                f"max_tokens: expected at least the {len(self.output_ids)} tokens of the output, "
                f"got {self.max_tokens}"
            )

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output."""
        return [*self.prompt_ids, *self.output_ids]

    def sequence(self, num_output: int) -> Sequence:
        """The request when ``num_output`` tokens of its output were drawn."""
        return Sequence(
            token_ids=[*self.prompt_ids, *self.output_ids[:num_output]],
            num_prompt=len(self.prompt_ids),
            temperature=self.temperature,
            seed=self.seed,
            rules=self.rules,
        )


class Reader:
    """A model with a pool for one sequence of ``num_tokens`` tokens.

    kv_dtype: what the pool stores; None for the dtype of the model's activations.
    keeps_states: the pool keeps the states that a feature head reads.
    target: for a feature head, whose states it reads: that reader has read the same tokens before.
    num_places: drafts of a pass that a feature head is to be asked for at every position.

    states_QE: a feature head's of the last call of ``read``. scratch_ids: blocks for the KV of
    LOGIT_ROWS passes.
    """

    def __init__(
        self,
        model: Transformer,
        num_tokens: int,
        kv_dtype: torch.dtype | None = None,
        *,
        keeps_states: bool = False,
        target: Reader | None = None,
        num_places: int = 1,
    ) -> None:
        end = 1 + -(-num_tokens // BLOCK_SIZE)
        num_scratch = 0
        if isinstance(model, FeatureHead) and num_places > 1:
            # The KV of n guesses begins anywhere in a block.
            num_scratch = LOGIT_ROWS * (1 + -(-(num_places - 1) // BLOCK_SIZE))
        self.model = model
        self.target = target
        self.cache = KVCache(
            model.config,
            end + num_scratch,
            BLOCK_SIZE,
            kv_dtype or model.activation_dtype,
            model.device,
            features_dtype=model.activation_dtype if keeps_states else None,
        )
        self.block_ids = list(range(1, end))
        self.scratch_ids = list(range(end, end + num_scratch))
        self.states_QE: torch.Tensor | None = None

    def skip(self, token_ids: Seq[int]) -> None:
        """Write the KV of a context from its first token on."""
        for start in range(0, len(token_ids), CHUNK_TOKENS):
            self._forward(token_ids[start : start + CHUNK_TOKENS], start, 0)

    def read(self, token_ids: Seq[int], start: int, observe: Observe | None = None) -> torch.Tensor:
        """Feed tokens at positions from ``start`` on; fp32 logits [tokens, V] after each.

        observe: see ``Transformer.forward``.
        """
        return self._forward(token_ids, start, len(token_ids), observe)

    def _forward(
        self, token_ids: Seq[int], start: int, num_logits: int, observe: Observe | None = None
    ) -> torch.Tensor:
        span = Span(token_ids, start, self.block_ids, num_logits)
        batch = build_step_batch(
            [span],
            block_size=BLOCK_SIZE,
            device=self.model.device,
            row_multiple=self.model.row_multiple,
        )
        if isinstance(self.model, FeatureHead):
            return self._forward_head(self.model, batch, span)
        if observe is None:
            return self.model.forward(batch, self.cache)
        return self.model.forward(batch, self.cache, observe)

    def _forward_head(self, model: FeatureHead, batch: StepBatch, span: Span) -> torch.Tensor:
        if self.target is None:
            raise ValueError("target: expected a reader of the states that a feature head reads")
        before_TE = states_before(self.target.cache, [span], batch.tokens_T.shape[0])
        logits_QV, self.states_QE = model.forward(batch, self.cache, before_TE)
        return logits_QV
