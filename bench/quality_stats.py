"""What a sample of tokens, requests or tasks says, and how far it can be wrong.

Intervals hold 95 %. Tokens, requests and tasks count as independent of each other; a mode and the
control always saw the same ones, so what is compared is paired.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Z = 1.959964  # standard deviations on either side of 95 % of a normal distribution
Z_60 = 0.841621  # the same of 60 %: from the 20th to the 80th percentile


@dataclass(frozen=True)
class Estimate:
    """A value, its standard error, and the interval [low, high] that holds 95 %."""

    value: float
    error: float
    low: float
    high: float

    def around(self, neutral: float) -> bool:
        """Whether ``neutral`` lies in the interval: no difference can be told."""
        return self.low <= neutral <= self.high

    @property
    def middle(self) -> tuple[float, float]:
        """The 20th and the 80th percentile of the estimate."""
        return self.value - Z_60 * self.error, self.value + Z_60 * self.error


def mean(values: torch.Tensor) -> Estimate:
    """The mean of numbers, or of differences of paired ones; ValueError for fewer than two."""
    if len(values) < 2:
        raise ValueError(f"values: expected at least 2, got {len(values)}")
    value = float(values.double().mean())
    error = float(values.double().std()) / math.sqrt(len(values))
    return Estimate(value, error, value - Z * error, value + Z * error)


def perplexity_ratio(losses: torch.Tensor, control: torch.Tensor) -> Estimate:
    """exp of the mean difference of two models' losses at the same tokens."""
    change = mean(losses - control)
    ratio = math.exp(change.value)
    return Estimate(ratio, ratio * change.error, math.exp(change.low), math.exp(change.high))


def share(is_so: torch.Tensor) -> Estimate:
    """The share of true flags. Interval: Wilson's, which stays in [0, 1] and is wide for few."""
    num, count = len(is_so), int(is_so.sum())
    if num < 1:
        raise ValueError("flags: expected at least 1, got 0")
    value = count / num
    centre = (count + Z**2 / 2) / (num + Z**2)
    half = Z / (num + Z**2) * math.sqrt(num * value * (1 - value) + Z**2 / 4)
    return Estimate(value, math.sqrt(value * (1 - value) / num), centre - half, centre + half)


@dataclass(frozen=True)
class Change:
    """What became of the control's right answers: lost ones, won ones, and their difference."""

    lost: int
    won: int
    share: Estimate


def change_of_share(is_right: torch.Tensor, was_right: torch.Tensor) -> Change:
    """Share right less the control's, of the same tasks.

    The error is that of the paired differences. The interval adds half a task to each of right and
    wrong, before and after (Agresti and Min, 2005): with no task lost or won the error is 0, and
    the interval still says how much few tasks can tell.
    """
    num = len(is_right)
    lost, won = int((was_right & ~is_right).sum()), int((is_right & ~was_right).sum())
    plain = mean(is_right.double() - was_right.double())
    centre = (won - lost) / (num + 2)
    half = Z * math.sqrt(lost + won + 1 - (won - lost) ** 2 / (num + 2)) / (num + 2)
    return Change(lost, won, Estimate(plain.value, plain.error, centre - half, centre + half))
