"""The suffix automaton finds what a search of all its texts would, and grows linearly."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedraft.decoding.drafters.suffix_automaton import (
    MIN_MATCH,
    NO_MATCH,
    TEXT_END,
    Match,
    SuffixAutomaton,
)


def first_end(texts: list[list[int]], run: list[int]) -> int | None:
    """Where ``run`` ends first in the texts laid out one after another, or None."""
    flat = flatten(texts)
    ends = range(len(run), len(flat) + 1)
    return next((end for end in ends if flat[end - len(run) : end] == run), None)


def flatten(texts: list[list[int]]) -> list[int]:
    return sum(([*text, TEXT_END] for text in texts), [])[:-1]


def longest_suffix(texts: list[list[int]], tokens: list[int], min_match: int) -> Match:
    """The definition, by brute force: the longest suffix of ``tokens`` that is in a text."""
    for n in range(len(tokens), min_match - 1, -1):
        end = first_end(texts, tokens[len(tokens) - n :])
        if end is not None:
            return Match(n, end)
    return NO_MATCH


def longest_repeat(text: list[int]) -> Match:
    """The longest suffix of ``text`` that ends before its end too, and where it ended first."""
    for n in range(len(text) - 1, 0, -1):
        end = first_end([text], text[len(text) - n :])
        if end < len(text):
            return Match(n, end)
    return NO_MATCH


def automaton_of(texts: list[list[int]], min_match: int = MIN_MATCH) -> SuffixAutomaton:
    automaton = SuffixAutomaton(min_match)
    for text in texts:
        automaton.start_text()
        automaton.extend(text)
    return automaton


CASES = {
    "empty context": ([], 1, [], 0),
    "one token": ([1], 1, [], 0),
    "nothing repeats": ([1, 2, 3, 4], 1, [], 0),
    "copies what followed": ([1, 2, 3, 4, 5, 1, 2], 2, [3, 4, 5], 2),
    "too short a match": ([1, 2, 3, 4, 5, 1, 2], 3, [], 0),
    "first copy wins": ([1, 2, 3, 3, 1, 2, 4, 4, 1, 2], 2, [3, 3, 1], 2),
    "longest suffix wins over an earlier short one": (
        [1, 2, 4, 7, 1, 2, 3, 9, 8, 7, 1, 2],
        2,
        [3, 9, 8],
        3,
    ),
    "end of the context runs on": ([1, 2, 8, 1, 2], 2, [8, 1, 2], 2),
    "a run of one token": ([5, 5, 5], 2, [5, 5, 5], 2),
    "copy overlaps the suffix": ([1, 2, 1, 2, 1], 3, [2, 1, 2], 3),
}


@pytest.mark.parametrize("tokens, min_match, expected, evidence", CASES.values(), ids=CASES)
def test_propose(tokens: list[int], min_match: int, expected: list[int], evidence: int) -> None:
    proposal = automaton_of([tokens], min_match).propose(3)
    assert (proposal.tokens, proposal.evidence) == (expected, evidence)


@pytest.mark.parametrize("min_match", [0, -1])
def test_bad_lengths_are_refused(min_match: int) -> None:
    with pytest.raises(ValueError, match="min_match: expected at least 1 token"):
        SuffixAutomaton(min_match)


texts_of = st.lists(st.lists(st.integers(0, 3), max_size=24), max_size=5)


@settings(max_examples=300)
@given(text=st.lists(st.integers(0, 3), max_size=40))
def test_same_as_search_after_every_token(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    grown = [(automaton.extend([token]), automaton.repeat)[1] for token in text]
    assert grown == [longest_repeat(text[: i + 1]) for i in range(len(text))]


@settings(max_examples=300)
@given(texts=texts_of, tail=st.lists(st.integers(0, 4), max_size=12), min_match=st.integers(1, 3))
def test_find_is_a_search_of_all_texts(
    texts: list[list[int]], tail: list[int], min_match: int
) -> None:
    texts = [text for text in texts if text]
    found = automaton_of(texts, min_match).find(tail)
    assert found == longest_suffix(texts, tail, min_match)


@settings(max_examples=300)
@given(
    known=st.lists(st.integers(0, 3), min_size=1, max_size=24),
    parts=st.lists(st.lists(st.integers(0, 4), max_size=6), max_size=4),
)
def test_tokens_that_are_followed_are_looked_for_in_what_is_learned(
    known: list[int], parts: list[list[int]]
) -> None:
    """Part by part as if at once; learned, they are as if they never waited."""
    automaton, at_once = automaton_of([known]), automaton_of([[*known, *sum(parts, [])]])
    for part in parts:
        automaton.follow(part)
    tokens = at_once.tokens
    assert (automaton.tokens, automaton.num_learned) == (tokens, len(known))
    if tokens != known:
        assert automaton.repeat == longest_suffix([known], tokens, 1)
    automaton.learn()
    assert vars(automaton) == vars(at_once)


def test_what_followed_is_proposed_though_it_is_not_learned() -> None:
    automaton = automaton_of([[1, 2, 8, 1, 2]])
    automaton.follow([8, 9, 2, 8])
    assert automaton.propose(3).tokens == [1, 2, 8]
    automaton.follow([1, 2, 8, 9])
    assert (automaton.propose(2).tokens, automaton.propose(2).evidence) == ([], 0)
    automaton.learn()
    assert (automaton.propose(2).tokens, automaton.propose(2).evidence) == ([2, 8], 6)


def test_a_text_that_ends_is_learned() -> None:
    automaton = automaton_of([[1, 2, 3]])
    automaton.follow([4, 5])
    automaton.start_text()
    assert automaton.num_learned == automaton.num_tokens == 6
    assert automaton.find([3, 4]) == Match(2, 4)


@settings(max_examples=200)
@given(texts=texts_of)
def test_a_repeat_is_looked_for_in_all_texts(texts: list[list[int]]) -> None:
    """Cut off its last token, everything is what the newest text may repeat."""
    texts = [text for text in texts if text] + [[1, 2, 1]]
    *others, newest = texts
    expected = longest_suffix([*others, newest[:-1]], newest, 1)
    assert automaton_of(texts).repeat == expected


@settings(max_examples=200)
@given(texts=texts_of)
def test_size_is_linear(texts: list[list[int]]) -> None:
    automaton = automaton_of(texts)
    num_tokens = sum(map(len, texts))
    assert len(automaton._next) <= 2 * num_tokens + 1
    assert sum(map(len, automaton._next)) <= 3 * num_tokens + 1


FOLLOWING = {
    "what followed": ([[1, 2, 3, 4], [8, 9]], [7, 1, 2], [3, 4]),
    "not past the end of a text": ([[1, 2], [8, 9]], [1, 2], []),
    "as much as is asked for": ([[1, 2, 3, 4, 5, 6]], [1, 2], [3, 4, 5]),
}


@pytest.mark.parametrize("texts, tail, expected", FOLLOWING.values(), ids=FOLLOWING)
def test_following(texts: list[list[int]], tail: list[int], expected: list[int]) -> None:
    automaton = automaton_of(texts)
    assert automaton.following(automaton.find(tail), 3) == expected


def test_search_has_teeth() -> None:
    """An automaton that keeps the latest end disagrees with the search."""
    text = [1, 2, 3, 1, 2, 4, 1, 2]
    automaton = automaton_of([text[:5]])
    automaton._end = [max(end, 5) for end in automaton._end]
    automaton.extend(text[5:])
    assert automaton.repeat != longest_repeat(text)
