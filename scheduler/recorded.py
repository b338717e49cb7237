"""What decides in an engine, as a trace recorded it: nobody drafts, and no clock decides."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.scheduler.request import Request
from pagedraft.scheduler.swap_policy import Decision, SwapPolicy
from pagedraft.scheduler.trace_format import recorded_proposal


class RecordedFailure(Exception):
    """A step fails as it did when it was recorded."""


class RecordedStep:
    """The step that is replayed now; set before each one.

    args: of its event (``step_args``), ``fail`` of one that failed. requests: all that were
    submitted, by arrival as recorded.
    """

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.args: Mapping[str, Any] = {}
        self.rows: dict[Request, Mapping[str, Any]] = {}

    def begin(self, args: Mapping[str, Any]) -> None:
        """Go on to the step of ``args``."""
        self.args = args
        self.rows = {self.requests[row["request"]]: row for row in args["rows"]}

    def fail(self, is_drafted: bool) -> None:
        """Raise what the step failed with, if it failed with its drafts made, or without."""
        if "error" in self.args and self.args.get("is_drafted", True) == is_drafted:
            kind = MemoryError if self.args["is_out_of_memory"] else RecordedFailure
            raise kind(self.args["error"])


class RecordedSpeculation:
    """Stands in for Speculation (speculation.py) and proposes what a trace has."""

    def __init__(self, step: RecordedStep, vocab_size: int) -> None:
        self.drafters: dict[str, Any] = {}
        self.num_errors = 0
        self._step = step
        self._vocab_size = vocab_size

    def decide(self, running: Seq[Request], num_other_tokens: int) -> None:
        """Ask for as many drafts as were asked for then."""
        for request in running:
            request.num_drafts = self._step.rows.get(request, {}).get("wanted", 0)

    def propose(self, scheduled: Mapping[Request, int]) -> dict[Request, Proposal]:
        """The recorded drafts, as far as this plan has room for them; a failure, if it failed."""
        self._step.fail(is_drafted=False)
        proposals = {}
        for request, num_tokens in scheduled.items():
            row = self._step.rows.get(request, {})
            proposal = recorded_proposal(row, max(0, num_tokens - request.sequence.num_pending))
            if proposal.tokens:
                self._check(request, proposal)
                proposals[request] = proposal
        return proposals

    def teach(self, scheduled: Iterable[Request]) -> None:
        """Nothing is learned."""

    def _check(self, request: Request, proposal: Proposal) -> None:
        """Raise ValueError for what no drafter may propose: kernels take it as it is."""
        tokens, q_KV, size = proposal.tokens, proposal.q_KV, self._vocab_size
        where = f"request {request.request_id!r}: drafts"
        bad = [t for t in tokens if not isinstance(t, int) or not 0 <= t < size]
        if bad:
            raise ValueError(f"{where}: expected token ids from 0 to {size - 1}, got {bad[0]!r}")
        if q_KV is not None and tuple(q_KV.shape) != (len(tokens), size):
            shape = list(q_KV.shape)
            raise ValueError(f"{where}: expected q of [{len(tokens)}, {size}], got {shape}")

    def admit(self, request: Request) -> None:
        """A new request: nothing to prepare."""

    def record_step(self, *args: Any, **options: Any) -> None:
        """Nothing is learned."""

    def settle(
        self, request: Request, proposal: Proposal, tokens: list[int], num_kept: int
    ) -> None:
        """Nothing is learned."""

    def turn_off(self, request: Request, name: str | None, error: str) -> None:
        """Nobody drafts."""

    def forget(self, request: Request) -> None:
        """Nothing is planned any more."""
        request.num_drafts = 0


class RecordedSwapPolicy(SwapPolicy):
    """Decides as was decided; ``swaps`` are the decisions to come."""

    def __init__(self) -> None:
        super().__init__()
        self.swaps: deque[bool] = deque()

    def decide(self, num_blocks: int, num_tokens: int) -> Decision:
        """Whether KV was copied out."""
        return Decision(bool(self.swaps) and self.swaps.popleft(), 0.0, 0.0, "recorded")

    decide_back = decide


class RecordedPace:
    """Stands in for Pace (pace.py) and grants what a trace has."""

    def __init__(self, step: RecordedStep) -> None:
        self._step = step

    def plan(self, *args: Any, **options: Any) -> tuple[int | None, list[Request]]:
        """The recorded prompt budget and urgent requests."""
        urgent = [self._step.requests[arrival] for arrival in self._step.args["urgent"]]
        return self._step.args["prompt_budget"], urgent

    def __getattr__(self, name: str) -> Any:
        """Whatever else a pace is told, it does not learn from."""
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **options: None
