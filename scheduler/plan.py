"""The step plan: which request runs how many tokens in the next step. No torch, no clock.

Requests only catch up: ``num_tokens - num_written`` tokens are *pending*, a whole prompt as much as
the one token drawn last, and drafts follow when all of it runs. So there is no phase: a prompt
chunk, a decoded token and a row of drafts to verify are spans of one budget.

Order of claims on budget and blocks: pending tokens of running requests, then their drafts, then
admission of waiting requests, each by priority and arrival. Drafts never preempt anybody and
never cost a running request its pending token.

A request is admitted with what others have computed of its tokens (``PrefixSource``: prefix
cache, forks), so blocks can have several owners. Preempting one of them may free nothing, but the
most important running request still always runs: at worst all others are preempted, and then every
block is its own, free or evictable.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from pagedraft.model.block_pool import BlockPool


class Schedulable(Protocol):
    """What the plan reads of a request (hashed by identity), and the two things it changes.

    It appends to and clears ``block_ids`` and calls ``drop_kv``. All counts are tokens.
    """

    @property
    def request_id(self) -> Hashable: ...  # owner of its blocks in the pool
    @property
    def priority(self) -> int: ...  # a lower number is more important, as in vLLM
    @property
    def arrival(self) -> int: ...  # unique, increasing with submission
    @property
    def num_tokens(self) -> int: ...  # prompt and output so far
    @property
    def num_written(self) -> int: ...  # tokens whose target KV is computed, < num_tokens
    @property
    def num_drafts(self) -> int: ...  # drafts wanted this step, >= 0
    @property
    def block_ids(self) -> list[int]: ...
    def drop_kv(self) -> None: ...  # num_written = 0; the tokens stay


RequestT = TypeVar("RequestT", bound=Schedulable)
_RequestT = TypeVar("_RequestT", bound=Schedulable, contravariant=True)


class PrefixSource(Protocol[_RequestT]):
    """Gives a waiting request the blocks that others have computed (scheduler/prefix.py)."""

    def is_ready(self, request: _RequestT, /) -> bool: ...  # False: it waits for another to run
    def attach(self, request: _RequestT, /) -> None: ...  # sets block_ids and num_written
    def detach(self, request: _RequestT, /) -> None: ...  # gives back what attach gave, grants too


@dataclass
class StepPlan(Generic[RequestT]):
    """``scheduled`` maps each row of the step, in order, to its span in tokens, drafts included.

    The caller moves ``admitted`` to running and ``preempted`` (already without blocks) to waiting.
    """

    scheduled: dict[RequestT, int] = field(default_factory=dict)
    admitted: list[RequestT] = field(default_factory=list)
    preempted: list[RequestT] = field(default_factory=list)


def plan_step(
    waiting: Iterable[RequestT],
    running: Collection[RequestT],
    pool: BlockPool,
    token_budget: int,
    max_rows: int,
    chunk_tokens: int | None = None,
    prefixes: PrefixSource[RequestT] | None = None,
) -> StepPlan[RequestT]:
    """Plan one step, and grant every scheduled request the blocks of its whole span.

    ``chunk_tokens`` caps the pending tokens of one request. A full pool preempts the youngest of
    the lowest priority, and nobody is admitted in such a step. The most important running request
    always runs, provided that each request passed ``fits_pool``. A waiting request is attached
    right before its first grant, and detached if it is not admitted; one that is not ready is
    passed over.
    """
    chunk = token_budget if chunk_tokens is None else chunk_tokens
    if min(token_budget, max_rows, chunk) < 1:
        raise ValueError(
            "token_budget, max_rows, chunk_tokens: expected at least 1 each, "
            f"got {token_budget}, {max_rows}, {chunk_tokens}"
        )
    plan: StepPlan[RequestT] = StepPlan()
    budget = token_budget
    rows = sorted(running, key=_rank)
    for request in rows:  # a full pool shortens the list from its end while we walk it
        span = min(_num_pending(request), chunk, budget)
        if span == 0:
            break
        while not _grant(request, span, pool):
            plan.preempted.append(_preempt(rows.pop(), pool))
            if plan.preempted[-1] is request:
                break
        else:
            plan.scheduled[request] = span
            budget -= span
    for request in plan.scheduled:
        budget -= _add_drafts(plan, request, budget, pool)
    if plan.preempted:
        return plan
    _admit(plan, _ready(waiting, prefixes, max_rows - len(rows)), pool, budget, chunk, prefixes)
    return plan


def fits_pool(num_tokens_total: int, pool: BlockPool) -> bool:
    """Whether a request of that many tokens (prompt and all outputs) could run alone."""
    return pool.blocks_for(num_tokens_total) <= pool.num_usable


def _ready(
    waiting: Iterable[RequestT], prefixes: PrefixSource[RequestT] | None, count: int
) -> list[RequestT]:
    """The first ``count`` waiting requests that can start now.

    Chosen before any of them is attached: a fork and its parent never start in one step, so what
    is copied for a fork is no copy of this step itself.
    """
    if count <= 0:
        return []
    able = waiting if prefixes is None else filter(prefixes.is_ready, waiting)
    return heapq.nsmallest(count, able, key=_rank)


def _admit(
    plan: StepPlan[RequestT],
    candidates: Iterable[RequestT],
    pool: BlockPool,
    budget: int,
    chunk: int,
    prefixes: PrefixSource[RequestT] | None,
) -> None:
    """Schedule waiting requests in order, up to the first that budget or pool have no room for."""
    for request in candidates:
        if budget == 0 or pool.num_free == 0:  # each needs a block: its last token is never cached
            break
        if prefixes is not None:
            prefixes.attach(request)
        span = min(_num_pending(request), chunk, budget)
        if not _grant(request, span, pool):
            if prefixes is not None:
                prefixes.detach(request)
            break
        plan.admitted.append(request)
        plan.scheduled[request] = span
        budget -= span + _add_drafts(plan, request, budget - span, pool)


def _rank(request: Schedulable) -> tuple[int, int]:
    return request.priority, request.arrival


def _num_pending(request: Schedulable) -> int:
    pending = request.num_tokens - request.num_written
    if pending < 1:
        raise ValueError(f"request {request.request_id!r}: expected pending tokens, got {pending}")
    return pending


def _grant(request: Schedulable, span: int, pool: BlockPool) -> bool:
    """Append the blocks that ``span`` more tokens need; False, changing nothing, if too few."""
    missing = pool.blocks_for(request.num_written + span) - len(request.block_ids)
    if missing > pool.num_free:
        return False
    if missing > 0:
        request.block_ids.extend(pool.allocate(request.request_id, missing))
    return True


def _add_drafts(plan: StepPlan[RequestT], request: RequestT, budget: int, pool: BlockPool) -> int:
    """Lengthen a span that reaches the last token by drafts, as budget and free slots allow."""
    span = plan.scheduled[request]
    if span < _num_pending(request):
        return 0
    num_slots = (len(request.block_ids) + pool.num_free) * pool.block_size
    drafts = min(request.num_drafts, budget, num_slots - request.num_tokens)
    _grant(request, span + drafts, pool)
    plan.scheduled[request] = span + drafts
    return drafts


def _preempt(request: RequestT, pool: BlockPool) -> RequestT:
    pool.free(request.request_id, request.block_ids)
    request.block_ids.clear()
    request.drop_kv()
    return request
