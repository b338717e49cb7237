"""The step plan, case by case; random workloads are in test_plan_workloads.py."""

from __future__ import annotations

import pytest

from pagedraft.model.block_pool import BlockPool
from pagedraft.scheduler.plan import fits_pool, plan_step
from pagedraft.tests.scheduler.fake_engine import describe, make_pool, queue_of, running, waiting
from pagedraft.tests.scheduler.plan_checks import BLOCK, check_blocks, rank

# waiting, running, usable blocks, token budget, max rows, chunk tokens -> scheduled and the rest
CASES = {
    "nothing to do": ([], [], 9, 8, 4, None, {}),
    "a prompt that fits runs whole": (
        [waiting(1, 6)],
        [],
        *(9, 8, 4, None),
        {"scheduled": [(1, 6)], "admitted": [1]},
    ),
    "a long prompt is cut to the budget": (
        [waiting(1, 20)],
        [],
        *(9, 8, 4, None),
        {"scheduled": [(1, 8)], "admitted": [1]},
    ),
    "a long prompt is cut to the chunk": (
        [waiting(1, 20)],
        [],
        *(9, 8, 4, 5),
        {"scheduled": [(1, 5)], "admitted": [1]},
    ),
    "a prompt chunk leaves budget to the next": (
        [waiting(1, 20), waiting(2, 20)],
        [],
        *(9, 8, 4, 5),
        {"scheduled": [(1, 5), (2, 3)], "admitted": [1, 2]},
    ),
    "running before waiting, whatever the priority": (
        [waiting(1, 6)],
        [running(2, 9, 8, priority=3)],
        *(9, 4, 4, None),
        {"scheduled": [(2, 1), (1, 3)], "admitted": [1]},
    ),
    "running by priority, then arrival": (
        [],
        [running(3, 9, 8), running(1, 9, 8, priority=1), running(2, 9, 8)],
        *(9, 2, 4, None),
        {"scheduled": [(2, 1), (3, 1)]},
    ),
    "waiting by priority, then arrival": (
        [waiting(1, 2, priority=1), waiting(3, 2), waiting(2, 2)],
        [],
        *(9, 8, 2, None),
        {"scheduled": [(2, 2), (3, 2)], "admitted": [2, 3]},
    ),
    "rows include running ones without budget": (
        [waiting(3, 2)],
        [running(1, 30, 8), running(2, 9, 8)],
        *(9, 8, 2, None),
        {"scheduled": [(1, 8)]},
    ),
    "drafts follow the pending token": (
        [],
        [running(1, 9, 8, num_drafts=3)],
        *(9, 8, 4, None),
        {"scheduled": [(1, 4)]},
    ),
    "drafts are cut to the budget": (
        [],
        [running(1, 9, 8, num_drafts=9)],
        *(9, 8, 4, None),
        {"scheduled": [(1, 8)]},
    ),
    "drafts never take the pending token of another row": (
        [],
        [running(1, 9, 8, num_drafts=9), running(2, 9, 8, num_drafts=9), running(3, 9, 8)],
        *(12, 4, 4, None),
        {"scheduled": [(1, 2), (2, 1), (3, 1)]},
    ),
    "no drafts behind a prompt chunk": (
        [],
        [running(1, 16, 4, num_drafts=3)],
        *(9, 20, 4, 8),
        {"scheduled": [(1, 8)]},
    ),
    "drafts behind the last prompt chunk": (
        [],
        [running(1, 12, 4, num_drafts=3)],
        *(9, 20, 4, 8),
        {"scheduled": [(1, 11)]},
    ),
    "an admitted prompt can be followed by drafts": (
        [waiting(1, 6, num_drafts=3), waiting(2, 6)],
        [],
        *(9, 12, 4, None),
        {"scheduled": [(1, 9), (2, 3)], "admitted": [1, 2]},
    ),
    "drafts of running rows before admission": (
        [waiting(2, 6)],
        [running(1, 9, 8, num_drafts=7)],
        *(9, 8, 4, None),
        {"scheduled": [(1, 8)]},
    ),
    "drafts are cut to the free slots, nobody is preempted": (
        [],
        [running(1, 8, 7, num_drafts=7), running(2, 8, 7)],
        *(5, 20, 4, None),
        {"scheduled": [(1, 5), (2, 1)]},
    ),
    "full pool preempts the youngest": (
        [],
        [running(1, 9, 8), running(2, 9, 7), running(3, 9, 8)],
        *(6, 20, 4, None),
        {"scheduled": [(1, 1), (2, 2)], "preempted": [3]},
    ),
    "full pool preempts the lowest priority": (
        [],
        [running(1, 9, 8, priority=2), running(2, 9, 8), running(3, 9, 8)],
        *(6, 20, 4, None),
        {"scheduled": [(2, 1), (3, 1)], "preempted": [1]},
    ),
    "a request can preempt itself": (
        [],
        [running(1, 8, 7), running(2, 9, 8)],
        *(4, 20, 4, None),
        {"scheduled": [(1, 1)], "preempted": [2]},
    ),
    "several can be preempted for one": (
        [],
        [running(1, 17, 4), running(2, 9, 8), running(3, 4, 3)],
        *(5, 20, 4, None),
        {"scheduled": [(1, 13)], "preempted": [3, 2]},
    ),
    "no admission in a step that preempted": (
        [waiting(3, 2)],
        [running(1, 9, 8), running(2, 9, 8)],
        *(4, 20, 4, None),
        {"scheduled": [(1, 1)], "preempted": [2]},
    ),
    "the first waiting one that does not fit blocks the rest": (
        [waiting(2, 20), waiting(3, 2)],
        [running(1, 9, 8)],
        *(5, 40, 4, None),
        {"scheduled": [(1, 1)]},
    ),
    "admission needs blocks for the chunk only": (
        [waiting(2, 20)],
        [running(1, 9, 8)],
        *(5, 40, 4, 8),
        {"scheduled": [(1, 1), (2, 8)], "admitted": [2]},
    ),
    "an old row's prompt takes the budget before a young row's token": (
        [],
        [running(1, 20, 8), running(2, 9, 8)],
        *(9, 8, 4, None),
        {"scheduled": [(1, 8)]},
    ),
}


