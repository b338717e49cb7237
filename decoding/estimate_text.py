"""What an estimate is made from: texts that the target wrote, and a model that reads them again."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from pagedraft.decoding.logit_rules import NEUTRAL, LogitRules
from pagedraft.decoding.sequence import Sequence
from pagedraft.model.batch import Span, build_step_batch
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
    """

    def __init__(
        self, model: Transformer, num_tokens: int, kv_dtype: torch.dtype | None = None
    ) -> None:
        num_blocks = 1 + -(-num_tokens // BLOCK_SIZE)
        stored = kv_dtype or model.activation_dtype
        self.model = model
        self.cache = KVCache(model.config, num_blocks, BLOCK_SIZE, stored, model.device)
        self.block_ids = list(range(1, num_blocks))

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
        batch = build_step_batch(
            [Span(token_ids, start, self.block_ids, num_logits)],
            block_size=BLOCK_SIZE,
            device=self.model.device,
            row_multiple=self.model.row_multiple,
        )
        if observe is None:
            return self.model.forward(batch, self.cache)
        return self.model.forward(batch, self.cache, observe)
