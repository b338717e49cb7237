"""A fake request and a fake engine for plan and prefixes: KV that says which context it is of."""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate

from pagedraft.decoding.sequence import Sequence
from pagedraft.model.block_pool import BlockPool
from pagedraft.scheduler.plan import StepPlan, plan_step
from pagedraft.scheduler.prefix import Prefixes
from pagedraft.scheduler.waiting import AGEING, WaitingQueue
from pagedraft.tests.scheduler.plan_checks import BLOCK, check_plan, rank


@dataclass(eq=False)
class FakeRequest:
    """A request that nobody samples for; ``arrival`` is its id."""

    arrival: int
    sequence: Sequence
    num_drafts: int = 0
    priority: int = 0
    ageing: int = AGEING
    num_final: int = 1000  # tokens at which it ends
    parent: FakeRequest | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    times_preempted: int = 0
    finished: bool = False

    @property
    def request_id(self) -> str:
        return f"r{self.arrival}"

    @property
    def rank(self) -> int:
        return self.arrival + self.ageing * self.priority

    @property
    def num_tokens(self) -> int:
        return self.sequence.num_tokens

    @property
    def num_written(self) -> int:
        return self.sequence.num_written

    @property
    def block_ids(self) -> list[int]:
        return self.sequence.block_ids

    def drop_kv(self) -> None:
        self.sequence.drop_kv()
        self.times_preempted += 1


def fake_request(
    arrival: int, tokens: Seq[int], written: int = 0, num_prompt: int | None = None, **fields
) -> FakeRequest:
    """num_prompt: all of ``tokens`` where it is None."""
    num_prompt = len(tokens) if num_prompt is None else num_prompt
    sequence = Sequence(list(tokens), num_prompt, 0.0, 0, num_written=written)
    return FakeRequest(arrival, sequence, **fields)


def waiting(arrival: int, num_tokens: int, **fields: int) -> FakeRequest:
    return fake_request(arrival, range(num_tokens), **fields)


def running(arrival: int, num_tokens: int, written: int, **fields: int) -> FakeRequest:
    return fake_request(arrival, range(num_tokens), written, **fields)


def make_pool(num_usable: int, requests: list[FakeRequest]) -> BlockPool:
    """A pool in which each request owns just the blocks of its written tokens."""
    pool = BlockPool(num_usable + 1, BLOCK)
    for request in requests:
        count = pool.blocks_for(request.num_written)
        request.block_ids.extend(pool.allocate(request.request_id, count))
    return pool


def queue_of(*requests: FakeRequest) -> WaitingQueue[FakeRequest]:
    queue: WaitingQueue[FakeRequest] = WaitingQueue()
    for request in requests:
        queue.push(request)
    return queue


def describe(plan: StepPlan[FakeRequest]) -> dict:
    """The plan by arrivals: scheduled as an ordered list of (arrival, span)."""
    return {
        "scheduled": [(request.arrival, span) for request, span in plan.scheduled.items()],
        "admitted": [request.arrival for request in plan.admitted],
        "preempted": [request.arrival for request in plan.preempted],
    }


