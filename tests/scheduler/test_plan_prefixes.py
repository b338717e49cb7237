"""The step plan with blocks that others have computed: who is attached, and what it then needs."""

from __future__ import annotations

import pytest

from pagedraft.model.block_pool import BlockPool
from pagedraft.scheduler.plan import plan_step
from pagedraft.tests.scheduler.fake_engine import (
    FakeRequest,
    describe,
    make_pool,
    queue_of,
    running,
    waiting,
)
from pagedraft.tests.scheduler.plan_checks import BLOCK, check_blocks


class KnownBlocks:
    """Prefixes by table: how many tokens of each arrival lie in which blocks of another owner."""

    def __init__(self, pool: BlockPool, known: dict[int, int], blocks: list[int]) -> None:
        self.pool, self.known, self.blocks = pool, known, blocks
        self.calls: list[tuple[str, int]] = []
        self.not_ready: set[int] = set()

    def is_ready(self, request: FakeRequest) -> bool:
        return request.arrival not in self.not_ready

    def attach(self, request: FakeRequest) -> None:
        self.calls.append(("attach", request.arrival))
        request.sequence.num_written = self.known.get(request.arrival, 0)
        shared = self.blocks[: request.num_written // BLOCK]
        self.pool.share(request.request_id, shared)
        request.block_ids.extend(shared)

    def detach(self, request: FakeRequest) -> None:
        self.calls.append(("detach", request.arrival))
        self.give_back(request)

    def retire(self, request: FakeRequest) -> None:
        self.calls.append(("retire", request.arrival))
        self.give_back(request)

    def give_back(self, request: FakeRequest) -> None:
        self.pool.free(request.request_id, request.block_ids)
        request.block_ids.clear()
        request.sequence.drop_kv()


# tokens known of arrivals, not ready, usable blocks, budget, max rows, chunk -> plan and calls.
# Request 1 runs with 9 tokens in 2 blocks, 2 and 3 wait with 11 tokens each.
ATTACH_CASES = {
    "the span begins after what is known": (
        *({2: 8}, set(), 9, 20, 4, None),
        {"scheduled": [(1, 1), (2, 3), (3, 11)], "admitted": [2, 3]},
        [("attach", 2), ("attach", 3)],
    ),
    "budget and chunk cut what is left": (
        *({2: 4, 3: 8}, set(), 9, 7, 4, 5),
        {"scheduled": [(1, 1), (2, 5), (3, 1)], "admitted": [2, 3]},
        [("attach", 2), ("attach", 3)],
    ),
    "known blocks make a request fit": (
        *({2: 8}, set(), 4, 20, 4, None),
        {"scheduled": [(1, 1), (2, 3)], "admitted": [2]},
        [("attach", 2)],
    ),
    "a request that does not fit gives all back": (
        *({2: 4}, set(), 4, 20, 4, None),
        {"scheduled": [(1, 1)]},
        [("attach", 2), ("detach", 2)],
    ),
    "nobody is attached without budget": (
        {2: 8},
        set(),
        9,
        1,
        4,
        None,
        {"scheduled": [(1, 1)]},
        [],
    ),
    "nobody is attached without a row": (
        {2: 8},
        set(),
        9,
        20,
        1,
        None,
        {"scheduled": [(1, 1)]},
        [],
    ),
    "nobody is attached without a free block": (
        *({2: 8}, set(), 3, 20, 4, None),
        {"scheduled": [(1, 1)]},
        [],
    ),
    "one that is not ready is passed over": (
        *({3: 8}, {2}, 9, 20, 2, None),
        {"scheduled": [(1, 1), (3, 3)], "admitted": [3]},
        [("attach", 3)],
    ),
}


@pytest.mark.parametrize(
    "known, not_ready, num_usable, budget, max_rows, chunk, expected, calls",
    ATTACH_CASES.values(),
    ids=ATTACH_CASES,
)
def test_plan_attaches_what_it_admits(
    known, not_ready, num_usable, budget, max_rows, chunk, expected, calls
) -> None:
    row, queue = running(1, 9, 8), [waiting(2, 11), waiting(3, 11)]
    pool = make_pool(num_usable, [row])
    prefixes = KnownBlocks(pool, known, list(row.block_ids))
    prefixes.not_ready = not_ready
    plan = plan_step(queue_of(*queue), [row], pool, budget, max_rows, chunk, prefixes)
    assert describe(plan) == {"scheduled": [], "admitted": [], "preempted": [], **expected}
    assert prefixes.calls == calls
    check_blocks([row, *queue], plan, pool)
    left = [request for request in queue if request not in plan.admitted]
    assert not any(request.block_ids or request.num_written for request in left)


def test_nobody_is_attached_in_a_step_that_preempts() -> None:
    rows, queue = [running(1, 9, 8), running(2, 9, 8)], [waiting(3, 11)]
    pool = make_pool(4, rows)
    prefixes = KnownBlocks(pool, {3: 8}, list(rows[0].block_ids))
    plan = plan_step(queue_of(*queue), rows, pool, 20, 4, None, prefixes)
    assert describe(plan)["preempted"] == [2]
    assert prefixes.calls == [("retire", 2)]


def test_the_head_runs_although_preemption_frees_no_block_at_first() -> None:
    """All share the head's blocks; only the last one's own blocks make room."""
    head, sharer, owner = rows = [running(1, 9, 8), running(2, 9, 8), running(3, 9, 4)]
    pool = make_pool(4, [head])
    pool.share("r2", head.block_ids)
    sharer.block_ids.extend(head.block_ids)
    owner.block_ids.extend(pool.allocate("r3", 2))
    owner.priority, sharer.priority = 1, 2
    plan = plan_step(queue_of(), [head, owner, sharer], pool, 20, 4)
    assert describe(plan) == {"scheduled": [(1, 1)], "admitted": [], "preempted": [2, 3]}
    check_blocks(rows, plan, pool)
