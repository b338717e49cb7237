"""What a bench found, figure by figure: said alike by every bench, so that runs can be compared.

Every bench's JSON document has a list ``figures`` of these. ``how`` says how a figure was got, so
that a count or a model's guess is never read as a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

HOW = {
    "measured": "timed on this device, or read from its counters",
    "counted": "counted; the same on every machine",
    "modelled": "bytes, flops and ceilings put into a formula; nothing ran",
    "predicted": "computed from other measured figures",
    "synthetic": "timed, with drafts whose acceptance was set, not earned",
}
BETTER = ("higher", "lower")


@dataclass(frozen=True)
class Figure:
    """One number of a bench.

    name: "part/row/what", unique in its document, the same from run to run.
    low, high: 20th and 80th percentile of the samples; None where there is only one.
    better: of BETTER. how: a key of HOW. target: what value is judged against, None for nothing.
    """

    name: str
    value: float
    unit: str
    better: str
    how: str
    low: float | None = None
    high: float | None = None
    target: float | None = None

    def __post_init__(self) -> None:
        if self.better not in BETTER:
            raise ValueError(f"{self.name}: better: expected one of {BETTER}, got {self.better!r}")
        if self.how not in HOW:
            raise ValueError(f"{self.name}: how: expected one of {list(HOW)}, got {self.how!r}")
        if not math.isfinite(self.value):
            raise ValueError(f"{self.name}: expected a finite number, got {self.value}")

    @property
    def is_met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.target is None:
            return None
        is_higher = self.better == "higher"
        return self.value >= self.target if is_higher else self.value <= self.target

    def as_json(self) -> dict[str, Any]:
        """The figure as a JSON object, without what it has not."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def from_samples(
    name: str,
    samples: Sequence[float],
    unit: str,
    better: str,
    *,
    how: str = "measured",
    target: float | None = None,
) -> Figure:
    """The median of samples with their 20th and 80th percentile."""
    if not samples:
        raise ValueError(f"{name}: expected at least one sample, got none")
    low = high = None
    if len(samples) > 1:
        cuts = quantiles(samples, n=5, method="inclusive")
        low, high = cuts[0], cuts[-1]
    return Figure(name, median(samples), unit, better, how, low, high, target)


def as_json(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """The list ``figures`` of a document; ValueError if two have one name."""
    names = [figure.name for figure in figures]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"figures: expected each name once, got {twice} more than once")
    return [figure.as_json() for figure in figures]


def read_figures(document: Mapping[str, Any], file: str = "document") -> list[Figure]:
    """The figures of a bench's document; ValueError names the one that is none."""
    rows = document.get("figures")
    if not isinstance(rows, list):
        raise ValueError(f"{file}: expected a list 'figures', got {type(rows).__name__}")
    figures = []
    for index, row in enumerate(rows):
        try:
            figures.append(Figure(**row))
        except TypeError as error:
            raise ValueError(f"{file}: figure {index} cannot be read: {error}") from None
    return figures