class FakeKV:
    """One model's pool: each slot holds a number that stands for a token and all before it."""

    def __init__(self, pool: BlockPool) -> None:
        self.slots = [-1] * (pool.num_blocks * BLOCK)

    def forward(self, block_ids: list[int], tokens: list[int], start: int) -> None:
        """Write ``tokens[start:]``; what is read before them must be of this very context."""
        contexts = list(accumulate(tokens, lambda before, token: hash((before, token)), initial=0))
        for position, context in enumerate(contexts[1:]):
            slot = block_ids[position // BLOCK] * BLOCK + position % BLOCK
            if position < start:
                assert self.slots[slot] == context, f"KV of another context at {position}"
            self.slots[slot] = context

    def copy(self, source: int, destination: int) -> None:
        block = self.slots[source * BLOCK :][:BLOCK]
        self.slots[destination * BLOCK : (destination + 1) * BLOCK] = block


@dataclass
class FakeEngine:
    """Runs plans without a model: each draft is accepted with a probability of its own.

    coming: requests that are still to be submitted, the next one last.
    """

    pool: BlockPool
    budget: int
    max_rows: int
    chunk: int | None
    rng: random.Random
    prefixes: Prefixes | None = None
    coming: list[FakeRequest] = field(default_factory=list)
    waiting: WaitingQueue[FakeRequest] = field(default_factory=WaitingQueue)
    running: list[FakeRequest] = field(default_factory=list)
    finished: list[FakeRequest] = field(default_factory=list)
    num_copies: int = 0

    def __post_init__(self) -> None:
        self.target_kv, self.draft_kv = FakeKV(self.pool), FakeKV(self.pool)

    @property
    def live(self) -> list[FakeRequest]:
        """All that run or wait."""
        return [*self.running, *self.waiting]

    def step(
        self, prompt_budget: int | None = None, urgent: Seq[FakeRequest] = ()
    ) -> StepPlan[FakeRequest]:
        head = self.running[0] if self.running else None
        plan = plan_step(
            self.waiting,
            self.running,
            self.pool,
            self.budget,
            self.max_rows,
            self.chunk,
            self.prefixes,
            prompt_budget=prompt_budget,
            urgent=urgent,
        )
        self.move(plan)
        self.check(plan, head, prompt_budget, urgent)
        self.start_sharing(plan)
        for request, span in plan.scheduled.items():
            self.run(request, span)
        return plan

    def check(self, plan: StepPlan, head: FakeRequest | None, *given) -> None:
        """What holds after every plan, before its step runs."""
        check_plan(self, plan, head, *given)

    def move(self, plan: StepPlan[FakeRequest]) -> None:
        """Between the queues, as the plan says."""
        for request in plan.preempted:
            self.running.remove(request)
            self.waiting.push(request)
        for request in plan.admitted:
            self.waiting.remove(request)
            insort(self.running, request, key=rank)

    def start_sharing(self, plan: StepPlan[FakeRequest]) -> None:
        if self.prefixes is None:
            return
        for request in plan.preempted:
            self.prefixes.forget(request)
        copies = self.prefixes.take_copies()
        assert not {source for source, _ in copies} & {destination for _, destination in copies}
        self.num_copies += len(copies)
        for source, destination in copies:
            self.target_kv.copy(source, destination)
            self.draft_kv.copy(source, destination)

    def run(self, request: FakeRequest, span: int) -> None:
        sequence = request.sequence
        pending = sequence.num_pending
        drafts = [self.rng.randint(0, 1) for _ in range(span - pending)]
        self.draft(sequence, drafts)
        start = sequence.num_written
        tokens = [*sequence.token_ids[: start + span], *drafts]
        self.target_kv.forward(sequence.block_ids, tokens, start)
        if span < pending:
            sequence.num_written += span
        else:
            accepted = next((i for i in range(len(drafts)) if self.rng.random() < 0.4), len(drafts))
            sequence.append([*drafts[:accepted], self.rng.randint(0, 1)])
            self.charge(request, accepted + 1)
        if self.prefixes is not None:
            self.prefixes.publish(request)
            self.prefixes.check_integrity()
        if request.num_tokens >= request.num_final:
            self.finish(request)

    def charge(self, request: FakeRequest, num_tokens: int) -> None:
        self.waiting.charge(request.tenant, num_tokens)

    def draft(self, sequence: Sequence, drafts: list[int]) -> None:
        """The draft model catches up: wholly where it drafts, else now and then, a little."""
        start = sequence.num_draft_written
        tokens = [*sequence.token_ids, *drafts[:-1]]
        if not drafts:
            room = min(len(sequence.block_ids) * BLOCK, sequence.num_tokens - 1)
            tokens = tokens[: min(room, start + self.rng.choice([0, 0, 1, 5]))]
        if len(tokens) > start:
            self.draft_kv.forward(sequence.block_ids, tokens, start)
            sequence.num_draft_written = len(tokens)

    def finish(self, request: FakeRequest) -> None:
        """End a request, wherever it stands."""
        if self.prefixes is not None:
            self.prefixes.forget(request)
        self.pool.free(request.request_id, request.block_ids)
        request.block_ids.clear()
        request.finished = True
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
        self.finished.append(request)
