"""The waiting queue: who is admitted next, by priority and arrival, with a fair share a tenant.

**Rank**: ``arrival + ageing * priority``; the lower one goes first. It never changes, so there is
no clock, and a schedule can be replayed. One level of priority is worth ``ageing`` arrivals, so
nobody starves: of the requests that arrive after one of priority p, at most
``max(0, ageing * (p - q) - 1)`` go before it, where q is the most important priority among them.

**Fair share**: deficit round robin over tenants. Each has an account of the tokens it was served,
and is in *turn* ``served // quantum``: those in the earliest turn are served, one tenant after the
other, each until its account reaches the next turn. So when a request is admitted, its tenant is
ahead of any other that has a request to start by less than ``quantum`` tokens. Tokens are known
only when they are served (pending ones at admission, after a preemption once more; output when it
comes), so an account can overshoot its turn; the tenant then waits until the others have caught up.
A tenant of whom nobody waits keeps no credit: it comes back in the earliest turn of those who wait,
or in the one after where others wait for that, or tenants that come and go would keep it away.
It keeps its debt, but when nobody at all waits there is nothing to share, and all accounts end;
nor is anything counted for a tenant that is alone. Urgent requests come first whoever's they are;
their tenants pay for them all the same.

Priorities order the requests of a tenant, not tenants. Requests without a tenant are one tenant's;
without others the queue is plain: rank, then arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, Protocol, TypeVar

AGEING = 256
QUANTUM = 256


class Queued(Protocol):
    """What the queue reads of a request (hashed by identity); fixed while it waits."""

    @property
    def request_id(self) -> Hashable: ...  # for messages
    @property
    def arrival(self) -> int: ...  # unique, increasing with submission
    @property
    def rank(self) -> int: ...  # by ``rank_of``
    @property
    def tenant(self) -> Hashable: ...


QueuedT = TypeVar("QueuedT", bound=Queued)
ItemT = TypeVar("ItemT")
Entry = tuple[int, int, int, ItemT]  # key, number of the push, item


class KeyedHeap(Generic[ItemT]):
    """Items by keys of two integers. Removed entries stay in the heap until they come up, or until
    they are most of it.

    All but ``in_order`` is O(log n), amortised; that is O(log n) an item it gives.
    """

    def __init__(self) -> None:
        self._heap: list[Entry[ItemT]] = []  # the first one is live
        self._live: dict[ItemT, Entry[ItemT]] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._live)

    def push(self, first: int, second: int, item: ItemT) -> None:
        """Add an item that is not in the heap."""
        entry = self._live[item] = (first, second, self._num_pushed, item)
        self._num_pushed += 1
        heappush(self._heap, entry)

    def remove(self, item: ItemT) -> None:
        """Take an item out; KeyError if it is not in."""
        heap, live = self._heap, self._live
        del live[item]
        if len(heap) > 2 * len(live) + 16:
            heap[:] = live.values()
            heapify(heap)
        while heap and live.get(heap[0][3]) is not heap[0]:
            heappop(heap)

    def first(self) -> Entry[ItemT]:
        """The entry of the lowest key; IndexError if there is none."""
        return self._heap[0]

    def in_order(self) -> Iterator[Entry[ItemT]]:
        """All entries by key, without taking them out; the heap may not change meanwhile."""
        heap, live = self._heap, self._live
        front = [(heap[0], 0)] if heap else []  # entries whose parents were given, and their places
        while front:
            entry, place = front[0]
            if live.get(entry[3]) is entry:
                yield entry
            children = range(2 * place + 1, min(2 * place + 3, len(heap)))
            if not children:
                heappop(front)
                continue
            heapreplace(front, (heap[children[0]], children[0]))
            for child in children[1:]:
                heappush(front, (heap[child], child))


@dataclass(eq=False)
class _Account(Generic[QueuedT]):
    """One tenant. served: tokens, counted from the start of turn 0.

    turn, place: its key among the accounts of waiting tenants; the turn may be behind ``served``.
    """

    served: int = 0
    turn: int = 0
    place: int = 0
    requests: KeyedHeap[QueuedT] = field(default_factory=KeyedHeap)


@dataclass
class Misfit(Generic[QueuedT]):
    """The first candidate, which the pool had no room for (kept for the plan).

    need: free blocks that it would have taken for a span of at most ``span`` tokens.
    num_skipped: how often it was not tried since.
    """

    request: QueuedT
    need: int
    span: int
    num_skipped: int = 0


class WaitingQueue(Generic[QueuedT]):
    """Requests that wait for admission. Every operation is O(log n), amortised; ``charge`` is O(1).

    ageing: arrivals that one level of priority is worth.
    quantum: tokens that a tenant is served in its turn.
    """

    def __init__(self, ageing: int = AGEING, quantum: int = QUANTUM) -> None:
        for name, value, low in (("ageing", ageing, 0), ("quantum", quantum, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name}: expected an integer >= {low}, got {value!r}")
        self.ageing = ageing
        self.quantum = quantum
        self.misfit: Misfit[QueuedT] | None = None
        self._homes: dict[QueuedT, _Account[QueuedT]] = {}  # of all that wait
        self._accounts: dict[Hashable, _Account[QueuedT]] = {}
        self._turns: KeyedHeap[_Account[QueuedT]] = KeyedHeap()  # of tenants that wait
        self._overdrawn: dict[_Account[QueuedT], None] = {}  # whose turn in the heap is behind
        self._num_in_turn: Counter[int] = Counter()  # accounts in the heap
        self._num_places = 0
        self._num_accounts_to_sweep = 64

    def __len__(self) -> int:
        return len(self._homes)

    def __contains__(self, request: object) -> bool:
        return request in self._homes

    def __iter__(self) -> Iterator[QueuedT]:
        """All of them, in the order they were pushed."""
        return iter(self._homes)

    def rank_of(self, priority: int, arrival: int) -> int:
        """The rank for a request's whole life; a lower priority is more important."""
        return arrival + self.ageing * priority

    def push(self, request: QueuedT) -> None:
        """Let a request wait: a new one, or a preempted one, which finds its old place."""
        if request in self._homes:
            raise ValueError(f"request {request.request_id!r}: expected one that does not wait yet")
        account = self._accounts.get(request.tenant) or self._open(request.tenant)
        if not account.requests:
            self._join(account)
        account.requests.push(request.rank, request.arrival, request)
        self._homes[request] = account

    def remove(self, request: QueuedT) -> None:
        """Take out a request that was admitted or has ended."""
        account = self._homes.pop(request, None)
        if account is None:
            raise ValueError(f"request {request.request_id!r}: expected one that waits")
        account.requests.remove(request)
        if not account.requests:
            self._leave_turn(account)
            self._overdrawn.pop(account, None)
        if not self._homes:
            self._accounts.clear()
        if self.misfit is not None and self.misfit.request is request:
            self.misfit = None

    def charge(self, tenant: Hashable, num_tokens: int) -> None:
        """Note tokens that a tenant was served: nothing to note while no other has an account."""
        if not self._homes or (len(self._accounts) == 1 and tenant in self._accounts):
            return
        account = self._accounts.get(tenant) or self._open(tenant)
        if not account.requests:
            account.served = max(account.served, self._earliest()) + num_tokens
            return
        account.served += num_tokens
        if account.served // self.quantum > account.turn:
            self._overdrawn[account] = None

    def select(self, requests: Collection[QueuedT]) -> list[QueuedT]:
        """Those of ``requests`` that wait, by rank and arrival, whoever's they are."""
        return sorted(self._homes.keys() & set(requests), key=lambda r: (r.rank, r.arrival))

    def candidates(self, urgent: Collection[QueuedT] = ()) -> Iterator[QueuedT]:
        """All that wait, in the order of admission, without taking them out: first the ``urgent``.

        To admit a request, charge its tenant before going on: that decides whose turn is next. To
        pass one over, just go on. Meanwhile nothing may be pushed or removed, nor others charged.
        """
        first = self.select(urgent) if urgent else []
        yield from first
        given = set(first)
        for request in self._by_turn():
            if request not in given:
                yield request

    def _by_turn(self) -> Iterator[QueuedT]:
        """Merge the tenants' queues, always from the one whose turn it is."""
        self._settle()
        closed = self._turns.in_order()  # accounts of whom nothing was given, by turn as it was
        ahead = next(closed, None)
        opened: list[tuple[int, int, _Account[QueuedT], Iterator[Entry[QueuedT]]]] = []
        while opened or ahead is not None:
            while ahead is not None and (not opened or ahead[:2] < opened[0][:2]):
                account = ahead[3]
                heappush(opened, (*self._turn_of(account), account, account.requests.in_order()))
                ahead = next(closed, None)
            turn, _, account, requests = opened[0]
            if turn < account.served // self.quantum:  # charged meanwhile
                heapreplace(opened, (*self._turn_of(account), account, requests))
                continue
            entry = next(requests, None)
            if entry is None:
                heappop(opened)
            else:
                yield entry[3]

    def _turn_of(self, account: _Account[QueuedT]) -> tuple[int, int]:
        return account.served // self.quantum, account.place

    def _settle(self) -> None:
        """Move accounts that were charged beyond their turn to where they belong."""
        for account in self._overdrawn:
            self._leave_turn(account)
            self._enter_turn(account)
        self._overdrawn.clear()

    def _earliest(self) -> int:
        """Tokens at the start of the earliest turn of the tenants that wait."""
        self._settle()
        return self._turns.first()[0] * self.quantum if self._turns else 0

    def _open(self, tenant: Hashable) -> _Account[QueuedT]:
        """A new account, which begins in the earliest turn."""
        earliest = self._earliest()
        if len(self._accounts) >= self._num_accounts_to_sweep:  # those without debt can be anew
            self._accounts = {
                name: account
                for name, account in self._accounts.items()
                if account.requests or account.served > earliest
            }
            self._num_accounts_to_sweep = max(64, 2 * len(self._accounts))
        account = self._accounts[tenant] = _Account(earliest)
        return account

    def _join(self, account: _Account[QueuedT]) -> None:
        """Give a tenant that comes to wait a turn, the last of its kind."""
        earliest = self._earliest()
        is_one_turn = self._num_in_turn[earliest // self.quantum] == len(self._turns)
        account.served = max(account.served, earliest + (0 if is_one_turn else self.quantum))
        account.place = self._num_places
        self._num_places += 1
        self._enter_turn(account)

    def _enter_turn(self, account: _Account[QueuedT]) -> None:
        account.turn = account.served // self.quantum
        self._turns.push(account.turn, account.place, account)
        self._num_in_turn[account.turn] += 1

    def _leave_turn(self, account: _Account[QueuedT]) -> None:
        self._turns.remove(account)
        self._num_in_turn[account.turn] -= 1
        if not self._num_in_turn[account.turn]:
            del self._num_in_turn[account.turn]
