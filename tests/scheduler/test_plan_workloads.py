"""The step plan under random workloads: invariants after every step, progress, nothing left."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedraft.model.block_pool import BlockPool, IntegrityError
from pagedraft.scheduler import admit as admit_module
from pagedraft.scheduler import plan as plan_module
from pagedraft.scheduler.claims import Room
from pagedraft.scheduler.plan import StepPlan
from pagedraft.scheduler.prefix import Prefixes, _Chain
from pagedraft.scheduler.waiting import WaitingQueue
from pagedraft.tests.scheduler.fake_engine import FakeEngine, FakeRequest, describe, fake_request
from pagedraft.tests.scheduler.plan_checks import BLOCK, rank


def make_engine(seed: int, has_cache: bool | None = None) -> FakeEngine:
    """A random workload: small pools, so that most of them preempt.

    has_cache: None for requests that share nothing; else there are forks and common prompts.
    """
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(3, 16), BLOCK)
    groups: list[list[FakeRequest]] = []
    for arrival in range(rng.randint(1, 8)):
        is_fork = has_cache is not None and groups and rng.random() < 0.4
        group = rng.choice(groups) if is_fork else []
        group.append(make_request(arrival, rng, pool, group[0] if is_fork else None))
        if not is_fork:
            groups.append(group)
    rng.shuffle(groups)
    return FakeEngine(
        pool,
        budget=rng.randint(1, 24),
        max_rows=rng.randint(1, 6),
        chunk=rng.choice([None, 1, 3, 8]),
        rng=rng,
        prefixes=None if has_cache is None else Prefixes(pool, has_cache),
        coming=[request for group in groups for request in reversed(group)],
    )


def make_request(
    arrival: int, rng: random.Random, pool: BlockPool, parent: FakeRequest | None
) -> FakeRequest:
    """Prompts are beginnings of one of two texts, so that many have a prefix in common."""
    final = rng.randint(2, min(pool.num_usable * BLOCK, 40))
    text = [rng.randint(0, 1), *range(10, 50)]
    prompt = text[: rng.randint(1, final - 1)]
    if parent is not None:
        prompt = parent.sequence.token_ids
        final = rng.randint(len(prompt) + 1, pool.num_usable * BLOCK)
    return fake_request(arrival, prompt, priority=rng.randint(0, 2), num_final=final, parent=parent)


def run_to_the_end(
    engine: FakeEngine, max_k: int, abort_rate: float = 0.0, prompt_budget: int | None = None
) -> Iterator[StepPlan[FakeRequest]]:
    """Step until all is done; requests arrive over time, each wants its own k each step."""
    rng = engine.rng
    while engine.coming or engine.live:
        if engine.coming and (rng.random() < 0.5 or not engine.live):
            engine.waiting.push(engine.coming.pop())
        for request in engine.live:
            room = request.num_final - request.num_tokens - 1
            request.num_drafts = min(rng.randint(0, max_k), room)
        if engine.live:
            yield engine.step(prompt_budget)
        if engine.live and rng.random() < abort_rate:
            engine.finish(rng.choice(engine.live))


@settings(max_examples=400)
@given(
    seed=st.integers(0, 2**32),
    max_k=st.sampled_from([0, 2, 5]),
    has_cache=st.sampled_from([None, False, True]),
    abort_rate=st.sampled_from([0.0, 0.1]),
)
def test_random_workloads_finish_and_leave_nothing(
    seed: int, max_k: int, has_cache: bool | None, abort_rate: float
) -> None:
    """At most all tokens of all requests, one a step, once more for each preemption."""
    engine = make_engine(seed, has_cache)
    requests = list(engine.coming)
    num_steps = sum(1 for _ in run_to_the_end(engine, max_k, abort_rate))
    assert sorted(r.arrival for r in engine.finished) == sorted(r.arrival for r in requests)
    assert engine.pool.num_free == engine.pool.num_usable
    engine.pool.check_integrity({})
    assert num_steps <= sum(r.num_final * (1 + r.times_preempted) for r in requests)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_plans_are_deterministic(seed: int) -> None:
    first, second = (
        [describe(plan) for plan in run_to_the_end(make_engine(seed, True), 5)] for _ in range(2)
    )
    assert first == second


def test_workloads_preempt_and_speculate() -> None:
    """The random workloads above are worth something: they reach the rare paths."""
    engines = [make_engine(seed) for seed in range(120)]
    plans = [plan for engine in engines for plan in run_to_the_end(engine, 5)]
    assert sum(len(plan.preempted) for plan in plans) > 120
    assert sum(len(plan.preempted) > 1 for plan in plans) > 5


@pytest.mark.parametrize("has_cache", [False, True])
def test_workloads_share_blocks(has_cache: bool) -> None:
    engines = [make_engine(seed, has_cache) for seed in range(40)]
    plans = [plan for engine in engines for plan in run_to_the_end(engine, 5)]
    assert sum(len(plan.preempted) for plan in plans) > 40
    assert sum(engine.num_copies for engine in engines) > 10
    assert (sum(engine.prefixes.num_hit_tokens for engine in engines) > 100) == has_cache


def forget_blocks(request: FakeRequest, *_) -> FakeRequest:
    """``preempt`` that leaks."""
    request.block_ids.clear()
    request.drop_kv()
    return request


def grant_nothing(request: FakeRequest, span: int, pool: BlockPool) -> bool:
    """``grant`` that takes no blocks."""
    return True


def draft_beyond_budget(plan: StepPlan, request: FakeRequest, *args, **options) -> None:
    """``add_drafts`` that asks nobody."""
    plan.scheduled[request] += request.num_drafts


def serve_last_first(spans: dict, rows: list[FakeRequest], room: Room) -> None:
    """``_claim`` from the last row on."""
    real_claim(spans, list(rows)[::-1], room)


def serve_without_blocks(plan: StepPlan, running: list[FakeRequest], *args) -> bool:
    """``_serve_all`` that takes blocks for granted."""
    plan.scheduled.update((request, 1) for request in running)
    return True


def youngest_first(queue: WaitingQueue, urgent=()) -> list[FakeRequest]:
    """``candidates`` upside down."""
    return sorted(queue, key=rank, reverse=True)


real_claim = plan_module._claim
BROKEN_HELPERS = {
    "preempt": (plan_module, "preempt", forget_blocks),
    "grant": (plan_module, "grant", grant_nothing),
    "grant at admission": (admit_module, "grant", grant_nothing),
    "drafts": (plan_module, "add_drafts", draft_beyond_budget),
    "drafts at admission": (admit_module, "add_drafts", draft_beyond_budget),
    "claims": (plan_module, "_claim", serve_last_first),
    "blocks of all rows": (plan_module, "_serve_all", serve_without_blocks),
    "order of admission": (WaitingQueue, "candidates", youngest_first),
}


@pytest.mark.parametrize("home, name, broken", BROKEN_HELPERS.values(), ids=BROKEN_HELPERS)
def test_invariants_have_teeth(
    home: object, name: str, broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home, name, broken)
    with pytest.raises((AssertionError, IntegrityError)):
        [list(run_to_the_end(make_engine(seed), 5)) for seed in range(20)]


def copy_nothing(prefixes: Prefixes) -> list[tuple[int, int]]:
    """``take_copies`` that takes none."""
    prefixes._forks.clear()
    return []


def share_without_copy(prefixes: Prefixes, request: FakeRequest, parent: FakeRequest) -> None:
    """``_fork`` that shares the block that both write on in."""
    shared = parent.block_ids[: -(-(request.sequence.num_prompt - 1) // BLOCK)]
    prefixes._share(request, shared)
    request.sequence.num_written = request.sequence.num_prompt - 1


def give_half_back(prefixes: Prefixes, request: FakeRequest) -> None:
    """``detach`` that forgets the noted copy."""
    prefixes._pool.free(request.request_id, request.block_ids)
    request.block_ids.clear()
    request.sequence.drop_kv()


def publish_unwritten(prefixes: Prefixes, request: FakeRequest) -> None:
    """``publish`` of full blocks of committed tokens, written or not."""
    if request not in prefixes._chains:
        return
    chain, tokens = prefixes._chains[request], request.sequence.token_ids
    blocks = request.block_ids[: len(tokens) // BLOCK]
    for index, block in list(enumerate(blocks))[len(chain.nodes) :]:
        parent = chain.nodes[-1] if chain.nodes else None
        part = tokens[index * BLOCK : (index + 1) * BLOCK]
        chain.nodes.append(prefixes._cache.insert(parent, part, block))


def mark_all(prefixes: Prefixes, request: FakeRequest) -> None:
    """``publish`` that takes the draft model's KV for granted."""
    real_publish(prefixes, request)
    for node in prefixes._chains.get(request, _Chain()).nodes:
        node.has_draft = True


def mark_private_block(prefixes: Prefixes, request: FakeRequest) -> None:
    """``publish`` that takes the request's own block for the known one."""
    real_publish(prefixes, request)
    num_drafted = request.sequence.num_draft_written // BLOCK
    for node in prefixes._chains.get(request, _Chain()).nodes[:num_drafted]:
        node.has_draft = True


real_publish = Prefixes.publish
BROKEN_METHODS = {
    "no copy": ("take_copies", copy_nothing),
    "no copy, shared": ("_fork", share_without_copy),
    "copy of a request that is not admitted": ("detach", give_half_back),
    "unwritten block known": ("publish", publish_unwritten),
    "draft taken for granted": ("publish", mark_all),
    "draft of a private block": ("publish", mark_private_block),
}


@pytest.mark.parametrize("name, broken", BROKEN_METHODS.values(), ids=BROKEN_METHODS)
def test_shared_kv_is_checked(name: str, broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefixes, name, broken)
    with pytest.raises((AssertionError, IntegrityError, IndexError)):
        [list(run_to_the_end(make_engine(seed, seed % 2 == 0), 5)) for seed in range(600)]
