"""Goodput: the largest request rate at which a latency target is kept, by bisection over rates.

A rate keeps the target if every run at it did, each with arrivals of its own. What is looked for is
the largest rate up to which nothing missed: a miss below counts against all rates above it, so
noise can lower the result, and seldom raise it. The rate that is found is run once more.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

REACH = 4.0  # how far below and above the rates that are known the search goes


class Trial(NamedTuple):
    """Whether a rate (requests a second) kept the target in all runs of one go."""

    rate: float
    is_kept: bool


@dataclass(frozen=True)
class Goodput:
    """What was found.

    kept: the largest rate up to which every trial kept the target; None: not even the lowest did.
    missed: the smallest rate above that missed it; None: none did.
    trials: all, in the order of their runs. is_confirmed: ``kept`` was run again, and kept it.
    """

    kept: float | None
    missed: float | None
    trials: tuple[Trial, ...]
    is_confirmed: bool

    @property
    def is_monotone(self) -> bool:
        """Whether no rate that missed lies below, or at, one that kept the target."""
        kept = [trial.rate for trial in self.trials if trial.is_kept]
        missed = [trial.rate for trial in self.trials if not trial.is_kept]
        return max(kept, default=0.0) < min(missed, default=math.inf)

    def lines(self) -> list[str]:
        """What can be said, and how sure that is."""
        lowest = min(trial.rate for trial in self.trials)
        highest = max(trial.rate for trial in self.trials)
        if self.kept is None:
            return [f"even the lowest rate tried, {lowest:.3g} requests/s, missed the target"]
        above = "no higher rate was tried" if self.kept == highest else ""
        if self.missed is not None:
            above = f"{self.missed:.3g} missed it, so the limit is known to a factor of "
            above += f"{self.missed / self.kept:.2f}"
        lines = [f"{self.kept:.3g} requests/s kept the target; {above}"]
        if not self.is_confirmed:
            lines.append("it was not run again: the time was over")
        if not self.is_monotone:
            lines.append("a rate above one that missed kept the target: the runs are noisy")
        return lines


async def search(
    judge: Callable[[float], Awaitable[bool]],
    known: Sequence[Trial],
    *,
    resolution: float,
    has_time: Callable[[int], bool] = lambda count: True,
) -> Goodput:
    """Bisect until kept and missed are within the factor ``resolution``, or the time is over.

    judge: runs a rate, with other arrivals at each call, and says whether it kept the target.
    known: at least one trial that was made before. Without one that missed, rates are doubled, and
    without one that kept the target halved, up to a factor of REACH.
    has_time: whether so many more trials fit; one is left for running the rate again.
    """
    if not known:
        raise ValueError("known: expected at least one trial, got none")
    trials = list(known)
    lowest, highest = (pick(trial.rate for trial in known) for pick in (min, max))
    while has_time(1 if bracket(trials)[0] is None else 2):
        rate = _next_rate(*bracket(trials), resolution)
        if rate is None or not lowest / REACH <= rate <= highest * REACH:
            break
        trials.append(Trial(rate, await judge(rate)))
    is_confirmed = False
    while (kept := bracket(trials)[0]) is not None and not is_confirmed and has_time(1):
        is_confirmed = await judge(kept)
        trials.append(Trial(kept, is_confirmed))
    return Goodput(*bracket(trials), tuple(trials), is_confirmed)


def bracket(trials: Sequence[Trial]) -> tuple[float | None, float | None]:
    """(largest rate up to which nothing missed, smallest rate that missed)."""
    missed = min((trial.rate for trial in trials if not trial.is_kept), default=None)
    limit = math.inf if missed is None else missed
    return max((trial.rate for trial in trials if trial.rate < limit), default=None), missed


def _next_rate(kept: float | None, missed: float | None, resolution: float) -> float | None:
    """The rate to try next; None where it is known well enough."""
    if kept is not None and missed is not None:
        return math.sqrt(kept * missed) if missed / kept > resolution else None
    return missed / 2 if missed is not None else 2 * kept if kept is not None else None
