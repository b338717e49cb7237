"""Trace: a file that Perfetto (ui.perfetto.dev) and chrome://tracing open, and ``replay`` reads.

Tracks: the engine's steps with their phases, a track for each request (queued, prompt chunks,
decode steps; submission, preemptions and end as instants), and counters of requests, blocks and
tokens. What a replay needs is in the arguments of some of these events (trace_format.py).

**Cost**: 5 us a row and 40 us a step, 7 us a row with 4 drafts (64 rows, a core of a shared
Intel Xeon, quickest of 300 steps); 220 to 390 bytes a row. Nothing grows but the file. Under the
rejection and the block rule the distributions that drafts were drawn from are written too, 4 bytes
a draft and token of the vocabulary before compression.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pagedraft.decoding.failure import describe
from pagedraft.scheduler.engine import Engine
from pagedraft.scheduler.observer import StepRecord
from pagedraft.scheduler.request import Request
from pagedraft.scheduler.step_limit import is_out_of_memory
from pagedraft.scheduler.trace_file import CATEGORY, TraceFile, Track, encode, named
from pagedraft.scheduler.trace_format import CALLBACK_ERROR, number, step_args, submission_args
from pagedraft.scheduler.trace_settings import settings_args

logger = logging.getLogger(__name__)
STEPS = Track(1, 0)
REQUESTS = 2  # the pid of their tracks
PHASES = ("plan", "draft", "forward", "verify+commit")


class Row(NamedTuple):
    """What a request was fed in a step, and what came of it, in tokens."""

    fed: int
    drafts: int
    accepted: int
    tokens: int


class Trace:
    """Writes what an engine tells its observers to ``path``; a context manager, closed at its end.

    Raises OSError, naming the file, where it cannot be written. What it held is there until
    ``begin``. A later failure ends the trace with one warning and nothing else.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._engine: Engine | None = None
        self._queued: dict[Request, float] = {}  # since when it waits, in seconds
        self._swaps: list[bool] = []  # decisions that are yet to be written
        self._told: list[Request] = []  # whose callbacks get the last step's tokens
        self._is_open = True
        try:
            self._file = TraceFile(path)
        except OSError as error:
            raise _named_error(self.path, error) from error

    def begin(self, engine: Engine, options: Mapping[str, Any]) -> Trace:
        """Write what ``engine`` is, and watch it from now on.

        options: the arguments that LLM was made with, by name.
        """
        self._engine = engine
        if engine.prefixes.swap is not None:
            engine.prefixes.swap.decisions = self._swaps
        args = settings_args(engine, options)
        events = [
            named("process", STEPS, "engine"),
            named("thread", STEPS, "steps"),
            named("process", Track(REQUESTS, 0), "requests"),
            self._file.instant(STEPS, "settings", time.perf_counter(), args, CATEGORY),
        ]
        try:
            self._file.begin()
            self._file.write(events)
        except OSError as error:
            self._stop()
            raise _named_error(self.path, error) from error
        engine.observers.append(self)
        return self

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Write the end; nothing is traced any more. A no-op the second time."""
        self._guarded(self._file.close)
        self._forget()

    def on_add(self, request: Request, caller: Request | None) -> None:
        """A request was submitted."""
        self._guarded(self._add, request, caller)

    def on_abort(self, request: Request, caller: Request | None) -> None:
        """A request was aborted."""
        self._guarded(self._abort, request, caller)

    def on_preempt(self, request: Request, caller: Request | None) -> None:
        """A request lost its blocks, and not by a plan."""
        self._guarded(self._preempt, request, caller)

    def on_clear(self, caller: Request | None) -> None:
        """The prefix cache was cleared."""
        self._guarded(self._act, "clear", STEPS, {}, caller)

    def on_fail(self, record: StepRecord, error: BaseException) -> None:
        """A step failed."""
        self._guarded(self._fail, record, error)

    def on_step(self, record: StepRecord) -> None:
        """A step is done."""
        self._guarded(self._step, record)

    def _guarded(self, method: Callable[..., None], *args: Any) -> None:
        """Whatever goes wrong ends the trace, and harms nobody else."""
        if not self._is_open:
            return
        try:
            method(*args)
        except Exception as error:
            logger.warning("trace: %s: the rest is not written: %r", self.path, error)
            self._stop()

    def _stop(self) -> None:
        self._forget()
        self._file.abandon()

    def _forget(self) -> None:
        self._is_open = False
        self._swaps = []  # another list: nobody fills this one
        if self._engine is not None and self._engine.prefixes.swap is not None:
            self._engine.prefixes.swap.decisions = None
        self._queued.clear()
        self._told.clear()

    def _add(self, request: Request, caller: Request | None) -> None:
        self._queued[request] = request.stats.submitted
        self._file.write([named("thread", _track(request), request.request_id)])
        self._act("submit", _track(request), submission_args(request), caller)

    def _abort(self, request: Request, caller: Request | None) -> None:
        self._file.write(self._queued_until(request, time.perf_counter()))
        self._act("abort", _track(request), {"request": request.arrival}, caller)

    def _preempt(self, request: Request, caller: Request | None) -> None:
        self._queued[request] = time.perf_counter()
        self._act("preempt", _track(request), {"request": request.arrival}, caller)

    def _act(
        self, name: str, track: Track, args: Mapping[str, Any], caller: Request | None
    ) -> None:
        """Write what was done to the engine from outside."""
        assert self._engine is not None
        args = {"before_step": self._engine.num_steps, "caller": number(caller), **args}
        args |= self._take_swaps()
        self._file.write([self._file.instant(track, name, time.perf_counter(), args, CATEGORY)])

    def _queued_until(self, request: Request, when: float) -> list[str]:
        """The slice of a request's waiting, if it waits; from now on it does not."""
        since = self._queued.pop(request, None)
        if since is None:
            return []
        return [self._file.slice(_track(request), "queued", self._file.span(since, when))]

    def _take_swaps(self) -> dict[str, list[bool]]:
        """What was decided about swapping since the last event, if anything was."""
        taken = {"swaps": self._swaps.copy()} if self._swaps else {}
        self._swaps.clear()
        return taken

    def _fail(self, record: StepRecord, error: BaseException) -> None:
        args = {
            **step_args(record),
            "error": describe(error),
            "is_out_of_memory": is_out_of_memory(error),
            "is_drafted": bool(record.drafted),
        }
        self._act("fail", STEPS, args, None)

    def _step(self, record: StepRecord) -> None:
        events = self._failed_callbacks(record)
        for request in record.preempted:
            self._queued[request] = record.planned
            events.append(self._file.instant(_track(request), "preempted", record.planned, {}))
        for request in record.admitted:
            events += self._queued_until(request, record.began)
        rows = {request: _row(request, span, record) for request, span in record.scheduled.items()}
        span = self._file.span(record.began, record.finished)
        for request, row in rows.items():
            events.append(_row_slice(request, row, record.index, span))
            if request.finish_reason is not None and request.finish_reason != "abort":
                events.append(self._end(request, record.finished))
        events += self._phases(record, span)
        events += self._counters(record, rows)
        self._file.write(events)
        self._told = [r for r in record.emitted if r.on_tokens is not None and not r.finished]

    def _failed_callbacks(self, record: StepRecord) -> list[str]:
        """Requests that ended because their callbacks failed on the tokens of the step before."""
        events = []
        for request in self._told:
            if request.error is None or not request.error.startswith(CALLBACK_ERROR):
                continue
            args = {
                "before_step": record.index,
                "caller": request.arrival,
                "request": request.arrival,
                "error": request.error,
            }
            now = time.perf_counter()
            events.append(self._file.instant(_track(request), "raise", now, args, CATEGORY))
        return events

    def _end(self, request: Request, when: float) -> str:
        end: dict[str, Any] = {"reason": request.finish_reason, "tokens": request.num_output}
        end |= {} if request.error is None else {"error": request.error}
        return self._file.instant(_track(request), "end", when, end)

    def _phases(self, record: StepRecord, span: str) -> list[str]:
        """The step and, inside it, its phases."""
        times = (record.began, record.planned, record.drafted, record.launched, record.finished)
        args = encode({**step_args(record), **self._take_swaps()})
        events = [self._file.slice(STEPS, "step", span, args, CATEGORY)]
        for name, begin, end in zip(PHASES, times, times[1:], strict=False):
            events.append(self._file.slice(STEPS, name, self._file.span(begin, end)))
        return events

    def _counters(self, record: StepRecord, rows: Mapping[Request, Row]) -> list[str]:
        assert self._engine is not None
        counts = {
            "requests": {"running": record.num_running, "waiting": record.num_waiting},
            "blocks": {
                "owned": self._engine.pool.num_usable - record.num_free,
                "evictable": record.num_evictable,
                "free": record.num_free - record.num_evictable,
            },
            "tokens": {
                "fed": sum(row.fed + row.drafts for row in rows.values()),
                "drafts": sum(row.drafts for row in rows.values()),
                "accepted": sum(row.accepted for row in rows.values()),
            },
        }
        return [self._file.counter(STEPS, *row, record.finished) for row in counts.items()]


def _row(request: Request, span: int, record: StepRecord) -> Row:
    tokens = len(record.emitted.get(request, ()))
    proposal = record.drafts.get(request)
    drafts = 0 if proposal is None else len(proposal.tokens)
    accepted = min(drafts, tokens - 1) if drafts and tokens else 0
    return Row(1 if request in record.wanted else span, drafts, accepted, tokens)


def _row_slice(request: Request, row: Row, step: int, span: str) -> str:
    name = "decode" if row.fed == 1 else "prompt"
    args = (
        f'{{"step":{step},"fed":{row.fed},"drafts":{row.drafts},'
        f'"accepted":{row.accepted},"tokens":{row.tokens}}}'
    )
    return TraceFile.slice(_track(request), name, span, args)


def _track(request: Request) -> Track:
    return Track(REQUESTS, request.arrival + 1)


def _named_error(path: Path, error: OSError) -> OSError:
    return type(error)(f"trace: {path}: {error.strerror or error}")
