"""Which changes of a figure count, and which are noise."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedraft.bench.changes import BETTER, SAME, WORSE, Rule, compare_figures
from pagedraft.bench.figures import HOW, Figure, from_samples
from pagedraft.tests.bench.made_figures import counted, rate, timed

# name -> before, after, the mark.
RULES = {
    "slower": (timed(100, 98, 102), timed(110, 108, 112), "worse"),
    "faster": (timed(100, 98, 102), timed(90, 88, 92), "better"),
    "more of what is good": (rate(100, 98, 102), rate(110, 108, 112), "better"),
    "less of what is good": (rate(100, 98, 102), rate(90, 88, 92), "worse"),
    "apart, within the margin": (timed(100, 99, 101), timed(104, 103, 105), "same"),
    "beyond the margin, overlapping": (timed(100, 80, 120), timed(118, 110, 130), "same"),
    "intervals that touch": (timed(100, 98, 105), timed(110, 105, 112), "same"),
    "one sample, 15 %": (timed(100), timed(115), "same"),
    "one sample, 25 %": (timed(100), timed(125), "worse"),
    "one sample against many": (timed(100, 99, 101), timed(115), "same"),
    "one sample against many, 25 %": (timed(100, 99, 101), timed(125), "worse"),
    "a prediction": (timed(100, how="predicted"), timed(70, how="predicted"), "better"),
    "one launch more": (counted(7), counted(8), "worse"),
    "one launch less": (counted(7), counted(6), "better"),
    "rounding of a count": (counted(0.1 + 0.2), counted(0.3), "same"),
    "one byte of a megabyte": (counted(1e6, unit="B"), counted(1e6 + 1, unit="B"), "worse"),
    "modelled": (timed(5.0, how="modelled"), timed(5.1, how="modelled"), "worse"),
    "a count from 0": (counted(0), counted(1), "worse"),
    "a count to 0": (counted(1), counted(0), "better"),
    "0 stays 0": (counted(0), counted(0), "same"),
    "a time from 0": (timed(0), timed(1), "worse"),
    "a time of 0 stays 0": (timed(0), timed(0), "same"),
    "negative, towards 0": (timed(-10, -11, -9), timed(-5, -6, -4), "worse"),
    "negative, away from 0": (timed(-5, -6, -4), timed(-10, -11, -9), "better"),
    "negative count": (counted(-1, better="higher"), counted(-2, better="higher"), "worse"),
}


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    old, new, mark = RULES[name]
    assert Rule().mark(old, new) == mark


def test_margins_are_what_was_asked_for():
    assert Rule(margin=0.2).mark(timed(100, 98, 102), timed(110, 108, 112)) == SAME
    assert Rule(single=0.1).mark(timed(100), timed(115)) == WORSE
    assert Rule(counted=0.01).mark(counted(1000), counted(1009)) == SAME


@st.composite
def figures(draw, how: str, better: str) -> Figure:
    number = st.floats(-1e6, 1e6)
    low, value, high = sorted(draw(st.tuples(number, number, number)))
    has_interval = draw(st.booleans())
    sides = (low, high) if has_interval else (None, None)
    return timed(value, *sides, how=how, better=better)


@given(st.data(), st.sampled_from([*HOW]), st.sampled_from(["lower", "higher"]))
def test_the_other_way_round_is_the_opposite(data, how, better):
    old, new = data.draw(figures(how, better)), data.draw(figures(how, better))
    opposite = {WORSE: BETTER, BETTER: WORSE, SAME: SAME}
    assert Rule().mark(new, old) == opposite[Rule().mark(old, new)]
    assert Rule().mark(old, old) == SAME


def noisy(seed: int, mean: float = 100.0, spread: float = 10.0) -> list[Figure]:
    """200 figures of 30 samples each, normal around ``mean``."""
    rng = random.Random(seed)
    samples = [[rng.gauss(mean, spread) for _ in range(30)] for _ in range(200)]
    return [from_samples(f"{i}", row, "us", "lower") for i, row in enumerate(samples)]


@pytest.mark.parametrize("seed", range(5))
def test_equal_runs_with_noise_are_the_same(seed):
    changes = compare_figures(noisy(seed), noisy(seed + 100), Rule())
    assert {change.mark for change in changes} == {SAME}


@pytest.mark.parametrize("seed", range(5))
def test_teeth_what_exceeds_the_noise_is_marked(seed):
    changes = compare_figures(noisy(seed), noisy(seed + 100, mean=125.0, spread=5.0), Rule())
    assert {change.mark for change in changes} == {WORSE}
