"""What lookup drafters share: an index over each sequence's own context that grows with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from pagedraft.decoding.drafters.base import NOTHING, Proposal
from pagedraft.decoding.sequence import Sequence


class ContextIndex(Protocol):
    """What is known of one context, and what it says comes next.

    tokens: seen so far. num_learned: how many of them are indexed.
    """

    tokens: list[int]
    num_learned: int

    def follow(self, token_ids: Seq[int]) -> None:
        """Append committed tokens, to be indexed later."""

    def extend(self, token_ids: Seq[int]) -> None:
        """Append committed tokens, and index all that were appended."""

    def propose(self, k: int) -> Proposal:
        """At most ``k`` tokens that may follow; evidence is the length of the match in tokens."""


class IndexedDrafter:
    """Proposes from one index a sequence. No model, no KV, no draw: q is 1 at each draft.

    Indexing takes longer than looking up, and is left to ``learn``: what was committed since then
    is looked for, and found in what was committed before. Until ``learn`` is called for the first
    time, ``propose`` indexes all that it looks for. Drafts that were accepted are copies of what is
    known, so the delay loses next to nothing: on 60 excerpts of the standard library with small
    edits, 8 drafts, tokens per pass are 8.06 at once and late with a suffix automaton, 7.43 with
    n-grams; where runs of a period of 1 to 3 begin again and again, 1.93 both, and 1.93 to 1.87.

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
        self._is_taught = False
        # By the sequence's id: a weak dictionary's look-up takes ten times as long.
        self._indexes: dict[int, tuple[ContextIndex, weakref.ref[Sequence]]] = {}

    def propose(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[Proposal]:
        """What each index says; none for a row whose index is behind its context."""
        if not self._is_taught:
            self._index(sequences)
        known, few_tokens = self._indexes, self.few_tokens
        proposals: list[Proposal] = []
        for sequence, k in zip(sequences, num_drafts, strict=True):
            entry = known.get(id(sequence))
            index = self._add_index(sequence) if entry is None else entry[0]
            token_ids = sequence.token_ids
            num_new = len(token_ids) - len(index.tokens)
            if num_new > few_tokens:
                proposals.append(NOTHING)
                continue
            if num_new > 0:
                index.follow(token_ids[-num_new:])
            proposals.append(index.propose(k) if k > 0 else NOTHING)
        return proposals

    def learn(self, sequences: Seq[Sequence]) -> None:
        """Index what was committed, also of rows that do not draft yet."""
        self._is_taught = True
        self._index(sequences)

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

    def _index(self, sequences: Seq[Sequence]) -> None:
        """Index all rows that lack few tokens, and as much of others as a call may."""
        known, few_tokens = self._indexes, self.few_tokens
        behind: list[tuple[int, Sequence, ContextIndex]] = []
        for sequence in sequences:
            entry = known.get(id(sequence))
            index = self._add_index(sequence) if entry is None else entry[0]
            token_ids = sequence.token_ids
            num_missing = len(token_ids) - index.num_learned
            if num_missing > few_tokens:
                behind.append((num_missing, sequence, index))
            elif num_missing > 0:
                index.extend(token_ids[len(index.tokens) :])
        left = self.index_tokens
        for num_missing, sequence, index in sorted(behind, key=lambda row: row[0]):
            end = index.num_learned + min(num_missing, left)
            left -= end - index.num_learned
            index.extend(sequence.token_ids[len(index.tokens) : end])


def run_on(tokens: list[int], start: int, k: int) -> list[int]:
    """``k`` tokens as ``tokens`` goes on from ``start``, which is before its end.

    Where that reaches the end of ``tokens`` it runs on into the copy itself, so text that repeats
    is continued for all of ``k``.
    """
    copy = tokens[start : start + k]
    return copy if len(copy) == k else (copy * -(-k // len(copy)))[:k]
