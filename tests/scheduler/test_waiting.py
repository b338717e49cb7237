"""The waiting queue, case by case; against a plain model of it in test_waiting_machine.py."""

from __future__ import annotations

import pytest

from pagedraft.scheduler.waiting import KeyedHeap, WaitingQueue
from pagedraft.tests.scheduler.plain_queue import Waiter


def fill(queue: WaitingQueue[Waiter], *priorities: int) -> list[Waiter]:
    waiters = [Waiter(i, queue.rank_of(priority, i)) for i, priority in enumerate(priorities)]
    for waiter in waiters:
        queue.push(waiter)
    return waiters


def arrivals(waiters) -> list[int]:
    return [waiter.arrival for waiter in waiters]


# ageing, priorities in the order of arrival -> arrivals in the order of admission
ORDERS = {
    "nobody": (4, [], []),
    "one": (4, [7], [0]),
    "arrival": (4, [0, 0, 0], [0, 1, 2]),
    "priority": (4, [1, 0, 2, 0], [1, 3, 0, 2]),
    "negative priority": (4, [0, -1], [1, 0]),
    "a level is worth so many arrivals, not one more": (2, [1, 0, 0, 0], [1, 0, 2, 3]),
    "two levels are worth twice as many": (2, [2, 0, 0, 0, 0], [1, 2, 3, 0, 4]),
    "without ageing priorities are nothing": (0, [9, 5, 0], [0, 1, 2]),
    "huge": (10**30, [1, 10**30, 0], [2, 0, 1]),
}


@pytest.mark.parametrize("ageing, priorities, expected", ORDERS.values(), ids=ORDERS)
def test_order(ageing: int, priorities: list[int], expected: list[int]) -> None:
    queue: WaitingQueue[Waiter] = WaitingQueue(ageing)
    fill(queue, *priorities)
    assert arrivals(queue.candidates()) == expected
    assert arrivals(queue.candidates()) == expected  # looking changes nothing
    assert arrivals(queue) == list(range(len(priorities)))


@pytest.mark.parametrize("ageing, levels", [(1, 1), (2, 1), (2, 3), (256, 1), (100, 5)])
def test_the_starvation_bound_is_exact(ageing: int, levels: int) -> None:
    """Just so many later requests go first, however many come."""
    queue: WaitingQueue[Waiter] = WaitingQueue(ageing)
    fill(queue, levels, *[0] * (ageing * levels + 50))
    order = arrivals(queue.candidates())
    assert order.index(0) == ageing * levels - 1
    assert order[: order.index(0)] == list(range(1, ageing * levels))


def test_a_preempted_request_comes_back_to_its_old_place() -> None:
    queue: WaitingQueue[Waiter] = WaitingQueue()
    waiters = fill(queue, 0, 0, 0)
    queue.remove(waiters[1])
    assert arrivals(queue.candidates()) == [0, 2]
    queue.push(waiters[1])
    queue.remove(waiters[0])
    assert arrivals(queue.candidates()) == [1, 2]


def test_a_request_can_leave_and_come_back_while_its_old_entry_is_buried() -> None:
    queue: WaitingQueue[Waiter] = WaitingQueue()
    waiters = fill(queue, 0, 0, 0, 0)
    for _ in range(30):
        queue.remove(waiters[3])
        queue.push(waiters[3])
    assert arrivals(queue.candidates()) == [0, 1, 2, 3]


def test_membership() -> None:
    queue: WaitingQueue[Waiter] = WaitingQueue()
    first, second = fill(queue, 0, 0)
    queue.remove(first)
    assert (len(queue), first in queue, second in queue, None in queue) == (1, False, True, False)
    with pytest.raises(ValueError, match="'r0': expected one that waits"):
        queue.remove(first)
    with pytest.raises(ValueError, match="'r1': expected one that does not wait yet"):
        queue.push(second)
    assert arrivals(queue.candidates()) == [1]


BAD_SIZES = {
    "ageing": ({"ageing": -1}, "ageing: expected an integer >= 0, got -1"),
    "ageing as a fraction": ({"ageing": 0.5}, "ageing: expected an integer >= 0, got 0.5"),
    "quantum": ({"quantum": 0}, "quantum: expected an integer >= 1, got 0"),
    "quantum as a flag": ({"quantum": True}, "quantum: expected an integer >= 1, got True"),
}


