"""Acceptance: what is right counts once, at its depth, for its evidence; lookups also unused."""

from __future__ import annotations

import pytest

from pagedraft.decoding.acceptance import FEW, MAX_WATCHES, Acceptance, AcceptanceTable, worth_of
from pagedraft.decoding.acceptance_cell import HUGE, OWN_DECAY, PRIORS, Cell
from pagedraft.decoding.drafters.base import Proposal

# proposal, drafts used, tokens of the steps that follow -> (depth, hit) counted by the watch
WATCHES = {
    "wrong at once": ([1, 2, 3], 0, [[9]], [(0, 0)]),
    "right, then wrong, in one step": ([1, 2, 3], 0, [[1, 9, 3]], [(0, 1), (1, 0)]),
    "over steps": ([1, 2, 3], 0, [[1], [2], [9]], [(0, 1), (1, 1), (2, 0)]),
    "right to its end": ([1, 2], 0, [[1, 2, 3], [4]], [(0, 1), (1, 1)]),
    "used ones are counted elsewhere": ([1, 2, 3], 2, [[1, 2, 3]], [(2, 1)]),
    "a used one was wrong": ([1, 2, 3], 2, [[1, 9]], []),
    "all were used": ([1, 2], 2, [[1, 2, 3]], []),
    "no drafts": ([], 0, [[1]], []),
    "no tokens": ([1], 0, [[], [1]], [(0, 1)]),
}


def counted(acceptance: Acceptance, name: str = "ngram") -> list[tuple[int, int]]:
    """(depth, hit) of every trial, for depths with a class of their own."""
    trials = []
    for (drafter, _), cell in acceptance.cells.items():
        pairs = zip(cell.hits, cell.tried, strict=True)
        trials += [(d, round(h)) for d, (h, t) in enumerate(pairs) if drafter == name and t]
    return trials


@pytest.mark.parametrize("name", WATCHES)
def test_watch(name):
    tokens, used, steps, expected = WATCHES[name]
    acceptance = Acceptance()
    acceptance.watch("ngram", Proposal(tokens, evidence=3), used)
    [acceptance.emitted(step) for step in steps]
    assert counted(acceptance) == expected
    assert acceptance.num_watches == 0


def test_drafters_are_watched_apart():
    acceptance = Acceptance()
    acceptance.watch("ngram", Proposal([1, 2]))
    acceptance.watch("suffix", Proposal([1, 7]))
    [acceptance.emitted([token]) for token in (1, 2)]
    assert counted(acceptance) == [(0, 1), (1, 1)]
    assert counted(acceptance, "suffix") == [(0, 1), (1, 0)]


def test_a_few_proposals_are_followed_and_all_are_scored_in_their_step():
    acceptance, text = Acceptance(), list(range(100, 120))
    for start in range(6):
        acceptance.watch("ngram", Proposal(text[start : start + 10]))
        acceptance.emitted(text[start : start + 1])
    assert acceptance.num_watches == MAX_WATCHES
    cell = acceptance.cells["ngram", 0]
    assert cell.tried[0] > 5
    assert cell.hits == pytest.approx(cell.tried)
    acceptance.emitted([0])
    assert acceptance.num_watches == 0


def test_drafts_behind_the_first_wrong_one_say_nothing():
    acceptance = Acceptance()
    acceptance.record("ngram", 0, 4, 1)
    acceptance.record("ngram", 0, 0, 0)
    assert counted(acceptance) == [(0, 1), (1, 0)]


def test_deep_drafts_share_classes():
    acceptance = Acceptance()
    acceptance.record("ngram", 0, 100, 70)
    cell = acceptance.cells["ngram", 0]
    assert cell.tried == pytest.approx([1, 1, 1, 1, 4, 63])
    assert cell.hits == pytest.approx([1, 1, 1, 1, 4, 62])


def test_worth_is_the_product_of_the_conditional_estimates():
    acceptance = Acceptance()
    worth = acceptance.worth("ngram", 0, 100)
    assert worth[:3] == pytest.approx([0.5, 0.5 * 0.6, 0.5 * 0.6**2])
    assert len(worth) == 100
    assert worth == sorted(worth, reverse=True)


@pytest.mark.parametrize(("accepted", "low", "high"), [(4, 0.85, 1.0), (0, 0.0, 0.15)])
def test_estimates_follow_the_record(accepted, low, high):
    acceptance = Acceptance()
    [acceptance.record("ngram", 9, 4, accepted) for _ in range(20)]
    assert low <= acceptance.worth("ngram", 9, 1)[0] <= high


