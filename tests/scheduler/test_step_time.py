"""Step times with prompts: careful at the start, right after few steps, robust, quick to adapt."""

from __future__ import annotations

import math
import random
from time import thread_time

import pytest

from pagedraft.scheduler.step_time import SIZES, Load, StepTime
from pagedraft.tests.scheduler.pace_simulator import MACHINES, cpu

DECODING = Load(4, 4, 400, 400)


def chunk(size: int, position: int = 0) -> Load:
    """Four decoding rows and a prompt's next tokens."""
    return DECODING.plus(size, position + size) if size else DECODING


def learn(time: StepTime, machine, num_steps: int, speed: float = 1.0, spikes: float = 0.0) -> None:
    """Steps of random chunks, half of them plain, with 3 % of noise."""
    numbers = random.Random(num_steps)
    for _ in range(num_steps):
        load = chunk(numbers.choice((0, 0, 0, 8, 24, 64, 128)), numbers.choice((0, 500, 1500)))
        seconds = speed * machine(load) * numbers.gauss(1.0, 0.03)
        time.record(load, 10 * seconds if numbers.random() < spikes else seconds)


def worst_error(time: StepTime, machine, speed: float = 1.0) -> float:
    """Largest relative error over chunks like those that were measured."""
    loads = [chunk(size, at) for size in (0, 8, 24, 64, 128) for at in (0, 800, 1500)]
    return max(abs(time.predict(load) / (speed * machine(load)) - 1.0) for load in loads)


def fitted(time: StepTime, machine, factor: float, position: int = 0) -> float:
    """Seconds of the step with the chunk that the model lets in, over what was allowed."""
    allowed = factor * machine(DECODING)
    size = time.most_tokens(allowed, DECODING, position)
    return machine(chunk(size, position)) / allowed


@pytest.mark.parametrize("name, most", [("cpu", 0.1), ("gpu", 0.15), ("tiles", 0.25)])
def test_machines_are_learnt(name, most):
    time = StepTime()
    learn(time, MACHINES[name], 150)
    assert worst_error(time, MACHINES[name]) < most


