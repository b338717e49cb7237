"""Latency targets: how many prompt tokens the next step may feed, and whose prompt goes first.

**Between tokens** (``itl_ms``). The gap of a decoding request is the time since its last tokens
plus the coming step, host work included. So the step may last as long as the tightest gap allows,
and prompts get what the model of step times (step_time.py) expects to fit, with a margin for its
own error. It is never nothing: ``LEAST_CHUNK`` tokens keep prompts moving, though a target close to
the time of a plain step is then missed. A target that even a plain step misses is not chased:
prompts get a step of ``HOPELESS`` times the plain one, or they would crawl for no gain.

**First token** (``ttft_ms``). Prompts are needed in the order of their deadlines. If one of them is
at risk, when all run in that order at the pace of the coming step, it and those before it are
*urgent*. One that cannot make it any more steps back behind those that can, until it is late by
``PATIENCE`` times its target, or times what it takes to read it: then it comes first. A preempted
request with a target between tokens has a deadline like that, too. The plan is told of the first of
them only, as many as fill the step: it serves urgent requests by rank. They share the budget above,
and break nobody's target between tokens. Where no such target is live, there is no limit.

Drafts are not cut. A step with drafts brings several tokens in its gap, the controller has weighed
what they cost, and their tokens are part of the step from which prompts get what remains. Rows are
not refused: with more of them than a target allows, it is one that a plain step misses.

No clock and no torch: times are ``time.perf_counter`` seconds and are passed in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from numbers import Real
from operator import mul
from typing import NamedTuple, Protocol

from pagedraft.scheduler.request import Request
from pagedraft.scheduler.step_time import Load, StepTime

LEAST_CHUNK = 4  # prompt tokens
HOPELESS = 1.5
PATIENCE = 4.0
RESERVE = 0.25  # of a first-token target, kept beside a whole step for errors of all kinds
SELDOM = 16  # without targets one step of so many is measured, besides those of large chunks
LARGE = 64  # tokens of one row
PLAIN_EVERY = 4  # of the steps with urgent requests one goes by rank alone, so that nobody starves


class Queue(Protocol):
    """What is read of the waiting queue."""

    def __len__(self) -> int: ...
    def __contains__(self, request: object) -> bool: ...
    def candidates(self, urgent: Collection[Request] = ()) -> Iterator[Request]: ...


class Verdict(NamedTuple):
    """What the plan of a step is given (see plan_step).

    prompt_budget: most prompt tokens, None for no limit; urgent: most urgent first.
    """

    prompt_budget: int | None = None
    urgent: tuple[Request, ...] = ()


FREE = Verdict()


def check_target(name: str, value: object) -> None:
    """Raise TypeError or ValueError, naming ``name``, unless it is a number of ms > 0, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number > 0, got {value!r}")
    try:
        is_good = 0 < float(value) < math.inf
    except OverflowError:
        is_good = False
    if not is_good:
        raise ValueError(f"{name}: expected a number > 0, got {value}")


class _Awaited(NamedTuple):
    """A request whose next token has a deadline that its prompt must make. Times are seconds."""

    request: Request
    deadline: float
    target: float


