"""The waiting queue against a plain model, under random use."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pagedraft.scheduler.waiting import KeyedHeap, WaitingQueue
from pagedraft.tests.scheduler.plain_queue import PlainQueue, Waiter


class QueueMachine(RuleBasedStateMachine):
    """The queue and its plain model, given the same."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: WaitingQueue[Waiter] = WaitingQueue(ageing=3, quantum=8)
        self.plain = PlainQueue(quantum=8)
        self.running: list[Waiter] = []
        self.num_submitted = 0

    @rule(tenant=st.sampled_from([None, "a", "b", "c"]), priority=st.integers(0, 3))
    def submit(self, tenant: str | None, priority: int) -> None:
        rank = self.queue.rank_of(priority, self.num_submitted)
        self.push(Waiter(self.num_submitted, rank, tenant))
        self.num_submitted += 1

    def push(self, waiter: Waiter) -> None:
        self.queue.push(waiter)
        self.plain.push(waiter)

    def remove(self, waiter: Waiter) -> None:
        self.queue.remove(waiter)
        self.plain.remove(waiter)

    @rule(costs=st.lists(st.none() | st.integers(0, 30), max_size=6))
    def walk(self, costs: list[int | None]) -> None:
        """None passes one over."""
        admitted = []
        for cost, waiter, other in zip(
            costs, self.queue.candidates(), self.plain.candidates(), strict=False
        ):
            assert waiter is other
            if cost is not None:
                self.queue.charge(waiter.tenant, cost)
                self.plain.charge(waiter.tenant, cost)
                admitted.append(waiter)
        for waiter in admitted:
            self.remove(waiter)
        self.running.extend(admitted)

    @rule(index=st.integers(0), num_tokens=st.integers(1, 20))
    def emit(self, index: int, num_tokens: int) -> None:
        if self.running:
            tenant = self.running[index % len(self.running)].tenant
            self.queue.charge(tenant, num_tokens)
            self.plain.charge(tenant, num_tokens)

    @rule(index=st.integers(0))
    def preempt(self, index: int) -> None:
        if self.running:
            self.push(self.running.pop(index % len(self.running)))

    @rule(index=st.integers(0))
    def abort(self, index: int) -> None:
        if self.plain.waiting:
            self.remove(self.plain.waiting[index % len(self.plain.waiting)])

    @invariant()
    def same(self) -> None:
        assert list(self.queue.candidates()) == list(self.plain.candidates())
        assert len(self.queue) == len(self.plain.waiting)


def run_at_random(seed: int, num_steps: int = 60) -> None:
    """The machine without hypothesis: faster, and all that a teeth test needs."""
    rng, machine = random.Random(seed), QueueMachine()
    for _ in range(num_steps):
        index = rng.randrange(1000)
        costs = [rng.choice([None, 0, 3, 9, 30]) for _ in range(rng.randrange(6))]
        step, given = rng.choice(
            [
                (machine.submit, (rng.choice([None, "a", "b", "c"]), rng.randrange(4))),
                (machine.walk, (costs,)),
                (machine.emit, (index, rng.randint(1, 20))),
                (machine.preempt, (index,)),
                (machine.abort, (index,)),
            ]
        )
        step(*given)
        machine.same()


QueueMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
test_against_the_plain_model = QueueMachine.TestCase


@pytest.mark.parametrize("seed", range(40))
def test_random_runs(seed: int) -> None:
    run_at_random(seed)


def keep_credit(queue: WaitingQueue, account) -> None:
    """``_join`` without a lift."""
    account.turn, account.place = account.served // queue.quantum, queue._num_places
    queue._num_places += 1
    queue._turns.push(account.turn, account.place, account)


def forget_removed(heap: KeyedHeap, item: object) -> None:
    """``remove`` that takes only the first out."""
    del heap._live[item]


def order_of_pushes(heap: KeyedHeap) -> Iterator:
    """``in_order`` that is not."""
    return iter(list(heap._live.values()))


BROKEN = {
    "charge": (WaitingQueue, "charge", lambda *_: None),
    "settle": (WaitingQueue, "_settle", lambda *_: None),
    "credit": (WaitingQueue, "_join", keep_credit),
    "remove": (KeyedHeap, "remove", forget_removed),
    "order": (KeyedHeap, "in_order", order_of_pushes),
}


@pytest.mark.parametrize("home, name, broken", BROKEN.values(), ids=BROKEN)
def test_the_model_has_teeth(home, name: str, broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, name, broken)
    with pytest.raises((AssertionError, LookupError)):
        [run_at_random(seed) for seed in range(40)]
