"""What a step with prompts in it takes: seconds against tokens, rows and attention, learnt live.

A plain step has a floor (the weights are read once); tokens of a prompt then cost little up to a
tile, and about linearly beyond. So tokens have a curve with nodes, and on top of it a row, a token
of context that a row reads, and a (token, context token) pair that attention works on have a price
each. Before anything is measured tokens are believed dear and prices in doubt, so what looks safe
with a margin is little; each step that feeds more than before is evidence for the next.

``most_tokens`` is what the planner asks: how long may a chunk be so that the step still fits?
Its margin is that of the model itself: what it does not know of the step's parts, and how far steps
lately were from what it expected.

**Units**: seconds; a ``Load`` holds counts.
**Cost**: about 20 us a measurement, 25 us a question (NumPy, 16 state entries).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from pagedraft.decoding.cost_filter import NUM_FIRST, CostFilter

NODES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
NUM_NODES = len(NODES)
ROW, CONTEXT, PAIR = range(NUM_NODES, NUM_NODES + 3)
NUM_PARTS = NUM_NODES + 3
# Lengths of chunks that are weighed, 0 is none; between two of them the answer is interpolated.
SIZES = (0, 1, 2, 4, 8, 12, *(n << s for s in range(3, 12) for n in (2, 3)), 8192)

# Beliefs before any measurement, relative to a plain step; standard deviations where so named.
PRIOR_TOKEN, STD_TOKEN = 0.03, 0.03
STD_BEND = 0.3  # of the prior's rise from one node to the next, beyond the line
STD_STEP = 0.05  # the same, where the rise is nothing: tiles
PRIOR_TERMS = (0.02, 0.05, 0.01)  # a row more; 1000 tokens of context; 1000 pairs
STD_TERMS = (0.05, 0.1, 0.02)
FIRST_NOISE = 0.15
GROWTH = 3  # at most so many times the tokens of the largest step measured: a tile may end there
MARGIN = 2.0  # standard deviations kept between what is expected and what is allowed
LEAST = 0.05  # what any step costs


class Load(NamedTuple):
    """What a step feeds.

    tokens: of all rows; rows: requests; context: tokens that the rows' last tokens attend to,
    summed; pairs: tokens that each token attends to, summed over tokens.
    """

    tokens: int = 0
    rows: int = 0
    context: int = 0
    pairs: int = 0

    def plus(self, span: int, context: int) -> Load:
        """With one more row: ``span`` tokens, the last of which attends to ``context``."""
        pairs = span * context - span * (span - 1) // 2
        return Load(self.tokens + span, self.rows + 1, self.context + context, self.pairs + pairs)


class StepTime:
    """Seconds of a step as a function of its load."""

    def __init__(self) -> None:
        self._nodes = np.array(NODES, dtype=np.float64)
        self._chunks_N = np.array(SIZES, dtype=np.float64)
        self._rows_N = np.arange(len(SIZES))
        prior_S = np.array([*(1.0 + PRIOR_TOKEN * (self._nodes - 1.0)), *PRIOR_TERMS])
        self._filter = CostFilter(prior_S, _prior_shape(), FIRST_NOISE)
        self._largest = 0  # tokens of a step that was measured

    @property
    def num_recorded(self) -> int:
        """Steps measured."""
        return self._filter.num_recorded

    def predict(self, load: Load) -> float:
        """Expected seconds of a step; meaningless before the first measurement."""
        state_S = self._filter.mean_S
        weights_S = self._weights(load)
        return self._filter.scale * max(LEAST, float(weights_S @ state_S))

    def record(self, load: Load, seconds: float) -> None:
        """Learn from a measured step; one without rows or of no positive duration says nothing."""
        if load.rows < 1 or not 0.0 < seconds < math.inf:
            return
        weights_S = self._weights(load)
        predicted = max(LEAST, float(weights_S @ self._filter.mean_S))
        self._filter.record(weights_S, predicted, seconds)
        if self.num_recorded > NUM_FIRST:  # the first ones set the scale and say nothing of sizes
            self._largest = max(self._largest, load.tokens)

    def most_tokens(self, seconds: float, load: Load, context: int) -> int:
        """Tokens that a prompt at position ``context`` may add to ``load`` within ``seconds``.

        At most the last of SIZES, and no more than makes a step GROWTH times the largest so far. 0
        where not even ``load`` fits, and before any measurement.
        """
        if self.num_recorded == 0 or not seconds > 0.0:
            return 0
        allowed = seconds / self._filter.scale
        highest = self._highest(load, context).tolist()
        upper = bisect_right(highest, allowed)
        if upper == 0:
            return 0
        size = float(SIZES[upper - 1])
        if upper < len(SIZES):
            share = (allowed - highest[upper - 1]) / (highest[upper] - highest[upper - 1])
            size += share * (SIZES[upper] - size)
        return max(0, min(int(size), GROWTH * self._largest - load.tokens))

    def _highest(self, load: Load, context: int) -> np.ndarray:
        """What steps with chunks of SIZES may take, margin included, in units of the scale."""
        chunks_N = self._chunks_N
        tokens_N = load.tokens + chunks_N
        upper_N = np.searchsorted(self._nodes[1:-1], tokens_N, side="right") + 1
        left_N = self._nodes[upper_N - 1]
        share_N = (tokens_N - left_N) / (self._nodes[upper_N] - left_N)
        weights_NS = np.zeros((len(SIZES), NUM_PARTS))
        weights_NS[self._rows_N, upper_N - 1] = 1.0 - share_N
        weights_NS[self._rows_N, upper_N] = share_N
        weights_NS[:, ROW] = load.rows
        weights_NS[:, CONTEXT] = (load.context + context + chunks_N) / 1000
        weights_NS[:, PAIR] = (load.pairs + chunks_N * (context + 0.5 + chunks_N / 2)) / 1000
        weights_NS[0, NUM_NODES:] = max(0, load.rows - 1), load.context / 1000, load.pairs / 1000
        expected_N = np.maximum(weights_NS @ self._filter.mean_S, LEAST)
        known_N = np.einsum("ns,ns->n", weights_NS @ self._filter.cov_SS, weights_NS)
        variance_N = np.maximum(known_N, 0.0) + self._filter.noise * expected_N**2
        highest_N = expected_N + MARGIN * np.sqrt(variance_N)
        return np.minimum.accumulate(highest_N[::-1])[::-1]  # more tokens never take less

    def _weights(self, load: Load) -> np.ndarray:
        """How the state adds up to one step's cost."""
        upper = min(max(1, bisect_right(NODES, load.tokens)), NUM_NODES - 1)
        left, right = NODES[upper - 1], NODES[upper]
        share = (load.tokens - left) / (right - left)
        weights_S = np.zeros(NUM_PARTS)
        weights_S[upper - 1], weights_S[upper] = 1.0 - share, share
        weights_S[NUM_NODES:] = max(0, load.rows - 1), load.context / 1000, load.pairs / 1000
        return weights_S


def _prior_shape() -> np.ndarray:
    """Covariance of the curve, a line plus a random walk along the nodes, and of the terms."""
    nodes = np.array(NODES, dtype=np.float64)
    rises = np.diff(nodes, prepend=1.0)
    walk = np.cumsum((STD_BEND * PRIOR_TOKEN * rises) ** 2 + STD_STEP**2)
    line = STD_TOKEN * (nodes - 1.0)
    shape = np.zeros((NUM_PARTS, NUM_PARTS))
    shape[:NUM_NODES, :NUM_NODES] = np.minimum.outer(walk, walk) + np.outer(line, line)
    shape[NUM_NODES:, NUM_NODES:] = np.diag(np.square(STD_TERMS))
    return shape
