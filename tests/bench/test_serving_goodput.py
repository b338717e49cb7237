"""The search for the largest rate that keeps a target, on made-up servers."""

from __future__ import annotations

import asyncio
import random

import pytest

from pagedraft.bench.serving_goodput import Goodput, Trial, bracket, search


def found(judge, rates=(1.0, 4.0), resolution: float = 1.1, most_trials: int = 99) -> Goodput:
    """The goodput of a server that keeps the target where ``judge(rate)``."""
    left = [most_trials]

    async def one(rate: float) -> bool:
        left[0] -= 1
        return judge(rate)

    known = [Trial(rate, judge(rate)) for rate in rates]
    return asyncio.run(
        search(one, known, resolution=resolution, has_time=lambda count: left[0] >= count)
    )


@pytest.mark.parametrize("limit", [0.26, 0.9, 1.0, 1.7, 3.99, 4.0, 9.0, 15.9])
def test_a_limit_is_found(limit):
    goodput = found(lambda rate: rate <= limit)
    assert goodput.kept <= limit < goodput.missed <= 1.1 * goodput.kept
    assert goodput.is_confirmed
    assert goodput.is_monotone
    assert goodput.trials[-1] == (goodput.kept, True)
    assert len(goodput.trials) <= 10
    factor = f"to a factor of {goodput.missed / goodput.kept:.2f}"
    assert factor in goodput.lines()[0]


def test_nothing_keeps_the_target():
    goodput = found(lambda rate: False)
    assert (goodput.kept, goodput.missed) == (None, 0.25)
    assert not goodput.is_confirmed
    assert goodput.lines() == ["even the lowest rate tried, 0.25 requests/s, missed the target"]


def test_everything_keeps_the_target():
    goodput = found(lambda rate: True)
    assert (goodput.kept, goodput.missed, goodput.is_confirmed) == (16.0, None, True)
    assert goodput.lines() == ["16 requests/s kept the target; no higher rate was tried"]


def test_a_miss_below_counts_against_all_rates_above():
    known = {1.0: True, 2.0: False, 4.0: True}
    goodput = found(lambda rate: known.get(rate, rate < 1.5), rates=known)
    assert goodput.kept < 1.5 <= goodput.missed
    assert not goodput.is_monotone
    assert "noisy" in goodput.lines()[-1]


def test_a_rate_that_misses_when_it_is_run_again_is_not_taken():
    """The first verdict at every rate below 3 is a pass; above 1.2 the second is not."""
    seen: set[float] = set()

    def judge(rate: float) -> bool:
        is_again = rate in seen
        seen.add(rate)
        return rate < 3.0 and (not is_again or rate <= 1.2)

    goodput = found(judge)
    assert goodput.kept == 1.0
    assert goodput.is_confirmed
    assert goodput.missed > 1.2
    assert not goodput.is_monotone


def test_noise_seldom_raises_the_result():
    """A server whose verdicts are chance around a limit of 2, certain from 1.5 and 2.7 on."""

    def run(seed: int) -> float:
        numbers = random.Random(seed)
        return found(lambda rate: rate < 1.5 + 1.2 * numbers.random()).kept

    rates = sorted(run(seed) for seed in range(40))
    assert rates[0] >= 1.0
    assert rates[-1] < 2.7
    assert 1.4 < rates[20] < 2.2


def test_the_last_of_the_time_is_for_running_the_rate_again():
    goodput = found(lambda rate: rate <= 1.7, most_trials=3)
    assert [trial.is_kept for trial in goodput.trials] == [True, False, False, True, True]
    assert goodput.trials[-1] == goodput.trials[-2]
    assert goodput.is_confirmed
    assert goodput.kept <= 1.7 < goodput.missed


def test_the_time_is_over_when_a_rate_misses_again():
    verdicts = iter([True, False, True, False])
    goodput = found(lambda rate: next(verdicts), most_trials=2)
    assert (goodput.kept, goodput.missed, goodput.is_confirmed) == (1.0, 2.0, False)
    assert "it was not run again: the time was over" in goodput.lines()


def test_the_time_is_over_before_the_first_trial():
    goodput = found(lambda rate: rate < 2.0, most_trials=0)
    assert (goodput.kept, goodput.missed, goodput.is_confirmed) == (1.0, 4.0, False)


def test_trials_of_a_rate_must_all_keep_the_target():
    trials = [Trial(1.0, True), Trial(2.0, True), Trial(2.0, False), Trial(3.0, True)]
    assert bracket(trials) == (1.0, 2.0)


def test_nothing_is_known():
    with pytest.raises(ValueError, match="known: expected at least one trial"):
        found(lambda rate: True, rates=())
