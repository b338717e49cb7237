"""The step plan's prompt budget, urgent requests, and waiting requests that do not fit."""

from __future__ import annotations

import pytest

from pagedraft.scheduler import plan as plan_module
from pagedraft.scheduler.admit import SKIPS
from pagedraft.scheduler.plan import plan_step
from pagedraft.scheduler.prefix import Prefixes
from pagedraft.tests.scheduler.fake_engine import (
    FakeRequest,
    describe,
    fake_request,
    make_pool,
    queue_of,
    running,
    waiting,
)
from pagedraft.tests.scheduler.plan_checks import check_blocks
from pagedraft.tests.scheduler.test_plan_workloads import make_engine, run_to_the_end

# waiting, running, token budget, prompt budget, arrivals of urgent ones -> plan; 40 blocks, 4 rows
CASES = {
    "a prompt is cut to its budget": ([], [running(1, 20, 4)], 20, 5, (), {"scheduled": [(1, 5)]}),
    "rows that decode count against nothing": (
        [],
        [running(1, 9, 8, num_drafts=3), running(2, 9, 8)],
        *(20, 1, ()),
        {"scheduled": [(1, 4), (2, 1)]},
    ),
    "a row decodes behind a prompt that is cut": (
        [],
        [running(1, 20, 4), running(2, 9, 8)],
        *(20, 5, ()),
        {"scheduled": [(1, 5), (2, 1)]},
    ),
    "a row decodes behind a prompt without any": (
        [],
        [running(1, 20, 4), running(2, 20, 4), running(3, 9, 8, num_drafts=2)],
        *(20, 5, ()),
        {"scheduled": [(1, 5), (3, 3)]},
    ),
    "prompts and admissions share one": (
        [waiting(3, 4), waiting(4, 4)],
        [running(1, 7, 4), running(2, 9, 8)],
        *(20, 5, ()),
        {"scheduled": [(1, 3), (2, 1), (3, 2)], "admitted": [3]},
    ),
    "none at all counts as one token": (
        [waiting(3, 4)],
        [running(2, 9, 8)],
        *(20, 0, ()),
        {"scheduled": [(2, 1), (3, 1)], "admitted": [3]},
    ),
    "less than none as well": ([], [running(1, 9, 0)], 20, -7, (), {"scheduled": [(1, 1)]}),
    "more than the token budget is no more": (
        [waiting(3, 30)],
        [running(2, 9, 8)],
        *(20, 99, ()),
        {"scheduled": [(2, 1), (3, 19)], "admitted": [3]},
    ),
    "no token of it where the token budget is used up": (
        [waiting(3, 4)],
        [running(1, 9, 8), running(2, 9, 8)],
        *(2, 5, ()),
        {"scheduled": [(1, 1), (2, 1)]},
    ),
    "drafts behind a last chunk count, too": (
        [],
        [running(1, 9, 6, num_drafts=4)],
        *(20, 5, ()),
        {"scheduled": [(1, 5)]},
    ),
    "drafts behind a chunk never take another chunk's": (
        [],
        [running(1, 9, 6, num_drafts=4), running(2, 9, 6)],
        *(20, 6, ()),
        {"scheduled": [(1, 3), (2, 3)]},
    ),
    "drafts behind an admitted prompt count, too": (
        [waiting(1, 4, num_drafts=4)],
        [],
        *(20, 6, ()),
        {"scheduled": [(1, 6)], "admitted": [1]},
    ),
    "an urgent prompt comes first, the first row keeps a token": (
        [],
        [running(1, 20, 4), running(2, 9, 8), running(3, 20, 4)],
        *(20, 8, (3,)),
        {"scheduled": [(1, 1), (2, 1), (3, 7)]},
    ),
    "what an urgent prompt leaves": (
        [],
        [running(1, 20, 4), running(2, 20, 4), running(3, 7, 4)],
        *(20, 10, (3,)),
        {"scheduled": [(1, 7), (3, 3)]},
    ),
    "an urgent prompt comes before another row's, not before a token": (
        [],
        [running(1, 20, 4), running(2, 9, 8), running(3, 20, 4)],
        *(4, None, (3,)),
        {"scheduled": [(1, 1), (2, 1), (3, 2)]},
    ),
    "one prompt token is the first row's": (
        [],
        [running(1, 20, 4), running(2, 20, 4)],
        *(20, 1, (2,)),
        {"scheduled": [(1, 1)]},
    ),
    "the first row is urgent itself": (
        [],
        [running(1, 20, 4), running(2, 20, 4)],
        *(20, 8, (1,)),
        {"scheduled": [(1, 8)]},
    ),
    "an urgent admission comes before other prompts": (
        [waiting(3, 4), waiting(4, 6)],
        [running(1, 20, 4), running(2, 9, 8)],
        *(20, 8, (4,)),
        {"scheduled": [(1, 2), (2, 1), (4, 6)], "admitted": [4]},
    ),
    "an urgent admission comes before drafts": (
        [waiting(4, 6)],
        [running(2, 9, 8, num_drafts=9)],
        *(10, None, (4,)),
        {"scheduled": [(2, 4), (4, 6)], "admitted": [4]},
    ),
    "others are admitted behind it": (
        [waiting(3, 4), waiting(4, 6)],
        [],
        *(20, 8, (4,)),
        {"scheduled": [(4, 6), (3, 2)], "admitted": [4, 3]},
    ),
    "nothing is kept for urgent ones without a row": (
        [waiting(5, 6)],
        [running(1, 20, 4), running(2, 9, 8), running(3, 9, 8), running(4, 9, 8)],
        *(20, 8, (5,)),
        {"scheduled": [(1, 8), (2, 1), (3, 1), (4, 1)]},
    ),
    "urgent requests that have ended are nothing": (
        [],
        [running(1, 20, 4)],
        *(20, 8, (77,)),
        {"scheduled": [(1, 8)]},
    ),
    "urgent and nobody runs": ([], [], 20, 8, (77,), {}),
}


