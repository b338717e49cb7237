"""The best set of drafts of a batch: against trying all sets."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from pagedraft.decoding.allocate import allocate

LINE = np.array([1.0 + 0.1 * n for n in range(30)])
TILES = np.array([1.0 + 0.5 * (n // 4) for n in range(30)])
STEEP = np.array([1.0 + n for n in range(30)])

# worth of each row, seconds of the step by drafts, rate, which rows are a model's, round's seconds
CASES = {
    "one row": ([[0.9, 0.5, 0.2]], LINE, 2.0, None, 0.0),
    "rows that compete": ([[0.9, 0.8, 0.1], [0.5, 0.4], [0.85]], LINE, 4.0, None, 0.0),
    "equal rows": ([[0.6, 0.36], [0.6, 0.36]], LINE, 4.0, None, 0.0),
    "up to the end of a tile": ([[0.9, 0.3, 0.2, 0.1, 0.05]], TILES, 1.0, None, 0.0),
    "over a bad tile": ([[0.99, 0.98, 0.97, 0.96, 0.95, 0.94, 0.93]], TILES, 6.0, None, 0.0),
    "nothing pays": ([[0.9, 0.8], [0.7]], STEEP, 1.0, None, 0.0),
    "a model alone": ([[0.9, 0.8, 0.7]], LINE, 2.0, [True], 0.2),
    "a model whose rounds are shared": (
        [[0.5, 0.4], [0.5, 0.4], [0.5, 0.4]],
        LINE,
        1.0,
        [True, True, True],
        0.6,
    ),
    "a model beside a lookup": ([[0.9, 0.9, 0.9], [0.8, 0.6]], LINE, 2.0, [False, True], 0.3),
    "a model that costs too much": ([[0.9, 0.9], [0.8, 0.6]], LINE, 2.0, [False, True], 3.0),
    "no rows": ([], LINE, 1.0, None, 0.0),
    "a row without drafts": ([[], [0.9]], LINE, 1.0, None, 0.0),
    "sizes that are ruled out": ([[0.9, 0.9, 0.9], [0.9, 0.9]], LINE[:3], 1.0, None, 0.0),
}


def padded(worth) -> np.ndarray:
    """Rows of one length, 0 where there is no draft."""
    most = max(map(len, worth), default=0)
    return np.array([[*row, *[0.0] * (most - len(row))] for row in worth]).reshape(len(worth), most)


def gain(ks, worth, seconds, rate, is_model, round_seconds) -> float:
    """Tokens expected of ``ks`` drafts, less rate * seconds."""
    rounds = max((k for k, model in zip(ks, is_model or [], strict=False) if model), default=0)
    if sum(ks) >= len(seconds):
        return -np.inf
    tokens = sum(sum(row[:k]) for row, k in zip(worth, ks, strict=True))
    return tokens - rate * (seconds[sum(ks)] - seconds[0] + rounds * round_seconds)


@pytest.mark.parametrize("name", CASES)
def test_no_other_set_gains_more(name):
    worth, seconds, rate, is_model, round_seconds = CASES[name]
    options = {"is_model": is_model, "round_seconds": round_seconds}
    ks, claimed = allocate(padded(worth), seconds, rate, **options)
    rest = (worth, seconds, rate, is_model, round_seconds)
    best = max(gain(other, *rest) for other in product(*[range(len(row) + 1) for row in worth]))
    assert gain(ks, *rest) == pytest.approx(claimed)
    assert claimed == pytest.approx(best)


def test_a_worse_set_is_seen():
    """Teeth of the comparison: one draft fewer gains less."""
    worth, seconds, rate, _, _ = CASES["rows that compete"]
    ks, claimed = allocate(padded(worth), seconds, rate)
    fewer = [max(0, k - 1) for k in ks]
    assert gain(fewer, worth, seconds, rate, None, 0.0) < claimed - 0.1