@pytest.mark.parametrize("position", [0, 1000])
@pytest.mark.parametrize("factor", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("name", MACHINES)
def test_what_is_let_in_fits(name, factor, position):
    time = StepTime()
    learn(time, MACHINES[name], 150)
    assert 0.45 < fitted(time, MACHINES[name], factor, position) < 1.02


def test_nothing_is_let_in_before_the_first_measurement():
    assert StepTime().most_tokens(10.0, DECODING, 0) == 0


@pytest.mark.parametrize("name", MACHINES)
def test_little_is_let_in_after_plain_steps_only(name):
    time = StepTime()
    [time.record(DECODING, MACHINES[name](DECODING)) for _ in range(30)]
    assert time.most_tokens(2.0 * MACHINES[name](DECODING), DECODING, 0) < 25


@pytest.mark.parametrize("name", MACHINES)
def test_from_plain_steps_to_the_full_chunk_in_10_steps(name):
    time, machine = StepTime(), MACHINES[name]
    [time.record(DECODING, machine(DECODING)) for _ in range(30)]
    for _ in range(10):
        size = max(4, time.most_tokens(2.0 * machine(DECODING), DECODING, 0))
        assert machine(chunk(size)) < 2.3 * machine(DECODING)
        time.record(chunk(size), machine(chunk(size)))
    assert fitted(time, machine, 2.0) > 0.75


@pytest.mark.parametrize("speed", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_a_machine_of_another_speed_is_followed_within_20_steps(name, speed):
    time = StepTime()
    learn(time, MACHINES[name], 150)
    learn(time, MACHINES[name], 20, speed)
    assert worst_error(time, MACHINES[name], speed) < 0.25


@pytest.mark.parametrize("spikes", [0.02, 0.05])
def test_interruptions_are_no_cost(spikes):
    time = StepTime()
    learn(time, cpu, 300, spikes=spikes)
    assert worst_error(time, cpu) < 0.2


def test_a_step_of_ten_times_is_not_believed_at_once():
    time = StepTime()
    learn(time, cpu, 150)
    before = time.predict(DECODING)
    time.record(DECODING, 10 * before)
    assert time.predict(DECODING) < 1.3 * before


def test_the_margin_grows_with_noise():
    """Of two machines as fast, the noisy one is let do less."""
    sizes = []
    for noise in (0.01, 0.15):
        time, numbers = StepTime(), random.Random(0)
        for _ in range(200):
            load = chunk(numbers.choice((0, 8, 24, 64)))
            time.record(load, cpu(load) * max(0.5, numbers.gauss(1.0, noise)))
        sizes.append(time.most_tokens(2 * cpu(DECODING), DECODING, 0))
    assert sizes[1] < 0.75 * sizes[0]


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_what_no_clock_measures_changes_nothing(seconds):
    time = StepTime()
    time.record(DECODING, seconds)
    assert time.num_recorded == 0
    learn(time, cpu, 20)
    before = time.predict(chunk(64))
    time.record(chunk(64), seconds)
    assert time.predict(chunk(64)) == before
    assert time.num_recorded == 20


def test_an_empty_step_says_nothing():
    time = StepTime()
    time.record(Load(), 1.0)
    assert time.num_recorded == 0


@pytest.mark.parametrize("load", [Load(1, 1, 1, 1), Load().plus(100000, 100000), chunk(9000)])
def test_any_load_can_be_measured(load):
    time = StepTime()
    [time.record(load, 0.5) for _ in range(30)]
    assert time.predict(load) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("seconds", [-1.0, 0.0, math.nan])
def test_no_time_lets_nothing_in(seconds):
    time = StepTime()
    learn(time, cpu, 50)
    assert time.most_tokens(seconds, DECODING, 0) == 0


def test_all_the_time_lets_everything_in():
    time = StepTime()
    learn(time, cpu, 50)
    assert time.most_tokens(math.inf, DECODING, 0) == 3 * chunk(128).tokens - DECODING.tokens
    time.record(chunk(8000), cpu(chunk(8000)))
    assert time.most_tokens(math.inf, DECODING, 0) == SIZES[-1]
    assert time.most_tokens(1e9, DECODING, 0) == SIZES[-1]


def test_steps_grow_by_little_at_once():
    """All sizes cost the same so far; where a tile ends nobody knows."""
    time = StepTime()
    [time.record(chunk(8), 0.01) for _ in range(100)]
    assert time.most_tokens(0.03, DECODING, 0) <= 32


def test_more_time_never_lets_less_in():
    time = StepTime()
    learn(time, lambda load: 0.01 + 1e-4 / load.tokens, 60)
    sizes = [time.most_tokens(0.001 * step, DECODING, 700) for step in range(200)]
    assert sizes == sorted(sizes)


def test_a_load_counts_the_triangle_of_a_chunk():
    """Three tokens at 5, 6 and 7 attend to 5, 6 and 7 tokens."""
    assert Load().plus(3, 7) == Load(tokens=3, rows=1, context=7, pairs=5 + 6 + 7)
    assert chunk(1, 9) == Load(5, 5, 410, 410)


def test_measurements_and_questions_are_cheap():
    """Against NumPy on this machine now: about 25 and 60 calls of it."""
    time = StepTime()
    learn(time, cpu, 50)

    def cost(call) -> float:
        rounds = []
        for _ in range(20):
            began = thread_time()
            [call() for _ in range(20)]
            rounds.append(thread_time() - began)
        return min(rounds)

    def plain_numpy() -> None:
        time._filter.mean_S + time._filter.mean_S

    one = cost(plain_numpy)
    assert cost(lambda: time.predict(DECODING)) < 40 * one
    assert cost(lambda: time.record(DECODING, 0.06)) < 150 * one
    assert cost(lambda: time.most_tokens(0.1, DECODING, 0)) < 250 * one


def test_the_comparison_sees_a_wrong_machine():
    """Teeth: what was learnt on one machine is far off on another."""
    time = StepTime()
    learn(time, MACHINES["gpu"], 150)
    assert worst_error(time, MACHINES["cpu"]) > 0.5
