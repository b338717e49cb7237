"""Plan, waiting queue, prefixes and pool under load, without a model; a plan's cost, in ratios."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest

from pagedraft.model.block_pool import BlockPool
from pagedraft.scheduler.plan import StepPlan, plan_step
from pagedraft.scheduler.prefix import Prefixes
from pagedraft.scheduler.waiting import QUANTUM, WaitingQueue
from pagedraft.tests.scheduler.fake_engine import FakeEngine, FakeKV, FakeRequest, fake_request
from pagedraft.tests.scheduler.plan_checks import check_plan

NUM_REQUESTS = 10_000


class NoKV(FakeKV):
    """Takes all, keeps nothing."""

    def __init__(self) -> None:
        pass

    def forward(self, *_) -> None: ...
    def copy(self, *_) -> None: ...


@dataclass
class LoadEngine(FakeEngine):
    """Checks a few steps wholly, and the rest of them for what is cheap to see.

    aborts: step to the requests that are aborted before it. hang_ups: requests that are aborted
    as soon as they have got a token. served: each tenant's tokens, prompts and output.
    """

    aborts: defaultdict[int, list[FakeRequest]] = field(default_factory=lambda: defaultdict(list))
    hang_ups: set[FakeRequest] = field(default_factory=set)
    served: Counter[str | None] = field(default_factory=Counter)
    num_steps: int = 0
    num_aborted: int = 0
    num_preempted: int = 0

    def __post_init__(self) -> None:
        self.target_kv = self.draft_kv = NoKV()

    def check(self, plan: StepPlan, head: FakeRequest | None, *given) -> None:
        if self.num_steps % 500 == 0:
            check_plan(self, plan, head, *given)
        assert plan.scheduled
        assert sum(plan.scheduled.values()) <= self.budget
        assert len(self.running) <= self.max_rows
        self.num_preempted += len(plan.preempted)
        for request in plan.admitted:
            self.served[request.tenant] += request.sequence.num_pending

    def charge(self, request: FakeRequest, num_tokens: int) -> None:
        super().charge(request, num_tokens)
        self.served[request.tenant] += num_tokens
        if request in self.hang_ups:
            request.num_final = 0
            self.num_aborted += 1

    def abort_due(self) -> None:
        for request in self.aborts.pop(self.num_steps, ()):
            if not request.finished:
                self.finish(request)
                self.num_aborted += 1


def make_load(seed: int) -> tuple[LoadEngine, list[FakeRequest]]:
    """64 blocks of 4 tokens: a few requests run at once, all others wait."""
    rng = random.Random(seed)
    pool = BlockPool(65, 4)
    engine = LoadEngine(pool, 64, 16, 24, rng, Prefixes(pool))
    requests: list[FakeRequest] = []
    for arrival in range(NUM_REQUESTS):
        prompt = [rng.randrange(9), *range(10, 10 + rng.randrange(40))]
        parent = requests[-1] if requests and rng.random() < 0.1 else None
        if parent is not None:
            parent = parent.parent or parent
            prompt = parent.sequence.token_ids
        request = fake_request(
            arrival,
            prompt,
            num_final=len(prompt) + rng.randint(1, 20),
            priority=rng.randrange(3),
            tenant=parent.tenant if parent else rng.choice([None, "a", "b"]),
            parent=parent,
        )
        requests.append(request)
        if rng.random() < 0.3:
            engine.aborts[rng.randrange(1500)].append(request)
        elif rng.random() < 0.1:
            engine.hang_ups.add(request)
    return engine, requests


def run_load(engine: LoadEngine, requests: list[FakeRequest]) -> None:
    """All are submitted at once."""
    for request in requests:
        engine.waiting.push(request)
    while engine.waiting or engine.running:
        engine.abort_due()
        for request in engine.running:
            room = max(0, request.num_final - request.num_tokens - 1)
            request.num_drafts = min(room, engine.rng.choice([0, 0, 4]))
        if engine.waiting or engine.running:
            engine.step([None, 40][engine.num_steps % 2], engine.running[-1:])
        engine.num_steps += 1


def test_ten_thousand_requests() -> None:
    """Nearly all wait, a third is aborted, nobody is lost, and the pool is whole in the end."""
    engine, requests = make_load(0)
    began = time.process_time()
    run_load(engine, requests)
    seconds = time.process_time() - began
    assert len(set(engine.finished)) == len(engine.finished) == NUM_REQUESTS
    assert engine.num_aborted > 0.3 * NUM_REQUESTS
    assert engine.num_preempted > 100
    assert engine.prefixes.num_hit_tokens > 1000
    engine.pool.check_integrity({})
    engine.prefixes.check_integrity()
    assert engine.pool.num_free == engine.pool.num_usable
    assert seconds < 120


NUM_ROWS = 8


def most_apart() -> int:
    """The largest lead in tokens of one tenant over another, while all of them wait.

    "a" has many small requests, "b" a few large ones, "c" both.
    """
    rng, lead = random.Random(0), 0
    engine = LoadEngine(BlockPool(257, 4), 64, NUM_ROWS, None, rng)
    arrivals = iter(range(NUM_REQUESTS))
    for tenant, num_requests, sizes in (("c", 600, (4, 40)), ("a", 900, (4,)), ("b", 150, (40,))):
        for _ in range(num_requests):
            size = rng.choice(sizes)
            request = fake_request(next(arrivals), range(size), num_final=2 * size, tenant=tenant)
            engine.waiting.push(request)
    while len({request.tenant for request in engine.waiting}) == 3:
        engine.step()
        engine.num_steps += 1
        served = [engine.served[tenant] for tenant in "abc"]
        lead = max(lead, max(served) - min(served))
    assert sum(engine.served.values()) > 10_000
    return lead


def test_tenants_get_equal_shares_of_tokens() -> None:
    """But for a turn, and for all that can run when a turn ends."""
    assert most_apart() < QUANTUM + NUM_ROWS * 80


def test_shares_have_teeth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitingQueue, "charge", lambda *_: None)
    assert most_apart() > 10 * (QUANTUM + NUM_ROWS * 80)


def decoding(num_rows: int, num_tokens: int, num_waiting: int, num_drafts: int = 4) -> tuple:
    """Arguments of ``plan_step``: rows that decode, with blocks for their drafts; others wait."""
    size = 64
    pool = BlockPool(num_rows * (num_tokens // size + 2) + 1, size)
    rows = []
    for arrival in range(num_rows):
        row = fake_request(arrival, range(num_tokens), num_tokens - 1, num_drafts=num_drafts)
        row.block_ids.extend(
            pool.allocate(row.request_id, pool.blocks_for(num_tokens + num_drafts))
        )
        rows.append(row)
    queue: WaitingQueue[FakeRequest] = WaitingQueue()
    for arrival in range(num_waiting):
        queue.push(fake_request(num_rows + arrival, range(20)))
    return queue, rows, pool, 10_000, num_rows


def ratio(given: tuple, base: tuple) -> float:
    """Processor time of a plan over that of another: the least of many, taken in turns."""
    least = [1.0, 1.0]
    for index in [0, 1] * 200:
        began = time.thread_time()
        plan_step(*(given, base)[index])
        least[index] = min(least[index], time.thread_time() - began)
    return least[0] / least[1]


# rows, context, waiting -> at most so many times the time of 64 rows, 100 tokens, 1 waiting
COSTS = {
    "a long context": (64, 16_000, 1, 1.7),
    "many that wait for a row": (64, 100, 10_000, 1.7),
    "four times the rows": (256, 100, 1, 8.0),
}


@pytest.mark.parametrize("num_rows, context, num_waiting, factor", COSTS.values(), ids=COSTS)
def test_cost(num_rows: int, context: int, num_waiting: int, factor: float) -> None:
    """Rows that decode and draft cost the same whatever is behind them."""
    assert ratio(decoding(num_rows, context, num_waiting), decoding(64, 100, 1)) < factor