@pytest.mark.parametrize(
    "waiting, running, num_usable, budget, max_rows, chunk, expected", CASES.values(), ids=CASES
)
def test_plan(waiting, running, num_usable, budget, max_rows, chunk, expected) -> None:
    pool = make_pool(num_usable, running)
    rows = sorted(running, key=rank)
    plan = plan_step(queue_of(*waiting), rows, pool, budget, max_rows, chunk)
    assert describe(plan) == {"scheduled": [], "admitted": [], "preempted": [], **expected}
    check_blocks(waiting + running, plan, pool)


def test_the_lists_of_the_caller_stay_as_they_are() -> None:
    queue, rows = queue_of(waiting(4, 2)), [running(1, 9, 8), running(2, 9, 8)]
    plan_step(queue, rows, make_pool(9, rows), 20, 4)
    assert [r.arrival for r in [*queue, *rows]] == [4, 1, 2]


def test_a_preempted_request_restarts_from_nothing() -> None:
    rows = [running(1, 9, 8), running(2, 9, 8)]
    pool = make_pool(4, rows)
    plan_step(queue_of(), rows, pool, 20, 4)
    victim = rows[1]
    assert (victim.num_written, victim.num_tokens, victim.block_ids) == (0, 9, [])


BAD_LIMITS = {"budget": (0, 1, None), "rows": (1, 0, None), "chunk": (1, 1, 0)}


@pytest.mark.parametrize("budget, max_rows, chunk", BAD_LIMITS.values(), ids=BAD_LIMITS)
def test_limits_below_one_are_refused(budget: int, max_rows: int, chunk: int | None) -> None:
    with pytest.raises(ValueError, match="expected at least 1 each"):
        plan_step(queue_of(), [], BlockPool(4, BLOCK), budget, max_rows, chunk)


def test_a_request_with_nothing_to_do_is_named() -> None:
    rows = [running(7, 8, 8)]
    with pytest.raises(ValueError, match="'r7': expected pending tokens, got 0"):
        plan_step(queue_of(), rows, make_pool(4, rows), 8, 4)


@pytest.mark.parametrize("num_tokens, fits", [(1, True), (12, True), (13, False)])
def test_fits_pool(num_tokens: int, fits: bool) -> None:
    assert fits_pool(num_tokens, BlockPool(4, BLOCK)) is fits
