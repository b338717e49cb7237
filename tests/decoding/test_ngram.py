"""Prompt lookup: the incremental index proposes what a search of the whole context would."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedraft.decoding.drafters.ngram import LENGTHS, NgramIndex


def search(tokens: list[int], lengths: tuple[int, ...], k: int) -> list[int]:
    """The definition, by brute force: longest suffix, latest earlier copy, token by token."""
    for n in sorted(lengths, reverse=True):
        suffix = tokens[len(tokens) - n :]
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == suffix:
                longer = list(tokens)
                for i in range(k):
                    longer.append(longer[end + i])
                return longer[len(tokens) :]
    return []


def index_of(tokens: list[int], lengths: tuple[int, ...]) -> NgramIndex:
    index = NgramIndex(lengths)
    index.extend(tokens)
    return index


CASES = {
    "empty context": ([], (2,), []),
    "shorter than the n-gram": ([1], (2,), []),
    "the suffix does not find itself": ([1, 2], (2,), []),
    "nothing repeats": ([1, 2, 3, 4], (2, 1), []),
    "copies what followed": ([1, 2, 3, 4, 5, 1, 2], (2,), [3, 4, 5]),
    "latest copy wins": ([1, 2, 3, 3, 1, 2, 4, 4, 1, 2], (2,), [4, 4, 1]),
    "longest suffix wins over a later short one": (
        [7, 1, 2, 3, 9, 2, 4, 7, 1, 2],
        (3, 1),
        [3, 9, 2],
    ),
    "falls back to the shorter one": ([1, 2, 5, 6, 3, 2], (3, 1), [5, 6, 3]),
    "end of the context runs on": ([1, 2, 8, 1, 2], (2,), [8, 1, 2]),
    "a run of one token": ([5, 5, 5], (2,), [5, 5, 5]),
    "copy overlaps the suffix": ([1, 2, 1, 2, 1], (3,), [2, 1, 2]),
    "lengths in any order": ([7, 1, 2, 3, 9, 2, 4, 7, 1, 2], (1, 3), [3, 9, 2]),
}


@pytest.mark.parametrize("tokens, lengths, expected", CASES.values(), ids=CASES)
def test_propose(tokens: list[int], lengths: tuple[int, ...], expected: list[int]) -> None:
    assert index_of(tokens, lengths).propose(3).tokens == expected
    assert search(tokens, lengths, 3) == expected


@pytest.mark.parametrize("lengths", [(), (0,), (4, -1)])
def test_bad_lengths_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="lengths: expected n-gram lengths"):
        NgramIndex(lengths)


def test_zero_drafts() -> None:
    assert index_of([1, 2, 1, 2], (2,)).propose(0).tokens == []


@settings(max_examples=300)
@given(
    parts=st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=8),
    lengths=st.sampled_from([LENGTHS, (1,), (2, 1), (4, 3, 2), (3,)]),
    k=st.integers(0, 9),
)
def test_same_as_search_after_every_step(
    parts: list[list[int]], lengths: tuple[int, ...], k: int
) -> None:
    """Never stale: the context grows in any parts, with a proposal after each."""
    index = NgramIndex(lengths)
    grown = [(index.extend(part), index.propose(k).tokens)[1] for part in parts]
    contexts = [sum(parts[: i + 1], []) for i in range(len(parts))]
    assert grown == [search(context, lengths, k) for context in contexts]


EVIDENCE = {
    "the length that matched": ([1, 2, 3, 9, 1, 2, 3], (3, 2), 3),
    "of the shorter one": ([1, 2, 3, 9, 8, 2, 3], (3, 2), 2),
    "none without a match": ([1, 2, 3], (3, 2), 0),
}


@pytest.mark.parametrize("tokens, lengths, expected", EVIDENCE.values(), ids=EVIDENCE)
def test_evidence(tokens: list[int], lengths: tuple[int, ...], expected: int) -> None:
    assert index_of(tokens, lengths).propose(3).evidence == expected


def test_memory_is_bounded_by_the_context() -> None:
    index = index_of(list(range(100)) * 3, LENGTHS)
    assert len(index.tokens) == 300
    assert len(index._last_end) <= 100 * len(LENGTHS)


def test_search_has_teeth() -> None:
    """An index that lets the suffix find itself disagrees with the search."""
    tokens = [1, 2, 3, 1, 2]
    index = index_of(tokens, (2,))
    index._last_end[(1, 2)] = 4
    assert index.propose(3).tokens != search(tokens, (2,), 3)
