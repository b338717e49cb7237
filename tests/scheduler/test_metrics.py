"""Statistics: latencies per token, acceptance by position, percentiles, waste."""

from __future__ import annotations

import math

import pytest

from pagedraft.scheduler.metrics import EngineStats, percentile, summarise
from pagedraft.scheduler.request import Decision, RequestStats


def stats_of(emissions, drafts=()) -> RequestStats:
    stats = RequestStats(submitted=1.0, emissions=list(emissions))
    for drafted, accepted in drafts:
        stats.passes.append(Decision("ngram", drafted, drafted, accepted, "fixed"))
    return stats


def test_itl_is_the_gap_over_the_tokens_of_the_step():
    stats = stats_of([(1.5, 1), (1.7, 2), (1.8, 1)])
    assert stats.ttft == pytest.approx(0.5)
    assert stats.inter_token_latencies == pytest.approx([0.1, 0.1, 0.1])
    assert stats.tokens_per_pass == pytest.approx(4 / 3)


def test_acceptance_is_counted_by_position():
    stats = stats_of([], [(3, 3), (3, 1), (1, 0)])
    assert stats.drafted == [3, 2, 2]
    assert stats.accepted == [2, 1, 1]


def test_summary_pools_requests():
    rows = [
        stats_of([(1.5, 1), (1.6, 3)], [(4, 2)]),
        stats_of([(2.0, 1)], [(1, 1)]),
    ]
    summary = summarise(rows, seconds=2.0, kv_waste=0.1)
    assert summary.num_tokens == 5
    assert summary.tokens_per_second == pytest.approx(2.5)
    assert summary.tokens_per_pass == pytest.approx(5 / 3)
    assert summary.acceptance == pytest.approx(3 / 5)
    assert summary.acceptance_by_position == pytest.approx([1.0, 1.0, 0.0, 0.0])


def test_nothing_gives_nan_not_an_error():
    summary = summarise([], seconds=0.0, kv_waste=0.0)
    assert math.isnan(summary.tokens_per_second)
    assert math.isnan(summary.acceptance)
    assert math.isnan(percentile([], 99))
    assert stats_of([]).ttft is None
    assert stats_of([]).tokens_per_pass == 0.0


PERCENTILES = {
    "median": (50, 3),
    "p99 is the largest of few": (99, 5),
    "p0": (0, 1),
    "p20": (20, 1),
}


@pytest.mark.parametrize("name", PERCENTILES)
def test_percentile_is_nearest_rank(name):
    percent, expected = PERCENTILES[name]
    assert percentile([5, 1, 4, 2, 3], percent) == expected


def test_kv_waste():
    stats = EngineStats()
    assert stats.kv_waste == 0.0
    stats.record(0.1, fed=3, committed=1, used=48, owned=64)
    stats.record(0.1, fed=1, committed=1, used=49, owned=64)
    assert stats.kv_waste == pytest.approx(1 - 97 / 128)
