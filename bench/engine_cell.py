"""One batch, drafter and draft length of the sweep: its samples, figures and table row.

Inter-token latency is told twice: per token, the gap between two steps of a request over the tokens
that the later one brought, and the gap itself, which is what a reader of a stream waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from statistics import median
from typing import Any

from pagedraft.bench.engine_predict import NO_CUT, predict_passes, predict_set, round_seconds
from pagedraft.bench.engine_runs import Run
from pagedraft.bench.engine_steps import StepFacts, StepTimes, decode_speed
from pagedraft.bench.figures import Figure, from_samples
from pagedraft.scheduler.metrics import percentile

PLAIN, AUTO = 0, "auto"
PERCENTS = (50, 95, 99)
HEADERS = ("batch", "drafter", "k", "tokens/s", "speed-up", "predicted", "tokens/pass", "accepted")
HEADERS += ("TTFT p50 ms", "ITL p50/p95/p99 ms", "step gap p50/p95/p99 ms")


@dataclass
class Cell:
    """Samples of all rounds. alpha: the acceptance of a synthetic drafter, None of a real one.

    speeds, decode_speeds: tokens a second of whole runs and of full steps, a round each.
    ttft, itl, gaps: seconds, of every request, token and step. drafted, accepted: drafts by
    position. steps: full ones. speedups: decode_speeds over the control's; predicted: what step
    times and acceptance lead to expect, None where they are not known.
    """

    batch: int
    drafter: str
    k: int | str
    alpha: float | None = None
    speeds: list[float] = field(default_factory=list)
    decode_speeds: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_passes: int = 0
    steps: list[StepFacts] = field(default_factory=list, repr=False)
    speedups: list[float] = field(default_factory=list)
    predicted: float | None = None

    @property
    def name(self) -> str:
        """What figures call it."""
        return f"batch={self.batch}, {self.drafter}, k={self.k}"

    @property
    def tokens_per_pass(self) -> float:
        """Tokens a row and pass, prompts' passes included."""
        return self.num_tokens / max(1, self.num_passes)

    @property
    def acceptance(self) -> list[float]:
        """By position, the share of drafts that were kept; those before them were, too."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True) if d]

    def add(self, run: Run, steps: Sequence[StepFacts]) -> None:
        """Note a round."""
        self.speeds.append(run.speed)
        self.decode_speeds.append(decode_speed(steps))
        self.steps += steps
        for stats in run.stats:
            self.ttft += [] if stats.ttft is None else [stats.ttft]
            self.itl += stats.inter_token_latencies
            self.gaps += [after - before for (before, _), (after, _) in pairwise(stats.emissions)]
            self.drafted = _sum(self.drafted, stats.drafted)
            self.accepted = _sum(self.accepted, stats.accepted)
            self.num_tokens += sum(count for _, count in stats.emissions)
            self.num_passes += stats.num_passes

    def finish(self, control: Cell, longest: Cell, times: StepTimes) -> None:
        """Compare with the control; predict from the passes of the longest drafts."""
        pairs = zip(self.decode_speeds, control.decode_speeds, strict=True)
        self.speedups = [a / b for a, b in pairs if a > 0 and b > 0]
        if times.num_sizes < 2 or self.k == PLAIN:
            return
        if isinstance(self.k, int) and self.alpha is not None:
            self.predicted = predict_set(self.alpha, self.k, self.batch, times)
        elif isinstance(self.k, int):
            cost = round_seconds(longest.steps)
            self.predicted = predict_passes(longest.steps, self.k, times, cost)
        else:
            self.predicted = predict_passes(self.steps, NO_CUT, times, round_seconds(self.steps))

    def figures(self) -> list[Figure]:
        """Its figures; those of a synthetic drafter say so."""
        how = "measured" if self.alpha is None else "synthetic"
        where = f"engine/{self.name}"
        found = [
            from_samples(f"{where}/tokens_per_s", self.speeds, "tokens/s", "higher", how=how),
            Figure(f"{where}/tokens_per_pass", self.tokens_per_pass, "tokens", "higher", how),
        ]
        if self.speedups and self.k != PLAIN:
            found.append(from_samples(f"{where}/speedup", self.speedups, "x", "higher", how=how))
        if self.predicted is not None:
            name = f"{where}/predicted_speedup"
            found.append(Figure(name, self.predicted, "x", "higher", "predicted"))
        times = {"ttft": self.ttft, "itl": self.itl, "step_gap": self.gaps}
        for what, values in times.items():
            for percent in PERCENTS if values else ():
                value = 1e3 * percentile(values, percent)
                found.append(Figure(f"{where}/{what}_p{percent}", value, "ms", "lower", how))
        return found

    def table_row(self) -> list[str]:
        """One line under HEADERS."""
        drafted = sum(self.drafted)
        return [
            str(self.batch),
            self.drafter,
            str(self.k),
            f"{median(self.speeds):.1f}",
            f"{median(self.speedups):.2f}x" if self.speedups else "-",
            "-" if self.predicted is None else f"{self.predicted:.2f}x",
            f"{self.tokens_per_pass:.2f}",
            f"{100 * sum(self.accepted) / drafted:.0f} %" if drafted else "-",
            f"{1e3 * percentile(self.ttft, 50):.0f}",
            _percentiles(self.itl),
            _percentiles(self.gaps),
        ]

    def as_json(self) -> dict[str, Any]:
        """For the document: everything but single tokens and steps."""
        itl_ms, gap_ms, ttft_ms = (
            {f"p{p}": 1e3 * percentile(values, p) for p in PERCENTS} if values else {}
            for values in (self.itl, self.gaps, self.ttft)
        )
        return {
            "batch": self.batch,
            "drafter": self.drafter,
            "k": self.k,
            "synthetic_acceptance": self.alpha,
            "tokens_per_s": self.speeds,
            "decode_tokens_per_s": self.decode_speeds,
            "speedups": self.speedups,
            "predicted_speedup": self.predicted,
            "tokens_per_pass": self.tokens_per_pass,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "ttft_ms": ttft_ms,
            "itl_ms": itl_ms,
            "step_gap_ms": gap_ms,
            "full_steps": len(self.steps),
        }


def _sum(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]


def _percentiles(seconds: Sequence[float]) -> str:
    return " / ".join(f"{1e3 * percentile(seconds, p):.0f}" for p in PERCENTS)
