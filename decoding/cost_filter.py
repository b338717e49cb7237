"""A robust Kalman filter for what a step costs: weights of a step times costs of its parts.

The state is the cost of each part, in units of ``scale`` seconds. It drifts: the machine as a whole
becomes faster or slower by little, or jumps, and what is known of a part fades towards the prior's
doubt unless it is measured. A measurement far off what was expected is likely an interruption and
moves the state by little.

**Units**: measurements are seconds; state, covariance and noise are relative to ``scale``.
**Shapes**: ``_S`` is one entry a part.
**Source**: Kalman, "A New Approach to Linear Filtering and Prediction Problems", 1960.
"""

from __future__ import annotations

from statistics import median

import numpy as np

NUM_FIRST = 3  # measurements whose median sets the scale: a first step is often slow
STD_SCALE = 0.1  # of the scale, before any measurement
SPEED_DRIFT = 0.01  # a step: standard deviation of the machine's speed
FORGETTING = 0.0005  # a step: how far what is known of a part goes back to the prior's doubt

FIRST_NOISE, LEAST_NOISE = 0.3, 0.02  # standard deviation of a measurement, relative
NOISE_SHARE = 0.05  # of the newest step in the tracked noise
CLIP = 3.0  # standard deviations: what is beyond is likely an interruption
JUMP, NUM_JUMPS = 1.4, 5  # so many steps slower (or faster) by this factor: the machine's speed


class CostFilter:
    """Costs of the parts of a step, learnt from whole steps.

    num_recorded: measurements so far. scale: seconds of one unit. mean_S, cov_SS: the state and its
    covariance. noise: relative variance of a measurement.
    """

    def __init__(
        self, prior_S: np.ndarray, shape_SS: np.ndarray, first_noise: float = FIRST_NOISE
    ) -> None:
        """``prior_S``: beliefs before any measurement; ``shape_SS``: their covariance."""
        self.num_recorded = 0
        self.scale = 1.0
        self.mean_S = prior_S.copy()
        self.cov_SS = shape_SS + STD_SCALE**2 * np.outer(prior_S, prior_S)
        self.noise = first_noise**2
        self._forgotten_SS = FORGETTING * shape_SS
        self._ratios: list[float] = []  # measured over predicted, of the newest steps

    def record(self, weights_S: np.ndarray, predicted: float, seconds: float) -> None:
        """Learn from a step for which ``predicted`` units were expected (> 0)."""
        self.num_recorded += 1
        if self._rescale(seconds / (self.scale * predicted)):
            return
        self.cov_SS *= 1.0 - FORGETTING
        self.cov_SS += self._forgotten_SS
        drift_S = SPEED_DRIFT * self.mean_S
        self.cov_SS += drift_S[:, None] * drift_S
        self._update(weights_S, predicted, seconds / self.scale - predicted)

    def _rescale(self, ratio: float) -> bool:
        """Whether the newest steps say that all steps take ``ratio`` times what was believed."""
        self._ratios = [*self._ratios[1 - NUM_JUMPS :], ratio]
        is_first = self.num_recorded <= NUM_FIRST
        is_jump = len(self._ratios) == NUM_JUMPS and (
            min(self._ratios) > JUMP or max(self._ratios) < 1.0 / JUMP
        )
        if is_first or is_jump:
            change = median(self._ratios)
            self.scale *= change
            self._ratios = [ratio / change for ratio in self._ratios]
        return is_first or is_jump

    def _update(self, weights_S: np.ndarray, predicted: float, surprise: float) -> None:
        """The filter's step; a surprise beyond the clip moves the state by half of the clip."""
        covariance_S = self.cov_SS @ weights_S
        known = float(weights_S @ covariance_S)
        noise = self.noise * predicted**2
        limit = min(CLIP * (known + noise) ** 0.5, predicted)
        error = min(max(surprise, -limit), limit)
        unexplained = (error**2 - known) / predicted**2
        self.noise = max(LEAST_NOISE**2, self.noise + NOISE_SHARE * (unexplained - self.noise))
        total = known + noise if error == surprise else 2.0 * known + noise
        self.mean_S += covariance_S * (error / total)
        self.cov_SS -= covariance_S[:, None] * (covariance_S / total)
