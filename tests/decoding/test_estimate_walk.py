"""Passes over a text: counts by hand, chances against enumeration, a lookup replayed."""

from __future__ import annotations

import itertools
import math

import pytest

from pagedraft.decoding.drafters.lookup import NgramDrafter
from pagedraft.decoding.estimate_text import Text
from pagedraft.decoding.estimate_walk import Walk, replay, walk

# accepted at output 0, 1, ..; k; max_tokens; reach -> passes with n drafts, full, accepted.
WALKS = {
    "plain": ("1111", 0, 4, None, [3], 0, 0),
    "never": ("10000", 2, 5, None, [1, 1, 2], 0, 0),
    "always": ("0111111", 2, 7, None, [0, 0, 2], 1, 4),
    "the end cuts k": ("011111", 3, 6, None, [1, 0, 0, 1], 1, 3),
    "a run": ("01101110", 4, 8, None, [0, 0, 0, 1, 1], 0, 5),
    "a stop does not cut k": ("011111", 3, 90, None, [0, 0, 0, 2], 1, 4),
    "reach": ("0111111", 2, 7, 3, [3, 0, 1], 1, 2),
    "one token": ("1", 2, 1, None, [0, 0, 0], 0, 0),
    "none": ("", 2, 1, None, [0, 0, 0], 0, 0),
}


@pytest.mark.parametrize("name", WALKS)
def test_walks_by_hand(name):
    accepted, k, max_tokens, reach, passes_n, num_full, num_accepted = WALKS[name]
    accept_n = [float(digit) for digit in accepted]
    found = walk(accept_n, k, len(accept_n), max_tokens, reach)
    assert found == Walk(passes_n, max(0, len(accept_n) - 1), num_full, num_accepted)


# As above -> drafts by their place: offered, reached, accepted.
PLACES = {
    "a run": ([2, 2, 2, 1], [2, 2, 2, 0], [2, 2, 1, 0]),
    "never": ([3, 2], [3, 0], [0, 0]),
    "a stop does not cut k": ([2, 1, 1], [2, 1, 1], [2, 1, 1]),
    "reach": ([1, 1], [1, 1], [1, 1]),
    "plain": ([], [], []),
}


@pytest.mark.parametrize("name", PLACES)
def test_drafts_are_counted_by_their_place(name):
    accepted, k, max_tokens, reach, *_ = WALKS[name]
    found = walk([float(digit) for digit in accepted], k, len(accepted), max_tokens, reach)
    assert (found.offered_n, found.reached_n, found.accepted_n) == PLACES[name]
    twice = found + Walk([0.0] * (k + 1)) + found
    assert twice.reached_n == [2 * count for count in found.reached_n]


@pytest.mark.parametrize("k", [1, 2, 3, 6])
@pytest.mark.parametrize("max_tokens", [7, 20])  # the end cuts k; a stop does not
def test_the_walk_of_chances_is_the_mean_of_walks(k, max_tokens):
    chances = [0.5, 0.9, 0.3, 0.7, 0.1, 0.6, 0.8]
    total = Walk([0.0] * (k + 1))
    for outcome in itertools.product((0.0, 1.0), repeat=len(chances)):
        pairs = zip(chances, outcome, strict=True)
        weight = math.prod(p if is_accepted else 1 - p for p, is_accepted in pairs)
        one = walk(outcome, k, len(outcome), max_tokens)
        scaled = [weight * count for count in one.passes_n]
        total += Walk(scaled, 0, weight * one.num_full, weight * one.num_accepted)
    found = walk(chances, k, len(chances), max_tokens)
    assert found.passes_n == pytest.approx(total.passes_n)
    assert found.num_full == pytest.approx(total.num_full)
    assert found.num_accepted == pytest.approx(total.num_accepted)


def test_a_lookup_is_replayed():
    """After 1 2 3 4 1 2 it proposes 3 4 1; the text goes on 3 4 9, and 9 was never seen."""
    text = Text((1, 2, 3, 4, 1), (2, 3, 4, 9, 8, 7), 6)
    found = replay(NgramDrafter(), text, 3, vocab_size=10)
    assert found == Walk([2.0, 0.0, 0.0, 1.0], 5, 0.0, 2.0)
    assert (found.offered_n, found.reached_n, found.accepted_n) == ([1, 1, 1], [1, 1, 1], [1, 1, 0])


def test_a_lookup_learns_when_the_engine_lets_it():
    """While a pass is under way: what it emits is known one pass later."""
    contexts = []

    class Noting(NgramDrafter):
        def learn(self, sequences):
            contexts.append(list(sequences[0].token_ids))
            super().learn(sequences)

    replay(Noting(), Text((1, 2), (3, 4, 5), 3), 2, vocab_size=10)
    assert contexts == [[1, 2], [1, 2, 3], [1, 2, 3, 4]]


def test_a_drafter_that_cannot_learn_is_named():
    class Failing(NgramDrafter):
        def learn(self, sequences):
            raise KeyError("no")

    with pytest.raises(RuntimeError, match="ngram: learn: KeyError"):
        replay(Failing(), Text((1,), (2, 3, 4), 3), 2, vocab_size=10)


def test_a_drafter_that_fails_is_named():
    class Failing(NgramDrafter):
        def propose(self, sequences, num_drafts):
            raise KeyError("no")

    with pytest.raises(RuntimeError, match="ngram: KeyError"):
        replay(Failing(), Text((1,), (2, 3, 4), 3), 2, vocab_size=10)
