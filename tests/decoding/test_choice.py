"""Candidates of a step: the strongest a row, and none left out that the best set would have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedraft.decoding.acceptance import Acceptance
from pagedraft.decoding.choice import (
    NO_DRAFTS,
    Lineup,
    Row,
    best_drafts,
    fixed,
    lineups,
    unweighed,
)
from pagedraft.decoding.drafters.base import Proposal


def knows(**accepted: int) -> Acceptance:
    """A request whose drafters had so many of four drafts accepted, again and again."""
    acceptance = Acceptance()
    [acceptance.record(name, 3, 4, n) for name, n in accepted.items() for _ in range(20)]
    [acceptance.record(name, 0, 4, n) for name, n in accepted.items() for _ in range(20)]
    return acceptance


OFFER = Proposal([5, 6, 7, 8], evidence=3)
BOTH = {"ngram": OFFER, "suffix": OFFER}

# row -> who may draft for it in each lineup: lookups alone, then beside each model
LINEUPS = {
    "the stronger lookup": (Row(knows(ngram=1, suffix=3), 9, None, BOTH), [["suffix"]]),
    "whichever comes first": (Row(knows(ngram=4, suffix=0), 9, None, BOTH), [["ngram"]]),
    "a model in place of a weak lookup": (
        Row(knows(ngram=0, draft=4), 9, None, {"ngram": OFFER}, ["draft"]),
        [["ngram"], ["draft"]],
    ),
    "a weak model": (
        Row(knows(ngram=4, draft=0), 9, None, {"ngram": OFFER}, ["draft"]),
        [["ngram"], ["ngram"]],
    ),
    "two models, no offer": (
        Row(knows(draft=3, layers=2), 9, None, {}, ["draft", "layers"]),
        [[], ["draft"], ["layers"]],
    ),
}


@pytest.mark.parametrize("name", LINEUPS)
def test_lineups(name):
    row, expected = LINEUPS[name]
    other = Row(Acceptance(), 0)
    ways = lineups([other, row], [1], 16, 0.0)
    assert [way.names for way in ways] == expected
    assert [way.rows for way in ways] == [[1] * len(names) for names in expected]


def test_no_more_is_worth_than_was_offered_or_can_be_kept():
    rows = [Row(Acceptance(), limit, None, {"ngram": OFFER}) for limit in (1, 3, 9)]
    [way] = lineups(rows, [0, 1, 2], 16, 0.0)
    assert np.count_nonzero(way.worth_RK, axis=1).tolist() == [1, 3, 4]


@settings(max_examples=200)
@given(
    accepted=st.lists(st.integers(0, 4), min_size=1, max_size=20),
    rate=st.floats(0.1, 50.0),
    slope=st.floats(0.001, 0.5),
    bend=st.floats(0.0, 0.3),
)
def test_what_is_left_out_would_not_be_chosen(accepted, rate, slope, bend):
    """No draft costs less than ``slope``, so none that is worth less gains anything."""
    rows = [Row(knows(ngram=n), 16, None, {"ngram": Proposal([1] * 16, None, 3)}) for n in accepted]
    num_drafts = np.arange(16 * len(rows) + 1)
    seconds = 1.0 + slope * num_drafts + bend * (num_drafts // 7)
    everybody = range(len(rows))
    best = [
        best_drafts(lineups(rows, everybody, 16, least), seconds, rate, lambda name, n: 0.0)
        for least in (0.0, rate * slope)
    ]
    gains = [drafts.tokens - rate * (seconds[drafts.total] - 1.0) for drafts in best]
    assert gains[1] == pytest.approx(gains[0])


def test_too_much_left_out_is_seen():
    """Teeth: with half of the drafts missing less is gained."""
    rows = [Row(knows(ngram=3), 16, None, {"ngram": OFFER}) for _ in range(3)]
    seconds = 1.0 + 0.01 * np.arange(13)
    totals = [
        best_drafts(lineups(rows, range(3), 16, least), seconds, 1.0, lambda name, n: 0.0).total
        for least in (0.01, 0.9)
    ]
    assert totals[0] > totals[1]


def test_expected_tokens_are_those_of_the_drafts_taken():
    worth_RK = np.array([[0.9, 0.5, 0.0], [0.8, 0.1, 0.05]])
    way = Lineup([4, 7], ["ngram", "suffix"], worth_RK)
    drafts = best_drafts([way], 1.0 + 0.2 * np.arange(7), 1.0, lambda name, n: 0.0)
    assert (drafts.ks, drafts.total) == ([2, 1], 3)
    assert drafts.tokens == pytest.approx(2.2)
    assert [(row, c.drafter, c.k, c.reason) for row, c in drafts.choices("why")] == [
        (4, "ngram", 2, "why"),
        (7, "suffix", 1, "why"),
    ]
    assert [c.expected for _, c in drafts.choices("why")] == pytest.approx([2.4, 1.8])


def test_nothing_pays():
    way = Lineup([0], ["ngram"], np.array([[0.1, 0.05]]))
    assert best_drafts([way], np.array([1.0, 9.0]), 1.0, lambda name, n: 0.0) is NO_DRAFTS
    assert best_drafts([], np.array([1.0]), 1.0, lambda name, n: 0.0) is NO_DRAFTS
    assert (NO_DRAFTS.total, NO_DRAFTS.tokens, NO_DRAFTS.choices("why")) == (0, 0, [])


def test_fixed_choices_are_made_once():
    first = unweighed(4, 9, {"ngram": OFFER}, ())
    assert first is unweighed(7, 4, {"ngram": OFFER}, ()) is fixed("ngram", 4)
    assert first.expected == 1.0
