"""Prompt lookup: what followed the last time these few tokens were seen in the same context."""

from __future__ import annotations

import weakref
from collections.abc import Sequence as Seq

from pagedraft.decoding.drafters.ngram import NgramIndex
from pagedraft.decoding.sequence import Sequence


class NgramDrafter:
    """Proposes from an n-gram index over each sequence's own context. No model, no KV.

    Source: Saxena, "Prompt Lookup Decoding", 2023.
    """

    name = "ngram"

    def __init__(self) -> None:
        self._indexes: weakref.WeakKeyDictionary[Sequence, NgramIndex] = weakref.WeakKeyDictionary()

    def propose(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[list[int]]:
        """Continuations of the most recent earlier match of each context's last tokens."""
        return [
            self._propose_one(sequence, k) if k > 0 else []
            for sequence, k in zip(sequences, num_drafts, strict=True)
        ]

    def _propose_one(self, sequence: Sequence, k: int) -> list[int]:
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = NgramIndex()
        index.extend(sequence.token_ids[index.num_tokens :])
        return index.propose(k)

    def on_free(self, sequence: Sequence) -> None:
        """Drop the index of ``sequence``."""
        self._indexes.pop(sequence, None)
