"""Rows of the serving bench: one rate, with or without speculation, in one or several rounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median, quantiles
from typing import Any

from pagedraft.bench.figures import Figure, from_samples
from pagedraft.bench.serving_goodput import Goodput
from pagedraft.bench.serving_summary import PERCENTS, Missed, Summary

TIMES = tuple(f"{what} p{p}" for what in ("TTFT", "ITL", "step gap") for p in PERCENTS)
UNITS = {  # of figures: unit, and which way is better
    **dict.fromkeys(TIMES, ("ms", "lower")),
    "achieved": ("requests/s", "higher"),
    "tokens/s": ("tokens/s", "higher"),
    "failed": ("requests", "lower"),
}
HEADERS = (
    *("speculation", "rate", "achieved", "TTFT p50", "p95", "p99", "ITL p50", "p95", "p99"),
    *("gap p50", "p95", "p99", "tok/s", "tok/chunk", "in flight", "most", "waiting", "late"),
    *("failed", "kept"),
)
CUTS = 100  # of the distributions in the JSON


@dataclass
class Row:
    """All rounds of a rate (requests a second)."""

    arrivals: str
    mix: str
    speculation: str
    rate: float
    rounds: list[Summary] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What its figures' names begin with."""
        return f"serving/{self.arrivals}/{self.mix}/{self.speculation}"

    @property
    def is_kept(self) -> bool:
        """Whether every round kept the target."""
        return all(one.is_kept for one in self.rounds)

    def samples(self, name: str) -> list[float]:
        """A figure of every round that has it."""
        values = [one.values()[name] for one in self.rounds]
        return [value for value in values if not math.isnan(value)]

    def value(self, name: str) -> float:
        """The median over the rounds; NaN if none has it."""
        samples = self.samples(name)
        return median(samples) if samples else math.nan

    def pooled(self, name: str) -> list[float]:
        """The latencies (ms) of all rounds together."""
        return list(chain.from_iterable(getattr(one, name) for one in self.rounds))

    def figures(self) -> list[Figure]:
        """One for each of UNITS that the rounds have."""
        return [
            from_samples(f"{self.name}/{name} at {self.rate:g} per s", samples, unit, better)
            for name, (unit, better) in UNITS.items()
            if (samples := self.samples(name))
        ]

    def cells(self) -> list[str]:
        """A line of the table."""
        return [
            self.speculation,
            f"{self.rate:g}",
            f"{self.value('achieved'):.2f}",
            *[_shown(self.value(name), 1) for name in TIMES],
            f"{self.value('tokens/s'):.1f}",
            _shown(self.value("tokens a chunk"), 2),
            f"{self.value('in flight'):.1f}",
            *[f"{self.value(name):.0f}" for name in ("most in flight", "most waiting")],
            *[f"{self.total(name):.0f}" for name in ("late", "failed")],
            "yes" if self.is_kept else "no",
        ]

    def total(self, name: str) -> float:
        """The sum over the rounds."""
        return sum(self.samples(name))

    def document(self) -> dict[str, Any]:
        """Everything but single latencies; of these what 0, 1, ... 100 % are not above."""
        return {
            **{key: getattr(self, key) for key in ("arrivals", "mix", "speculation", "rate")},
            "kept": self.is_kept,
            "rounds": [summary_document(one) for one in self.rounds],
            "percentiles_ms": {
                name: _cuts(self.pooled(attribute))
                for name, attribute in (("TTFT", "ttft"), ("ITL", "itl"), ("step gap", "gaps"))
            },
        }


def summary_document(summary: Summary) -> dict[str, Any]:
    """One run for the JSON; what a run has none of is None."""
    values = {
        name: None if math.isnan(value) else round(value, 4)
        for name, value in summary.values().items()
    }
    return {
        **values,
        "offered": summary.offered,
        "requests": summary.num_requests,
        "mean_prompt": summary.mean_prompt,
        "mean_new": summary.mean_new,
        "failures": summary.failures,
        "missed_ttft": summary.first.missed,
        "missed_itl": summary.between.missed,
        "tokens_counted_by": summary.counted_by,
        "kept": summary.is_kept,
        "cut": summary.is_cut,
    }


@dataclass(frozen=True)
class Found:
    """The goodput of one kind of speculation, and all runs that were made at each rate."""

    arrivals: str
    mix: str
    speculation: str
    target_ms: float
    goodput: Goodput
    runs: dict[float, list[Summary]]

    def figure(self) -> Figure:
        """The rate; 0 where even the lowest missed the target."""
        name = f"serving/{self.arrivals}/{self.mix}/{self.speculation}"
        name += f"/goodput at {self.target_ms:g} ms"
        return Figure(name, self.goodput.kept or 0.0, "requests/s", "higher", "measured")

    def first(self) -> Missed:
        """First tokens at the rate that was found."""
        runs = self.runs[self.goodput.kept] if self.goodput.kept is not None else []
        return Missed(sum(one.first.num for one in runs), sum(one.first.missed for one in runs))

    def lines(self) -> list[str]:
        """What can be said, and how sure it is."""
        lines = self.goodput.lines()
        if self.goodput.kept is not None:
            first = self.first()
            lines.append(
                f"{first.num} requests at that rate, {first.missed} missed: were they independent, "
                f"p99 TTFT is kept in the long run with {first.confidence:.0%} confidence; they "
                "are not, so with less"
            )
            return lines
        runs = self.runs[min(self.runs)]
        parts = [
            f"p99 {name} {_shown(_median(runs, f'{name} p99'), 0)} ms" for name in ("TTFT", "ITL")
        ]
        failed = sum(sum(one.failures.values()) for one in runs)
        num = sum(one.num_requests for one in runs)
        return [*lines, f"there {', '.join(parts)}; {failed} of {num} requests failed"]

    def document(self) -> dict[str, Any]:
        """All of it."""
        first = self.first()
        return {
            **{key: getattr(self, key) for key in ("arrivals", "mix", "speculation", "target_ms")},
            "kept": self.goodput.kept,
            "missed": self.goodput.missed,
            "is_confirmed": self.goodput.is_confirmed,
            "is_monotone": self.goodput.is_monotone,
            "trials": [list(trial) for trial in self.goodput.trials],
            "requests": first.num,
            "missed_ttft": first.missed,
            "confidence_if_independent": first.confidence if first.num else None,
            "runs": {
                f"{rate:g}": [summary_document(one) for one in runs]
                for rate, runs in sorted(self.runs.items())
            },
            "says": self.lines(),
        }


def failures(rows: Sequence[Row]) -> dict[str, int]:
    """Requests that failed in any round, by reason."""
    reasons: Counter[str] = Counter()
    for row in rows:
        for one in row.rounds:
            reasons.update(one.failures)
    return dict(reasons.most_common())


def _median(runs: Sequence[Summary], name: str) -> float:
    values = [one.values()[name] for one in runs]
    finite = [value for value in values if not math.isnan(value)]
    return median(finite) if finite else math.nan


def _cuts(values: Sequence[float]) -> list[float]:
    if len(values) < 2:
        return [round(value, 3) for value in values]
    inner = quantiles(values, n=CUTS, method="inclusive")
    return [round(value, 3) for value in (min(values), *inner, max(values))]


def _shown(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"
