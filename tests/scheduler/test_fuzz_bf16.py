"""Random workloads against plain decoding, with bf16 weights; a file of its own, so that it runs
beside test_fuzz.py."""

from __future__ import annotations

import pytest
import torch

from pagedraft.tests.scheduler.fuzz import assert_all_events, run_shard, shard_seeds


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("first_seed", shard_seeds())
def test_random_workloads_are_as_plain_decoding(first_seed: int) -> None:
    assert_all_events(run_shard(first_seed + 2**32, torch.bfloat16))
