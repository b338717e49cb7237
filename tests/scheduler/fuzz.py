"""Shards of random cases: many workloads, and whether they met what they are there for."""

from __future__ import annotations

import os
from collections import Counter

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from pagedraft.tests.scheduler.fuzz_cases import Case, cases
from pagedraft.tests.scheduler.fuzz_run import EVENTS, Oracle, run_case

MIN_SHARE = 0.10
SHARD_CASES = 250


def shard_seeds() -> list[int]:
    """Seeds of the shards that a test module runs: one, or as the environment asks (``make fuzz``).

    FUZZ_CASES: cases in all, of which each of the two modules runs half. FUZZ_SEED: the first seed.
    """
    num_cases = int(os.environ.get("FUZZ_CASES", 2 * SHARD_CASES))
    first = int(os.environ.get("FUZZ_SEED", 0))
    return list(range(first, first + -(-num_cases // (2 * SHARD_CASES))))


def run_shard(first_seed: int, dtype: torch.dtype, num_cases: int = SHARD_CASES) -> Counter[str]:
    """Run random cases; return how many met each of EVENTS, and how many there were ("case")."""
    counts: Counter[str] = Counter()
    oracle: Oracle = {}

    @seed(first_seed)
    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases())
    def check(case: Case) -> None:
        counts.update(["case", *run_case(case, dtype, oracle)])

    check()
    return counts


def assert_all_events(counts: Counter[str]) -> None:
    """Each of EVENTS has occurred in at least MIN_SHARE of the cases."""
    shares = {name: counts[name] / counts["case"] for name in EVENTS}
    rare = {name: f"{share:.1%}" for name, share in shares.items() if share < MIN_SHARE}
    assert not rare, f"of {counts['case']} cases: {rare}"
