"""A second, smaller model drafts: its whole k-step loop runs batched over the sequences.

The draft model has pool tensors of its own, addressed by the target's block tables: one allocator
and one rollback serve both.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.drafters.model_loop import DraftRow, draft_tokens, run_model
from pagedraft.decoding.sequence import Sequence
from pagedraft.model.config import ModelConfig
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer


class DraftModelDrafter:
    """Drafts with a model that speaks the target's vocabulary.

    catch_up_tokens: most tokens a call may feed beyond one a row, to write draft KV that is missing
        (a new prompt, preemption, full acceptance). A row that needs more than is left catches up
        partly and proposes nothing in this call. Catching up is part of the first pass.
    last_num_rounds: passes of the draft model in the last call of ``propose``.
    """

    name = "draft"

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        target_vocab_size: int,
        catch_up_tokens: int = 512,
    ) -> None:
        self.model = model
        self.cache = cache
        self.target_vocab_size = target_vocab_size
        self.catch_up_tokens = catch_up_tokens
        self.last_num_rounds = 0

    def propose(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[Proposal]:
        """Draw up to ``num_drafts[i]`` tokens a row, each from its sequence's own distribution.

        Under the match rule with the noise that the target will use. A row ends where the draft
        model has no more positions.
        """
        rows = catching_up(self.model.config, sequences, num_drafts, self.catch_up_tokens)
        self.last_num_rounds = 0
        self.last_num_rounds = draft_tokens(
            partial(run_model, self.model, self.cache),
            list(rows.values()),
            self.model.config.vocab_size,
            self.target_vocab_size,
        )
        for row in rows.values():
            row.sequence.num_draft_written = row.start
        return [
            rows[index].proposal if index in rows else Proposal([])
            for index in range(len(sequences))
        ]

    def on_free(self, sequence: Sequence) -> None:
        """Nothing is kept but ``num_draft_written``, which the sequence itself drops."""


def catching_up(
    config: ModelConfig, sequences: Seq[Sequence], num_drafts: Seq[int], catch_up_tokens: int
) -> dict[int, DraftRow]:
    """The rows that draft or catch up, by their index in the batch.

    config: of the drafting model. catch_up_tokens: see DraftModelDrafter.
    """
    rows: dict[int, DraftRow] = {}
    left = catch_up_tokens
    for index, (sequence, k) in enumerate(zip(sequences, num_drafts, strict=True)):
        # The pass that draws draft i has read i - 1 drafts.
        wanted = min(k, config.max_positions - sequence.num_tokens + 1)
        start = min(sequence.num_draft_written, sequence.num_tokens - 1)
        feed = sequence.token_ids[start : start + left + 1]
        if wanted <= 0 or max(feed) >= config.vocab_size:
            continue  # no positions, or a token that the draft model cannot read
        is_ready = start + len(feed) == sequence.num_tokens
        if not is_ready:
            feed, wanted = feed[:left], 0
        if feed:
            rows[index] = DraftRow(sequence, start, feed, wanted)
            left -= len(feed) - is_ready
    return rows


def check_vocabularies(draft: Transformer, target: Transformer) -> None:
    """Raise ValueError unless draft and target may share token ids.

    Sizes may differ by padding (multiples of 128 above the tokenizer's size); anything more means
    different tokenizers.
    """
    draft_size, target_size = draft.config.vocab_size, target.config.vocab_size
    if abs(draft_size - target_size) >= 1024:
        raise ValueError(
            f"draft: its vocabulary of {draft_size} tokens does not agree with the target's "
            f"{target_size}; they must share one tokenizer"
        )
