"""What a step costs: seconds against tokens fed, rows and context, learnt while the engine runs.

On a GPU a few more tokens are nearly free until the arithmetic catches up with the weights' bytes;
on a CPU the cost climbs in tiles. So the cost is a curve with nodes, not a line. It is tracked by a
Kalman filter whose state is the curve: neighbouring nodes are believed alike until measured, and
one measurement that is slow for all shows as a slower machine, which moves the whole curve.

**Units**: seconds; tokens, rows and context are counts.
**Cost**: about 20 us a measurement, 10 us a prediction of many sizes (NumPy, 25 state entries).
**Source**: Kalman, "A New Approach to Linear Filtering and Prediction Problems", 1960.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from statistics import median

import numpy as np

# Denser where steps are small, and on both sides of multiples of 16, where the rows of a tile end.
NODES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 17, 20, 24, 32, 33, 48, 64, 65, 96, 128, 256, 1024)
NUM_NODES = len(NODES)
NUM_TERMS = 3  # a row more; 1000 tokens of context; a token that attends to 1000 tokens
NUM_FIRST = 3  # steps whose median sets the scale: a first step is often slow

# Beliefs before any measurement, and how fast they change, relative to a plain step.
PRIOR_SLOPE = 0.01  # of a token: an unmeasured size is believed cheap, so it is tried and measured
STD_SLOPE = 0.07  # of that slope; these are standard deviations
STD_BEND = 0.25  # of the difference of two sizes, one twice the other, beyond the slope
STD_TERM = 0.1
STD_SCALE = 0.1
SPEED_DRIFT = 0.01  # a step: standard deviation of the machine's speed
FORGETTING = 0.0005  # a step: how far what is known of a size goes back to the prior's doubt

FIRST_NOISE, LEAST_NOISE = 0.3, 0.02  # standard deviation of a measurement, relative
NOISE_SHARE = 0.05  # of the newest step in the tracked noise
CLIP = 3.0  # standard deviations: what is beyond is likely an interruption
LEAST = 0.05  # what any step costs
JUMP, NUM_JUMPS = 1.4, 5  # so many steps slower (or faster) by this factor: the machine's speed


def _prior_shape() -> np.ndarray:
    """Covariance of the curve and the terms: a random walk along log2 of the size, and a line."""
    nodes = np.array(NODES, dtype=np.float64)
    walk, line = 1.0 + np.log2(nodes), STD_SLOPE * (nodes - 1.0)
    shape = np.zeros((NUM_NODES + NUM_TERMS, NUM_NODES + NUM_TERMS))
    curve = STD_BEND**2 * np.minimum.outer(walk, walk) + np.outer(line, line)
    shape[:NUM_NODES, :NUM_NODES] = curve
    shape[NUM_NODES:, NUM_NODES:] = STD_TERM**2 * np.eye(NUM_TERMS)
    return shape


class StepCost:
    """Seconds of a step as a function of (tokens fed, rows, context tokens of all rows).

    num_recorded: steps measured. most_tokens: the largest of them.
    """

    def __init__(self) -> None:
        self.num_recorded = 0
        self.most_tokens = 1
        self._nodes = np.array(NODES, dtype=np.float64)
        self._mean = np.zeros(NUM_NODES + NUM_TERMS)  # in units of the scale
        self._mean[:NUM_NODES] = 1.0 + PRIOR_SLOPE * (self._nodes - 1.0)
        self._levels: list[float] = self._mean.tolist()  # the same, for single predictions
        shape = _prior_shape()
        self._forgotten = FORGETTING * shape
        self._cov = shape + STD_SCALE**2 * np.outer(self._mean, self._mean)
        self._noise = FIRST_NOISE**2
        self._scale = 1.0
        self._ratios: list[float] = []  # measured over predicted, of the newest steps

    def predict(
        self, num_tokens: Seq[int] | np.ndarray, num_rows: int, num_context: int
    ) -> np.ndarray:
        """Seconds of steps that feed ``num_tokens[i]`` tokens, in rising order; float64."""
        tokens = np.asarray(num_tokens, dtype=np.float64)
        row, context, attended = self._mean[NUM_NODES:].tolist()
        kilotokens = num_context / 1000
        seconds = np.interp(tokens, self._nodes, self._mean[:NUM_NODES])
        seconds += max(0, num_rows - 1) * row + kilotokens * context
        seconds += tokens * (kilotokens / max(1, num_rows) * attended)
        return self._scale * np.maximum.accumulate(np.maximum(seconds, LEAST))

    def predict_one(self, num_tokens: int, num_rows: int, num_context: int) -> float:
        """Seconds of one step; what ``predict`` gives for one size, without NumPy's overhead."""
        return self._scale * self._relative(num_tokens, num_rows, num_context)

    def spread(self, num_tokens: np.ndarray, reference: int) -> np.ndarray:
        """Standard deviation of the seconds between steps of these sizes and one of ``reference``.

        0 at the reference; wide for sizes that were not measured lately and are far from others.
        """
        near = int(np.searchsorted(self._nodes[:-1], reference))
        variance = np.diagonal(self._cov)[:NUM_NODES] + self._cov[near, near]
        variance = np.maximum(variance - 2.0 * self._cov[near, :NUM_NODES], 0.0)
        return self._scale * np.interp(num_tokens, self._nodes, np.sqrt(variance))

    def record(self, num_tokens: int, num_rows: int, num_context: int, seconds: float) -> None:
        """Learn from a measured step."""
        predicted = self._relative(num_tokens, num_rows, num_context)
        self.num_recorded += 1
        self.most_tokens = max(self.most_tokens, num_tokens)
        if self._rescale(seconds / (self._scale * predicted)):
            return
        self._cov *= 1.0 - FORGETTING
        self._cov += self._forgotten
        drift = SPEED_DRIFT * self._mean
        self._cov += drift[:, None] * drift
        weights = self._weights(num_tokens, num_rows, num_context)
        self._update(weights, predicted, seconds / self._scale - predicted)

    def _rescale(self, ratio: float) -> bool:
        """Whether the newest steps say that all steps take ``ratio`` times what was believed."""
        self._ratios = [*self._ratios[1 - NUM_JUMPS :], ratio]
        is_first = self.num_recorded <= NUM_FIRST
        is_jump = len(self._ratios) == NUM_JUMPS and (
            min(self._ratios) > JUMP or max(self._ratios) < 1.0 / JUMP
        )
        if is_first or is_jump:
            change = median(self._ratios)
            self._scale *= change
            self._ratios = [ratio / change for ratio in self._ratios]
        return is_first or is_jump

    def _update(self, weights: np.ndarray, predicted: float, surprise: float) -> None:
        """The filter's step; a surprise beyond the clip moves the state by half of the clip."""
        covariance = self._cov @ weights
        known = float(weights @ covariance)
        noise = self._noise * predicted**2
        limit = min(CLIP * (known + noise) ** 0.5, predicted)
        error = min(max(surprise, -limit), limit)
        unexplained = (error**2 - known) / predicted**2
        self._noise = max(LEAST_NOISE**2, self._noise + NOISE_SHARE * (unexplained - self._noise))
        total = known + noise if error == surprise else 2.0 * known + noise
        self._mean += covariance * (error / total)
        self._cov -= covariance[:, None] * (covariance / total)
        self._levels = self._mean.tolist()

    def _relative(self, num_tokens: int, num_rows: int, num_context: int) -> float:
        """Seconds of one step in units of the scale."""
        upper, share = _place(num_tokens)
        row, context, attended = self._levels[NUM_NODES:]
        kilotokens = num_context / 1000
        seconds = share * self._levels[upper] + (1.0 - share) * self._levels[upper - 1]
        seconds += max(0, num_rows - 1) * row + kilotokens * context
        return max(LEAST, seconds + num_tokens * kilotokens / max(1, num_rows) * attended)

    def _weights(self, num_tokens: int, num_rows: int, num_context: int) -> np.ndarray:
        """How the state adds up to one step's seconds."""
        upper, share = _place(num_tokens)
        kilotokens = num_context / 1000
        weights = np.zeros(NUM_NODES + NUM_TERMS)
        weights[upper - 1], weights[upper] = 1.0 - share, share
        attended = num_tokens * kilotokens / max(1, num_rows)
        weights[NUM_NODES:] = (max(0, num_rows - 1), kilotokens, attended)
        return weights


def _place(num_tokens: int) -> tuple[int, float]:
    """The node at or above a size, and its share beside the node below."""
    upper = min(max(1, bisect_left(NODES, num_tokens)), NUM_NODES - 1)
    left, right = NODES[upper - 1], NODES[upper]
    return upper, min(1.0, (num_tokens - left) / (right - left))
