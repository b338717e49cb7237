"""Blocks left of a sliding window go back to the pool, and nobody sees that."""

from __future__ import annotations

import dataclasses
import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from pagedraft.decoding.params import SamplingParams
from pagedraft.decoding.sequence import Sequence
from pagedraft.kernels.dispatch import INTERPRETED, use_implementation
from pagedraft.kernels.paged_attention import paged_attention
from pagedraft.model.block_pool import BlockPool
from pagedraft.scheduler.admission import check_request
from pagedraft.scheduler.prefix import Prefixes
from pagedraft.scheduler.request import Request
from pagedraft.scheduler.window import Window
from pagedraft.tests.inputs import paged_case
from pagedraft.tests.kernels.attention import arguments
from pagedraft.tests.scheduler.fake_engine import BLOCK, FakeRequest, fake_request

TEXT = list(range(100, 200))


def make(window: int | None, **options) -> tuple[BlockPool, Prefixes]:
    pool = BlockPool(31, BLOCK)
    return pool, Prefixes(pool, window=window, **options)


def start(prefixes: Prefixes, pool: BlockPool, request: FakeRequest) -> FakeRequest:
    prefixes.attach(request)
    missing = pool.blocks_for(request.num_tokens) - len(request.block_ids)
    request.block_ids.extend(pool.allocate(request.request_id, missing))
    return request


def write(prefixes: Prefixes, request: FakeRequest, written: int, drafted: int = 0) -> None:
    request.sequence.num_written, request.sequence.num_draft_written = written, drafted
    prefixes.publish(request)
    prefixes.release_left(request)


def num_null(request: FakeRequest) -> int:
    return request.block_ids.count(0)


# window, written tokens -> null blocks, of blocks of 4: the query at ``written`` sees window tokens
EDGES = {
    "no window": (None, 30, 0),
    "nothing written": (4, 0, 0),
    "the context is shorter than the window": (16, 15, 0),
    "one token of a block is seen": (5, 7, 0),
    "a block is just left behind": (5, 8, 1),
    "one token more": (5, 9, 1),
    "a query that sees itself alone": (1, 8, 2),
    "the same inside a block": (1, 11, 2),
    "a window of whole blocks": (8, 15, 2),
    "many blocks at once": (3, 30, 7),
}


@pytest.mark.parametrize("window, written, expected", EDGES.values(), ids=EDGES)
def test_left_edge(window: int | None, written: int, expected: int) -> None:
    pool, prefixes = make(window)
    request = start(prefixes, pool, fake_request(0, TEXT[:33]))
    write(prefixes, request, written)
    assert request.block_ids[:expected] == [0] * expected
    assert all(request.block_ids[expected:])
    assert len(request.block_ids) == 9
    assert pool.num_free == pool.num_usable - 9 + expected
    pool.check_integrity({"r0": request.block_ids})


def test_released_blocks_stay_known_and_can_be_evicted() -> None:
    pool, prefixes = make(4)
    request = start(prefixes, pool, fake_request(0, TEXT[:33]))
    write(prefixes, request, 20)
    assert pool.num_evictable == num_null(request) == 4
    again = start(prefixes, pool, fake_request(1, TEXT[:33]))
    assert (again.num_written, num_null(again)) == (20, 4)
    pool.check_integrity({"r0": request.block_ids, "r1": again.block_ids})
    prefixes.check_integrity()
    pool.allocate("all", pool.num_free)
    write(prefixes, request, 32)
    write(prefixes, again, 32)
    prefixes.check_integrity()


def test_releasing_publishes_first() -> None:
    pool, prefixes = make(4)
    request = start(prefixes, pool, fake_request(0, TEXT[:33]))
    request.sequence.num_written = 20
    prefixes.release_left(request)
    assert (pool.num_evictable, len(pool.kept)) == (4, 5)


