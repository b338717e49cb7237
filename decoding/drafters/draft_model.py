"""A second, smaller model drafts: its whole k-step loop runs batched over the sequences.

The draft model has pool tensors of its own, addressed by the target's block tables: one allocator
and one rollback serve both.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from pagedraft.decoding.draw import draw
from pagedraft.decoding.sequence import Sequence
from pagedraft.model.batch import Span, StepBatch, build_step_batch
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer


class DraftModelDrafter:
    """Drafts with a model that speaks the target's vocabulary.

    catch_up_tokens: most tokens a call may feed beyond one a row, to write draft KV that is missing
        (a new prompt, preemption, full acceptance). A row that needs more than is left catches up
        partly and proposes nothing in this call.
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
        self.num_shared_tokens = min(model.config.vocab_size, target_vocab_size)
        self.catch_up_tokens = catch_up_tokens

    def propose(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[list[int]]:
        """Draw up to ``num_drafts[i]`` tokens a row with the noise that the target will use."""
        drafts: list[list[int]] = [[] for _ in sequences]
        positions_left = self.model.config.max_positions
        wanted = [
            min(k, max(0, positions_left - sequence.num_tokens))
            for sequence, k in zip(sequences, num_drafts, strict=True)
        ]
        active = [row for row, k in enumerate(wanted) if k > 0]
        active = self._catch_up(sequences, active)
        while active:
            spans = [self._next_span(sequences[row], drafts[row]) for row in active]
            rows = [sequences[row] for row in active]
            tokens = self._step(rows, spans, [drafts[row] for row in active])
            for row, token in zip(active, tokens, strict=True):
                if token >= 0:
                    drafts[row].append(token)
                else:
                    wanted[row] = len(drafts[row])  # a NaN row proposes no more
            active = [row for row in active if len(drafts[row]) < wanted[row]]
        return drafts

    def on_free(self, sequence: Sequence) -> None:
        """Nothing is kept but ``num_draft_written``, which the sequence itself drops."""

    def _catch_up(self, sequences: Seq[Sequence], active: list[int]) -> list[int]:
        """Feed missing context within the budget; return the rows that may draft now."""
        left = self.catch_up_tokens
        fed: dict[int, Span] = {}
        ready = []
        for row in active:
            sequence = sequences[row]
            start = min(sequence.num_draft_written, sequence.num_tokens - 1)
            sequence.num_draft_written = start
            if max(sequence.token_ids[start:]) >= self.model.config.vocab_size:
                continue  # a token that the draft does not know: it cannot follow this text
            missing = sequence.token_ids[start:-1]
            if len(missing) <= left:
                ready.append(row)
            if missing[:left]:
                fed[row] = Span(missing[:left], start, sequence.block_ids, num_logits=0)
                left -= len(fed[row].token_ids)
        if fed:
            self.model.forward(self._batch(list(fed.values())), self.cache)
        for row, span in fed.items():
            sequences[row].num_draft_written += len(span.token_ids)
        return ready

    def _next_span(self, sequence: Sequence, drafted: list[int]) -> Span:
        """The newest token of the row, committed or drafted."""
        start = sequence.num_draft_written
        token = drafted[-1] if drafted else sequence.token_ids[-1]
        return Span([token], start, sequence.block_ids, num_logits=1)

    def _step(
        self, sequences: Seq[Sequence], spans: list[Span], drafted: list[list[int]]
    ) -> list[int]:
        logits_QV = self.model.forward(self._batch(spans), self.cache)[:, : self.num_shared_tokens]
        positions = [span.start + 1 for span in spans]
        tokens_Q = draw(logits_QV, sequences, positions, drafted)
        for sequence in sequences:
            sequence.num_draft_written += 1
        return tokens_Q.tolist()

    def _batch(self, spans: list[Span]) -> StepBatch:
        return build_step_batch(
            spans,
            block_size=self.cache.block_size,
            device=self.model.device,
            row_multiple=self.model.row_multiple,
        )


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
