"""Plan, waiting queue, prefixes and pool together: random use, watched after every step."""

from __future__ import annotations

import random
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from pagedraft.model.block_pool import BlockPool, IntegrityError
from pagedraft.scheduler import admit as admit_module
from pagedraft.scheduler import plan as plan_module
from pagedraft.scheduler.claims import Room, StepPlan
from pagedraft.scheduler.prefix import Prefixes
from pagedraft.scheduler.waiting import WaitingQueue
from pagedraft.tests.scheduler.fake_engine import FakeEngine, FakeRequest, fake_request
from pagedraft.tests.scheduler.plain_queue import PlainQueue
from pagedraft.tests.scheduler.plan_checks import BLOCK

AGEING = 3
QUANTUM = 8


@dataclass
class WatchedEngine(FakeEngine):
    """A fake engine that counts who goes before whom, and what each tenant is served.

    passed_by: the later requests that were admitted while a request could have been.
    """

    waiting: WaitingQueue[FakeRequest] = field(
        default_factory=lambda: WaitingQueue(AGEING, QUANTUM)
    )
    accounts: PlainQueue = field(default_factory=lambda: PlainQueue(QUANTUM))
    passed_by: dict[FakeRequest, set[FakeRequest]] = field(default_factory=dict)
    able: list[FakeRequest] = field(default_factory=list)

    def submit(self, request: FakeRequest) -> None:
        self.waiting.push(request)
        self.accounts.push(request)

    def step(self, prompt_budget=None, urgent=()) -> StepPlan[FakeRequest]:
        self.able = [r for r in self.waiting if self.prefixes.is_ready(r) and r not in urgent]
        return super().step(prompt_budget, urgent)

    def check(self, plan: StepPlan[FakeRequest], head, *given) -> None:
        super().check(plan, head, *given)
        able = [request for request in self.able if request.parent not in plan.admitted]
        for request in plan.preempted:
            self.accounts.push(request)
        for request in plan.admitted:
            if request in able:
                able.remove(request)
                self.check_age(request, able)
                self.check_share(request, able)
            self.accounts.charge(request.tenant, request.sequence.num_pending)
        for request in plan.admitted:
            self.accounts.remove(request)

    def check_age(self, admitted: FakeRequest, able: list[FakeRequest]) -> None:
        """The bound on starvation, which waiting.py states."""
        for request in able:
            if request.tenant == admitted.tenant and request.arrival < admitted.arrival:
                passed = self.passed_by.setdefault(request, set())
                passed.add(admitted)
                most_important = min(other.priority for other in passed)
                bound = AGEING * (request.priority - most_important) - 1
                assert len(passed) <= max(0, bound), f"{request.request_id} starves"

    def check_share(self, admitted: FakeRequest, able: list[FakeRequest]) -> None:
        """The bound between tenants, which waiting.py states."""
        served = self.accounts.served
        for tenant in {request.tenant for request in able} - {admitted.tenant}:
            assert served[admitted.tenant] < served[tenant] + QUANTUM, "an unfair share"

    def charge(self, request: FakeRequest, num_tokens: int) -> None:
        super().charge(request, num_tokens)
        self.accounts.charge(request.tenant, num_tokens)

    def finish(self, request: FakeRequest) -> None:
        if request in self.waiting:
            self.accounts.remove(request)
        super().finish(request)


class PlanMachine(RuleBasedStateMachine):
    """Requests come, fork, run and are aborted."""

    @initialize(
        num_usable=st.integers(3, 16),
        budget=st.integers(1, 24),
        max_rows=st.integers(1, 6),
        chunk=st.sampled_from([None, 1, 3, 8]),
        has_cache=st.booleans(),
        seed=st.integers(0, 2**20),
    )
    def start(self, num_usable, budget, max_rows, chunk, has_cache, seed) -> None:
        pool, rng = BlockPool(num_usable + 1, BLOCK), random.Random(seed)
        prefixes = Prefixes(pool, has_cache)
        self.engine = WatchedEngine(pool, budget, max_rows, chunk, rng, prefixes)
        self.requests: list[FakeRequest] = []

    def add(self, prompt: Seq[int], num_output: int, **fields) -> None:
        longest = self.engine.pool.num_usable * BLOCK
        fields["num_final"] = min(longest, len(prompt) + num_output)
        request = fake_request(len(self.requests), prompt, ageing=AGEING, **fields)
        self.requests.append(request)
        self.engine.submit(request)

    @rule(
        text=st.integers(0, 1),
        num_prompt=st.integers(1, 30),
        num_output=st.integers(1, 12),
        priority=st.integers(0, 3),
        tenant=st.sampled_from([None, None, "a", "b"]),
    )
    def submit(self, text, num_prompt, num_output, priority, tenant) -> None:
        longest = self.engine.pool.num_usable * BLOCK - 1
        prompt = [text, *range(10, 50)][: min(num_prompt, longest)]
        self.add(prompt, num_output, priority=priority, tenant=tenant)

    @rule(index=st.integers(0, 99), num_output=st.integers(1, 12), priority=st.integers(0, 3))
    def fork(self, index, num_output, priority) -> None:
        parents = [request for request in self.requests if request.parent is None]
        if parents:
            parent = parents[index % len(parents)]
            prompt = parent.sequence.token_ids[: parent.sequence.num_prompt]
            fields = {"parent": parent, "priority": priority, "tenant": parent.tenant}
            self.add(prompt, num_output, **fields)

    @rule(index=st.integers(0, 99))
    def abort(self, index) -> None:
        live = self.engine.live
        if live:
            self.engine.finish(live[index % len(live)])

    @rule(
        num_steps=st.integers(1, 4),
        prompt_budget=st.none() | st.integers(0, 30),
        urgent=st.sets(st.integers(0, 9), max_size=3),
        max_k=st.integers(0, 5),
    )
    def step(self, num_steps, prompt_budget, urgent, max_k) -> None:
        for _ in range(num_steps):
            self.one_step(prompt_budget, urgent, max_k)

    def one_step(self, prompt_budget: int | None, urgent: Collection[int], max_k: int) -> None:
        engine = self.engine
        for request in engine.live:
            room = request.num_final - request.num_tokens - 1
            request.num_drafts = min(engine.rng.randint(0, max_k), room)
        if engine.live:
            chosen = [request for i, request in enumerate(engine.live[::-1]) if i in urgent]
            engine.step(prompt_budget, chosen)

    def teardown(self) -> None:
        """All end, in so many steps; the pool is whole."""
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        bound = 100 + 3 * sum(r.num_final * (1 + r.times_preempted) for r in engine.live)
        for _ in range(bound):
            self.one_step(None, (), 0)
        assert not engine.live, "a request that does not end"
        assert all(request.finished for request in self.requests)
        assert engine.pool.num_free == engine.pool.num_usable
        engine.pool.check_integrity({})


PlanMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
test_plan_machine = PlanMachine.TestCase


def run_at_random(seed: int, num_steps: int = 60) -> PlanMachine:
    """The machine without hypothesis, with more in it."""
    rng, machine = random.Random(seed), PlanMachine()
    sizes = rng.randint(3, 16), rng.randint(1, 24), rng.randint(1, 6)
    machine.start(*sizes, rng.choice([None, 1, 3, 8]), rng.random() < 0.7, seed)
    for _ in range(num_steps):
        index, output, priority = rng.randrange(100), rng.randint(1, 12), rng.randrange(4)
        urgent = rng.sample(range(10), rng.choice([0, 0, 0, 2]))
        tenant, budget = rng.choice([None, "a", "b"]), rng.choice([None, None, 0, 2, 9, 30])
        prompt = rng.randrange(2), rng.randint(1, 30)
        step, given = rng.choice(
            [
                (machine.submit, (*prompt, output, priority, tenant)),
                (machine.fork, (index, output, priority)),
                (machine.abort, (index,)),
                *[(machine.one_step, (budget, urgent, 5))] * 3,
            ]
        )
        step(*given)
    machine.teardown()
    return machine


@pytest.mark.parametrize("seed", range(60))
def test_random_runs(seed: int) -> None:
    run_at_random(seed)


def test_random_runs_reach_the_rare_paths() -> None:
    machines = [run_at_random(seed) for seed in range(60)]
    assert sum(r.times_preempted for m in machines for r in m.requests) > 100
    assert sum(len(m.engine.passed_by) for m in machines) > 30
    assert sum(m.engine.num_copies for m in machines) > 10


def leak(prefixes: Prefixes, request: FakeRequest, save: bool = True) -> None:
    """``retire`` that loses the blocks."""
    request.block_ids.clear()
    request.drop_kv()


def grant_the_first(request: FakeRequest, span: int, pool: BlockPool) -> bool:
    """``grant`` of a block that is another's."""
    while len(request.block_ids) * BLOCK < request.num_written + span:
        request.block_ids.append(1)
    return True


def claim_tokens(spans: dict, rows: Seq[FakeRequest], room: Room) -> None:
    """``_claim`` past the token budget."""
    room.tokens += 1
    real_claim(spans, rows, room)


def claim_prompts(spans: dict, rows: Seq[FakeRequest], room: Room) -> None:
    """``_claim`` past the prompt budget."""
    room.prompt_tokens = room.tokens
    real_claim(spans, rows, room)


def rank_by_priority(request: FakeRequest) -> int:
    """``rank`` without ageing."""
    return 10**6 * request.priority + request.arrival


def never_again(waiting: WaitingQueue, *_) -> bool:
    """``_is_misfit`` that nothing changes."""
    return waiting.misfit is not None


def keep_credit(queue: WaitingQueue, account) -> None:
    """``_join`` without a lift."""
    account.turn, account.place = account.served // queue.quantum, queue._num_places
    queue._num_places += 1
    queue._turns.push(account.turn, account.place, account)


def serve_in_turn(*_) -> bool:
    """``_serve_all`` that leaves all to what is broken."""
    return False


real_claim = plan_module._claim
BROKEN = {
    "a lost block": (Prefixes, "retire", leak, "not free and not in its list"),
    "a block in two places": (admit_module, "grant", grant_the_first, "but also in the free list"),
    "a block of a row twice": (plan_module, "grant", grant_the_first, "listed twice"),
    "the token budget": (plan_module, "_claim", claim_tokens, "more than the token budget"),
    "the prompt budget": (plan_module, "_claim", claim_prompts, "more than the prompt budget"),
    "no ageing": (FakeRequest, "rank", property(rank_by_priority), "starves"),
    "an eternal wait": (admit_module, "_is_misfit", never_again, "a step without progress"),
    "what is served is free": (WaitingQueue, "charge", lambda *_: None, "an unfair share"),
    "credit for the idle": (WaitingQueue, "_join", keep_credit, "an unfair share"),
}


@pytest.mark.parametrize("home, name, broken, message", BROKEN.values(), ids=BROKEN)
def test_the_watch_has_teeth(
    home, name: str, broken, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home, name, broken)
    monkeypatch.setattr(plan_module, "_serve_all", serve_in_turn)
    with pytest.raises((AssertionError, IntegrityError), match=message):
        [run_at_random(seed) for seed in range(200)]
