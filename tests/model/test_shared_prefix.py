"""Runs of rows that begin with the same blocks, and what attention makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedraft.kernels.dispatch import INTERPRETED
from pagedraft.kernels.paged_attention_config import SECTION, SEGMENT, Split
from pagedraft.kernels.paged_attention_launch import (
    LAUNCH_BYTES,
    KVPool,
    SharedPrefixes,
    split_for_prefix,
)
from pagedraft.model.batch import Span, build_step_batch
from pagedraft.model.shared_prefix import Run, find_runs, shared_prefixes
from pagedraft.tests.compare import assert_same_bits
from pagedraft.tests.inputs import CPU, PagedCase, paged_case, poisoned
from pagedraft.tests.kernels.attention import attend, attend_split, check

A, B, C = range(1, 9), range(11, 19), range(21, 29)  # blocks of 64 tokens: 512 tokens each
# name: (block ids, tokens before the first query, runs)
RUNS: dict[str, tuple[list[list[int]], list[int], list[Run]]] = {
    "nothing_shared": ([[*A], [*B]], [500, 500], [Run(0, 1, 0), Run(1, 2, 0)]),
    "two_share": ([[*A, 31], [*A, 32]], [520, 530], [Run(0, 2, 512)]),
    "three_share": ([[*A, 31], [*A, 32], [*A, 33]], [520] * 3, [Run(0, 3, 512)]),
    "less_than_a_segment": ([[1, 2, 3, 4], [1, 2, 3, 5]], [250, 250], [Run(0, 1, 0), Run(1, 2, 0)]),
    "whole_segments_only": ([[*A, 9, 31], [*A, 9, 32]], [600, 600], [Run(0, 2, 512)]),
    "queries_inside_the_blocks": ([[*A], [*A]], [511, 300], [Run(0, 2, 256)]),
    "another_run_behind": (
        *([[*A, 31], [*A, 32], [*B, 33], [*B, 34]], [520] * 4),
        [Run(0, 2, 512), Run(2, 4, 512)],
    ),
    "not_neighbours": ([[*A], [*B], [*A]], [512] * 3, [Run(i, i + 1, 0) for i in range(3)]),
    "shorter_prefix_of_more_rows_loses": (
        *([[*A, *B, *C], [*A, *B, *C], [*A, *C]], [1536, 1536, 1024]),
        [Run(0, 2, 1536), Run(2, 3, 0)],
    ),
    "shorter_prefix_of_more_rows_wins": (
        *([[*A, *B], [*A, *B], [*A, *B[:6], *C]], [1024] * 3),
        [Run(0, 3, 768)],
    ),
    "no_blocks": ([[], []], [0, 0], [Run(0, 1, 0), Run(1, 2, 0)]),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs(name):
    block_ids, num_cached, expected = RUNS[name]
    assert find_runs(block_ids, num_cached, 64) == expected


def test_step_batch_says_what_its_rows_share():
    spans = [Span([5, 6], 520, [*A, 31], 1), Span([7], 530, [*A, 32], 1), Span([8], 3, [40], 1)]
    shared = build_step_batch(spans, block_size=64, device=CPU).shared
    assert shared.query_starts_P1.tolist() == [0, 3, 4]
    assert shared.num_keys_P.tolist() == [512, 0]
    assert shared.num_keys_R.tolist() == [512, 512, 0]
    assert shared.kv_lens_P.tolist() == [515, 1]
    assert shared.block_table_PM[0, :8].tolist() == [*A]
    assert (shared.max_query_len, shared.max_keys, shared.num_saved_keys) == (3, 512, 512)


def test_step_batch_of_rows_that_share_nothing():
    spans = [Span([5], 3, [31], 1), Span([7], 4, [32], 1)]
    assert build_step_batch(spans, block_size=64, device=CPU).shared is None


def forked_case(
    spans: list[int], kv_lens: list[int], num_shared: int, **sizes: Any
) -> tuple[PagedCase, SharedPrefixes]:
    """Rows that share the blocks of their first ``num_shared`` keys; the others' own are poisoned.

    Returns the case and what it shares, as the step batch would say it.
    """
    case = paged_case(spans, kv_lens, **sizes)
    block_size = case.k_cache_NGBD.shape[2]
    num_blocks = num_shared // block_size
    table_RM = case.block_table_RM
    for pool in (case.k_cache_NGBD, case.v_cache_NGBD):
        own = table_RM[1:, :num_blocks].flatten().long()
        pool[own] = poisoned(*pool[own].shape, dtype=pool.dtype, device=pool.device)
    table_RM[1:, :num_blocks] = table_RM[0, :num_blocks]
    table, starts = table_RM.cpu().numpy(), case.query_starts_R1.cpu().numpy()
    cached = [kv_len - span for span, kv_len in zip(spans, kv_lens, strict=True)]
    runs = find_runs(table.tolist(), cached, block_size)
    return case, shared_prefixes(np.array(table), np.array(starts), runs, case.q_THD.device)


HALF = {"dtype": torch.float16, "block_size": 64}
# name: (spans, contexts, shared keys, unit, sizes)
FORKS: dict[str, tuple[list[int], list[int], int, int, dict[str, Any]]] = {
    "three_rows": ([1, 1, 1], [700, 600, 520], 512, SEGMENT, HALF),
    "verify_spans": ([5, 1, 3], [700, 600, 520], 512, SEGMENT, HALF),
    "many_queries": ([9, 9], [600, 600], 512, SEGMENT, HALF),
    "rows_end_with_the_prefix": ([1, 1], [513, 513], 512, SEGMENT, HALF),
    "fp32": ([2, 1], [600, 520], 512, SEGMENT, {"block_size": 16}),
    "sections": ([1, 2], [2100, 2300], 2048, SECTION, {**HALF, "num_heads": 2, "head_dim": 16}),
    "prefix_ends_inside_a_section": (
        *([1, 2], [2100, 2300], 1024, SECTION),
        {**HALF, "num_heads": 2, "head_dim": 16},
    ),
}


@pytest.mark.parametrize("name", FORKS)
def test_same_bits_with_a_prefix_pass(name, device):
    spans, kv_lens, num_shared, unit, sizes = FORKS[name]
    case, shared = forked_case(spans, kv_lens, num_shared, **sizes, device=device)
    split = Split(unit, -(-max(kv_lens) // unit))
    with_pass = attend_split(case, split, shared=shared)
    check(case, with_pass)
    assert_same_bits(with_pass, attend_split(case, split))


@pytest.mark.skipif(not INTERPRETED, reason="counts interpreted loads")
def test_shared_keys_are_read_once():
    from pagedraft.tests.sanitizer import sanitize

    case, shared = forked_case([1, 1, 1], [700, 600, 520], 512, **HALF)
    with sanitize() as launches:
        attend_split(case, Split(SEGMENT, 3), shared=shared)
    keys = 512 + (700 - 512) + (600 - 512) + (520 - 512)
    read = sum(launch.bytes_loaded(case.k_cache_NGBD) for launch in launches)
    assert read == keys * 2 * 32 * 2
    assert [launch.name for launch in launches] == ["paged_units_kernel"] * 2 + ["combine_kernel"]


def test_the_op_takes_what_the_batch_says(device):
    case, shared = forked_case([1, 1], [700, 600], 512, **HALF, device=device)
    assert_same_bits(attend(case, shared=shared), attend(case))


# name: (keys saved, split without a prefix pass, split with one)
PAYS = {
    "two_short_rows": (512, Split(SEGMENT, 4), None),
    "many_keys": (1 << 20, Split(SEGMENT, 4), Split(SEGMENT, 4)),
    "many_keys_of_a_walk": (1 << 20, Split(0, 0), Split(SECTION, 4)),
    "too_few_for_the_scratch_of_a_walk": (2 * LAUNCH_BYTES // 4096 + 1, Split(0, 0), None),
    "enough_with_scratch_at_hand": (
        *(2 * LAUNCH_BYTES // 4096 + 1, Split(SECTION, 4)),
        Split(SECTION, 4),
    ),
}


@pytest.mark.parametrize("name", PAYS)
def test_prefix_pass_only_where_it_pays(name):
    num_saved, split, expected = PAYS[name]
    none = torch.empty(0, dtype=torch.int32)
    shared = SharedPrefixes(none, none, none, none, none, 64, 8192, num_saved)
    pool = KVPool(*(torch.empty(4, 8, 64, 128, dtype=torch.float16) for _ in range(2)))
    q_THD = torch.empty(64, 32, 128, dtype=torch.float16)
    assert split_for_prefix(q_THD, pool, split, shared, 8192) == expected
