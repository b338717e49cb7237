"""Suffix automaton: every run of tokens in the texts seen so far, and where each first ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pagedraft.decoding.drafters.base import NOTHING, Proposal
from pagedraft.decoding.drafters.indexed import run_on

ROOT = 0
TEXT_END = -1  # between two texts; no token

# Tokens per pass (share of drafts accepted), 8 drafts, teacher forced with SmolLM2's tokenizer.
# edits: 60 excerpts of 80 lines of the standard library with 2 to 5 small edits, the original in
# the prompt; turns: edited twice, both versions in the prompt; renames: two names replaced all
# over; fresh: no original; rows: a repeated table row. 42k tokens each, rows 7k.
#
#                          edits        turns        renames      fresh        rows
#   n-grams of 8, 4, 2     7.29 (0.88)  7.27 (0.86)  5.97 (0.73)  1.25 (0.14)  7.83
#   n-grams of 16, 8, 4, 2 7.57 (0.93)  7.67 (0.92)  6.08 (0.74)  1.25 (0.14)  7.83
#   suffix, first copy     7.70 (0.95)  7.74 (0.93)  6.25 (0.77)  1.24 (0.14)  7.83
#   suffix, latest copy    7.63 (0.94)  7.75 (0.93)  6.14 (0.75)  1.25 (0.14)  7.83
#   suffix, 3 at least     7.41 (0.96)  7.51 (0.96)  5.52 (0.77)  1.16 (0.20)  7.74
#
# The latest copy of a match is no better than the first, which costs nothing to keep: a state never
# changes where it ended. A token of code took 0.65 us and 500 bytes in a long text, 0.9 us where
# two came at a time (n-grams of 8, 4, 2: 0.55 us and 250 bytes, 1.7 us); of one repeated text
# 365 bytes. Time and memory a token are the same at 10k and at 100k tokens.
MIN_MATCH = 2


class Match(NamedTuple):
    """``length`` tokens that were seen before and ended at ``end``: what followed begins there."""

    length: int
    end: int


NO_MATCH = Match(0, 0)


class SuffixAutomaton:
    """The smallest automaton that reads all runs of tokens of its texts, built token by token.

    A state stands for runs that end at the same places; its link leads to the state of their
    longest suffix that ends elsewhere too. The texts come one after another.

    **Units**: lengths and positions are tokens; a run that ends at ``end`` is
    ``tokens[end - length : end]``.

    tokens: all that were appended. num_learned: how many of them are in the automaton; those that
        were only followed are looked for in it, and found by nobody.

    **Cost**: amortised O(1) a token, at most 2 states and 3 transitions a token; a token that is
    only followed takes a look-up or a few, a proposal its length.

    **Source**: Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985;
    for decoding Hu et al., "SAM decoding", arXiv 2411.10666.
    """

    def __init__(self, min_match: int = MIN_MATCH) -> None:
        if min_match < 1:
            raise ValueError(f"min_match: expected at least 1 token, got {min_match}")
        self.min_match = min_match
        self.tokens: list[int] = []
        self.num_learned = 0
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # of a state's longest run
        self._end = [0]  # where its runs ended first
        self._last = ROOT  # the state of the whole current text, as far as it is learned
        self._seen = ROOT  # the state of its longest suffix that was seen before
        self._seen_length = 0  # of that suffix

    @property
    def num_tokens(self) -> int:
        """Tokens appended so far, with one TEXT_END between two texts."""
        return len(self.tokens)

    @property
    def repeat(self) -> Match:
        """The longest suffix of the current text that was seen before, in it or in another."""
        return Match(self._seen_length, self._end[self._seen])

    def start_text(self) -> None:
        """End the current text: what is appended next does not follow it."""
        self.learn()
        if self.tokens:
            self.tokens.append(TEXT_END)
            self.num_learned += 1
        self._last = self._seen = ROOT
        self._seen_length = 0

    def follow(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the current text, to be learned later."""
        self.tokens += token_ids
        self._seen, self._seen_length = self._walk(token_ids, self._seen, self._seen_length)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the current text and learn them."""
        self.tokens += token_ids
        self.learn()

    def learn(self) -> None:
        """Build what was appended into the automaton."""
        nexts, links, lengths, ends = self._next, self._link, self._length, self._end
        last, seen = self._last, self._seen
        new_tokens = self.tokens[self.num_learned :]
        if not new_tokens:
            return
        for end, token in enumerate(new_tokens, self.num_learned + 1):
            following = nexts[last]
            if token in following:  # another text began like this one
                seen = following[token]
                if lengths[seen] != lengths[last] + 1:
                    seen = self._split(last, token)
                last = seen
                continue
            state = len(nexts)
            nexts.append({})
            links.append(ROOT)
            lengths.append(lengths[last] + 1)
            ends.append(end)
            while True:
                following[token] = state
                last = links[last]
                if last < 0:
                    seen = ROOT
                    break
                following = nexts[last]
                if token in following:
                    seen = following[token]
                    if lengths[seen] != lengths[last] + 1:
                        seen = self._split(last, token)
                    break
            links[state] = seen
            last = state
        self._last, self._seen, self._seen_length = last, seen, lengths[seen]
        self.num_learned = len(self.tokens)

    def propose(self, k: int) -> Proposal:
        """``k`` tokens after the first copy of the longest repeated suffix; for one text."""
        length = self._seen_length
        if length < self.min_match:
            return NOTHING
        end = self._end[self._seen]
        drafts = self.tokens[end : end + k]
        return Proposal(drafts if len(drafts) == k else run_on(self.tokens, end, k), None, length)

    def find(self, token_ids: Sequence[int]) -> Match:
        """The longest suffix of ``token_ids`` that was seen, and where it ended first."""
        state, length = self._walk(token_ids, ROOT, 0)
        return Match(length, self._end[state]) if length >= self.min_match else NO_MATCH

    def following(self, match: Match, k: int) -> list[int]:
        """At most ``k`` tokens that followed ``match`` in its text."""
        tokens = self.tokens[match.end : match.end + k]
        return tokens[: tokens.index(TEXT_END)] if TEXT_END in tokens else tokens

    def _walk(self, token_ids: Sequence[int], state: int, length: int) -> tuple[int, int]:
        """The longest known suffix of a run of ``state``, ``length`` tokens, with more tokens."""
        nexts, links, lengths = self._next, self._link, self._length
        for token in token_ids:
            longer = nexts[state].get(token)
            while longer is None and state != ROOT:
                state = links[state]
                length = lengths[state]
                longer = nexts[state].get(token)
            if longer is not None:
                state = longer
                length += 1
        return state, length

    def _split(self, state: int, token: int) -> int:
        """Split the state of ``state``'s longest run and ``token`` off one that longer runs share.

        The longer ones have not ended here; both ended at the same place first.
        """
        nexts, links = self._next, self._link
        shared, split = nexts[state][token], len(nexts)
        nexts.append(nexts[shared].copy())
        links.append(links[shared])
        self._length.append(self._length[state] + 1)
        self._end.append(self._end[shared])
        links[shared] = split
        while state >= 0 and nexts[state].get(token) == shared:
            nexts[state][token] = split
            state = links[state]
        return split
