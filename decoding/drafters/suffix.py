"""Suffix lookup: what followed the longest part of the context's end that was seen before."""

from __future__ import annotations

import weakref
from collections.abc import Sequence as Seq

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.drafters.indexed import IndexedDrafter
from pagedraft.decoding.drafters.suffix_automaton import Match, SuffixAutomaton
from pagedraft.decoding.sequence import Sequence

TAIL_TOKENS = 16  # how much of a context's end is looked for in other texts: 16 us


class RecentTexts:
    """The last texts, at most ``max_tokens`` tokens in all, as two generations of automata.

    Texts enter the young one; when it holds half of them it becomes the old one, and the old one is
    forgotten. So between half and all of ``max_tokens`` are known, at no cost of deleting.
    """

    def __init__(self, max_tokens: int) -> None:
        if max_tokens < 2:
            raise ValueError(f"max_tokens: expected at least 2, got {max_tokens}")
        self.max_tokens = max_tokens
        self._young, self._old = SuffixAutomaton(), SuffixAutomaton()

    @property
    def num_tokens(self) -> int:
        """Tokens known now, and one mark between two texts."""
        return self._young.num_tokens + self._old.num_tokens

    def add(self, token_ids: Seq[int]) -> None:
        """Remember a text, or as much of its beginning as fits one generation."""
        half = self.max_tokens // 2
        if self._young.num_tokens and self._young.num_tokens + 1 + len(token_ids) > half:
            self._young, self._old = SuffixAutomaton(), self._young
        self._young.start_text()
        self._young.extend(token_ids[:half])

    def propose(self, tail: Seq[int], k: int) -> Proposal:
        """At most ``k`` tokens that followed the longest match of the end of ``tail``."""
        found: list[tuple[Match, SuffixAutomaton]] = [
            (texts.find(tail), texts) for texts in (self._young, self._old)
        ]
        match, texts = max(found, key=lambda row: row[0].length)
        return Proposal(texts.following(match, k) if match.length else [], evidence=match.length)


class SuffixDrafter(IndexedDrafter):
    """Proposes from a suffix automaton over each sequence's own context.

    share_outputs: look in the outputs of ended requests too, and take the longer match. Off unless
        asked for: what one user was answered then shows in how fast another is answered.
    max_shared_tokens: how many tokens of outputs are kept, the newest.

    Source: Hu et al., "SAM decoding", arXiv 2411.10666.
    """

    name = "suffix"
    copies_contexts = True

    def __init__(
        self,
        *,
        share_outputs: bool = False,
        max_shared_tokens: int = 100_000,
        index_tokens: int = 4096,
    ) -> None:
        super().__init__(SuffixAutomaton, index_tokens=index_tokens)
        self._outputs = RecentTexts(max_shared_tokens) if share_outputs else None
        self._num_shared: weakref.WeakKeyDictionary[Sequence, int] = weakref.WeakKeyDictionary()

    def on_free(self, sequence: Sequence) -> None:
        """Drop the index of ``sequence``; keep its output if outputs are shared."""
        if self._outputs is not None and id(sequence) in self._indexes:
            output_ids = sequence.output_ids
            new_ids = output_ids[self._num_shared.get(sequence, 0) :]
            if new_ids:
                self._outputs.add(new_ids)
            self._num_shared[sequence] = len(output_ids)
        super().on_free(sequence)

    def propose(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[Proposal]:
        """What each index says, or other texts where they know better."""
        proposals = super().propose(sequences, num_drafts)
        if self._outputs is None:
            return proposals
        for row, (sequence, k) in enumerate(zip(sequences, num_drafts, strict=True)):
            own = proposals[row]
            if k > 0 and own.evidence < TAIL_TOKENS and self.knows(sequence):
                other = self._outputs.propose(sequence.token_ids[-TAIL_TOKENS:], k)
                if other.tokens and other.evidence > own.evidence:
                    proposals[row] = other
        return proposals