class Pace:
    """Keeps the live requests with targets, and learns what steps take.

    token_budget, max_rows, chunk_tokens: the engine's; None is no limit.
    """

    def __init__(
        self, token_budget: int, max_rows: int | None = None, chunk_tokens: int | None = None
    ) -> None:
        self.token_budget = token_budget
        self.max_rows = max_rows
        self.chunk_tokens = token_budget if chunk_tokens is None else chunk_tokens
        self.step_time = StepTime()
        self._between: dict[Request, float] = {}  # live, by itl target
        self._first: dict[Request, float] = {}  # live, without a token, by ttft target
        self._num_seen = 0
        self._num_urgent = 0  # steps that somebody was urgent in

    @property
    def has_targets(self) -> bool:
        """Whether any live request has a target that can still be kept or missed."""
        return bool(self._between or self._first)

    def admit(self, request: Request) -> None:
        """A request was added to the engine; its targets passed ``check_target``."""
        if request.itl_ms is not None:
            self._between[request] = request.itl_ms / 1e3
        if request.ttft_ms is not None:
            self._first[request] = request.ttft_ms / 1e3

    def forget(self, request: Request) -> None:
        """A request has ended. Not for one that was preempted."""
        self._between.pop(request, None)
        self._first.pop(request, None)

    def plan(self, running: Collection[Request], waiting: Queue, now: float) -> Verdict:
        """Judge the coming step, which begins at ``now``; requests know their drafts.

        Nearly free without targets, else O(running), and O(n log n) in targets.
        """
        if not self._between and not self._first:
            return FREE
        awaited, allowed = self._look(now)
        if not awaited and allowed == math.inf:
            return FREE
        load, position = self._load(running)
        if position < 0:
            if not len(waiting):
                return FREE
            position = next(waiting.candidates()).num_tokens  # of which the cache may have most
        budget = None if allowed == math.inf else self._budget(allowed, load, position)
        chunk = self.token_budget if budget is None else min(budget, self.token_budget)
        ordered = self._by_urgency(awaited, chunk, load, now) if awaited else []
        can_admit = self.max_rows is None or len(running) < self.max_rows
        able = (r for r in ordered if can_admit or r not in waiting)
        self._num_urgent += bool(ordered)
        if self._num_urgent % PLAIN_EVERY == 0:
            return Verdict(budget)
        return Verdict(budget, tuple(self._fill(able, chunk)))

    def record(self, scheduled: Mapping[Request, int], seconds: float) -> None:
        """Learn from a step that has ended: the spans of its rows, and how long all of it took."""
        self._num_seen += 1
        if (
            not self.has_targets
            and self._num_seen % SELDOM
            and max(scheduled.values(), default=0) < LARGE
        ):
            return
        spans = scheduled.values()
        ends = [request.sequence.num_written for request in scheduled]
        pairs = sum(map(mul, spans, ends)) - sum([span * (span - 1) // 2 for span in spans])
        self.step_time.record(Load(sum(spans), len(scheduled), sum(ends), pairs), seconds)

    def _look(self, now: float) -> tuple[list[_Awaited], float]:
        """Requests whose prompts have a deadline, and the seconds that the coming step may last."""
        awaited: list[_Awaited] = []
        allowed = math.inf
        for request, target in self._between.items():
            if not request.stats.emissions:
                continue
            deadline = request.stats.emissions[-1][0] + target
            sequence = request.sequence
            if len(sequence.token_ids) - sequence.num_written > 1:
                awaited.append(_Awaited(request, deadline, target))
            else:
                allowed = min(allowed, deadline - now)
        for request, target in [*self._first.items()]:
            if request.stats.emissions:
                del self._first[request]
            else:
                awaited.append(_Awaited(request, request.stats.submitted + target, target))
        return awaited, allowed

    def _load(self, running: Collection[Request]) -> tuple[Load, int]:
        """What decoding rows will feed, and where the latest position of a prompt is; -1: none."""
        rows = context = drafts = draft_pairs = 0
        position = -1
        for request in running:
            sequence = request.sequence
            written = sequence.num_written
            if len(sequence.token_ids) - written > 1:
                position = max(position, written)
                continue
            rows += 1
            context += written + 1
            if request.num_drafts:
                drafts += request.num_drafts
                draft_pairs += request.num_drafts * (written + 1)
        return Load(rows + drafts, rows, context, context + draft_pairs), position

    def _budget(self, allowed: float, load: Load, position: int) -> int:
        """Prompt tokens that fit in a step of ``allowed`` seconds."""
        plain = self.step_time.predict(load)
        if plain > allowed:
            allowed = HOPELESS * plain
        return max(LEAST_CHUNK, self.step_time.most_tokens(allowed, load, position))

    def _by_urgency(
        self, awaited: list[_Awaited], chunk: int, load: Load, now: float
    ) -> list[Request]:
        """Those at risk and those that must run before them, by deadline; then the late ones."""
        step = self.step_time.predict(load.plus(chunk, chunk))
        further = self.step_time.predict(load.plus(chunk, chunk + 1000)) - step
        in_time: list[Request] = []
        late: list[Request] = []
        num_urgent, total = 0, 0.0
        for request, deadline, target in sorted(awaited, key=lambda row: row.deadline):
            pending = request.num_tokens - request.num_written
            middle = request.num_written + pending / 2
            needed = (step + further * middle / 1000) * pending / chunk
            is_patient = now < deadline + PATIENCE * max(target, needed)
            if now + needed > deadline and is_patient:
                late.append(request)
                continue
            in_time.append(request)
            total += needed
            if now + total + step + RESERVE * target > deadline:
                num_urgent = len(in_time)
        return in_time[:num_urgent] + late

    def _fill(self, requests: Iterable[Request], chunk: int) -> Iterator[Request]:
        """The first of ``requests``, as many as have ``chunk`` tokens to feed."""
        for request in requests:
            if chunk <= 0:
                return
            yield request
            chunk -= min(request.num_tokens - request.num_written, self.chunk_tokens)
