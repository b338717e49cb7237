"""The cost curve: follows steps and lines, keeps apart rows and context, survives interruptions."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pagedraft.decoding.step_cost import NODES, StepCost
from pagedraft.tests.decoding.controller_simulator import CURVES

SIZES = (1, 2, 4, 8, 12, 16, 17, 20, 24, 32)


def learn(cost: StepCost, curve, num_steps: int, spike_share: float = 0.0, seed: int = 0) -> None:
    """Measure steps of random sizes with 3 % of noise."""
    numbers = random.Random(seed)
    for _ in range(num_steps):
        size = numbers.choice(SIZES)
        seconds = curve(size) * numbers.gauss(1.0, 0.03)
        cost.record(size, 1, 300, seconds * (5.0 if numbers.random() < spike_share else 1.0))


def worst_error(cost: StepCost, curve) -> float:
    """Largest relative error over the sizes measured."""
    exact = np.array([curve(size) for size in SIZES])
    return float(np.abs(cost.predict(SIZES, 1, 300) / exact - 1.0).max())


@pytest.mark.parametrize("name", CURVES)
def test_curves_are_learnt(name):
    cost = StepCost()
    learn(cost, CURVES[name], 200)
    assert worst_error(cost, CURVES[name]) < 0.08


@pytest.mark.parametrize("name", CURVES)
def test_interruptions_are_no_cost(name):
    cost = StepCost()
    learn(cost, CURVES[name], 300, spike_share=0.02)
    assert worst_error(cost, CURVES[name]) < 0.2


@pytest.mark.parametrize("factor", [0.5, 2.0, 3.0])
def test_a_machine_of_another_speed_is_followed_within_50_steps(factor):
    cost = StepCost()
    learn(cost, CURVES["demo"], 200)
    learn(cost, lambda size: factor * CURVES["demo"](size), 50)
    assert worst_error(cost, lambda size: factor * CURVES["demo"](size)) < 0.15


def test_a_slow_first_step_is_forgotten():
    cost = StepCost()
    cost.record(1, 1, 300, 0.2)
    learn(cost, CURVES["demo"], 60)
    assert worst_error(cost, CURVES["demo"]) < 0.1


def test_rows_and_context_cost_too():
    """10 ms, 0.1 a token, 1 a row, 2 for 1000 tokens of context."""

    def exact(tokens: int, rows: int, context: int) -> float:
        return 1e-3 * (10 + 0.1 * tokens + (rows - 1) + 2 * context / 1000)

    cost, numbers = StepCost(), random.Random(0)
    for _ in range(600):
        rows, context = numbers.choice((1, 2, 4, 8)), numbers.choice((100, 1000, 3000))
        tokens = rows * numbers.choice((1, 2, 4))
        cost.record(tokens, rows, context, exact(tokens, rows, context))
    for tokens, rows, context in ((1, 1, 100), (8, 8, 3000), (4, 1, 2000), (16, 4, 500)):
        predicted = float(cost.predict((tokens,), rows, context)[0])
        assert predicted == pytest.approx(exact(tokens, rows, context), rel=0.1)


def test_a_size_never_measured_is_believed_cheap_and_in_doubt():
    cost = StepCost()
    [cost.record(1, 1, 100, 0.01) for _ in range(50)]
    one, eight = cost.predict((1, 8), 1, 100)
    assert one < eight < 1.2 * one
    spread = cost.spread(np.array([1, 2, 8, 32]), 1)
    assert spread[0] == 0
    assert 0.2 * one < spread[1] < spread[2] < spread[3]
    [cost.record(8, 1, 100, 0.02) for _ in range(20)]
    assert cost.spread(np.array([8]), 1)[0] < 0.3 * spread[2]


def test_predictions_never_fall_with_size():
    cost = StepCost()
    learn(cost, lambda size: 0.01 / size, 100)
    assert (np.diff(cost.predict(np.arange(1, 100), 1, 300)) >= 0).all()


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 17, 18, 1000, 5000])
def test_one_prediction_is_that_of_many(num_tokens):
    cost = StepCost()
    learn(cost, CURVES["linear"], 100)
    expected = float(cost.predict((num_tokens,), 3, 900)[0])
    assert cost.predict_one(num_tokens, 3, 900) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("num_tokens", [1, 7, NODES[-1], 10 * NODES[-1]])
def test_any_size_can_be_measured(num_tokens):
    cost = StepCost()
    [cost.record(num_tokens, 1, 0, 0.01) for _ in range(30)]
    assert float(cost.predict((num_tokens,), 1, 0)[0]) == pytest.approx(0.01, rel=0.05)
    assert cost.most_tokens == num_tokens


def test_the_comparison_sees_a_wrong_curve():
    """Teeth: a curve learnt from another one is far off."""
    cost = StepCost()
    learn(cost, CURVES["costly"], 200)
    assert worst_error(cost, CURVES["tiles"]) > 0.5
