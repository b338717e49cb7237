"""Request: a Sequence plus what scheduling needs: arrival, priority, limits, statistics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from pagedraft.decoding.controller import Acceptance
from pagedraft.decoding.params import SamplingParams
from pagedraft.decoding.sequence import Sequence

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass
class RequestStats:
    """What one request cost. Times are ``time.perf_counter`` seconds.

    emissions: (time, number of tokens) of every target pass that emitted tokens.
    drafted, accepted: counts by draft position (index 0 is the first draft).
    num_preemptions: how often its KV was dropped and recomputed.
    drafter_errors: messages of a drafter that failed and was turned off for this request.
    """

    submitted: float = field(default_factory=time.perf_counter)
    emissions: list[tuple[float, int]] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    drafter_errors: list[str] = field(default_factory=list)

    def record_drafts(self, num_drafted: int, num_accepted: int) -> None:
        """Count one verified step by position."""
        grow = num_drafted - len(self.drafted)
        self.drafted.extend([0] * grow)
        self.accepted.extend([0] * grow)
        for position in range(num_drafted):
            self.drafted[position] += 1
            self.accepted[position] += position < num_accepted

    @property
    def ttft(self) -> float | None:
        """Seconds from submission to the first token; None before it."""
        return self.emissions[0][0] - self.submitted if self.emissions else None

    @property
    def inter_token_latencies(self) -> list[float]:
        """Seconds a token after the first pass: the gap to the pass before over its tokens."""
        return [
            (when - before) / count
            for (before, _), (when, count) in pairwise(self.emissions)
            for _ in range(count)
        ]

    @property
    def num_passes(self) -> int:
        """Target passes that emitted tokens."""
        return len(self.emissions)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens emitted per target pass; 0 before the first."""
        total = sum(count for _, count in self.emissions)
        return total / self.num_passes if self.num_passes else 0.0


@dataclass(eq=False)
class Request:
    """One request on its way through the engine.

    Set by the submitter: request_id, sequence, params (resolved: no None temperature), stop_ids,
    max_context (tokens), priority (lower runs first), on_tokens.
    Set by the engine: arrival, num_drafts (wanted in the next step), finish_reason, error.
    """

    request_id: str
    sequence: Sequence
    params: SamplingParams
    stop_ids: frozenset[int]
    max_context: int
    priority: int = 0
    on_tokens: Callable[[list[int]], None] | None = None
    arrival: int = -1
    num_drafts: int = 0
    speculating: bool = True
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)
    stats: RequestStats = field(default_factory=RequestStats)

    @property
    def num_tokens(self) -> int:
        """Committed tokens, prompt and output."""
        return self.sequence.num_tokens

    @property
    def num_written(self) -> int:
        """Tokens whose target KV is computed."""
        return self.sequence.num_written

    @property
    def block_ids(self) -> list[int]:
        """Pool blocks the request owns, in order."""
        return self.sequence.block_ids

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return self.sequence.num_tokens - self.sequence.num_prompt

    @property
    def finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self.finish_reason is not None

    def drop_kv(self) -> None:
        """Preemption: forget what is written; tokens stay."""
        self.sequence.drop_kv()
        self.stats.num_preemptions += 1