def test_nothing_is_published_of_what_was_released_before_a_reset() -> None:
    pool, prefixes = make(4)
    request = start(prefixes, pool, fake_request(0, TEXT[:33]))
    write(prefixes, request, 12)
    prefixes.clear()
    write(prefixes, request, 32)
    assert (pool.kept, num_null(request)) == (frozenset(), 7)


def test_a_draft_model_that_lags_keeps_its_blocks() -> None:
    pool, prefixes = make(4, has_draft=True)
    request = start(prefixes, pool, fake_request(0, TEXT[:33]))
    write(prefixes, request, 30, drafted=9)
    assert num_null(request) == 1
    write(prefixes, request, 30, drafted=30)
    assert num_null(request) == 6


def test_a_draft_model_that_is_off_keeps_none() -> None:
    pool, prefixes = make(4, has_draft=True)
    request = start(prefixes, pool, fake_request(0, TEXT[:33]))
    request.sequence.num_written = 30
    prefixes.release_left(request, needs_draft=False)
    assert num_null(request) == 6


@pytest.mark.parametrize("method", ["retire", "detach"])
def test_a_table_with_null_blocks_goes_back_whole(method: str) -> None:
    pool, prefixes = make(4)
    request = start(prefixes, pool, fake_request(0, TEXT[:33]))
    write(prefixes, request, 30)
    getattr(prefixes, method)(request)
    assert (request.block_ids, request.num_written) == ([], 0)
    assert pool.num_free == pool.num_usable
    pool.check_integrity({})
    write(prefixes, start(prefixes, pool, request), 32)
    assert num_null(request) == 7


# parent's written tokens, whether there is a cache -> written by the fork, null blocks, a copy
FORKS = {
    "what it needs is there": (10, False, 9, 1, True),
    "the parent has gone on": (20, False, 0, 0, False),
    "the parent has gone on, and the cache knows": (20, True, 8, 1, False),
}


@pytest.mark.parametrize("written, has_cache, start_at, null, copies", FORKS.values(), ids=FORKS)
def test_fork(written: int, has_cache: bool, start_at: int, null: int, copies: bool) -> None:
    pool = BlockPool(31, BLOCK)
    prefixes = Prefixes(pool, has_cache, window=4)
    parent = start(prefixes, pool, fake_request(0, TEXT[:33], num_prompt=10))
    write(prefixes, parent, written)
    fork = start(prefixes, pool, fake_request(1, TEXT[:10], parent=parent))
    assert (fork.num_written, num_null(fork)) == (start_at, null)
    assert bool(prefixes.take_copies()) == copies
    pool.check_integrity({"r0": parent.block_ids, "r1": fork.block_ids})


# total tokens, window, span, draft -> blocks of 4
MOST_BLOCKS = {
    "no window": (100, None, 8, False, 25),
    "a short context": (9, 50, 8, False, 3),
    "one token a step": (100, 4, 1, False, 2),
    "a window of one": (100, 1, 1, False, 1),
    "a chunk": (100, 4, 8, False, 4),
    "a draft model may lag": (100, 4, 8, True, 25),
}