@pytest.mark.parametrize("sizes, message", BAD_SIZES.values(), ids=BAD_SIZES)
def test_bad_sizes_are_named(sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WaitingQueue(**sizes)


def test_urgent_requests_come_first_and_once() -> None:
    queue: WaitingQueue[Waiter] = WaitingQueue()
    waiters = fill(queue, 0, 0, 0, 0)
    stranger = Waiter(9, 9)
    urgent = [waiters[3], stranger, waiters[1]]
    assert arrivals(queue.candidates(urgent)) == [1, 3, 0, 2]
    assert arrivals(queue.select(urgent)) == [1, 3]
    assert arrivals(queue.candidates()) == [0, 1, 2, 3]


def tenants_of(costs: dict[str, list[int]]) -> tuple[WaitingQueue[Waiter], dict[Waiter, int]]:
    """A queue with a quantum of 10 and each tenant's requests of so many tokens."""
    queue: WaitingQueue[Waiter] = WaitingQueue(quantum=10)
    tokens: dict[Waiter, int] = {}
    for tenant, row in costs.items():
        for cost in row:
            waiter = Waiter(len(tokens), len(tokens), tenant)
            tokens[waiter] = cost
            queue.push(waiter)
    return queue, tokens


def admit_all(queue: WaitingQueue[Waiter], tokens: dict[Waiter, int]) -> str:
    """All admitted in one walk: the tenants in order."""
    given = []
    for waiter in queue.candidates():
        queue.charge(waiter.tenant, tokens[waiter])
        given.append(waiter.tenant)
    return "".join(given)


# each tenant's requests by their tokens -> tenants in the order of admission
SHARES = {
    "requests of a quantum take turns": ({"a": [10] * 3, "b": [10] * 3}, "ababab"),
    "small ones share a turn": ({"a": [5] * 4, "b": [10] * 2}, "aabaab"),
    "tokens count, not requests": ({"a": [40] * 2, "b": [10] * 5}, "abbbbab"),
    "a turn that was overdrawn is paid back": ({"a": [9, 9, 9, 9], "b": [10] * 4}, "aabababb"),
    "three": ({"a": [10] * 3, "b": [10], "c": [10] * 2}, "abcaca"),
    "nothing to pay": ({"a": [0] * 3, "b": [10]}, "aaab"),
}


@pytest.mark.parametrize("costs, expected", SHARES.values(), ids=SHARES)
def test_shares(costs: dict[str, list[int]], expected: str) -> None:
    assert admit_all(*tenants_of(costs)) == expected


def test_output_is_paid_for_too() -> None:
    queue, tokens = tenants_of({"a": [10] * 3, "b": [10] * 3})
    queue.charge("a", 25)
    assert admit_all(queue, tokens) == "bbabaa"


def test_who_runs_while_others_wait_pays_before_he_waits() -> None:
    queue, tokens = tenants_of({"a": [10] * 4})
    queue.charge("b", 25)
    waiter = Waiter(9, 9, "b")
    tokens[waiter] = 10
    queue.push(waiter)
    assert admit_all(queue, tokens) == "aaaba"


def test_an_idle_tenant_keeps_no_credit() -> None:
    queue, tokens = tenants_of({"a": [10] * 4, "b": [10] * 4, "c": [10]})
    idle = next(waiter for waiter in tokens if waiter.tenant == "c")
    queue.remove(idle)
    queue.charge("a", 100)
    queue.charge("b", 100)
    queue.push(idle)
    assert admit_all(queue, tokens) == "abcababab"


def test_all_accounts_end_when_nobody_waits() -> None:
    queue, tokens = tenants_of({"a": [10], "b": [10]})
    queue.charge("a", 1000)
    for waiter in tokens:
        queue.remove(waiter)
    queue.charge("a", 1000)
    for waiter in tokens:
        queue.push(waiter)
    assert admit_all(queue, tokens) == "ab"


def test_priorities_order_the_requests_of_a_tenant_only() -> None:
    queue: WaitingQueue[Waiter] = WaitingQueue(quantum=10)
    for arrival, (tenant, priority) in enumerate([("a", 1), ("a", 0), ("b", 5), ("b", 6)]):
        queue.push(Waiter(arrival, queue.rank_of(priority, arrival), tenant))
    given = []
    for waiter in queue.candidates():
        queue.charge(waiter.tenant, 10)
        given.append(waiter.arrival)
    assert given == [1, 2, 0, 3]


def test_one_that_is_passed_over_blocks_nobody_and_keeps_its_place() -> None:
    queue, _ = tenants_of({"a": [10] * 2, "b": [10] * 2})
    walk = queue.candidates()
    assert next(walk).tenant == "a"  # passed over
    second = next(walk)
    assert second.tenant == "a"
    queue.charge("a", 10)
    assert [waiter.tenant for waiter in walk] == ["b", "b"]
    queue.remove(second)
    assert arrivals(queue.candidates()) == [2, 3, 0]


def test_accounts_of_tenants_that_left_do_not_pile_up() -> None:
    queue, _ = tenants_of({"a": [10]})
    for number in range(5000):
        waiter = Waiter(number + 1, 0, f"t{number}")
        queue.push(waiter)
        queue.remove(waiter)
    assert len(queue._accounts) < 100


def test_removed_entries_do_not_pile_up() -> None:
    heap: KeyedHeap[int] = KeyedHeap()
    heap.push(-1, 0, -1)
    for number in range(5000):
        heap.push(number, 0, number)
        heap.remove(number)
    assert len(heap._heap) < 50


def test_tenants_that_come_and_go_starve_nobody():
    """One has had more than its share; fresh tenants, five at a time, each ask for little."""
    queue: WaitingQueue[Waiter] = WaitingQueue(quantum=64)
    big = Waiter(0, 0, "big")
    queue.push(Waiter(1, 1, "other"))
    queue.push(big)
    queue.charge("big", 700)
    for arrival in range(2, 400):
        queue.push(Waiter(arrival, arrival, f"fresh {arrival}"))
        if len(queue) < 6:
            continue
        first = next(queue.candidates())
        if first is big:
            break
        queue.charge(first.tenant, 13)
        queue.remove(first)
    assert first is big
    assert arrival < 100
