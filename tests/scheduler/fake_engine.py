"""A fake request and a fake engine for the step plan: counts of tokens instead of a model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from pagedraft.model.block_pool import BlockPool
from pagedraft.scheduler.plan import StepPlan, plan_step

BLOCK = 4


@dataclass(eq=False)
class FakeRequest:
    """A request reduced to counts of tokens; ``arrival`` is its id."""

    arrival: int
    num_tokens: int
    num_written: int = 0
    num_drafts: int = 0
    priority: int = 0
    num_final: int = 1000  # tokens at which it ends
    block_ids: list[int] = field(default_factory=list)
    times_preempted: int = 0

    @property
    def request_id(self) -> str:
        return f"r{self.arrival}"

    def drop_kv(self) -> None:
        self.num_written = 0
        self.times_preempted += 1


def rank(request: FakeRequest) -> tuple[int, int]:
    return request.priority, request.arrival


def describe(plan: StepPlan[FakeRequest]) -> dict:
    """The plan by arrivals: scheduled as an ordered list of (arrival, span)."""
    return {
        "scheduled": [(request.arrival, span) for request, span in plan.scheduled.items()],
        "admitted": [request.arrival for request in plan.admitted],
        "preempted": [request.arrival for request in plan.preempted],
    }


def check_blocks(requests: list[FakeRequest], plan: StepPlan[FakeRequest], pool: BlockPool) -> None:
    pool.check_integrity({request.request_id: request.block_ids for request in requests})
    for request, span in plan.scheduled.items():
        assert len(request.block_ids) * BLOCK >= request.num_written + span


@dataclass
class FakeEngine:
    """Runs plans without a model: each draft is accepted with a probability of its own."""

    pool: BlockPool
    waiting: list[FakeRequest]
    budget: int
    max_rows: int
    chunk: int | None
    rng: random.Random
    running: list[FakeRequest] = field(default_factory=list)
    finished: list[FakeRequest] = field(default_factory=list)

    def step(self) -> StepPlan[FakeRequest]:
        head = min(self.running, key=rank, default=None)
        pending = {r: r.num_tokens - r.num_written for r in self.waiting + self.running}
        plan = plan_step(
            self.waiting, self.running, self.pool, self.budget, self.max_rows, self.chunk
        )
        self.running = [r for r in self.running + plan.admitted if r not in plan.preempted]
        self.waiting = [r for r in self.waiting + plan.preempted if r not in plan.admitted]
        self.check(plan, pending, head)
        for request, span in plan.scheduled.items():
            self.run(request, span, pending[request])
        return plan

    def run(self, request: FakeRequest, span: int, pending: int) -> None:
        if span < pending:
            request.num_written += span
            return
        drafts = span - pending
        accepted = next((i for i in range(drafts) if self.rng.random() < 0.4), drafts)
        request.num_written = request.num_tokens + accepted
        request.num_tokens += accepted + 1
        if request.num_tokens >= request.num_final:
            self.finish(request)

    def finish(self, request: FakeRequest) -> None:
        self.pool.free(request.request_id, request.block_ids)
        request.block_ids.clear()
        self.running.remove(request)
        self.finished.append(request)

    def check(self, plan: StepPlan, pending: dict, head: FakeRequest | None) -> None:
        """What holds after every plan."""
        spans = plan.scheduled
        check_blocks(self.waiting + self.running, plan, self.pool)
        assert all(span >= 1 for span in spans.values())
        assert sum(spans.values()) <= self.budget
        assert len(self.running) <= self.max_rows
        assert set(spans) <= set(self.running)
        assert not any(request.block_ids for request in self.waiting)
        assert not (plan.preempted and plan.admitted)
        assert spans, "a step without progress"
        assert head is None or head in spans, "the most important running request must run"
        self.check_order(plan, pending)

    def check_order(self, plan: StepPlan, pending: dict) -> None:
        """Spans respect drafts, chunks and ranks."""
        for request, span in plan.scheduled.items():
            catch_up = min(span, pending[request])
            assert span - catch_up in range(request.num_drafts + 1)
            assert catch_up <= (self.chunk or self.budget)
            assert span == catch_up or catch_up == pending[request]
        old = sorted((r for r in self.running if r not in plan.admitted), key=rank)
        order = [r for r in old if r in plan.scheduled]
        assert list(plan.scheduled) == order + sorted(plan.admitted, key=rank)
        if order != old:  # some running row got nothing: then nobody had drafts
            assert all(span <= pending[r] for r, span in plan.scheduled.items())
        kept = [rank(r) for r in self.running]
        assert all(rank(victim) > max(kept) for victim in plan.preempted)
