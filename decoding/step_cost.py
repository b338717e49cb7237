"""What a step costs: seconds against tokens fed, rows and context, learnt while the engine runs.

On a GPU a few more tokens are nearly free until the arithmetic catches up with the weights' bytes;
on a CPU the cost climbs in tiles. So the cost is a curve with nodes, not a line. It is the state of
a Kalman filter (cost_filter.py): neighbouring nodes are believed alike until measured, and one
measurement that is slow for all shows as a slower machine, which moves the whole curve.

**Units**: seconds; tokens, rows and context are counts.
**Cost**: about 20 us a measurement, 10 us a prediction of many sizes (NumPy, 25 state entries).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq

import numpy as np

from pagedraft.decoding.cost_filter import CostFilter

# Denser where steps are small, and on both sides of multiples of 16, where the rows of a tile end.
NODES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 17, 20, 24, 32, 33, 48, 64, 65, 96, 128, 256, 1024)
NUM_NODES = len(NODES)
NUM_TERMS = 3  # a row more; 1000 tokens of context; a token that attends to 1000 tokens

# Beliefs before any measurement, relative to a plain step.
PRIOR_SLOPE = 0.01  # of a token: an unmeasured size is believed cheap, so it is tried and measured
STD_SLOPE = 0.07  # of that slope; these are standard deviations
STD_BEND = 0.25  # of the difference of two sizes, one twice the other, beyond the slope
STD_TERM = 0.1
LEAST = 0.05  # what any step costs


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

    most_tokens: of the largest step measured.
    """

    def __init__(self) -> None:
        self.most_tokens = 1
        self._nodes = np.array(NODES, dtype=np.float64)
        prior_S = np.zeros(NUM_NODES + NUM_TERMS)
        prior_S[:NUM_NODES] = 1.0 + PRIOR_SLOPE * (self._nodes - 1.0)
        self._filter = CostFilter(prior_S, _prior_shape())
        self._levels: list[float] = prior_S.tolist()  # the state, for single predictions

    @property
    def num_recorded(self) -> int:
        """Steps measured."""
        return self._filter.num_recorded

    def predict(
        self, num_tokens: Seq[int] | np.ndarray, num_rows: int, num_context: int
    ) -> np.ndarray:
        """Seconds of steps that feed ``num_tokens[i]`` tokens, in rising order; float64."""
        tokens = np.asarray(num_tokens, dtype=np.float64)
        row, context, attended = self._filter.mean_S[NUM_NODES:].tolist()
        kilotokens = num_context / 1000
        seconds = np.interp(tokens, self._nodes, self._filter.mean_S[:NUM_NODES])
        seconds += max(0, num_rows - 1) * row + kilotokens * context
        seconds += tokens * (kilotokens / max(1, num_rows) * attended)
        return self._filter.scale * np.maximum.accumulate(np.maximum(seconds, LEAST))

    def predict_one(self, num_tokens: int, num_rows: int, num_context: int) -> float:
        """Seconds of one step; what ``predict`` gives for one size, without NumPy's overhead."""
        return self._filter.scale * self._relative(num_tokens, num_rows, num_context)

    def spread(self, num_tokens: np.ndarray, reference: int) -> np.ndarray:
        """Standard deviation of the seconds between steps of these sizes and one of ``reference``.

        0 at the reference; wide for sizes that were not measured lately and are far from others.
        """
        covariance = self._filter.cov_SS
        near = int(np.searchsorted(self._nodes[:-1], reference))
        variance = np.diagonal(covariance)[:NUM_NODES] + covariance[near, near]
        variance = np.maximum(variance - 2.0 * covariance[near, :NUM_NODES], 0.0)
        return self._filter.scale * np.interp(num_tokens, self._nodes, np.sqrt(variance))

    def record(self, num_tokens: int, num_rows: int, num_context: int, seconds: float) -> None:
        """Learn from a measured step."""
        self.most_tokens = max(self.most_tokens, num_tokens)
        predicted = self._relative(num_tokens, num_rows, num_context)
        self._filter.record(self._weights(num_tokens, num_rows, num_context), predicted, seconds)
        self._levels = self._filter.mean_S.tolist()

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
