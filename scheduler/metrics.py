"""What the tools print: latencies, acceptance by position, tokens per pass, KV waste."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from pagedraft.scheduler.request import RequestStats


@dataclass
class EngineStats:
    """Sums over an engine's steps. Times are seconds.

    slot_steps_owned, slot_steps_used: KV slots owned and holding a token, summed over steps.
    num_out_of_memory: steps that ran out of device memory and were run again in parts.
    """

    num_steps: int = 0
    step_seconds: float = 0.0
    num_fed: int = 0
    num_committed: int = 0
    slot_steps_owned: int = 0
    slot_steps_used: int = 0
    num_out_of_memory: int = 0

    def record(self, seconds: float, fed: int, committed: int, used: int, owned: int) -> None:
        """Add one step."""
        self.num_steps += 1
        self.step_seconds += seconds
        self.num_fed += fed
        self.num_committed += committed
        self.slot_steps_used += used
        self.slot_steps_owned += owned

    @property
    def kv_waste(self) -> float:
        """Share of owned KV slots that held no token, over all steps."""
        if self.slot_steps_owned == 0:
            return 0.0
        return 1.0 - self.slot_steps_used / self.slot_steps_owned


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile; NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(frozen=True)
class Summary:
    """Figures of a set of finished requests run together. Times are seconds."""

    num_requests: int
    num_tokens: int
    seconds: float
    ttft: list[float]
    inter_token_latencies: list[float]
    tokens_per_pass: float
    drafted: list[int]
    accepted: list[int]
    kv_waste: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over wall time."""
        return self.num_tokens / self.seconds if self.seconds > 0 else math.nan

    @property
    def acceptance(self) -> float:
        """Accepted drafts over all drafts; NaN without drafts."""
        return sum(self.accepted) / sum(self.drafted) if sum(self.drafted) else math.nan

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each draft position, how often that draft was accepted."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True) if d]


def summarise(stats: Iterable[RequestStats], seconds: float, kv_waste: float) -> Summary:
    """Pool the statistics of requests that ran within ``seconds``."""
    rows = list(stats)
    num_tokens = sum(count for row in rows for _, count in row.emissions)
    num_passes = sum(row.num_passes for row in rows)
    return Summary(
        num_requests=len(rows),
        num_tokens=num_tokens,
        seconds=seconds,
        ttft=[row.ttft for row in rows if row.ttft is not None],
        inter_token_latencies=[gap for row in rows for gap in row.inter_token_latencies],
        tokens_per_pass=num_tokens / num_passes if num_passes else math.nan,
        drafted=_sum_columns(row.drafted for row in rows),
        accepted=_sum_columns(row.accepted for row in rows),
        kv_waste=kv_waste,
    )


def _sum_columns(rows: Iterable[list[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]
