"""What holds of every step plan, as checks of a fake engine (fake_engine.py)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from pagedraft.model.block_pool import BlockPool
from pagedraft.scheduler.claims import StepPlan

if TYPE_CHECKING:
    from pagedraft.tests.scheduler.fake_engine import FakeEngine, FakeRequest

BLOCK = 4


def rank(request: FakeRequest) -> tuple[int, int]:
    return request.rank, request.arrival


def check_blocks(requests: list[FakeRequest], plan: StepPlan[FakeRequest], pool: BlockPool) -> None:
    pool.check_integrity({request.request_id: request.block_ids for request in requests})
    for request, span in plan.scheduled.items():
        assert len(request.block_ids) * BLOCK >= request.num_written + span


def check_plan(
    engine: FakeEngine,
    plan: StepPlan[FakeRequest],
    head: FakeRequest | None,
    prompt_budget: int | None = None,
    urgent: Seq[FakeRequest] = (),
) -> None:
    """head: the first running request before the plan."""
    spans = plan.scheduled
    check_blocks(engine.live, plan, engine.pool)
    assert all(span >= 1 for span in spans.values())
    assert sum(spans.values()) <= engine.budget, "more than the token budget"
    assert len(engine.running) <= engine.max_rows
    assert set(spans) <= set(engine.running)
    assert not any(request.block_ids or request.num_written for request in engine.waiting)
    assert not (plan.preempted and plan.admitted)
    assert spans, "a step without progress"
    assert head is None or head in spans, "the first running request must run"
    kept = [rank(request) for request in engine.running]
    assert kept == sorted(kept)
    assert all(rank(victim) > max(kept) for victim in plan.preempted)
    check_spans(engine, plan)
    check_prompts(engine, plan, prompt_budget, has_urgent=bool(urgent))


def check_spans(engine: FakeEngine, plan: StepPlan[FakeRequest]) -> None:
    """Spans respect chunks, and drafts come last."""
    pending = {request: request.sequence.num_pending for request in plan.scheduled}
    for request, span in plan.scheduled.items():
        catch_up = min(span, pending[request])
        assert span - catch_up in range(request.num_drafts + 1)
        assert catch_up <= (engine.chunk or engine.budget)
        assert span == catch_up or catch_up == pending[request]
    old = [request for request in engine.running if request not in plan.admitted]
    order = [request for request in old if request in plan.scheduled]
    assert list(plan.scheduled) == order + plan.admitted
    idle = [request for request in old if request not in plan.scheduled]
    if any(request.sequence.num_pending == 1 for request in idle):  # budget for no token more
        assert sum(plan.scheduled.values()) == engine.budget
        assert all(span <= pending[request] for request, span in plan.scheduled.items())


def check_prompts(
    engine: FakeEngine, plan: StepPlan[FakeRequest], prompt_budget: int | None, has_urgent: bool
) -> None:
    """The prompt budget is kept, and without urgent requests only it disturbs the order."""
    budget = engine.budget if prompt_budget is None else max(1, prompt_budget)
    prompts = [r for r in plan.scheduled if r.sequence.num_pending > 1 or r in plan.admitted]
    num_prompt = sum(plan.scheduled[request] for request in prompts)
    assert num_prompt <= budget, "more than the prompt budget"
    if has_urgent:
        return
    if all(request.tenant is None for request in plan.admitted):
        assert plan.admitted == sorted(plan.admitted, key=rank)
    old = [request for request in engine.running if request not in plan.admitted]
    idle = [request for request in old if request not in plan.scheduled]
    if idle and num_prompt < budget:
        assert not plan.admitted
        served = [request for request in old if request in plan.scheduled]
        assert old == served + idle
