"""The controller: near the best fixed k for all texts and costs, never much below plain."""

from __future__ import annotations

import pytest

from pagedraft.decoding.acceptance import Acceptance
from pagedraft.decoding.controller import Choice, DraftController, Row
from pagedraft.decoding.drafters.base import Proposal
from pagedraft.tests.decoding.controller_simulator import (
    CURVES,
    Simulator,
    best_fixed_rate,
    expected_rate,
    fixed_rate,
)

OFFER = Proposal([5, 6, 7, 8], evidence=4)

# alpha, rows -> least share of the best fixed k's speed in the second 200 steps, for every curve
SPEEDS = {
    "nothing is right": (0.0, 1),
    "nothing is right, 4 rows": (0.0, 4),
    "nothing is right, 16 rows": (0.0, 16),
    "little is right": (0.3, 1),
    "little is right, 4 rows": (0.3, 4),
    "little is right, 16 rows": (0.3, 16),
    "more is right": (0.6, 1),
    "more is right, 4 rows": (0.6, 4),
    "more is right, 16 rows": (0.6, 16),
    "most is right": (0.9, 1),
    "most is right, 4 rows": (0.9, 4),
    "most is right, 16 rows": (0.9, 16),
}

# row, controller's k -> choice
CHOICES = {
    "the controller's k": (Row(Acceptance(), 9, offers={"ngram": OFFER}), 2, ("ngram", 2, "fixed")),
    "the request's k": (Row(Acceptance(), 9, 3, {"ngram": OFFER}), "auto", ("ngram", 3, "fixed")),
    "off": (Row(Acceptance(), 9, 0, {"ngram": OFFER}), "auto", (None, 0, "fixed")),
    "fewer found": (Row(Acceptance(), 9, 8, {"ngram": OFFER}), "auto", ("ngram", 4, "fixed")),
    "first that offers": (
        Row(Acceptance(), 9, 2, {"ngram": Proposal([]), "suffix": OFFER}),
        "auto",
        ("suffix", 2, "fixed"),
    ),
    "a model where no lookup offers": (
        Row(Acceptance(), 9, 2, {"ngram": Proposal([])}, ["draft"]),
        "auto",
        ("draft", 2, "fixed"),
    ),
    "the limit": (Row(Acceptance(), 1, 3, {"ngram": OFFER}), "auto", ("ngram", 1, "fixed")),
    "no room": (Row(Acceptance(), 0, offers={"ngram": OFFER}), "auto", (None, 0, "limit")),
    "nothing": (Row(Acceptance(), 9), "auto", (None, 0, "nothing found")),
    "plain is measured first": (
        Row(Acceptance(), 9, offers={"ngram": OFFER}),
        "auto",
        (None, 0, "not worth it"),
    ),
}


def share_of_best(simulator: Simulator, num_steps: int, round_seconds: float = 0.0) -> float:
    """Speed of the next steps over that of the best fixed k."""
    speed = expected_rate(simulator.run(num_steps), simulator.alphas)
    return speed / best_fixed_rate(simulator.alphas, simulator.curve, round_seconds)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("name", SPEEDS)
def test_near_the_best_fixed_k_and_never_below_plain(name, curve):
    alpha, rows = SPEEDS[name]
    simulator = Simulator([alpha] * rows, CURVES[curve])
    plain = fixed_rate(simulator.alphas, simulator.curve, 0)
    first = expected_rate(simulator.run(200), simulator.alphas)
    assert first / plain >= 0.97
    assert share_of_best(simulator, 200) >= (0.95 if rows < 16 else 0.93)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.9])
def test_interruptions_do_not_derail_it(alpha, curve):
    """2 % of the steps are measured at five times their length."""
    simulator = Simulator([alpha] * 4, CURVES[curve], spike_share=0.02, noise=0.05)
    simulator.run(200)
    plain = fixed_rate(simulator.alphas, simulator.curve, 0)
    run = simulator.run(200)
    assert expected_rate(run, simulator.alphas) / plain >= 0.97
    assert (
        expected_rate(run, simulator.alphas) / best_fixed_rate(simulator.alphas, simulator.curve)
        >= 0.9
    )


def test_rows_are_told_apart():
    """One row copies, one does not: the first drafts, the second hardly does."""
    simulator = Simulator([0.9, 0.1], CURVES["linear"])
    simulator.run(100)
    run = simulator.run(100)
    ks = [sum(choices[row].k for choices in run.choices) / 100 for row in range(2)]
    assert ks[0] > 4
    assert ks[1] < 1


