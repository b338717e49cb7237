"""Trace: a file that Perfetto (ui.perfetto.dev) and chrome://tracing open, and ``replay`` reads.

Tracks: the engine's steps with their phases, a track for each request (queued, prompt chunks,
decode steps; submission, preemptions and end as instants), and counters of requests, blocks and
tokens. What a replay needs is in the arguments of some of these events (trace_format.py).

**Cost**: TO_MEASURE. Under the rejection and the block rule the distributions that drafts were
drawn from are written too, 4 bytes a draft and token of the vocabulary before compression.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pagedraft.scheduler.engine import Engine
from pagedraft.scheduler.observer import StepRecord
from pagedraft.scheduler.request import Request
from pagedraft.scheduler.trace_file import CATEGORY, Track, TraceFile, encode, named
from pagedraft.scheduler.trace_format import number, step_args, submission_args
from pagedraft.scheduler.trace_settings import settings_args

logger = logging.getLogger(__name__)
STEPS = Track(1, 0)
REQUESTS = 2  # the pid of their tracks
PHASES = ("plan", "draft", "forward", "verify+commit")
SPARE = 256  # requests that may have ended unseen before they are looked for


class Row(NamedTuple):
    """What a request was fed in a step, and what came of it, in tokens.

    wanted: drafts that were asked for, whatever was granted.
    """

    fed: int
    drafts: int
    accepted: int
    tokens: int
    wanted: int


@dataclass
class _Progress:
    """A live request. queued: since when it waits, in seconds; None: it runs.

    num_written: tokens in KV after its last step. num_cached: how many the cache had, in all.
    """

    queued: float | None = None
    num_written: int = 0
    num_cached: int = 0


class Trace:
    """Writes what an engine tells its observers to ``path``; a context manager, closed at its end.

    Raises OSError, naming the file, where it cannot be written. A later failure ends the trace with
    one warning and nothing else.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._num_steps = 0
        self._num_usable = 0
        self._live: dict[Request, _Progress] = {}
        self._is_open = True
        try:
            self._file = TraceFile(path)
        except OSError as error:
            raise _named_error(self.path, error) from error

    def begin(self, engine: Engine, options: Mapping[str, Any]) -> Trace:
        """Write what ``engine`` is, and watch it from now on.

        options: the arguments that LLM was made with, by name.
        """
        self._num_usable = engine.pool.num_usable
        args = settings_args(engine, options)
        events = [
            named("process", STEPS, "engine"),
            named("thread", STEPS, "steps"),
            named("process", Track(REQUESTS, 0), "requests"),
            self._file.instant(STEPS, "settings", time.perf_counter(), args, CATEGORY),
        ]
        try:
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
        self._is_open = False
        self._live.clear()

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
        args = {"before_step": self._num_steps, "caller": number(caller)}
        self._guarded(self._write_instant, STEPS, "clear", args)

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
        self._is_open = False
        self._live.clear()
        self._file.abandon()

    def _add(self, request: Request, caller: Request | None) -> None:
        self._live[request] = _Progress(queued=request.stats.submitted)
        args = {"before_step": self._num_steps, **submission_args(request, caller)}
        submit = self._file.instant(
            _track(request), "submit", request.stats.submitted, args, CATEGORY
        )
        self._file.write([named("thread", _track(request), request.request_id), submit])

    def _abort(self, request: Request, caller: Request | None) -> None:
        self._file.write(self._queued_until(request, time.perf_counter()))
        self._act("abort", request, caller)
        if caller is None:  # else its row of this very step is yet to come
            self._live.pop(request, None)

    def _preempt(self, request: Request, caller: Request | None) -> None:
        self._requeue(request, time.perf_counter())
        self._act("preempt", request, caller)

    def _act(self, name: str, request: Request, caller: Request | None) -> None:
        args = {
            "before_step": self._num_steps,
            "request": request.arrival,
            "caller": number(caller),
        }
        self._write_instant(_track(request), name, args)

    def _write_instant(self, track: Track, name: str, args: Mapping[str, Any]) -> None:
        self._file.write([self._file.instant(track, name, time.perf_counter(), args, CATEGORY)])

    def _requeue(self, request: Request, when: float) -> None:
        progress = self._live[request]
        progress.queued, progress.num_written = when, 0

    def _queued_until(self, request: Request, when: float) -> list[str]:
        """The slice of a request's waiting, if it waits; from now on it does not."""
        progress = self._live.setdefault(request, _Progress())
        since, progress.queued = progress.queued, None
        if since is None:
            return []
        return [self._file.slice(_track(request), "queued", since, when)]

    def _step(self, record: StepRecord) -> None:
        self._num_steps += 1
        events: list[str] = []
        for request in record.preempted:
            self._requeue(request, record.planned)
            events.append(self._file.instant(_track(request), "preempted", record.planned, {}))
        for request in record.admitted:
            events += self._queued_until(request, record.began)
        rows = {request: self._row(request, record) for request in record.scheduled}
        for request, row in rows.items():
            events += self._row_events(request, row, record)
        events += self._phases(record, rows)
        events += self._counters(record, rows)
        self._file.write(events)
        self._forget_ended(record)

    def _row(self, request: Request, record: StepRecord) -> Row:
        """What a row was; the request itself has moved on since."""
        progress = self._live.setdefault(request, _Progress())
        tokens = len(record.emitted.get(request, ()))
        proposal = record.drafts.get(request)
        drafts = 0 if proposal is None else len(proposal.tokens)
        num_cached = request.stats.num_cached_tokens
        num_written = progress.num_written + num_cached - progress.num_cached
        progress.num_cached, progress.num_written = num_cached, request.num_written
        granted = max(0, record.scheduled[request] - (request.num_tokens - tokens - num_written))
        return Row(
            fed=record.scheduled[request] - granted,
            drafts=drafts,
            accepted=min(drafts, max(0, tokens - 1)),
            tokens=tokens,
            wanted=granted if request.finished else max(granted, request.choice.k),
        )

    def _row_events(self, request: Request, row: Row, record: StepRecord) -> list[str]:
        track, name = _track(request), "decode" if row.fed == 1 else "prompt"
        args = (
            f'{{"step":{record.index},"fed":{row.fed},"drafts":{row.drafts},'
            f'"accepted":{row.accepted},"tokens":{row.tokens}}}'
        )
        events = [self._file.slice(track, name, record.began, record.finished, args)]
        if request.finished and request.finish_reason != "abort":
            end = {"reason": request.finish_reason, "tokens": request.num_output}
            end |= {} if request.error is None else {"error": request.error}
            events.append(self._file.instant(track, "end", record.finished, end))
        return events

    def _phases(self, record: StepRecord, rows: Mapping[Request, Row]) -> list[str]:
        """The step and, inside it, its phases."""
        args = encode(step_args(record, {request: row.wanted for request, row in rows.items()}))
        times = (record.began, record.planned, record.drafted, record.launched, record.finished)
        step = self._file.slice(STEPS, "step", record.began, record.finished, args, CATEGORY)
        phases = zip(PHASES, times, times[1:], strict=False)
        return [step, *(self._file.slice(STEPS, name, *span) for name, *span in phases)]

    def _counters(self, record: StepRecord, rows: Mapping[Request, Row]) -> list[str]:
        counts = {
            "requests": {"running": record.num_running, "waiting": record.num_waiting},
            "blocks": {
                "owned": self._num_usable - record.num_free,
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

    def _forget_ended(self, record: StepRecord) -> None:
        for request in record.scheduled:
            if request.finished:
                del self._live[request]
        if len(self._live) > record.num_waiting + record.num_running + SPARE:
            self._live = {r: row for r, row in self._live.items() if not r.finished}


def _track(request: Request) -> Track:
    return Track(REQUESTS, request.arrival + 1)


def _named_error(path: Path, error: OSError) -> OSError:
    return type(error)(f"trace: {path}: {error.strerror or error}")
