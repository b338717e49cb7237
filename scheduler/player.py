"""Plays a trace on an engine, and reports the first step that is another than recorded."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pagedraft.decoding.failure import describe
from pagedraft.scheduler.launch import Launched
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.observer import StepRecord
from pagedraft.scheduler.recorded import (
    RecordedFailure,
    RecordedPace,
    RecordedSpeculation,
    RecordedStep,
    RecordedSwapPolicy,
)
from pagedraft.scheduler.request import Request
from pagedraft.scheduler.trace_compare import schedule_difference, token_difference
from pagedraft.scheduler.trace_format import Event, build_request, step_args

# What bad data makes anything raise, a failed step or callback of the trace apart.
DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    zlib.error,
    RecordedFailure,
)


@dataclass
class Report:
    """How far the runs are the same.

    num_steps, num_tokens, num_requests: what was replayed, up to the first difference.
    schedule, tokens: the first difference of each kind, in words. notes: what else to know.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_requests: int = 0
    schedule: str | None = None
    tokens: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_identical(self) -> bool:
        """Whether nothing differs."""
        return self.schedule is None and self.tokens is None

    def lines(self) -> list[str]:
        """The report, as the command prints it."""
        until = "" if self.is_identical else " until there"
        counts = f"{self.num_tokens} tokens of {self.num_requests} requests"
        return [
            *(f"note: {note}" for note in self.notes),
            f"schedule: differs at {self.schedule}"
            if self.schedule
            else f"schedule: identical{until} ({self.num_steps} steps)",
            f"tokens: differ at {self.tokens}"
            if self.tokens
            else f"tokens: identical{until} ({counts})",
        ]


class Player:
    """Feeds an engine the events of a trace, and is told by it what its steps became.

    A step runs when the next one is read: what its callbacks did stands between the two.
    """

    def __init__(self, llm: LLM, report: Report) -> None:
        self._llm = llm
        self._engine = llm.engine
        self._report = report
        self._step = RecordedStep()
        self._policy = RecordedSwapPolicy()
        self._outside: dict[int, list[Event]] = {}  # by the step that they came before
        self._inside: dict[tuple[int, int], list[Event]] = {}  # by caller, too
        self._expected: dict[int, Mapping[str, Any]] = {}  # steps that are yet to be told of
        self._damage: ValueError | None = None
        self._own_launch: Callable[..., Launched] = llm.engine.launcher.launch

    def play(self, events: Iterable[Event]) -> None:
        """Run to the end or the first difference; raises one of DAMAGE where the data is bad.

        What decides in the engine is its own again afterwards.
        """
        engine: Any = self._engine
        swap = engine.prefixes.swap
        own = engine.speculation, engine.pace, None if swap is None else swap.policy
        vocab_size = engine.target.config.vocab_size
        engine.speculation = RecordedSpeculation(self._step, vocab_size)
        engine.pace = RecordedPace(self._step)
        if swap is not None:
            swap.policy = self._policy
        engine.launcher.launch = self._launch
        engine.observers.append(self)
        try:
            self._play(events)
        finally:
            engine.observers.remove(self)
            engine.abort_all()
            self._inside.clear()  # callbacks that are yet to be called do nothing
            engine.launcher.launch = self._own_launch
            engine.speculation, engine.pace = own[:2]
            if swap is not None:
                swap.policy = own[2]

    def _launch(self, *args: Any) -> Launched:
        self._step.fail(is_drafted=True)
        return self._own_launch(*args)

    def _play(self, events: Iterable[Event]) -> None:
        held: Event | None = None
        for event in events:
            self._policy.swaps.extend(event.args.get("swaps", ()))
            if event.kind != "step":
                self._keep(event)
                continue
            if held is not None:
                self._run_step(held.args)
            if not self._report.is_identical:
                return
            held = event
        if held is not None:
            self._run_step(held.args)
        if self._expected and self._report.is_identical:
            self._act_outside(self._engine.num_steps)
            self._engine.outbox.send()
            self._check_damage()

    def on_add(self, request: Request, caller: Request | None) -> None:
        """Own doing."""

    def on_abort(self, request: Request, caller: Request | None) -> None:
        """Own doing."""

    def on_preempt(self, request: Request, caller: Request | None) -> None:
        """Own doing."""

    def on_clear(self, caller: Request | None) -> None:
        """Own doing."""

    def on_fail(self, record: StepRecord, error: BaseException) -> None:
        """Own doing."""

    def on_step(self, record: StepRecord) -> None:
        """Compare a step with the recorded one."""
        then, now = self._expected.pop(record.index), step_args(record)
        report, where = self._report, f"step {record.index}"
        if not report.is_identical:
            return
        requests = self._step.requests
        names = {arrival: request.request_id for arrival, request in requests.items()}
        schedule = schedule_difference(then, now, names)
        num_same, tokens = token_difference(then, now, requests)
        report.num_tokens += num_same
        if schedule is not None:
            report.schedule = f"{where}: {schedule}"
            return
        report.num_steps += 1
        if tokens is not None:
            report.tokens = f"{where}: {tokens}"

    def _keep(self, event: Event) -> None:
        """Put what was done to the engine where its turn comes."""
        caller, before = event.args.get("caller"), event.args.get("before_step")
        if before is None:  # settings, and the end of a trace that has none
            return
        if caller is None:
            self._outside.setdefault(before, []).append(event)
        else:
            self._inside.setdefault((caller, before), []).append(event)

    def _run_step(self, args: Mapping[str, Any]) -> None:
        index = args["step"]
        self._act_outside(index)
        self._expected[index] = args
        self._step.begin(args)
        self._engine.step()
        self._check_damage()
        if self._engine.num_steps == index:
            self._differs("there is nothing to run")

    def _act_outside(self, step: int) -> None:
        for event in self._outside.pop(step, ()):
            self._act(event)

    def _call_back(self, arrival: int) -> None:
        """Do what a request's callback did."""
        for event in self._inside.pop((arrival, self._engine.num_steps), ()):
            if event.kind == "raise":
                raise RecordedFailure(event.args["error"])
            self._act(event)

    def _act(self, event: Event) -> None:
        """Do to the engine what was done then."""
        kind, args = event
        engine = self._engine
        if kind == "submit":
            self._submit(args)
        elif kind == "clear":
            self._llm.reset_prefix_cache()
        elif kind == "fail":
            self._step.begin(args)
            with suppress(RecordedFailure):
                engine.step()
        elif kind == "abort":
            engine.abort(self._step.requests[args["request"]])
        elif self._step.requests[args["request"]] in engine.running:  # else a failure did it
            engine.preempt(self._step.requests[args["request"]])

    def _submit(self, args: Mapping[str, Any]) -> None:
        try:
            self._engine.add(self._submitted(args))
        except DAMAGE as error:
            words = str(error) if isinstance(error, (ValueError, TypeError)) else describe(error)
            self._damage = ValueError(f"request {args['id']!r}: {words}")
            raise self._damage from error
        self._report.num_requests += 1

    def _check_damage(self) -> None:
        """Raise what a callback met; the engine took it for the callback's failure."""
        if self._damage is not None:
            raise self._damage

    def _submitted(self, args: Mapping[str, Any]) -> Request:
        requests, arrival = self._step.requests, args["request"]
        parent = None if args["parent"] is None else requests[args["parent"]]

        def on_tokens(tokens: list[int]) -> None:
            self._call_back(arrival)

        requests[arrival] = build_request(args, parent, self._llm.tokenizer, on_tokens)
        return requests[arrival]

    def _differs(self, what: str) -> None:
        self._report.schedule = self._report.schedule or f"step {self._engine.num_steps}: {what}"
