"""Prompt lookup: what followed the last time these few tokens were seen in the same context."""

from __future__ import annotations

from pagedraft.decoding.drafters.indexed import IndexedDrafter
from pagedraft.decoding.drafters.ngram import NgramIndex


class NgramDrafter(IndexedDrafter):
    """Proposes from an n-gram index over each sequence's own context.

    Source: Saxena, "Prompt Lookup Decoding", 2023.
    """

    name = "ngram"
    copies_contexts = True

    def __init__(self, *, index_tokens: int = 4096) -> None:
        super().__init__(NgramIndex, index_tokens=index_tokens)