def test_evidence_and_drafters_are_told_apart():
    acceptance = Acceptance()
    [acceptance.record("ngram", 2, 4, 0) for _ in range(20)]
    [acceptance.record("ngram", 20, 4, 4) for _ in range(20)]
    weak, strong, other = (
        acceptance.worth(name, evidence, 1)[0]
        for name, evidence in (("ngram", 1), ("ngram", 17), ("suffix", 17))
    )
    assert weak < 0.15 < 0.85 < strong
    assert other == PRIORS[5][0]


def test_a_new_request_begins_with_what_others_taught_and_moves_away_from_it():
    table = AcceptanceTable()
    old, new = Acceptance(table), Acceptance(table)
    [old.record("ngram", 0, 4, 4) for _ in range(50)]
    assert new.worth("ngram", 0, 1)[0] > 0.9
    [new.record("ngram", 0, 4, 0) for _ in range(20)]
    assert new.worth("ngram", 0, 1)[0] < 0.35
    assert old.worth("ngram", 0, 1)[0] > 0.8


def test_what_differs_at_one_depth_is_expected_to_differ_at_the_next():
    """A request that was probed with one draft a step has nothing of its own deeper."""
    table = AcceptanceTable()
    old, new = Acceptance(table), Acceptance(table)
    [old.record("draft", 0, 2, 0 if i % 2 else 1) for i in range(200)]
    others = old.worth("draft", 0, 2)
    [new.record("draft", 0, 1, 1) for _ in range(15)]
    worth = new.worth("draft", 0, 2)
    assert worth[1] / worth[0] > 1.5 * others[1] / others[0]


def test_what_differs_with_one_evidence_is_expected_to_differ_with_another():
    """Others copied; this request's weak matches are wrong more often than theirs."""
    table = AcceptanceTable()
    old, new = Acceptance(table), Acceptance(table)
    [old.record("suffix", 20, 4, 4) for _ in range(50)]
    [old.record("suffix", 1, 4, 3) for _ in range(50)]
    [new.record("suffix", 1, 4, 0) for _ in range(10)]
    misses = [1.0 - acceptance.worth("suffix", 20, 4)[3] for acceptance in (new, old)]
    assert misses[0] > 3 * misses[1]


def test_the_newest_steps_count_most():
    acceptance = Acceptance()
    [acceptance.record("ngram", 0, 1, 0) for _ in range(100)]
    [acceptance.record("ngram", 0, 1, 1) for _ in range(20)]
    assert acceptance.worth("ngram", 0, 1)[0] > 0.5


def taught(num_requests: int) -> list[Acceptance]:
    """Requests of one table, each with a history of its own."""
    table = AcceptanceTable()
    requests = [Acceptance(table) for _ in range(num_requests)]
    [
        request.record(name, (7 * i * step) % 23, 5, (i * step) % 6)
        for i, request in enumerate(requests)
        for step in range(i % 13)
        for name in ("ngram", "suffix")
    ]
    return requests


@pytest.mark.parametrize("num_requests", [1, FEW - 1, FEW, 70])
def test_estimates_of_many_are_those_of_each(num_requests):
    asked = [
        (request, ("ngram", "suffix", "draft")[i % 3], (5 * i) % 30 - 1, i % 19)
        for i, request in enumerate(taught(num_requests))
    ]
    worth_EK = worth_of(asked, 20)
    assert worth_EK.shape == (num_requests, 20)
    one_by_one = [
        request.worth(name, evidence, count) + [0.0] * (20 - count)
        for request, name, evidence, count in asked
    ]
    assert worth_EK.tolist() == [pytest.approx(row) for row in one_by_one]


def test_no_estimates():
    assert worth_of([], 16).shape == (0, 16)


@pytest.mark.parametrize("num_drafts", [0, 1])
def test_few_drafts(num_drafts):
    assert len(Acceptance().worth("ngram", 0, num_drafts)) == num_drafts


def test_a_cell_is_what_decay_says_it_is():
    """By its definition: at each proposal what was counted shrinks, also past the scaling back."""
    cell, hits, tried = Cell(OWN_DECAY), 0.0, 0.0
    largest = 0.0
    for step in range(9000):
        cell.age()
        hits, tried = OWN_DECAY * hits, OWN_DECAY * tried
        weight = cell.values[-1]
        cell.values[6] += weight
        cell.values[0] += weight * (step % 3 == 0)
        hits, tried = hits + (step % 3 == 0), tried + 1.0
        largest = max(largest, weight)
    assert (cell.hits[0], cell.tried[0]) == pytest.approx((hits, tried))
    assert HUGE / 2 < largest <= HUGE


def test_negative_and_large_evidence_have_a_class():
    worth = [Acceptance().worth("ngram", evidence, 1)[0] for evidence in (-5, 0, 17, 10**9)]
    assert worth == pytest.approx([PRIORS[0][0], PRIORS[0][0], PRIORS[5][0], PRIORS[5][0]])
