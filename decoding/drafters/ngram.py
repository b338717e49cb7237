"""Prompt lookup: propose what followed the last time the context ended as it ends now."""

from __future__ import annotations

from collections.abc import Iterable


class NgramIndex:
    """Index of one context's n-grams: for each, where it last ended before the current end.

    **Units**: positions and lengths are tokens. An n-gram that ends at ``end`` covers
    ``tokens[end - n : end]``, so what followed it begins at ``end``.

    **Cost**: a committed token costs ``max_ngram - min_ngram + 1`` dictionary writes, a proposal at
    most as many look-ups plus its length; neither grows with the context.

    **Source**: Saxena, Prompt Lookup Decoding, 2023.
    """

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                "min_ngram, max_ngram: expected 1 <= min_ngram <= max_ngram, "
                f"got {min_ngram}, {max_ngram}"
            )
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self._tokens: list[int] = []
        self._last_end: dict[tuple[int, ...], int] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens seen so far."""
        return len(self._tokens)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append committed tokens."""
        for token in token_ids:
            # An n-gram is entered when a token follows it, so the current suffix never finds itself
            end = len(self._tokens)
            for n in range(self.min_ngram, min(self.max_ngram, end) + 1):
                self._last_end[tuple(self._tokens[end - n :])] = end
            self._tokens.append(token)

    def propose(self, k: int) -> list[int]:
        """Up to ``k`` tokens that followed the latest earlier copy of the longest known suffix."""
        end = len(self._tokens)
        for n in range(min(self.max_ngram, end), self.min_ngram - 1, -1):
            start = self._last_end.get(tuple(self._tokens[end - n :]))
            if start is not None:
                return self._copy(start, k)
        return []

    def _copy(self, start: int, k: int) -> list[int]:
        drafts = self._tokens[start : start + k]
        period = len(self._tokens) - start
        return [drafts[i % period] for i in range(k)]
