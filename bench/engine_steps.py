"""What the engine's steps did, one by one, and what a step costs by the tokens that it feeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pagedraft.scheduler.observer import StepRecord
from pagedraft.scheduler.request import Request


@dataclass(frozen=True)
class StepFacts:
    """One step in which every row decoded.

    seconds: all of it. drafting_seconds: of drafters that run a model.
    drafted_R, accepted_R: drafts verified, and those that the row kept.
    """

    seconds: float
    drafting_seconds: float
    drafted_R: tuple[int, ...]
    accepted_R: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Requests in it."""
        return len(self.drafted_R)

    @property
    def num_fed(self) -> int:
        """Tokens that it fed: one a row and the drafts."""
        return self.num_rows + sum(self.drafted_R)

    @property
    def num_kept(self) -> int:
        """Tokens that it brought."""
        return self.num_rows + sum(self.accepted_R)


class StepLog:
    """An observer of an engine that keeps the steps in which ``num_rows`` requests decoded.

    Steps with prompt tokens or fewer rows are left out: a batch that is full is what is measured.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self.steps: list[StepFacts] = []

    def begin(self, num_rows: int) -> None:
        """Forget what was kept; from now on keep steps of ``num_rows`` requests."""
        self.num_rows, self.steps = num_rows, []

    def on_step(self, record: StepRecord) -> None:
        """Keep it, if it is a full one."""
        spans, drafts = record.scheduled, record.drafts
        if len(spans) != self.num_rows or len(record.emitted) != self.num_rows:
            return
        drafted = [len(drafts[request].tokens) if request in drafts else 0 for request in spans]
        fed = zip(spans.values(), drafted, strict=True)
        if any(span != 1 + count for span, count in fed):
            return
        accepted = [len(record.emitted[request]) - 1 for request in spans]
        self.steps.append(
            StepFacts(
                record.finished - record.began,
                record.drafted - record.planned,
                tuple(drafted),
                tuple(accepted),
            )
        )

    def on_add(self, request: Request, caller: Request | None) -> None:
        """Nothing to keep."""

    def on_abort(self, request: Request, caller: Request | None) -> None:
        """Nothing to keep."""

    def on_preempt(self, request: Request, caller: Request | None) -> None:
        """Nothing to keep."""

    def on_clear(self, caller: Request | None) -> None:
        """Nothing to keep."""

    def on_fail(self, record: StepRecord, error: BaseException) -> None:
        """Nothing to keep."""


def decode_speed(steps: Sequence[StepFacts]) -> float:
    """Tokens a second of these steps; 0 for none."""
    seconds = sum(step.seconds for step in steps)
    return sum(step.num_kept for step in steps) / seconds if seconds > 0 else 0.0


class StepTimes:
    """Seconds of a step of one batch by the tokens that it feeds, a line between two sizes.

    Beyond the largest measured size the last line goes on.
    """

    def __init__(self, seconds_by_tokens: Mapping[int, float]) -> None:
        if not seconds_by_tokens:
            raise ValueError("seconds_by_tokens: expected at least one size, got none")
        self.seconds_by_tokens = dict(sorted(seconds_by_tokens.items()))

    @property
    def num_sizes(self) -> int:
        """Measured ones."""
        return len(self.seconds_by_tokens)

    def at(self, num_tokens: float) -> float:
        """Seconds of a step that feeds so many tokens (a mean need not be whole)."""
        points = list(self.seconds_by_tokens.items())
        if len(points) == 1:
            return points[0][1]
        lines = list(pairwise(points))
        inside = (line for line in lines if num_tokens <= line[1][0])
        (left, low), (right, high) = next(inside, lines[-1])
        return low + (high - low) * (num_tokens - left) / (right - left)