def test_copying_is_noticed_within_20_steps_though_drafting_was_off():
    simulator = Simulator([0.02], CURVES["costly"])
    simulator.run(300)
    assert sum(choices[0].k for choices in simulator.run(50).choices) <= 5
    simulator.alphas = [0.95]
    simulator.run(20)
    assert share_of_best(simulator, 60) >= 0.9


def test_the_end_of_copying_is_noticed_within_20_steps():
    simulator = Simulator([0.95], CURVES["costly"])
    simulator.run(300)
    simulator.alphas = [0.0]
    simulator.run(20)
    assert share_of_best(simulator, 60) >= 0.95


def test_other_costs_of_verifying_are_noticed_within_100_steps():
    simulator = Simulator([0.6], CURVES["tiles"])
    simulator.run(200)
    simulator.curve = CURVES["costly"]
    simulator.run(100)
    assert share_of_best(simulator, 100) >= 0.9


@pytest.mark.parametrize(("alpha", "round_seconds"), [(0.8, 0.002), (0.3, 0.004), (0.9, 0.05)])
def test_a_model_drafter_is_used_where_it_pays(alpha, round_seconds):
    simulator = Simulator([alpha] * 4, CURVES["linear"], round_seconds=round_seconds)
    simulator.run(200)
    assert share_of_best(simulator, 300, round_seconds) >= 0.93


def test_a_model_drafter_that_is_off_comes_back():
    """Its probes cost at most 1 % of the time, so it takes some hundred steps."""
    simulator = Simulator([0.0], CURVES["linear"], round_seconds=0.001)
    simulator.run(100)
    run = simulator.run(300)
    probes = sum(choices[0].k for choices in run.choices)
    assert 0 < probes * (0.001 + 0.04 * 0.010) < 0.011 * run.seconds
    simulator.alphas = [0.9]
    simulator.run(500)
    assert share_of_best(simulator, 100, 0.001) >= 0.8


@pytest.mark.parametrize("name", CHOICES)
def test_choices_without_weighing(name):
    row, k, expected = CHOICES[name]
    choice = DraftController(k).choose([row])[0]
    assert (choice.drafter, choice.k, choice.reason) == expected


def test_the_better_lookup_is_chosen():
    controller, acceptance = measured(), Acceptance()
    for _ in range(10):
        acceptance.record("ngram", 4, 4, 0)
        acceptance.record("suffix", 4, 4, 4)
    row = Row(acceptance, 9, offers={"ngram": OFFER, "suffix": OFFER})
    choice = controller.choose([row])[0]
    assert (choice.drafter, choice.k, choice.reason) == ("suffix", 4, "worth it")
    assert 4 < choice.expected < 5


def measured() -> DraftController:
    """A controller that has seen cheap verification."""
    controller = DraftController()
    for step in range(41):
        tokens = 1 + step % 5
        controller.record_step(
            num_tokens=tokens, num_rows=1, num_context=9, seconds=0.01 + 1e-5 * tokens
        )
    return controller


def test_report_tells_choices_and_errors():
    simulator = Simulator([0.6], CURVES["linear"])
    simulator.run(100)
    simulator.controller.clear_report()
    run = simulator.run(200)
    report = simulator.controller.report()
    assert report["steps"] == 200
    assert report["mean_k"] == sum(choices[0].k for choices in run.choices) / 200
    assert report["drafts_by_drafter"] == {"ngram": round(200 * report["mean_k"])}
    assert sum(report["reasons"].values()) == 200
    assert report["seconds_error"] < 0.06
    assert abs(report["tokens_bias"]) < 0.1


def test_report_sees_a_wrong_prediction():
    """Teeth: steps that take twice as long as any before are an error of one half."""
    controller = measured()
    controller.clear_report()
    controller.choose([Row(Acceptance(), 0)])
    controller.record_step(num_tokens=1, num_rows=1, num_context=9, seconds=0.02, num_emitted=2)
    report = controller.report()
    assert report["seconds_error"] == pytest.approx(0.5, abs=0.05)
    assert report["tokens_error"] == report["tokens_bias"] * -1 == 0.5


def test_no_rows():
    assert DraftController().choose([], 100) == []


def test_choice_of_a_row_that_gets_nothing_expects_one_token():
    assert DraftController().choose([Row(Acceptance(), 9)]) == [Choice(None, 0, "nothing found")]


@pytest.mark.parametrize("k", [-1, 1.5, "many", True, None])
def test_bad_k(k):
    with pytest.raises(ValueError, match="k: expected"):
        DraftController(k)
