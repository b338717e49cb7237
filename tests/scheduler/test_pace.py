"""Latency targets against machines of known cost: gaps kept, prompts fast, nobody starves."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest

from pagedraft.scheduler.pace import FREE, HOPELESS, LEAST_CHUNK, Verdict, check_target
from pagedraft.scheduler.step_time import Load, StepTime
from pagedraft.tests.scheduler.pace_simulator import MACHINES, Simulator, alone, cpu, gaps, gpu

STREAMS = Load(4, 4, 400, 400)


def streaming(machine, factor: float | None, num_streams: int = 4, **options) -> Simulator:
    """Streams that have run for a while; their target is ``factor`` plain steps (None: none)."""
    simulator = Simulator(machine, **options)
    itl_ms = None if factor is None else 1e3 * factor * machine(STREAMS)
    streams = [simulator.add(64, itl_ms=itl_ms) for _ in range(num_streams)]
    simulator.run_until(*streams)
    simulator.run(30)
    return simulator


def first_token(simulator: Simulator, num_prompt: int, **options) -> tuple[float, list[float]]:
    """A prompt's TTFT, and the gaps of the running streams meanwhile, over a plain step."""
    streams, began = list(simulator.running), simulator.now
    prompt = simulator.add(num_prompt, **options)
    simulator.run_until(prompt)
    plain = simulator.machine(STREAMS)
    return prompt.stats.ttft, [gap / plain for row in streams for gap in gaps(row, began)]


# --- targets between tokens


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
@pytest.mark.parametrize("name, most", [("cpu", 1.35), ("gpu", 1.5), ("tiles", 1.6)])
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


# --- targets of the first token


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


# --- who has targets


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


# --- teeth


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
