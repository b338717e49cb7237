"""Figures of two runs side by side: what changed beyond noise, for better or worse.

The rule is in ``Rule``; compare.py is the command line, counted.py holds its own baseline with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagedraft.bench.figures import Figure
from pagedraft.bench.table import print_table

TIMED = ("measured", "predicted", "synthetic")
GONE, WORSE, BETTER, NEW, MOVED, SAME = MARKS = ("gone", "worse", "better", "new", "moved", "same")
FAILURES = (GONE, WORSE)
# Ends of names of shares of what this run found the device to reach at best.
CEILING = ("/ceiling", "/of floor")
HEADERS = ("figure", "before", "after", "change", "")


@dataclass(frozen=True)
class Rule:
    """By how much a figure has to change to count, as a share of the smaller of both values.

    margin: timed figures with intervals from the 20th to the 80th percentile, which must not
        overlap either. single: those of one sample. counted: all others, where only sums round;
        ``slack``, in their unit, is allowed them where that is more.
    """

    margin: float = 0.05
    single: float = 0.20
    counted: float = 1e-9
    slack: float = 0.0

    def mark(self, old: Figure, new: Figure) -> str:
        """BETTER, WORSE or SAME, or MOVED for a share of the ceiling.

        ValueError where the two do not mean the same.
        """
        for field in ("unit", "better", "how"):
            before, after = getattr(old, field), getattr(new, field)
            if before != after:
                raise ValueError(f"{old.name}: {field}: expected {before!r}, got {after!r}")
        if not self._counts(old, new):
            return SAME
        if old.name.endswith(CEILING):
            return MOVED
        return BETTER if (new.value > old.value) == (old.better == "higher") else WORSE

    def _counts(self, old: Figure, new: Figure) -> bool:
        difference = abs(new.value - old.value)
        least = min(abs(old.value), abs(new.value))
        if old.how not in TIMED:
            return difference > max(self.counted * least, self.slack)
        has_intervals = old.low is not None and new.low is not None
        margin = self.margin if has_intervals else self.single
        (low, high), (new_low, new_high) = interval(old), interval(new)
        overlap = low <= new_high and new_low <= high
        return difference > margin * least and not overlap


@dataclass(frozen=True)
class Change:
    """One figure of two runs; ``old`` is None for a new one, ``new`` for one that is gone."""

    name: str
    mark: str
    old: Figure | None
    new: Figure | None

    @property
    def ratio(self) -> float | None:
        """New value over old; None where there is none."""
        if self.old is None or self.new is None or self.old.value == 0:
            return None
        return self.new.value / self.old.value

    def as_json(self) -> dict[str, Any]:
        """Name, mark, ratio and both figures; without those that there are not."""
        figures = {"before": self.old, "after": self.new}
        found = {side: figure.as_json() for side, figure in figures.items() if figure}
        return {"name": self.name, "mark": self.mark, "ratio": self.ratio, **found}


def compare_figures(
    old: Sequence[Figure], new: Sequence[Figure], rule: Rule, prefix: str = ""
) -> list[Change]:
    """Every figure of either run, in the order of the first; ``prefix`` goes before the names."""
    before, after = ({figure.name: figure for figure in side} for side in (old, new))
    changes = []
    for name in dict.fromkeys([*before, *after]):
        first, second = before.get(name), after.get(name)
        if first is None or second is None:
            mark = NEW if first is None else GONE
        else:
            mark = rule.mark(first, second)
        changes.append(Change(prefix + name, mark, first, second))
    return changes


def interval(figure: Figure) -> tuple[float, float]:
    """Low and high; twice the value where there is no interval."""
    if figure.low is None or figure.high is None:
        return figure.value, figure.value
    return figure.low, figure.high


def count_marks(changes: Sequence[Change]) -> dict[str, int]:
    """How many figures have each mark."""
    marks = [change.mark for change in changes]
    return {mark: marks.count(mark) for mark in MARKS}


def is_failure(changes: Sequence[Change]) -> bool:
    """Whether a figure is worse or gone."""
    return any(change.mark in FAILURES for change in changes)


def show(title: str, changes: Sequence[Change], *, everything: bool = False) -> list[Change]:
    """Print what changed, the worst first, and return it; ``everything``: also what did not."""
    chosen = [change for change in changes if everything or change.mark != SAME]
    chosen.sort(key=_order)
    if chosen:
        print_table(title, HEADERS, [_cells(change) for change in chosen])
    counts = ", ".join(f"{count} {mark}" for mark, count in count_marks(changes).items())
    print(f"\n{title}: {counts}")
    return chosen


def _order(change: Change) -> tuple[int, float]:
    ratio = change.ratio
    size = -abs(math.log(ratio)) if ratio is not None and ratio > 0 else -math.inf
    return MARKS.index(change.mark), size


def _cells(change: Change) -> list[str]:
    ratio = change.ratio
    percent = "-" if ratio is None else f"{100 * (ratio - 1):+.1f} %"
    return [change.name, _text(change.old), _text(change.new), percent, change.mark]


def _text(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    around = "" if figure.low is None else f" [{figure.low:.4g} {figure.high:.4g}]"
    return f"{figure.value:.6g}{around} {figure.unit}"
