"""Random workloads against plain decoding, with fp32 weights; test_fuzz_bf16.py has the others.

A failure prints the shortest case that fails. Run it alone, and keep it: its repr is a row of
test_fuzz_regressions.py. ``make fuzz`` runs many more, from other seeds.
"""

from __future__ import annotations

import pytest
import torch

from pagedraft.tests.scheduler.fuzz import assert_all_events, run_shard, shard_seeds


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("first_seed", shard_seeds())
def test_random_workloads_are_as_plain_decoding(first_seed: int) -> None:
    assert_all_events(run_shard(first_seed, torch.float32))
