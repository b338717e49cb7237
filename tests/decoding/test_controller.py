"""Draft length: follows acceptance and cost, stays in bounds, comes back after a bad spell."""

from __future__ import annotations

import pytest

from pagedraft.decoding.controller import Acceptance, DraftController, StepCost

RECORDS = {
    "everything accepted": ([(4, 4)] * 20, 0.9, 1.0),
    "nothing accepted": ([(4, 0)] * 20, 0.0, 0.1),
    "first of two": ([(2, 1)] * 20, 0.4, 0.6),
    "no drafts tell nothing": ([(0, 0)] * 20, 0.69, 0.71),
}


def measured(seconds_per_token: float, base: float = 0.02) -> StepCost:
    cost = StepCost()
    for step in range(40):
        tokens = 1 + step % 5
        cost.record(tokens, tokens, base + seconds_per_token * tokens)
    return cost


@pytest.mark.parametrize("name", RECORDS)
def test_alpha_follows_the_record(name):
    steps, low, high = RECORDS[name]
    acceptance = Acceptance()
    for drafted, accepted in steps:
        acceptance.record(drafted, accepted)
    assert low <= acceptance.alpha <= high


@pytest.mark.parametrize("seconds_per_token", [1e-4, 1e-3, 5e-3])
def test_marginal_cost_is_recovered(seconds_per_token):
    assert measured(seconds_per_token).seconds_per_token == pytest.approx(
        seconds_per_token, rel=0.05
    )


def test_cheap_verification_drafts_to_the_limit():
    controller = DraftController("auto", max_drafts=8)
    controller.cost = measured(1e-5)
    assert controller.choose(Acceptance(accepted=9, tried=10)) == 8


def test_costly_verification_drafts_less_and_then_nothing():
    controller = DraftController("auto", max_drafts=8)
    controller.cost = measured(1e-2)
    few = controller.choose(Acceptance(accepted=9, tried=10))
    none = controller.choose(Acceptance(accepted=1, tried=10))
    assert 0 < few < 8
    assert none == 0


def test_a_request_that_stopped_drafting_tries_again():
    controller = DraftController("auto", max_drafts=8)
    controller.cost = measured(1e-3)
    acceptance = Acceptance(accepted=0.0, tried=5.0)
    steps = [controller.choose(acceptance) for _ in range(100)]
    assert steps[0] == 0
    assert max(steps) > 0


def test_an_integer_is_taken_at_its_word():
    assert DraftController(3).choose(Acceptance(accepted=0.0, tried=9.0)) == 3


@pytest.mark.parametrize("k", [-1, 1.5, "many", True, None])
def test_bad_k(k):
    with pytest.raises(ValueError, match="k: expected"):
        DraftController(k)
