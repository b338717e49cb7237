"""Targets between tokens, against machines of known cost: gaps kept, prompts fast, none starved."""

from __future__ import annotations

from statistics import median

import pytest

from pagedraft.scheduler.pace import FREE, HOPELESS, LEAST_CHUNK
from pagedraft.scheduler.step_time import StepTime
from pagedraft.tests.scheduler.pace_simulator import (
    MACHINES,
    STREAMS,
    alone,
    cpu,
    first_token,
    gaps,
    streaming,
)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factor", [2.0, 2.5, 4.0])
@pytest.mark.parametrize("name", MACHINES)
def test_gaps_are_kept_while_a_prompt_is_read(name, factor, seed):
    simulator = streaming(MACHINES[name], factor, seed=seed)
    _, seen = first_token(simulator, 2000)
    assert max(seen) < 1.15 * factor
    assert sum(gap > factor for gap in seen) < 0.1 * len(seen)


@pytest.mark.parametrize("name", MACHINES)
def test_without_targets_gaps_are_those_of_whole_chunks(name):
    """The control: nobody asks, and nothing is limited."""
    simulator = streaming(MACHINES[name], None)
    ttft, seen = first_token(simulator, 2000)
    assert max(seen) > 2.5
    assert set(simulator.verdicts) == {FREE}
    assert ttft < 1.25 * alone(MACHINES[name], 2000)


def constant_rate(machine, num_prompt: int, allowed: float) -> float:
    """Seconds to read a prompt in steps that last just as long as they may."""
    written = 0
    seconds = 0.0
    while written < num_prompt:
        size = 1
        while machine(STREAMS.plus(size + 1, written + size + 1)) <= allowed:
            size += 1
        written += size
        seconds += machine(STREAMS.plus(size, written))
    return seconds


@pytest.mark.parametrize("factor", [2.0, 3.0])
@pytest.mark.parametrize("name, most", [("cpu", 1.35), ("gpu", 1.5), ("tiles", 1.75)])
def test_the_prompt_is_nearly_as_fast_as_the_targets_allow(name, most, factor):
    simulator = streaming(MACHINES[name], factor)
    ttft, _ = first_token(simulator, 4000)
    best = constant_rate(MACHINES[name], 4000, factor * MACHINES[name](STREAMS))
    assert ttft < most * best


@pytest.mark.parametrize("speed", [2.0, 0.5])
@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_that_changes_its_speed_is_followed_in_20_steps(name, speed):
    simulator = streaming(MACHINES[name], 4.0, num_blocks=8192)
    simulator.add(100000)
    simulator.run(40)
    simulator.speed = speed
    simulator.run(20)
    changed = simulator.now
    simulator.run(60)
    target = 4.0 * MACHINES[name](STREAMS)
    after = gaps(simulator.running[0], changed)
    assert sum(gap > 1.1 * target for gap in after) < 0.15 * len(after)
    assert median(after) > 0.6 * target


def test_interruptions_do_not_stop_the_prompt():
    calm, rough = (streaming(cpu, 2.5, spike_share=share) for share in (0.0, 0.03))
    first_token(calm, 2000)
    first_token(rough, 2000)
    assert len(rough.verdicts) < 1.5 * len(calm.verdicts)


@pytest.mark.parametrize("name", MACHINES)
def test_the_first_chunks_are_small(name):
    """Nothing is known, and the first request with a target already streams."""
    simulator = streaming(MACHINES[name], 2.0)
    simulator.pace.step_time = StepTime()
    simulator.add(2000)
    simulator.run(2)
    assert [verdict.prompt_budget for verdict in simulator.verdicts[-2:]][0] == LEAST_CHUNK
    assert simulator.verdicts[-1].prompt_budget < 64


@pytest.mark.parametrize("factor", [0.01, 0.5, 1.0, 1.1])
@pytest.mark.parametrize("name", MACHINES)
def test_a_target_that_cannot_be_kept_starves_no_prompt(name, factor):
    simulator = streaming(MACHINES[name], factor)
    ttft, seen = first_token(simulator, 1000)
    assert ttft < 300 * HOPELESS * MACHINES[name](STREAMS)
    assert median(seen) < 1.2 * HOPELESS


def test_the_tightest_target_counts():
    simulator = streaming(cpu, 4.0)
    loose = simulator.pace.plan(simulator.running, simulator.waiting, simulator.now)
    tight = simulator.add(16, itl_ms=1e3 * 1.8 * cpu(STREAMS))
    simulator.run_until(tight)
    simulator.run(1)
    _, seen = first_token(simulator, 1000)
    assert loose == FREE  # nobody has a prompt to read
    assert max(seen) < 2.2
    simulator.end(tight)
    _, seen = first_token(simulator, 1000)
    assert median(seen) > 2.5


def test_time_between_steps_counts_in_the_gap():
    """Half of the target is gone when the step begins."""
    simulator = streaming(cpu, 4.0)
    simulator.add(4000)
    simulator.run(20)
    waiting, running, pace = simulator.waiting, simulator.running, simulator.pace
    at_once = pace.plan(running, waiting, simulator.now).prompt_budget
    later = pace.plan(running, waiting, simulator.now + 2.0 * cpu(STREAMS)).prompt_budget
    too_late = pace.plan(running, waiting, simulator.now + 100.0).prompt_budget
    assert LEAST_CHUNK <= too_late < later < 0.6 * at_once


def test_drafts_use_the_time_of_the_prompt():
    simulator = streaming(cpu, 3.0)
    simulator.add(4000)
    simulator.run(20)
    plain = simulator.pace.plan(simulator.running, simulator.waiting, simulator.now)
    for request in simulator.running[:4]:
        request.num_drafts = 8
    drafting = simulator.pace.plan(simulator.running, simulator.waiting, simulator.now)
    assert LEAST_CHUNK <= drafting.prompt_budget < 0.6 * plain.prompt_budget


def test_a_long_prompt_that_waits_is_taken_for_cached():
    """Its first chunk may attend to all of it."""
    simulator = streaming(cpu, 3.0)
    simulator.add(2000)
    simulator.run_until(simulator.add(64))
    simulator.run(5)
    short, long = (streaming(cpu, 3.0) for _ in range(2))
    short.pace.step_time = long.pace.step_time = simulator.pace.step_time
    short.add(100)
    long.add(3000)
    short.step()
    long.step()
    assert long.verdicts[-1].prompt_budget < short.verdicts[-1].prompt_budget


def test_a_pace_that_is_not_asked_keeps_no_gap():
    simulator = streaming(cpu, 2.0, has_pace=False)
    _, seen = first_token(simulator, 2000)
    assert max(seen) > 5.0


def test_a_pace_that_never_learns_is_slow_or_late():
    simulator = streaming(cpu, 2.0)
    ttft, _ = first_token(simulator, 2000)
    blind = streaming(cpu, 2.0)
    blind.pace.step_time = StepTime()
    blind.pace.record = lambda scheduled, seconds: None
    slow, _ = first_token(blind, 2000)
    assert slow > 1.5 * ttft
