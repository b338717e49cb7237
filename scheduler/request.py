"""Request: a Sequence plus what scheduling needs: arrival, priority, limits, statistics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

from pagedraft.decoding.acceptance import Acceptance
from pagedraft.decoding.controller import Choice
from pagedraft.decoding.detokenize import OutputText
from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.params import SamplingParams
from pagedraft.decoding.sequence import Sequence

FinishReason = Literal["stop", "length", "abort", "error"]
OFF = Choice(None, 0, "off", 0.0)
PROMPT = Choice(None, 0, "prompt", 0.0)
RESTING = Choice(None, 0, "resting")


class Decision(NamedTuple):
    """What was decided about a request's drafts in one step, and what came of it.

    drafter: whose drafts were verified, None for none. wanted: drafts that the controller chose.
    drafted: drafts that were verified; accepted: how many of them counted.
    reason: why so many and no more, in plain words; without drafts, why none.
    """

    drafter: str | None
    wanted: int
    drafted: int
    accepted: int
    reason: str


Pass = tuple[str | None, int, int, int, str]


@dataclass
class RequestStats:
    """What one request cost. Times are ``time.perf_counter`` seconds.

    emissions: (time, number of tokens) of every target pass that emitted tokens.
    passes: a Decision's fields for every target pass that ended in a draw.
    num_cached_tokens: context tokens whose KV the prefix cache had, summed over admissions.
    num_preemptions: how often its KV was dropped and recomputed.
    drafter_errors: messages of drafters that failed and were turned off for this request.
    """

    submitted: float = field(default_factory=time.perf_counter)
    emissions: list[tuple[float, int]] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    drafter_errors: list[str] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)

    @property
    def decisions(self) -> list[Decision]:
        """The passes with names; made anew at each call."""
        return [Decision(*one) for one in self.passes]

    @property
    def drafted(self) -> list[int]:
        """Drafts verified, by draft position (index 0 is the first draft)."""
        lengths = Counter(drafted for _, _, drafted, _, _ in self.passes)
        return _reached(lengths, max(lengths, default=0))

    @property
    def accepted(self) -> list[int]:
        """Drafts that counted, by draft position, for all positions that were drafted."""
        most = max((drafted for _, _, drafted, _, _ in self.passes), default=0)
        return _reached(Counter(accepted for _, _, _, accepted, _ in self.passes), most)

    @property
    def num_drafts(self) -> int:
        """Target passes that verified drafts."""
        return sum(drafted > 0 for _, _, drafted, _, _ in self.passes)

    @property
    def skipped(self) -> dict[str, int]:
        """Why passes had no drafts: how often for each reason."""
        return dict(Counter(reason for _, _, drafted, _, reason in self.passes if not drafted))

    @property
    def drafters(self) -> dict[str, tuple[int, int]]:
        """Drafts verified and accepted, by drafter."""
        totals: dict[str, tuple[int, int]] = {}
        for name, _, drafted, accepted, _ in self.passes:
            if name is not None:
                before = totals.get(name, (0, 0))
                totals[name] = (before[0] + drafted, before[1] + accepted)
        return totals

    @property
    def token_times(self) -> list[float]:
        """Seconds from submission to each token; tokens of one pass come together."""
        return [when - self.submitted for when, count in self.emissions for _ in range(count)]

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


def _reached(lengths: Counter[int], most: int) -> list[int]:
    """For each position below ``most``, how many of so many lengths reach beyond it."""
    return [sum(n for length, n in lengths.items() if length > i) for i in range(most)]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """One request on its way through the engine.

    Set by the submitter: request_id, sequence, params (resolved: no None temperature), stop_ids,
    max_context (tokens), priority (lower runs first), on_tokens, output_text (where stop strings
    are looked for; None without any), parent (the first of a prompt's n samples, for the others),
    tenant (whose fair share it counts for), cache_salt (only requests of equal salts share cached
    KV), ttft_ms and itl_ms (latency targets in milliseconds: until the first token, and between
    steps that bring tokens; None: none).
    Set by the engine: arrival, rank (lower runs first, see waiting.py), drafters (names of those
        that may still draft for it), choice and offers (of the next step, see speculation.py),
        num_drafts (wanted in the next step), row (its row of the block table, -1: none), max_total
        (most tokens, prompt and output), is_plain (neither stop strings nor logprobs),
        finish_reason, stop_reason (the stop id or string), error.
    """

    request_id: str
    sequence: Sequence
    params: SamplingParams
    stop_ids: frozenset[int]
    max_context: int
    priority: int = 0
    on_tokens: Callable[[list[int]], None] | None = None
    output_text: OutputText | None = None
    parent: Request | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    arrival: int = -1
    rank: int = -1
    drafters: tuple[str, ...] = ()
    choice: Choice = OFF
    offers: dict[str, Proposal] = field(default_factory=dict)
    num_drafts: int = 0
    num_plain_passes: int = 0
    row: int = -1
    max_total: int = 0
    is_plain: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
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
