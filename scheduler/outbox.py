"""What is told to submitters and observers, and when: late, while the next step runs, or at once.

Nothing of it is needed to launch a step, so an engine that overlaps host and device keeps a step's
tokens and record here until the next pass is on its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from pagedraft.scheduler.observer import Observer, StepRecord
from pagedraft.scheduler.output import call_back
from pagedraft.scheduler.request import Request


class Outbox:
    """Tokens that callbacks have yet to get, in order, and the record of their step.

    on_failure: told of a request whose callback failed, and why; it may have ended.
    caller: whose callback runs now.
    """

    def __init__(
        self, observers: Sequence[Observer], on_failure: Callable[[Request, str], None]
    ) -> None:
        self.observers = list(observers)
        self.caller: Request | None = None
        self._on_failure = on_failure
        self._tokens: deque[tuple[Request, list[int]]] = deque()
        self._record: StepRecord | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to tell."""
        return not self._tokens and self._record is None

    def put(self, request: Request, tokens: list[int]) -> None:
        """Keep tokens that a request got for its callback, if it has one."""
        if request.on_tokens is not None:
            self._tokens.append((request, tokens))

    def close(self, record: StepRecord) -> None:
        """The step of the tokens put since the last one is done."""
        if self.observers:
            self._record = record

    def send(self) -> None:
        """Tell the observers of the step, then call back; each is told once, whatever is raised."""
        record, self._record = self._record, None
        if record is not None:
            for observer in self.observers:
                observer.on_step(record)
        while self._tokens:
            self.caller, tokens = self._tokens.popleft()
            try:
                error = call_back(self.caller, tokens)
                if error is not None:
                    self._on_failure(self.caller, error)
            finally:
                self.caller = None

    def added(self, request: Request) -> None:
        """Tell of a submission."""
        for observer in self.observers:
            observer.on_add(request, self.caller)

    def aborted(self, request: Request) -> None:
        """Tell of an abort."""
        for observer in self.observers:
            observer.on_abort(request, self.caller)

    def preempted(self, request: Request) -> None:
        """Tell of a preemption that no plan asked for."""
        for observer in self.observers:
            observer.on_preempt(request, self.caller)

    def cleared(self) -> None:
        """Tell of a prefix cache that was cleared."""
        for observer in self.observers:
            observer.on_clear(self.caller)

    def failed(self, record: StepRecord, error: BaseException) -> None:
        """Tell of a step that failed."""
        for observer in self.observers:
            observer.on_fail(record, error)