@pytest.mark.parametrize(
    "waiting_, running_, budget, prompt_budget, urgent, expected", CASES.values(), ids=CASES
)
def test_plan(waiting_, running_, budget, prompt_budget, urgent, expected) -> None:
    pool = make_pool(40, running_)
    by_arrival = {request.arrival: request for request in [*waiting_, *running_]}
    plan = plan_step(
        queue_of(*waiting_),
        running_,
        *(pool, budget, 4),
        prompt_budget=prompt_budget,
        urgent=[by_arrival.get(arrival, waiting(arrival, 3)) for arrival in urgent],
    )
    assert describe(plan) == {"scheduled": [], "admitted": [], "preempted": [], **expected}
    check_blocks(waiting_ + running_, plan, pool)


def test_nothing_is_kept_for_urgent_ones_that_do_not_fit() -> None:
    rows, late = [running(1, 20, 4)], waiting(2, 12)
    pool = make_pool(5, rows)  # 4 are free, 3 for request 2, 2 for a chunk of request 1
    plan = plan_step(queue_of(late), rows, pool, 20, 4, prompt_budget=16, urgent=[late])
    assert describe(plan)["scheduled"] == [(1, 4), (2, 12)]
    rows, late = [running(1, 20, 4)], waiting(2, 17)
    plan = plan_step(
        queue_of(late), rows, make_pool(5, rows), 20, 4, prompt_budget=17, urgent=[late]
    )
    assert describe(plan)["scheduled"] == [(1, 16)]


def test_an_urgent_row_is_preempted_like_any_other() -> None:
    rows = [running(1, 9, 8), running(2, 20, 8)]
    plan = plan_step(queue_of(), rows, make_pool(4, rows), 20, 4, urgent=[rows[1]])
    assert describe(plan) == {"scheduled": [(1, 1)], "admitted": [], "preempted": [2]}


