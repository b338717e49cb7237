"""What lookup drafters share: an index over each sequence's own context that grows with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.sequence import Sequence


class ContextIndex(Protocol):
    """What is known of one context, and what it says comes next."""

    @property
    def num_tokens(self) -> int:
        """Tokens seen so far."""

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append committed tokens."""

    def propose(self, k: int) -> Proposal:
        """At most ``k`` tokens that may follow; evidence is the length of the match in tokens."""


class IndexedDrafter:
    """Proposes from one index a sequence. No model, no KV, no draw: q is 1 at each draft.

    index_tokens: most tokens a call adds to the indexes of rows that are behind by more than
        ``few_tokens`` (a new prompt, preemption), the shortest first. A row that is not caught up
        proposes nothing. A prompt of 100k tokens takes 25 calls of 4096, of 5 to 10 ms each with
        a suffix automaton. A row asked for 0 drafts is indexed too.
    """

    is_lookup = True
    name = "indexed"
    few_tokens = 64

    def __init__(self, make_index: Callable[[], ContextIndex], *, index_tokens: int = 4096) -> None:
        if index_tokens < 1:
            raise ValueError(f"index_tokens: expected at least 1, got {index_tokens}")
        self.index_tokens = index_tokens
        self._make_index = make_index
        self._indexes: weakref.WeakKeyDictionary[Sequence, ContextIndex] = (
            weakref.WeakKeyDictionary()
        )

    def propose(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[Proposal]:
        """What each index says; none for a row whose index is behind its context."""
        indexes = [self._index(sequence) for sequence in sequences]
        self._catch_up(sequences, indexes)
        return [
            self._propose_one(sequence, index, k)
            if k > 0 and index.num_tokens == sequence.num_tokens
            else Proposal([])
            for sequence, index, k in zip(sequences, indexes, num_drafts, strict=True)
        ]

    def on_free(self, sequence: Sequence) -> None:
        """Drop the index of ``sequence``."""
        self._indexes.pop(sequence, None)

    def _propose_one(self, sequence: Sequence, index: ContextIndex, k: int) -> Proposal:
        return index.propose(k)

    def _index(self, sequence: Sequence) -> ContextIndex:
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = self._make_index()
        return index

    def _catch_up(self, sequences: Seq[Sequence], indexes: Seq[ContextIndex]) -> None:
        left = self.index_tokens
        behind = []
        for sequence, index in zip(sequences, indexes, strict=True):
            missing = sequence.num_tokens - index.num_tokens
            if 0 < missing <= self.few_tokens:
                index.extend(sequence.token_ids[index.num_tokens :])
            elif missing > 0:
                behind.append((missing, sequence, index))
        for missing, sequence, index in sorted(behind, key=lambda row: row[0]):
            start = index.num_tokens
            index.extend(sequence.token_ids[start : start + min(missing, left)])
            left -= min(missing, left)


def run_on(tokens: Seq[int], start: int, k: int) -> list[int]:
    """``k`` tokens as ``tokens`` goes on from ``start``, which is before its end.

    Where that reaches the end of ``tokens`` it runs on into the copy itself, so text that repeats
    is continued for all of ``k``.
    """
    period = len(tokens) - start
    return [tokens[start + i % period] for i in range(k)]
