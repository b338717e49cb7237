"""The step plan: which request runs how many tokens in the next step. No torch, no clock.

Requests only catch up: ``num_tokens - num_written`` tokens are *pending*, a whole prompt as much as
the one token drawn last, and drafts follow when all of it runs. So there is no phase: a prompt
chunk, a decoded token and a row of drafts to verify are spans of one budget. A second budget caps
the spans of rows with more than one pending token and of admitted ones (*prompt* tokens), so that
rows that only decode need not wait for them.

Order of claims on budget and blocks: pending tokens of running requests by rank and arrival, then
their drafts, then admission of waiting requests. Drafts never preempt anybody and never cost a
running request its pending token. Urgent requests claim prompt tokens, and admission, before
others do.

A request is admitted with what others have computed of its tokens (``PrefixSource``: prefix
cache, forks), so blocks can have several owners. Preempting one of them may free nothing, but the
first running request still always runs: at worst all others are preempted, and then every block is
its own, free or evictable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from pagedraft.model.block_pool import BlockPool
from pagedraft.scheduler.admit import admit, reserve
from pagedraft.scheduler.claims import (
    PrefixSource,
    RequestT,
    Room,
    StepPlan,
    add_drafts,
    grant,
    num_missing,
    num_pending,
    preempt,
)
from pagedraft.scheduler.waiting import WaitingQueue


def plan_step(
    waiting: WaitingQueue[RequestT],
    running: Sequence[RequestT],
    pool: BlockPool,
    token_budget: int,
    max_rows: int,
    chunk_tokens: int | None = None,
    prefixes: PrefixSource[RequestT] | None = None,
    *,
    prompt_budget: int | None = None,
    urgent: Collection[RequestT] = (),
) -> StepPlan[RequestT]:
    """Plan one step, and grant every scheduled request the blocks of its whole span.

    running: sorted by rank and arrival. ``chunk_tokens`` caps the pending tokens of one request,
    ``prompt_budget`` all prompt tokens (None: the token budget does; below 1 counts as 1, so that
    nobody starves). ``urgent``: requests that claim prompt tokens and admission before others; the
    first running request keeps one token.

    A full pool preempts the last running request, and nobody is admitted in such a step. The first
    one always runs, provided that each passed ``fits_pool``. A waiting request is attached right
    before its first grant, and detached if it is not admitted; one that is not ready is passed
    over. Those admitted stay in ``waiting``, but their tenants have paid for their pending tokens.
    """
    chunk = token_budget if chunk_tokens is None else chunk_tokens
    if min(token_budget, max_rows, chunk) < 1:
        raise ValueError(
            "token_budget, max_rows, chunk_tokens: expected at least 1 each, "
            f"got {token_budget}, {max_rows}, {chunk_tokens}"
        )
    room = Room(token_budget, token_budget, chunk)
    if prompt_budget is not None:
        room.prompt_tokens = max(1, prompt_budget)
    plan: StepPlan[RequestT] = StepPlan()
    num_rows = max_rows - len(running)
    if urgent:
        urgent = frozenset(urgent)
        reserved = reserve(waiting, urgent, pool, chunk, num_rows, prefixes)
        _serve_in_turn(plan, running, pool, room, prefixes, urgent, reserved)
    elif not _serve_all(plan, running, pool, room):
        _serve_in_turn(plan, running, pool, room, prefixes)
    if num_rows > 0 and waiting and not plan.preempted:
        admit(plan, waiting, urgent, pool, room, num_rows, prefixes)
    return plan


def fits_pool(num_tokens_total: int, pool: BlockPool) -> bool:
    """Whether a request of that many tokens (prompt and all outputs) could run alone."""
    return pool.blocks_for(num_tokens_total) <= pool.num_usable


def _serve_all(
    plan: StepPlan[RequestT], running: Sequence[RequestT], pool: BlockPool, room: Room
) -> bool:
    """Schedule all rows with all they want, but for prompts that the prompt budget cuts; False,
    changing nothing, if it is too much for the token budget or the pool.

    The common case in a tight loop: most rows decode, and few of them need a block.
    """
    size, spans, prompt_left = pool.block_size, plan.scheduled, room.prompt_tokens
    prompt_drafts = 0
    short = []
    for request in running:
        sequence = request.sequence
        written = sequence.num_written
        span = len(sequence.token_ids) - written
        if span == 1:
            span += request.num_drafts
        elif prompt_left:
            pending = num_pending(request)
            span = min(pending, room.chunk, prompt_left)
            prompt_left -= span
            if span == pending:
                prompt_drafts += request.num_drafts
                span += request.num_drafts
        else:
            continue
        spans[request] = span
        if written + span > len(sequence.block_ids) * size:
            short.append(request)
    total = sum(spans.values())
    missing = [num_missing(request, spans[request], pool) for request in short]
    if total > room.tokens or prompt_drafts > prompt_left or sum(missing) > pool.num_free:
        spans.clear()
        return False
    for request, count in zip(short, missing, strict=True):
        request.sequence.block_ids.extend(pool.allocate(request.request_id, count))
    room.tokens -= total
    room.prompt_tokens = prompt_left - prompt_drafts
    return True


def _serve_in_turn(
    plan: StepPlan[RequestT],
    running: Sequence[RequestT],
    pool: BlockPool,
    room: Room,
    prefixes: PrefixSource[RequestT] | None,
    urgent: Collection[RequestT] = (),
    reserved: int = 0,
) -> None:
    """Schedule rows in the order of claims, as far as room and pool go, preempting from the end.

    ``reserved`` tokens are kept from prompts that are not urgent, and from drafts.
    """
    rows = list(running)
    spans = _spans(rows, room, urgent, reserved)
    for request in rows:  # a full pool shortens the list from its end while we walk it
        span = spans.get(request)
        if span is None:
            continue
        while not grant(request, span, pool):
            room.tokens += spans.get(rows[-1], 0)
            plan.preempted.append(preempt(rows.pop(), pool, prefixes))
            if plan.preempted[-1] is request:
                break
        else:
            plan.scheduled[request] = span
    for request in plan.scheduled:
        if room.tokens == 0:
            break
        if request.num_drafts:
            add_drafts(plan, request, pool, room, is_prompt=num_pending(request) > 1)
    room.release()


def _spans(
    rows: Sequence[RequestT], room: Room, urgent: Collection[RequestT], reserved: int
) -> dict[RequestT, int]:
    """Share the tokens of ``room`` out, without drafts, and hold the reserved ones."""
    spans: dict[RequestT, int] = {}
    if not urgent:
        _claim(spans, rows, room)
        return spans
    late = {r: None for r in rows if r not in urgent and num_pending(r) > 1}
    if rows and rows[0] in late:  # it always runs
        spans[rows[0]] = 1
        room.take(1)
    _claim(spans, [request for request in rows if request not in late], room)
    room.hold(reserved)
    _claim(spans, late, room)
    return spans


def _claim(spans: dict[RequestT, int], rows: Iterable[RequestT], room: Room) -> None:
    """Let rows take what they can of their pending tokens, in order."""
    for request in rows:
        if room.tokens == 0:
            break
        pending = num_pending(request)
        if pending == 1:
            spans[request] = 1
            room.tokens -= 1
            continue
        has = spans.get(request, 0)
        more = min(pending - has, room.chunk - has, room.tokens, room.prompt_tokens)
        if more:
            spans[request] = has + more
            room.take(more)
