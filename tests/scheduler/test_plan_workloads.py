"""The step plan under random workloads: invariants after every step, progress, nothing left."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedraft.model.block_pool import BlockPool, IntegrityError
from pagedraft.scheduler import plan as plan_module
from pagedraft.scheduler.plan import StepPlan
from pagedraft.tests.scheduler.fake_engine import BLOCK, FakeEngine, FakeRequest, describe


def make_engine(seed: int) -> FakeEngine:
    """A random workload: small pools, so that most of them preempt."""
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(3, 16), BLOCK)
    limit = pool.num_usable * BLOCK
    requests = []
    for arrival in range(rng.randint(1, 8)):
        final = rng.randint(2, min(limit, 40))
        request = FakeRequest(arrival, rng.randint(1, final - 1), priority=rng.randint(0, 2))
        request.num_final = final
        requests.append(request)
    rng.shuffle(requests)
    return FakeEngine(
        pool,
        requests,
        budget=rng.randint(1, 24),
        max_rows=rng.randint(1, 6),
        chunk=rng.choice([None, 1, 3, 8]),
        rng=rng,
    )


def run_to_the_end(engine: FakeEngine, max_k: int) -> Iterator[StepPlan[FakeRequest]]:
    """Step until all is done; requests arrive over time, each wants its own k each step."""
    rng, requests = engine.rng, engine.waiting
    engine.waiting = []
    while requests or engine.waiting or engine.running:
        if requests and (rng.random() < 0.5 or not engine.waiting + engine.running):
            engine.waiting.append(requests.pop())
        for request in engine.waiting + engine.running:
            room = request.num_final - request.num_tokens - 1
            request.num_drafts = min(rng.randint(0, max_k), room)
        if engine.waiting or engine.running:
            yield engine.step()


@settings(max_examples=400)
@given(seed=st.integers(0, 2**32), max_k=st.sampled_from([0, 2, 5]))
def test_random_workloads_finish_and_leave_nothing(seed: int, max_k: int) -> None:
    """At most all tokens of all requests, one a step, once more for each preemption."""
    engine = make_engine(seed)
    requests = list(engine.waiting)
    num_steps = sum(1 for _ in run_to_the_end(engine, max_k))
    assert sorted(r.arrival for r in engine.finished) == sorted(r.arrival for r in requests)
    assert engine.pool.num_free == engine.pool.num_usable
    assert num_steps <= sum(r.num_final * (1 + r.times_preempted) for r in requests)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_plans_are_deterministic(seed: int) -> None:
    first, second = (
        [describe(plan) for plan in run_to_the_end(make_engine(seed), 5)] for _ in range(2)
    )
    assert first == second


def test_workloads_preempt_and_speculate() -> None:
    """The random workloads above are worth something: they reach the rare paths."""
    engines = [make_engine(seed) for seed in range(40)]
    plans = [plan for engine in engines for plan in run_to_the_end(engine, 5)]
    assert sum(len(plan.preempted) for plan in plans) > 40
    assert sum(len(plan.preempted) > 1 for plan in plans) > 5


def forget_blocks(request: FakeRequest, pool: BlockPool) -> FakeRequest:
    """``_preempt`` that leaks."""
    request.block_ids.clear()
    request.drop_kv()
    return request


def grant_nothing(request: FakeRequest, span: int, pool: BlockPool) -> bool:
    """``_grant`` that takes no blocks."""
    return True


def draft_beyond_budget(plan: StepPlan, request: FakeRequest, budget: int, pool: BlockPool) -> int:
    """``_add_drafts`` that asks nobody."""
    plan.scheduled[request] += request.num_drafts
    return request.num_drafts


def newest_first(request: FakeRequest) -> tuple[int, int]:
    """``_rank`` upside down."""
    return -request.priority, -request.arrival


BROKEN_HELPERS = {
    "_preempt": forget_blocks,
    "_grant": grant_nothing,
    "_add_drafts": draft_beyond_budget,
    "_rank": newest_first,
}


@pytest.mark.parametrize("name, broken", BROKEN_HELPERS.items(), ids=BROKEN_HELPERS)
def test_invariants_have_teeth(name: str, broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, name, broken)
    with pytest.raises((AssertionError, IntegrityError)):
        [list(run_to_the_end(make_engine(seed), 5)) for seed in range(20)]
