"""Which drafts of a batch to verify: the best set of (row, depth) for one step.

A draft is of use only if those before it in its row are accepted too, so its worth is the
probability that all of them are, and worth never grows with depth. For a given number of drafts the
best set is therefore the first ones in order of worth, and there are only as many sets to compare
as there are drafts (times the rounds that a model drafter may run).

**Units**: seconds; tokens; ``rate`` is tokens a second.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np


def allocate(
    worth_RK: np.ndarray,
    step_seconds: np.ndarray,
    rate: float,
    *,
    is_model: Seq[bool] | None = None,
    round_seconds: float = 0.0,
) -> tuple[np.ndarray, float]:
    """Drafts of each row, int64 [R], and their gain over none in tokens less rate * seconds.

    worth_RK[r, i]: probability that drafts 0 to i of row r are all accepted, falling in i; 0 for
        drafts that there are not.
    step_seconds[n]: seconds of the step with n drafts in all; sizes beyond its end are ruled out.
    is_model[r]: whether the drafts of row r take a round of ``round_seconds`` for each depth, run
        once for all such rows. None: none does.
    """
    num_rows, num_drafts = worth_RK.shape
    place_N = np.flatnonzero(worth_RK)
    worth_N = worth_RK.ravel()[place_N]
    order_N = np.argsort(-worth_N, kind="stable")
    none = np.zeros(num_rows, dtype=np.int64)
    if len(order_N) == 0 or len(step_seconds) < 2:
        return none, 0.0
    if is_model is None or not any(is_model):
        order_N = order_N[: len(step_seconds) - 1]
        gain_N = worth_N[order_N].cumsum()
        gain_N -= rate * (step_seconds[1 : len(order_N) + 1] - step_seconds[0])
        best = int(gain_N.argmax())
        taken_N = order_N[: best + 1]
    else:
        depth_N = place_N % num_drafts
        depth_N[~np.array(is_model)[place_N // num_drafts]] = -1  # needs no round
        gain_N, best, taken_N = _with_rounds(
            worth_N, depth_N, order_N, step_seconds, rate, round_seconds
        )
    if gain_N[best] <= 0.0:
        return none, 0.0
    ks_R = np.bincount(place_N[taken_N] // num_drafts, minlength=num_rows)
    return ks_R, float(gain_N[best])


def _with_rounds(
    worth_N: np.ndarray,
    depth_N: np.ndarray,
    order_N: np.ndarray,
    step_seconds: np.ndarray,
    rate: float,
    round_seconds: float,
) -> tuple[np.ndarray, int, np.ndarray]:
    """The best number of rounds (axis C) and, for it, gains, best index and the drafts taken."""
    missing = max(0, worth_N.size + 1 - len(step_seconds))
    step_seconds = np.append(step_seconds, [np.inf] * missing)
    rounds_C = np.arange(int(depth_N.max()) + 2)
    allowed_CN = depth_N[order_N] < rounds_C[:, None]
    counts_CN = np.cumsum(allowed_CN, axis=1)
    seconds_CN = step_seconds[counts_CN] - step_seconds[0] + round_seconds * rounds_C[:, None]
    gain_CN = np.cumsum(worth_N[order_N] * allowed_CN, axis=1) - rate * seconds_CN
    rounds, best = divmod(int(np.argmax(gain_CN)), gain_CN.shape[1])
    taken = order_N[: best + 1][allowed_CN[rounds, : best + 1]]
    return gain_CN[rounds], best, taken
