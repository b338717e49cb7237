"""Prompt lookup: propose what followed the last time the context ended as it ends now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagedraft.decoding.drafters.base import NOTHING, Proposal
from pagedraft.decoding.drafters.indexed import run_on

# Suffix lengths tried, longest first. Tokens per pass (share of drafts accepted), 8 drafts, teacher
# forced with SmolLM2's tokenizer: 60 excerpts of the standard library with 2 to 5 small edits (48k
# tokens, the original in the prompt), the same excerpts without an original, and repeated rows.
#
#                                      edits        no original  rows
#   4, 3, 2                            6.42 (0.74)  1.36 (0.17)  8.69
#   8, 7, 6, 5, 4, 3, 2                7.06 (0.84)  1.36 (0.17)  8.69
#   8, 4, 2                            7.04 (0.83)  1.36 (0.17)  8.69
#   8, 4, 2, 1                         7.14 (0.79)  1.52 (0.10)  8.69
#   16, 8, 4, 2                        7.25 (0.86)  1.36 (0.17)  8.69
#   8, 4, 2 without running on         7.04 (0.83)  1.36 (0.17)  4.71
#
# Length 8 pays on edits; the lengths between do not, at over twice the memory. Length 1 drafts at
# nearly every position: it wins only where a draft costs less than about 4 % of a pass.
LENGTHS = (8, 4, 2)
FEW = 16  # new tokens: one by one up to here, all at once beyond


class NgramIndex:
    """Index of one context's n-grams: for each, where it last ended before the current end.

    tokens: seen so far. num_learned: how many of them are indexed.

    **Units**: positions and lengths are tokens. An n-gram that ends at ``end`` covers
    ``tokens[end - n : end]``, so what followed it begins at ``end``.

    **Cost**: a token costs one dictionary write for each of ``lengths`` (0.55 us and 250 bytes in
    all on 100k tokens of code), a proposal at most as many look-ups plus its length; neither
    grows with the context.

    **Source**: Saxena, "Prompt Lookup Decoding", 2023.
    """

    def __init__(self, lengths: Sequence[int] = LENGTHS) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths: expected n-gram lengths of at least 1, got {lengths}")
        self.lengths = tuple(sorted(set(lengths), reverse=True))
        self.tokens: list[int] = []
        self.num_learned = 0
        self._last_end: dict[tuple[int, ...], int] = {}

    def follow(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens, to be indexed later."""
        self.tokens += token_ids

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append committed tokens, and index all that were appended."""
        tokens, old_end = self.tokens, self.num_learned
        tokens += token_ids
        self.num_learned = len(tokens)
        for n in self.lengths:
            # Ends before the current one only: the current suffix must not find itself.
            ends = range(max(n, old_end), len(tokens))
            if len(ends) < FEW:
                for end in ends:
                    self._last_end[tuple(tokens[end - n : end])] = end
            else:
                columns = (tokens[ends.start - n + i : ends.stop - n + i] for i in range(n))
                self._last_end.update(zip(zip(*columns, strict=True), ends, strict=True))

    def propose(self, k: int) -> Proposal:
        """``k`` tokens after the latest earlier copy of the longest known suffix, else none."""
        tokens, end = self.tokens, len(self.tokens)
        for n in self.lengths:
            start = self._last_end.get(tuple(tokens[-n:])) if n <= end else None
            if start is not None:
                return Proposal(run_on(tokens, start, k), None, n)
        return NOTHING
