"""The target drafts for itself: its first layers, then its final norm and head.

They read and write the target's own KV. What they write for drafts lies behind the committed
context, where verification writes the same keys and values again, so there is nothing to catch up
and nothing to roll back.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.drafters.model_loop import DraftRow, draft_tokens, run_model
from pagedraft.decoding.params import check_int
from pagedraft.decoding.sequence import Sequence
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer


class LayersDrafter:
    """Drafts with the first ``num_layers`` layers of the target; None: a third of them.

    A model that was not trained for it agrees with its own first layers rarely. Of the first drafts
    of SmolLM2-135M-Instruct, which has 30 layers, 4 % were accepted with 10 layers, 13 % with 20,
    37 % with 25 and 55 % with 28 (four chat prompts, greedy): less than the layers' share of a
    pass each time.

    last_num_rounds: passes of these layers in the last call of ``propose``.

    Source: Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via
    Self-Speculative Decoding", 2023; Elhoushi et al., "LayerSkip", 2024.
    """

    name = "layers"

    def __init__(
        self, target: Transformer, cache: KVCache, *, num_layers: int | None = None
    ) -> None:
        if num_layers is None:
            num_layers = max(1, len(target.layers) // 3)
        check_int("num_layers", num_layers, 1, len(target.layers))
        self.model = target.first_layers(num_layers)
        self.cache = cache
        self.last_num_rounds = 0

    def propose(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[Proposal]:
        """Draw up to ``num_drafts[i]`` tokens a row; none for a row inside its prompt."""
        self.last_num_rounds = 0
        rows: dict[int, DraftRow] = {}
        for index, (sequence, k) in enumerate(zip(sequences, num_drafts, strict=True)):
            wanted = min(k, self.model.config.max_positions - sequence.num_tokens + 1)
            if wanted > 0 and sequence.num_pending == 1:
                pending = sequence.token_ids[-1:]
                rows[index] = DraftRow(sequence, sequence.num_written, pending, wanted)
        vocab_size = self.model.config.vocab_size
        self.last_num_rounds = draft_tokens(
            partial(run_model, self.model, self.cache), list(rows.values()), vocab_size, vocab_size
        )
        return [
            rows[index].proposal if index in rows else Proposal([])
            for index in range(len(sequences))
        ]

    def on_free(self, sequence: Sequence) -> None:
        """Nothing is kept."""