def test_the_token_of_a_preempted_row_goes_to_drafts() -> None:
    rows = [running(1, 9, 8, num_drafts=3), running(2, 9, 8)]
    plan = plan_step(queue_of(), rows, make_pool(4, rows), 2, 4)
    assert describe(plan) == {"scheduled": [(1, 2)], "admitted": [], "preempted": [2]}


@pytest.mark.parametrize("seed", range(60))
def test_the_tight_loop_plans_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As serving in turn, which is the rule."""

    def run() -> list[dict]:
        engine = make_engine(seed, seed % 3 == 0)
        budget = [None, 1, 4, 9][seed % 4]
        return [describe(plan) for plan in run_to_the_end(engine, 5, prompt_budget=budget)]

    fast = run()
    monkeypatch.setattr(plan_module, "_serve_all", lambda *_: False)
    assert fast == run()


class CountingPrefixes(Prefixes):
    """Counts attachments."""

    num_attached = 0

    def attach(self, request: FakeRequest) -> None:
        self.num_attached += 1
        super().attach(request)


def full_pool(num_waiting: int = 30) -> tuple:
    """Request 1 owns 8 of 10 blocks; request 2 wants 8 of its own."""
    row, late = running(1, 31, 30), fake_request(2, range(50, 50 + num_waiting))
    pool = make_pool(10, [row])
    return row, queue_of(late), late, pool, CountingPrefixes(pool)


def test_a_request_that_does_not_fit_is_not_attached_at_each_step() -> None:
    row, queue, _, pool, prefixes = full_pool()
    for _ in range(4 * SKIPS):
        plan = plan_step(queue, [row], pool, 64, 4, None, prefixes)
        assert describe(plan) == {"scheduled": [(1, 1)], "admitted": [], "preempted": []}
    assert prefixes.num_attached == 4


def test_it_is_attached_once_there_is_room() -> None:
    row, queue, late, pool, prefixes = full_pool()
    plan_step(queue, [row], pool, 64, 4, None, prefixes)
    pool.free("r1", row.block_ids)
    plan = plan_step(queue, [], pool, 64, 4, None, prefixes)
    assert plan.admitted == [late]


def test_it_is_attached_once_its_span_is_small_enough() -> None:
    row, queue, late, pool, prefixes = full_pool()
    plan_step(queue, [row], pool, 64, 4, None, prefixes)
    plan = plan_step(queue, [row], pool, 64, 4, None, prefixes, prompt_budget=12)
    assert (plan.admitted, prefixes.num_attached) == ([], 1)
    plan = plan_step(queue, [row], pool, 64, 4, None, prefixes, prompt_budget=8)
    assert plan.admitted == [late]
    assert plan.scheduled[late] == 8


def test_it_is_attached_soon_after_others_have_computed_its_prefix() -> None:
    row, queue, late, pool, prefixes = full_pool()
    plan_step(queue, [row], pool, 64, 4, None, prefixes)
    late.sequence.token_ids[:28] = row.sequence.token_ids[:28]  # as if they had been the same
    published = fake_request(0, row.sequence.token_ids)
    prefixes.attach(published)
    published.sequence.block_ids = row.block_ids
    published.sequence.num_written = 30
    prefixes.publish(published)
    plans = (plan_step(queue, [row], pool, 64, 4, None, prefixes) for _ in range(SKIPS))
    assert any(plan.admitted == [late] for plan in plans)


def test_another_head_is_not_held_up_by_what_is_known_of_the_first() -> None:
    row, queue, _, pool, prefixes = full_pool()
    plan_step(queue, [row], pool, 64, 4, None, prefixes)
    small = waiting(3, 4)
    queue.push(small)
    plan = plan_step(queue, [row], pool, 64, 4, None, prefixes, urgent=[small])
    assert plan.admitted == [small]


def test_tenants_take_turns_at_admission() -> None:
    requests = [waiting(i, 200, tenant="ab"[i > 4]) for i in range(10)]
    plan = plan_step(queue_of(*requests), [], make_pool(1000, []), 10**6, 6)
    assert describe(plan)["admitted"] == [0, 1, 5, 6, 2, 7]
