"""A plain model of the waiting queue: the same rules, with lists and sorting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagedraft.scheduler.waiting import Queued


@dataclass(eq=False)
class Waiter:
    """A request as the queue sees it."""

    arrival: int
    rank: int
    tenant: str | None = None

    @property
    def request_id(self) -> str:
        return f"r{self.arrival}"


class PlainQueue:
    """The rules of the queue, with lists and sorting."""

    def __init__(self, quantum: int) -> None:
        self.quantum = quantum
        self.waiting: list[Queued] = []
        self.served: dict[str | None, int] = {}
        self.places: dict[str | None, int] = {}
        self.num_places = 0

    def turn(self, tenant: str | None) -> tuple[int, int]:
        return self.served[tenant] // self.quantum, self.places[tenant]

    def tenants(self) -> set[str | None]:
        return {waiter.tenant for waiter in self.waiting}

    def lift(self, tenant: str | None) -> None:
        """No credit for a tenant of whom nobody waits."""
        turns = [self.served[name] // self.quantum for name in self.tenants()]
        self.served[tenant] = max(self.served.get(tenant, 0), self.quantum * min(turns, default=0))

    def push(self, waiter: Queued) -> None:
        if waiter.tenant not in self.tenants():
            turns = {self.served[name] // self.quantum for name in self.tenants()}
            self.lift(waiter.tenant)
            if len(turns) > 1:  # others wait for the turn after the earliest
                least = self.quantum * (min(turns) + 1)
                self.served[waiter.tenant] = max(self.served[waiter.tenant], least)
            self.places[waiter.tenant] = self.num_places
            self.num_places += 1
        self.waiting.append(waiter)

    def remove(self, waiter: Queued) -> None:
        self.waiting.remove(waiter)
        if not self.waiting:
            self.served.clear()

    def charge(self, tenant: str | None, num_tokens: int) -> None:
        if not self.waiting or set(self.served) == {tenant}:
            return
        if tenant not in self.tenants():
            self.lift(tenant)
        self.served[tenant] += num_tokens

    def candidates(self) -> Iterator[Queued]:
        left = list(self.waiting)
        while left:
            tenant = min({waiter.tenant for waiter in left}, key=self.turn)
            own = [waiter for waiter in left if waiter.tenant == tenant]
            waiter = min(own, key=lambda waiter: (waiter.rank, waiter.arrival))
            left.remove(waiter)
            yield waiter
