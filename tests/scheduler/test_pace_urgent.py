"""Targets of the first token: whose prompt goes first; and who has targets, for how long."""

from __future__ import annotations

import math
import random

import pytest

from pagedraft.scheduler.pace import FREE, LEAST_CHUNK, Verdict, check_target
from pagedraft.scheduler.step_time import StepTime
from pagedraft.tests.scheduler.pace_simulator import (
    MACHINES,
    STREAMS,
    Simulator,
    alone,
    cpu,
    first_token,
    gpu,
    streaming,
)


@pytest.mark.parametrize("learnt", [True, False])
def test_without_targets_between_tokens_the_budget_is_free(learnt):
    simulator = streaming(gpu, None)
    if not learnt:
        simulator.pace.step_time = StepTime()
    request = simulator.add(2000, ttft_ms=1.0)
    simulator.step()
    assert simulator.verdicts[-1] == Verdict(None, (request,))


def test_prompts_go_by_deadline():
    """In the order of arrival, the third would come after two long ones."""
    simulator = streaming(cpu, None)
    whole = alone(cpu, 2000)
    long = [simulator.add(2000, ttft_ms=1e3 * 20 * whole) for _ in range(2)]
    short = simulator.add(500, ttft_ms=1e3 * 0.8 * whole)
    simulator.run_until(*long, short)
    assert short.stats.ttft < 0.8 * whole
    assert all(request.stats.ttft < 20 * whole for request in long)


def test_a_prompt_with_time_to_spare_does_not_push_ahead():
    simulator = streaming(cpu, None)
    simulator.run_until(simulator.add(600))
    first, second = simulator.add(1000), simulator.add(200, ttft_ms=1e6)
    simulator.step()
    assert simulator.verdicts[-1].urgent == ()
    simulator.run_until(first, second)
    assert first.stats.ttft <= second.stats.ttft


def test_those_before_one_at_risk_are_urgent_too():
    """Each would make it alone; the last one does not if it comes after the others' needs."""
    simulator = streaming(cpu, None, token_budget=64)
    simulator.run_until(simulator.add(1000))
    whole = alone(cpu, 200, token_budget=64)
    rows = [simulator.add(200, ttft_ms=1e3 * whole * (4.2 - i / 10)) for i in range(4)]

    def urgent() -> tuple:
        return simulator.pace.plan(simulator.running, simulator.waiting, simulator.now).urgent

    assert urgent() == (rows[3],)
    for row in rows[:2]:
        simulator.end(row)
    assert urgent() == ()


def test_the_plan_is_told_of_as_many_as_fill_the_step():
    """The deadlines are against the order of arrival, which the plan would serve."""
    simulator = streaming(cpu, None)
    simulator.run_until(simulator.add(1000))
    rows = [simulator.add(300, ttft_ms=1000.0 - i) for i in range(4)]
    simulator.step()
    assert simulator.verdicts[-1].urgent == (rows[3], rows[2])
    assert [row.num_written > 0 for row in rows] == [False, False, True, True]


def test_one_that_cannot_be_admitted_takes_no_place():
    simulator = streaming(cpu, None, max_rows=5)
    running = simulator.add(2000, ttft_ms=100.0)
    simulator.step()
    blocked = simulator.add(2000, ttft_ms=50.0)
    simulator.step()
    assert simulator.verdicts[-1].urgent == (running,)
    assert blocked in simulator.waiting


def test_one_that_cannot_make_it_steps_back_behind_those_that_can():
    simulator = streaming(cpu, None)
    simulator.run_until(simulator.add(1000))
    whole = alone(cpu, 1000)
    lost = simulator.add(1000, ttft_ms=1e3 * whole / 4)
    able = simulator.add(1000, ttft_ms=1e3 * whole * 1.5)
    simulator.step()
    assert simulator.verdicts[-1].urgent == (able,)
    simulator.run_until(lost, able)
    assert able.stats.ttft < 1.5 * whole


def test_one_that_stepped_back_for_long_comes_first():
    """New requests with targets that they can make keep coming, faster than they are read."""
    simulator = streaming(gpu, None)
    lost = simulator.add(2000, ttft_ms=1.0)
    for _ in range(60):
        simulator.add(500, ttft_ms=150.0)
        simulator.step()
    assert lost.stats.emissions
    assert lost.stats.ttft < 8 * alone(gpu, 2000)


def test_urgent_prompts_break_no_target_between_tokens():
    simulator = streaming(cpu, 2.0)
    _, seen = first_token(simulator, 1000, ttft_ms=1.0)
    assert max(seen) < 2.3
    assert simulator.verdicts[-2].urgent


