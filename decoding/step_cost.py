"""What a step costs: seconds against tokens fed, rows and context, learnt while the engine runs.

On a GPU a few more tokens are nearly free until the arithmetic catches up with the weights' bytes;
on a CPU the cost climbs in tiles. So the cost is a curve with nodes, not a line. It is tracked by a
Kalman filter whose state is the curve: neighbouring nodes are believed alike until measured, and
one measurement that is slow for all shows as a slower machine, which moves the whole curve.

**Units**: seconds; tokens, rows and context are counts.
**Cost**: about 30 us a measurement, 10 us a prediction of many sizes (NumPy, 25 state entries).
**Source**: Kalman, "A New Approach to Linear Filtering and Prediction Problems", 1960.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

NODES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 4096)
PRIOR_SLOPE = 0.01  # an unmeasured size is believed cheap, so that it is tried and then measured
PRIOR_SPEED = 1.0  # standard deviation, relative: the machine's speed is unknown at first
PRIOR_LINE = 0.1  # standard deviation of that slope
PRIOR_BEND = 0.25  # of the difference of two sizes, one twice the other
PRIOR_TERM = 0.05  # of one row more, and of 1000 tokens of context more
SPEED_DRIFT = 0.02  # a step: how fast the whole curve may move
SHAPE_DRIFT = 0.003  # a step, as a share of the prior variance: how fast a size is forgotten
MIN_NOISE = 0.02  # relative, of a measurement
NOISE_DECAY = 0.95
CLIP = 3.0  # standard deviations: what is beyond is taken for an interruption


class StepCost:
    """Seconds of a step as a function of (tokens fed, rows, context tokens of all rows)."""

    def __init__(self) -> None:
        nodes = np.array(NODES, dtype=np.float64)
        self._nodes = nodes
        self._size = (
            len(NODES) + 3
        )  # levels at the nodes; per row; per context; per query x context
        self._mean = np.zeros(self._size)
        self._mean[: len(NODES)] = 1.0 + PRIOR_SLOPE * (nodes - 1.0)
        position = 1.0 + np.log2(nodes)
        line = PRIOR_LINE * (nodes - 1.0)
        shape = np.zeros((self._size, self._size))
        shape[: len(NODES), : len(NODES)] = PRIOR_BEND**2 * np.minimum.outer(position, position)
        shape[: len(NODES), : len(NODES)] += np.outer(line, line)
        shape[len(NODES) :, len(NODES) :] = PRIOR_TERM**2 * np.eye(3)
        self._shape = shape
        self._cov = shape + PRIOR_SPEED**2 * np.outer(self._mean, self._mean)
        self._noise = 0.1**2
        self._scale = 1.0
        self.num_recorded = 0
        self.most_tokens = 1  # largest step recorded

    def predict(
        self, num_tokens: Seq[int] | np.ndarray, num_rows: int, num_context: int
    ) -> np.ndarray:
        """Seconds of steps that feed ``num_tokens[i]`` tokens; float64, one a size."""
        tokens = np.asarray(num_tokens, dtype=np.float64)
        mean, count = self._mean, len(NODES)
        rows, context = max(0, num_rows - 1), num_context / 1000
        seconds = np.interp(tokens, self._nodes, mean[:count])
        seconds += rows * mean[count] + context * mean[count + 1]
        seconds += tokens * (context / max(1, num_rows) * mean[count + 2])
        return self._scale * np.maximum.accumulate(np.maximum(seconds, 0.05))

    def spread(self, num_tokens: np.ndarray, reference: int) -> np.ndarray:
        """Standard deviation of the seconds between steps of these sizes and one of ``reference``.

        0 at the reference; wide for sizes that were not measured lately and are far from others.
        """
        count = len(NODES)
        nearest = int(np.searchsorted(self._nodes[:-1], reference))
        variance = np.diagonal(self._cov)[:count] - 2.0 * self._cov[nearest, :count]
        variance = np.maximum(variance + self._cov[nearest, nearest], 0.0)
        return self._scale * np.interp(num_tokens, self._nodes, np.sqrt(variance))

    def record(self, num_tokens: int, num_rows: int, num_context: int, seconds: float) -> None:
        """Learn from a measured step."""
        if self.num_recorded == 0:
            self._scale = seconds
        self.num_recorded += 1
        self.most_tokens = max(self.most_tokens, num_tokens)
        mean = self._mean
        self._cov += SPEED_DRIFT**2 * np.outer(mean, mean) + SHAPE_DRIFT * self._shape
        weights = self._weights(num_tokens, num_rows, num_context)
        predicted = max(float(weights @ mean), 0.05)
        gain = self._cov @ weights
        known = float(weights @ gain)
        noise = self._noise * predicted**2
        limit = CLIP * (known + noise) ** 0.5
        error = min(max(seconds / self._scale - predicted, -limit), limit)
        self._mean = mean + gain * (error / (known + noise))
        self._cov -= np.outer(gain, gain) / (known + noise)
        surprise = max(error**2 - known, 0.0) / predicted**2
        self._noise = max(MIN_NOISE**2, NOISE_DECAY * self._noise + (1 - NOISE_DECAY) * surprise)

    def _weights(self, num_tokens: int, num_rows: int, num_context: int) -> np.ndarray:
        """How the state adds up to one step's seconds."""
        weights = np.zeros(self._size)
        upper = int(np.searchsorted(self._nodes, num_tokens))
        if upper == 0 or upper == len(NODES):
            weights[min(upper, len(NODES) - 1)] = 1.0
        else:
            left, right = NODES[upper - 1], NODES[upper]
            weights[upper] = (num_tokens - left) / (right - left)
            weights[upper - 1] = 1.0 - weights[upper]
        context = num_context / 1000
        weights[len(NODES) :] = (
            max(0, num_rows - 1),
            context,
            num_tokens * context / max(1, num_rows),
        )
        return weights