@pytest.mark.parametrize(
    "total, window, span, has_draft, blocks", MOST_BLOCKS.values(), ids=MOST_BLOCKS
)
def test_most_blocks(total, window, span, has_draft, blocks) -> None:
    assert Window(BlockPool(4, BLOCK), window, has_draft).most_blocks(total, span) == blocks


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("max_span", [1, 2, 3, 4, 5, 7, 8])
def test_most_blocks_is_reached_and_not_passed(window: int, max_span: int) -> None:
    pool, prefixes = make(window)
    most, held, rng = prefixes.window.most_blocks(1000, max_span), [], random.Random(0)
    request = fake_request(0, range(1000))
    prefixes.attach(request)
    while request.num_written + max_span < 1000:
        written = request.num_written + rng.randint((max_span + 1) // 2, max_span)
        missing = pool.blocks_for(written) - len(request.block_ids)
        request.block_ids.extend(pool.allocate("r0", missing))
        held.append(len(request.block_ids) - num_null(request))
        write(prefixes, request, written)
    assert max(held) == most


@pytest.mark.parametrize("window", [0, -1])
def test_bad_window(window: int) -> None:
    with pytest.raises(ValueError, match=f"window: expected at least 1 .*, got {window}"):
        Prefixes(BlockPool(4, BLOCK), window=window)


# spans, contexts, window, sizes
ATTENTION = {
    "decode": ([1, 1], [70, 40], 20, {}),
    "drafts": ([5], [70], 20, {}),
    "a window that ends a block": ([1], [96], 32, {}),
    "a window of one": ([3], [57], 1, {}),
    "small blocks": ([2, 3], [100, 90], 30, {"block_size": 8}),
    "big blocks": ([2], [400], 70, {"block_size": 128}),
    "a chunk": ([20], [100], 30, {}),
    "segments": ([2], [900], 400, {"num_heads": 1, "num_kv_heads": 1}),
    "int8": ([4], [80], 30, {"kv_dtype": torch.int8}),
}


INTERPRETED_CASES = ["drafts", "a window of one", "int8"]  # the others take seconds


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_on_the_cpu_reads_no_null_block(name: str) -> None:
    check_attention(name, "cpu")


@pytest.mark.skipif(not INTERPRETED, reason="kernels run compiled here; see bench/gpu_check.py")
@pytest.mark.parametrize("name", INTERPRETED_CASES)
def test_attention_kernels_read_no_null_block(name: str) -> None:
    check_attention(name, "triton")


def check_attention(name: str, implementation: str) -> None:
    """NaN in the null block, and the bits of a whole table."""
    spans, contexts, window, sizes = ATTENTION[name]
    case = paged_case(spans, contexts, **sizes)
    edges = Window(BlockPool(2, case.k_cache_NGBD.shape[2]), window)
    table_RM = case.block_table_RM.clone()
    for row, (span, context) in enumerate(zip(spans, contexts, strict=True)):
        table_RM[row, : edges.left_edge(context - span, 0)] = 0
    assert (table_RM == 0).sum() > (case.block_table_RM == 0).sum()
    released = dataclasses.replace(case, block_table_RM=table_RM)
    outputs = []
    for which in (case, released):
        scales = {"k_scale_NGB": which.k_scale_NGB, "v_scale_NGB": which.v_scale_NGB}
        bounds = {"max_query_len": max(spans), "max_kv_len": max(contexts)}
        with use_implementation(implementation):
            outputs.append(paged_attention(*arguments(which), window=window, **bounds, **scales))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
    assert torch.isfinite(outputs[1]).all()


# total tokens of a request, usable blocks, window, span -> whether it can run
FITS = {
    "all of it": (40, 10, None, 8, True),
    "too long": (41, 10, None, 8, False),
    "too long, with a window": (41, 10, 8, 8, True),
    "a step that is too long": (80, 10, 8, 40, False),
    "a window that is too long": (80, 10, 40, 1, False),
    "a short one under a long window": (40, 10, 100, 100, True),
}


@pytest.mark.parametrize("total, num_usable, window, span, fits", FITS.values(), ids=FITS)
def test_admission(total: int, num_usable: int, window: int | None, span: int, fits: bool) -> None:
    pool = BlockPool(num_usable + 1, BLOCK)
    request = Request(
        "r",
        Sequence([1, 2, 3], 3, 0.0, 0),
        SamplingParams(max_tokens=total - 3),
        frozenset(),
        max_context=1000,
    )
    refused = pytest.raises(ValueError, match=f"need .* KV blocks .* the pool has {num_usable}")
    with nullcontext() if fits else refused:
        config = SimpleNamespace(vocab_size=97, max_positions=4096)
        check_request(request, config, pool, Window(pool, window), span)
