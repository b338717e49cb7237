"""What an engine tells those who watch it: submissions, ends, preemptions, and every step.

A watcher is told after the fact and changes nothing. ``Trace`` (trace.py) is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.scheduler.request import Request


@dataclass
class StepRecord:
    """One step. Times are ``time.perf_counter`` seconds.

    index: number of the step, from 0. scheduled: each row's span in tokens, drafts included, in row
    order. wanted: drafts that rows were to get, where any; fewer were granted where room was short.
    drafts: what was verified. emitted: what each request kept, in the order it was kept, where
    anybody observes; num_kept: how many tokens that were.
    admitted, preempted: by the plan of this step. prompt_budget, urgent: what the plan was given
    besides the queues (see plan_step). began, planned, drafted, launched, finished: when the plan
    began and ended, when drafts were there, when the forward pass was under way, and when all of
    the step was done. num_waiting, num_running, num_free, num_evictable: after the step, in
    requests and blocks.
    """

    index: int
    began: float
    planned: float = 0.0
    drafted: float = 0.0
    launched: float = 0.0
    finished: float = 0.0
    scheduled: Mapping[Request, int] = field(default_factory=dict)
    wanted: Mapping[Request, int] = field(default_factory=dict)
    drafts: Mapping[Request, Proposal] = field(default_factory=dict)
    emitted: dict[Request, list[int]] = field(default_factory=dict)
    num_kept: int = 0
    admitted: Seq[Request] = ()
    preempted: Seq[Request] = ()
    prompt_budget: int | None = None
    urgent: Seq[Request] = ()
    num_waiting: int = 0
    num_running: int = 0
    num_free: int = 0
    num_evictable: int = 0


class Observer(Protocol):
    """Told what the engine does; ``caller`` is the request whose callback is running.

    A step is told of before its callbacks run, and where the engine overlaps host and device only
    while the next one runs; all else at once. So what is told may belong behind a step that is yet
    to be told of: ``Engine.num_steps`` says behind how many.
    """

    def on_add(self, request: Request, caller: Request | None) -> None: ...
    def on_abort(self, request: Request, caller: Request | None) -> None: ...
    def on_preempt(self, request: Request, caller: Request | None) -> None: ...
    def on_clear(self, caller: Request | None) -> None:
        """The prefix cache was cleared."""

    def on_fail(self, record: StepRecord, error: BaseException) -> None:
        """A step failed before any of it was committed; its plan stands."""

    def on_step(self, record: StepRecord) -> None: ...