def test_a_preempted_request_with_a_target_between_tokens_is_urgent():
    simulator = streaming(cpu, 2.0)
    victim = simulator.running.pop()
    simulator.pool.free(victim.request_id, victim.block_ids)
    victim.block_ids.clear()
    victim.drop_kv()
    simulator.waiting.push(victim)
    simulator.step()
    assert simulator.verdicts[-1].urgent == (victim,)
    simulator.run(40)
    assert simulator.verdicts[-1] == FREE
    assert victim in simulator.running


def test_requests_without_targets_leave_no_trace():
    simulator = streaming(cpu, None)
    assert not simulator.pace.has_targets
    paced = simulator.add(10, itl_ms=50.0, max_tokens=3)
    hurried = simulator.add(10, ttft_ms=50.0)
    assert simulator.pace.has_targets
    simulator.run(10)
    assert paced in simulator.ended
    assert hurried.stats.emissions
    assert not simulator.pace.has_targets


@pytest.mark.parametrize("steps", [0, 1, 3, 30])
def test_an_abort_at_any_time_frees_the_budget(steps):
    simulator = streaming(cpu, None)
    aborted = simulator.add(300, itl_ms=1e-3, ttft_ms=1e-3)
    other = simulator.add(2000)
    simulator.run(steps)
    simulator.end(aborted)
    simulator.pace.forget(aborted)  # again: a no-op
    simulator.step()
    assert simulator.verdicts[-1] == FREE
    simulator.run_until(other)


def test_a_preemption_keeps_the_target():
    """Only what has ended is forgotten: a small pool preempts, and the gaps are still judged."""
    simulator = Simulator(cpu, num_blocks=40)
    rows = [simulator.add(100, itl_ms=1e4, max_tokens=200) for _ in range(4)]
    simulator.run_until(*rows)
    while len(simulator.ended) < 4:
        simulator.step()
    assert sum(row.stats.num_preemptions for row in rows) > 0
    assert not simulator.pace.has_targets


def test_an_empty_engine_is_free():
    simulator = Simulator(cpu)
    assert simulator.pace.plan([], simulator.waiting, 0.0) == FREE
    simulator.add(100, itl_ms=1.0)
    assert simulator.pace.plan([], simulator.waiting, 0.0) == FREE
    simulator.pace.record({}, 1.0)
    assert simulator.pace.step_time.num_recorded == 0


def test_plain_steps_without_targets_are_seldom_measured():
    simulator = streaming(cpu, None)
    before = simulator.pace.step_time.num_recorded
    simulator.run(160)
    assert simulator.pace.step_time.num_recorded == before + 10
    simulator.run_until(simulator.add(500))
    assert simulator.pace.step_time.num_recorded > before + 10


@pytest.mark.parametrize("value", [None, 1, 0.5, 1e9])
def test_good_targets(value):
    check_target("itl_ms", value)


BAD = {
    "zero": (0, ValueError),
    "negative": (-3, ValueError),
    "not a number": (math.nan, ValueError),
    "infinite": (math.inf, ValueError),
    "huge": (10**400, ValueError),
    "bool": (True, TypeError),
    "text": ("50", TypeError),
    "list": ([50], TypeError),
}


@pytest.mark.parametrize("value, error", BAD.values(), ids=BAD)
def test_bad_targets_are_named(value, error):
    with pytest.raises(error, match=r"^itl_ms: expected a number > 0, got "):
        check_target("itl_ms", value)


@pytest.mark.parametrize("seed", range(25))
def test_random_workloads_end(seed):
    """Any targets, aborts, a pool that is too small, spikes: every verdict is sound."""
    numbers = random.Random(seed)
    machine = numbers.choice([*MACHINES.values()])
    simulator = Simulator(machine, num_blocks=60, spike_share=0.02, max_rows=6, seed=seed)
    plain = 1e3 * machine(STREAMS)
    live = []
    for _ in range(120):
        if numbers.random() < 0.2:
            itl_ms = numbers.choice((None, plain * 10 ** numbers.uniform(-2, 2)))
            ttft_ms = numbers.choice((None, plain * 10 ** numbers.uniform(-2, 3)))
            options = {"itl_ms": itl_ms, "ttft_ms": ttft_ms, "max_tokens": numbers.randint(1, 30)}
            live.append(simulator.add(numbers.randint(1, 300), **options))
        if live and numbers.random() < 0.05 and live[-1] not in simulator.ended:
            simulator.end(live[-1])
        simulator.step()
        budget, urgent = simulator.verdicts[-1]
        assert budget is None or budget >= LEAST_CHUNK
        assert len(set(urgent)) == len(urgent)
        assert all(request.ttft_ms or request.stats.emissions for request in urgent)
    while len(simulator.ended) < len(live):
        simulator.step()
        assert len(simulator.verdicts) < 20000
    assert not simulator.pace.has_targets
