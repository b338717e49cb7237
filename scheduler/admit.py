"""Admission: which waiting requests start in a step, and with how many tokens (part of the plan).

A waiting request is attached to what others have computed of its tokens right before its first
grant: to find that out costs time, so one that does not fit is remembered (``Misfit``).
"""

from __future__ import annotations

from collections.abc import Collection

from pagedraft.model.block_pool import BlockPool
from pagedraft.scheduler.claims import (
    PrefixSource,
    RequestT,
    Room,
    StepPlan,
    add_drafts,
    grant,
    num_missing,
    num_pending,
)
from pagedraft.scheduler.waiting import Misfit, WaitingQueue

SKIPS = 16  # steps after which a request that did not fit is tried again, whatever is free


def admit(
    plan: StepPlan[RequestT],
    waiting: WaitingQueue[RequestT],
    urgent: Collection[RequestT],
    pool: BlockPool,
    room: Room,
    num_rows: int,
    prefixes: PrefixSource[RequestT] | None,
) -> None:
    """Schedule waiting requests in order, up to the first that room or pool have no place for.

    A fork and its parent never start in one step: what is copied for a fork is no copy of this
    step itself.
    """
    for request in waiting.candidates(urgent):
        if min(room.tokens, room.prompt_tokens) == 0 or len(plan.admitted) == num_rows:
            break
        if pool.num_free == 0:  # each needs a block: its last token is never cached
            break
        if prefixes is not None and (
            request.parent in plan.admitted or not prefixes.is_ready(request)
        ):
            continue
        if not _start(plan, waiting, request, pool, room, prefixes):
            break


def _start(
    plan: StepPlan[RequestT],
    waiting: WaitingQueue[RequestT],
    request: RequestT,
    pool: BlockPool,
    room: Room,
    prefixes: PrefixSource[RequestT] | None,
) -> bool:
    """Admit one request; False if the pool is too full for it."""
    limit = min(room.chunk, room.tokens, room.prompt_tokens)
    most = min(num_pending(request), limit)
    if _is_misfit(waiting, request, most, pool):
        return False
    num_free = pool.num_free
    if prefixes is not None:
        prefixes.attach(request)
    pending = num_pending(request)
    span = min(pending, limit)
    if not grant(request, span, pool):
        need = num_free - pool.num_free + num_missing(request, span, pool)
        waiting.misfit = Misfit(request, need, most)
        if prefixes is not None:
            prefixes.detach(request)
        return False
    plan.admitted.append(request)
    plan.scheduled[request] = span
    room.take(span)
    add_drafts(plan, request, pool, room, is_prompt=True)
    waiting.charge(request.tenant, pending)
    return True


def _is_misfit(
    waiting: WaitingQueue[RequestT], request: RequestT, most: int, pool: BlockPool
) -> bool:
    """Whether a request that did not fit is not worth another try: to attach it costs time.

    What it would need can become less without a free block more, when others compute a prefix of
    it; so it is tried now and then all the same.
    """
    misfit = waiting.misfit
    if misfit is None or misfit.request is not request:
        return False
    misfit.num_skipped += 1
    saved = pool.blocks_for(max(0, misfit.span - most))
    return misfit.num_skipped < SKIPS and pool.num_free < misfit.need - saved


def reserve(
    waiting: WaitingQueue[RequestT],
    urgent: Collection[RequestT],
    pool: BlockPool,
    chunk: int,
    num_rows: int,
    prefixes: PrefixSource[RequestT] | None,
) -> int:
    """Tokens that urgent requests which wait could take in this step, in rows and blocks so far."""
    tokens, num_free = 0, pool.num_free
    ready = [r for r in waiting.select(urgent) if prefixes is None or prefixes.is_ready(r)]
    for request in ready[: max(0, num_rows)]:
        span = min(num_pending(request), chunk)
        num_free -= pool.blocks_for(span)
        if num_free < 0:
            break
        tokens += span
    return tokens
