"""What lookup drafters share: an index over each sequence's own context that grows with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from pagedraft.decoding.drafters.base import NOTHING, Proposal
from pagedraft.decoding.sequence import Sequence


class ContextIndex(Protocol):
    """What is known of one context, and what it says comes next."""

    @property
    def tokens(self) -> list[int]:
        """Tokens seen so far."""

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append committed tokens."""

    def propose(self, k: int) -> Proposal:
        """At most ``k`` tokens that may follow; evidence is the length of the match in tokens."""


class IndexedDrafter:
    """Proposes from one index a sequence. No model, no KV, no draw: q is 1 at each draft.

    index_tokens: most tokens a call adds to the indexes of rows that are behind by more than
        ``few_tokens`` (a new prompt, preemption), the shortest first. A row that is not caught up
        proposes nothing. A prompt of 100k tokens takes 25 calls of 4096, of about 3 ms each with
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
        # By the sequence's id: a weak dictionary's look-up takes ten times as long.
        self._indexes: dict[int, tuple[ContextIndex, weakref.ref[Sequence]]] = {}

    def propose(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[Proposal]:
        """What each index says; none for a row whose index is behind its context."""
        known, few_tokens = self._indexes, self.few_tokens
        proposals: list[Proposal] = []
        behind: list[tuple[int, int, ContextIndex]] = []
        for sequence, k in zip(sequences, num_drafts, strict=True):
            entry = known.get(id(sequence))
            index = self._add_index(sequence) if entry is None else entry[0]
            token_ids = sequence.token_ids
            missing = len(token_ids) - len(index.tokens)
            if missing > few_tokens:
                behind.append((missing, len(proposals), index))
            elif missing > 0:
                index.extend(token_ids[-missing:])
            proposals.append(index.propose(k) if k > 0 and missing <= few_tokens else NOTHING)
        if behind:
            self._catch_up(behind, sequences, num_drafts, proposals)
        return proposals

    def on_free(self, sequence: Sequence) -> None:
        """Drop the index of ``sequence``."""
        self._indexes.pop(id(sequence), None)

    def knows(self, sequence: Sequence) -> bool:
        """Whether there is an index of the whole context."""
        entry = self._indexes.get(id(sequence))
        return entry is not None and len(entry[0].tokens) == len(sequence.token_ids)

    def _add_index(self, sequence: Sequence) -> ContextIndex:
        forget, key = self._indexes.pop, id(sequence)
        index = self._make_index()
        self._indexes[key] = (index, weakref.ref(sequence, lambda _: forget(key, None)))
        return index

    def _catch_up(
        self,
        behind: list[tuple[int, int, ContextIndex]],
        sequences: Seq[Sequence],
        num_drafts: Seq[int],
        proposals: list[Proposal],
    ) -> None:
        """Extend indexes that lack ``missing`` tokens; those that are complete then propose."""
        left = self.index_tokens
        for missing, row, index in sorted(behind, key=lambda row: row[0]):
            start, count = len(index.tokens), min(missing, left)
            index.extend(sequences[row].token_ids[start : start + count])
            left -= count
            if count == missing and num_drafts[row] > 0:
                proposals[row] = index.propose(num_drafts[row])


def run_on(tokens: list[int], start: int, k: int) -> list[int]:
    """``k`` tokens as ``tokens`` goes on from ``start``, which is before its end.

    Where that reaches the end of ``tokens`` it runs on into the copy itself, so text that repeats
    is continued for all of ``k``.
    """
    copy = tokens[start : start + k]
    return copy if len(copy) == k else (copy * -(-k // len(copy)))[:k]
