"""The one thread that owns an engine: takes submissions and aborts from others, and steps.

It sleeps while there is nothing to do. After each step it reports all that is new at once. Whatever
it raises ends it: then every request has failed.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch

from pagedraft.scheduler.engine import Engine
from pagedraft.scheduler.request import Request
from pagedraft.scheduler.stream import EngineDied, Update

# An idle thread looks this often whether those who could give it work are still there.
ORPHAN_CHECK_SECONDS = 0.5
Command = tuple[Literal["add", "abort"], list[Request]]


class EngineOverloaded(RuntimeError):
    """As many requests wait to be admitted as may: try again later."""


class EngineClosed(RuntimeError):
    """The engine was shut down, or is about to be."""


@dataclass
class _Progress:
    """How much of a request was reported."""

    num_output: int = 0  # tokens
    num_chars: int = 0


@dataclass
class Counts:
    """Requests since the start: submitted, refused for want of room, and ended by reason."""

    num_submitted: int = 0
    num_refused: int = 0
    num_ended: Counter[str] = field(default_factory=Counter)


class EngineThread:
    """Runs ``engine`` until it is stopped, its owner is gone, or a step raises.

    max_waiting: most requests that may wait to be admitted, preempted ones among them.
    report: called in the thread with what is new after a step.
    on_end: called in the thread as the last thing, with what it died of, if it did.
    is_orphaned: whether nobody is left to submit, abort or read.
    """

    def __init__(
        self,
        engine: Engine,
        max_waiting: int,
        report: Callable[[list[Update]], None],
        on_end: Callable[[BaseException | None], None],
        is_orphaned: Callable[[], bool],
    ) -> None:
        self.engine = engine
        self.max_waiting = max_waiting
        self.counts = Counts()
        self.cause: BaseException | None = None  # of its death
        self._report = report
        self._on_end = on_end
        self._is_orphaned = is_orphaned
        self._wake = threading.Condition()  # guards what follows
        self._commands: deque[Command] = deque()
        self._num_arriving = 0  # reserved, and not yet in the engine
        self._stop: Literal["drain", "now"] | None = None
        self._progress: dict[Request, _Progress] = {}  # the thread's own
        self._thread = threading.Thread(target=self._run, name="pagedraft-engine")

    @property
    def num_waiting(self) -> int:
        """Requests that wait to be admitted."""
        return self._num_arriving + len(self.engine.waiting)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def reserve(self, count: int) -> None:
        """Take the place of ``count`` requests that will be submitted, or ``release``d.

        Raises EngineOverloaded, EngineClosed or EngineDied.
        """
        with self._wake:
            self.check_open()
            if self._stop is not None:
                raise EngineClosed("AsyncEngine: it is being shut down and takes no requests")
            if self.num_waiting + count > self.max_waiting:
                self.counts.num_refused += count
                raise EngineOverloaded(
                    f"max_waiting: {self.num_waiting} of {self.max_waiting} requests wait to be "
                    f"admitted, {len(self.engine.running)} run; no room for {count} more"
                )
            self._num_arriving += count

    def release(self, count: int) -> None:
        """Give back a place that was reserved."""
        with self._wake:
            self._num_arriving -= count
            self._wake.notify()

    def submit(self, requests: list[Request]) -> None:
        """Queue requests whose places were reserved; raises EngineClosed or EngineDied."""
        with self._wake:
            self.check_open()
            self.counts.num_submitted += len(requests)
            self._commands.append(("add", requests))
            self._wake.notify()

    def abort(self, requests: list[Request]) -> None:
        """End requests, before the next step begins; a no-op for those that have ended."""
        with self._wake:
            self._commands.append(("abort", requests))
            self._wake.notify()

    def stop(self, drain: bool) -> None:
        """End the thread: when all that was reserved has run, or now, which aborts all."""
        with self._wake:
            if self._stop != "now":
                self._stop = "drain" if drain else "now"
            self._wake.notify()

    def check_open(self) -> None:
        """Raise EngineClosed or EngineDied where nothing is taken any more."""
        if self.cause is not None:
            raise EngineDied.of(self.cause)
        if self._stop == "now" or not self._thread.is_alive():
            raise EngineClosed("AsyncEngine: it was shut down and takes no requests")

    def _run(self) -> None:
        """Work until there is a reason to end, then end every request that is left."""
        error: BaseException | None = None
        try:
            if self.engine.target.device.type == "cuda":  # the current device is a thread's own
                torch.cuda.set_device(self.engine.target.device)
            while self._wait():
                self._send(self._apply_commands())
                stepped = self.engine.step() if self.engine.has_work else []
                self._send(self._updates(stepped) + self._find_lost())
        except BaseException as failure:  # an interrupt, too: nobody may wait for ever
            error = failure
        self._end(error)

    def _wait(self) -> bool:
        """Sleep until there is work; False when the thread shall end."""
        with self._wake:
            while not self._is_orphaned() and self._stop != "now":
                if self._commands or self.engine.has_work:
                    return True
                if self._stop == "drain" and self._num_arriving == 0:
                    return False
                self._wake.wait(ORPHAN_CHECK_SECONDS)
        return False

    def _end(self, cause: BaseException | None) -> None:
        """Let nobody in any more, and end all that is left."""
        with self._wake:
            self._stop, self.cause = "now", cause
        with contextlib.suppress(BaseException):  # a dead engine may raise, a closed loop does
            aborted = self._abort(list(self._progress)) if cause else self._abort_all()
            if cause is None:
                self._send(aborted)
        with contextlib.suppress(BaseException):
            self._on_end(cause)

    def _abort_all(self) -> list[Update]:
        return self._apply_commands() + self._abort(list(self._progress))

    def _send(self, updates: list[Update]) -> None:
        if updates:
            self._report(updates)

    def _apply_commands(self) -> list[Update]:
        """Do what others have asked for; return what came of it."""
        updates: list[Update] = []
        while self._commands:
            name, requests = self._commands.popleft()
            updates += self._add(requests) if name == "add" else self._abort(requests)
        return updates

    def _add(self, requests: list[Request]) -> list[Update]:
        """Queue all samples of a submission, or none."""
        updates: list[Update] = []
        try:
            for request in requests:
                self.engine.add(request)
                self._progress[request] = _Progress()
        except Exception as error:  # this submission's data; others go on
            updates = [*self._abort(requests), Update(requests[0], [], [], error=error)]
        self.release(len(requests))
        return updates

    def _abort(self, requests: Iterable[Request]) -> list[Update]:
        mine = [request for request in requests if request in self._progress]
        for request in mine:
            self.engine.abort(request)
        return self._updates(mine)

    def _find_lost(self) -> list[Update]:
        """Requests that ended outside of a step and of an abort of ours; nobody may wait for them.

        Raises RuntimeError for one that has not ended and that the engine does not have.
        """
        num_live = len(self.engine.running) + len(self.engine.waiting)
        if len(self._progress) <= num_live:
            return []
        ended = [request for request in self._progress if request.finished]
        if num_live == 0 and len(ended) < len(self._progress):
            lost = [r.request_id for r in self._progress if not r.finished]
            raise RuntimeError(f"the engine has lost requests: {lost}")
        return self._updates(ended)

    def _updates(self, requests: Iterable[Request]) -> list[Update]:
        """What is new of requests that got tokens or ended."""
        return [self._update(request) for request in requests if request in self._progress]

    def _update(self, request: Request) -> Update:
        progress, sequence = self._progress[request], request.sequence
        begin = progress.num_output
        update = Update(
            request,
            token_ids=sequence.token_ids[sequence.num_prompt + begin :],
            logprobs=request.logprobs[begin:],
            is_last=request.finished,
        )
        progress.num_output += len(update.token_ids)
        if request.finished:
            self.counts.num_ended[str(request.finish_reason)] += 1
            del self._progress[request]
        elif request.output_text is not None:
            update.text = request.output_text.settled_from(progress.num_chars)
            progress.num_chars += len(update.text)
        return update
