"""The swap space: which bytes, how many, and where they come back to."""

from __future__ import annotations

import pytest
import torch

from pagedraft.model.block_pool import BlockPool
from pagedraft.scheduler.prefix import Prefixes
from pagedraft.scheduler.swap import PROBE_BLOCKS, PROBE_REPEATS, SwapSpace
from pagedraft.scheduler.swap_policy import SwapPolicy
from pagedraft.tests.scheduler.fake_engine import BLOCK, FakeRequest, fake_request

BLOCK_BYTES = BLOCK * 8


class Pool:
    """Stands for a KVCache: tensors whose bytes are all different, NaN bits among them."""

    def __init__(self, num_blocks: int = 20, *dtypes: torch.dtype) -> None:
        self.num_blocks, self.block_size = num_blocks, BLOCK
        generator = torch.Generator().manual_seed(0)
        self.tensors = [
            torch.randint(0, 256, (num_blocks, BLOCK * 8), generator=generator, dtype=torch.uint8)
            .view(dtype)
            .unflatten(1, (2, -1))
            for dtype in dtypes or (torch.float32,)
        ]

    def bytes_of(self, blocks: list[int]) -> list[torch.Tensor]:
        return [tensor[blocks].view(torch.uint8).clone() for tensor in self.tensors]

    def spoil(self, blocks: list[int]) -> None:
        for tensor in self.tensors:
            tensor.view(torch.uint8)[blocks] = 0xAA


def running(arrival: int, blocks: list[int], written: int, drafted: int = 0) -> FakeRequest:
    request = fake_request(arrival, range(60), written)
    request.sequence.num_draft_written = drafted
    request.block_ids.extend(blocks)
    return request


def swap_of(pool: Pool, num_blocks: int, forced: bool | None = True, **options) -> SwapSpace:
    block_bytes = BLOCK_BYTES * len(pool.tensors)
    return SwapSpace([pool], num_blocks * block_bytes, SwapPolicy(forced), **options)


DTYPES = {
    "fp32": (torch.float32,),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "int8 and factors": (torch.int8, torch.int8, torch.float32, torch.float32),
    "fp8": (torch.float8_e4m3fn,),
}


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_the_bits_come_back_to_other_blocks(dtypes) -> None:
    pool = Pool(20, *dtypes)
    swap = swap_of(pool, 100)
    request = running(0, [7, 3, 12, 5], written=14, drafted=9)
    expected = pool.bytes_of([7, 3, 12, 5])
    others = pool.bytes_of([1, 2])
    assert swap.save(request)
    pool.spoil([7, 3, 12, 5])
    saved = swap.find(request, 0)
    assert (saved.num_written, saved.num_draft_written, saved.first_block) == (14, 9, 0)
    request.block_ids[:] = [9, 8, 15, 3]
    swap.restore(request, 0)
    for found, wanted in zip(pool.bytes_of([9, 8, 15, 3]), expected, strict=True):
        assert torch.equal(found, wanted)
    for found, wanted in zip(pool.bytes_of([1, 2]), others, strict=True):
        assert torch.equal(found, wanted)
    assert (len(swap), swap.num_bytes) == (0, 0)


def test_only_blocks_from_the_first_on_are_written() -> None:
    pool = Pool()
    swap = swap_of(pool, 100)
    request = running(0, [7, 3, 12, 5], written=14)
    [expected] = pool.bytes_of([12, 5])
    swap.save(request)
    pool.spoil([7, 3, 12, 5])
    [before] = pool.bytes_of([7, 3])
    swap.restore(request, 2)
    assert torch.equal(pool.bytes_of([12, 5])[0], expected)
    assert torch.equal(pool.bytes_of([7, 3])[0], before)
    assert (swap.stats.bytes_out, swap.stats.bytes_in) == (4 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert swap.stats.tokens_in == 14 - 8


# table, written, drafted -> blocks saved, the first of them, draft tokens
SAVES = {
    "nothing written": ([4], 0, 0, 0, 0, 0),
    "one token": ([4], 1, 0, 1, 0, 0),
    "full blocks": ([4, 5], 8, 8, 2, 0, 8),
    "blocks of rejected drafts": ([4, 5, 6], 8, 0, 2, 0, 0),
    "the draft model is ahead": ([4, 5], 7, 8, 2, 0, 7),
    "left of the window": ([0, 0, 6, 7], 14, 14, 2, 2, 14),
    "all left of the window": ([0, 0], 8, 8, 0, 0, 0),
}


@pytest.mark.parametrize(
    "table, written, drafted, num_blocks, first, draft", SAVES.values(), ids=SAVES
)
def test_what_is_saved(table, written, drafted, num_blocks, first, draft) -> None:
    swap = swap_of(Pool(), 100)
    request = running(0, table, written, drafted)
    assert swap.save(request) == (num_blocks > 0)
    assert swap.num_bytes == num_blocks * BLOCK_BYTES
    saved = swap.find(request, -1)
    assert (saved is not None) == (num_blocks > 0)
    if saved is not None:
        facts = saved.num_blocks, saved.first_block, saved.num_draft_written
        assert facts == (num_blocks, first, draft)


def test_the_oldest_go_first_and_what_is_too_big_drops_nobody() -> None:
    swap = swap_of(Pool(), 4)
    first, second, third, big = (
        running(index, list(range(1, count + 1)), 4 * count)
        for index, count in enumerate((1, 2, 3, 5))
    )
    assert [swap.save(request) for request in (first, second)] == [True, True]
    assert not swap.save(big)
    assert len(swap) == 2
    assert swap.save(third)
    assert [swap.find(r, 0) is not None for r in (first, second, third)] == [False, False, True]
    assert (swap.num_bytes, swap.stats.num_evicted) == (3 * BLOCK_BYTES, 2)
    assert swap.save(running(9, [1], 4))
    assert swap.num_bytes == swap.max_bytes


def test_what_is_kept_is_not_dropped_for_others() -> None:
    """An interrupted step may leave admitted requests that wait for their copy."""
    swap = swap_of(Pool(), 4)
    first, second, third = (running(index, [1, 2], 8) for index in range(3))
    assert [swap.save(request) for request in (first, second)] == [True, True]
    assert swap.save(third, keep={first: 0})
    assert [swap.find(r, 0) is not None for r in (first, second, third)] == [True, False, True]
    assert not swap.save(second, keep={first: 0, third: 0})
    swap.clear(keep={first: 0})
    assert (len(swap), swap.num_bytes) == (1, 2 * BLOCK_BYTES)


def test_saving_again_replaces() -> None:
    swap = swap_of(Pool(), 4)
    request = running(0, [1, 2, 3], 12)
    assert swap.save(request)
    assert swap.save(request)
    assert (len(swap), swap.num_bytes, swap.stats.num_evicted) == (1, 3 * BLOCK_BYTES, 0)


# tokens that the pool has -> whether the host copy is used
KNOWN = {"none": (-1, True), "some": (13, True), "all": (14, False), "more": (20, False)}


@pytest.mark.parametrize("num_known, used", KNOWN.values(), ids=KNOWN)
def test_what_the_pool_has_is_not_wanted(num_known: int, used: bool) -> None:
    swap = swap_of(Pool(), 4)
    request = running(0, [1, 2, 3, 4], 14)
    swap.save(request)
    assert (swap.find(request, num_known) is not None) == used
    assert len(swap) == used


def test_dropping_and_clearing() -> None:
    swap = swap_of(Pool(), 8)
    requests = [running(index, [1, 2], 8) for index in range(3)]
    for request in requests:
        swap.save(request)
    swap.drop(requests[1])
    swap.drop(requests[1])
    assert (len(swap), swap.num_bytes) == (2, 4 * BLOCK_BYTES)
    swap.clear()
    assert (len(swap), swap.num_bytes) == (0, 0)


def test_without_host_memory_nothing_is_saved(monkeypatch) -> None:
    swap = swap_of(Pool(), 8)

    def fail(num_blocks: int):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(swap, "_new_rows", fail)
    assert not swap.save(running(0, [1, 2], 8))
    assert (len(swap), swap.num_bytes) == (0, 0)


def test_a_table_that_is_too_short_is_named() -> None:
    with pytest.raises(ValueError, match="request 'r0': expected 3 blocks for 9 .* tokens, got 2"):
        swap_of(Pool(), 8).save(running(0, [1, 2], 9))


BAD_BYTES = {"none": 0, "negative": -1, "a float": 1e9, "a boolean": True}


@pytest.mark.parametrize("max_bytes", BAD_BYTES.values(), ids=BAD_BYTES)
def test_bad_sizes_are_named(max_bytes) -> None:
    with pytest.raises((ValueError, TypeError), match="swap_bytes"):
        SwapSpace([Pool()], max_bytes)


@pytest.fixture
def resumed() -> tuple[Prefixes, FakeRequest]:
    """A request of 14 written tokens that was preempted, lost its blocks and is admitted again."""
    pool = BlockPool(20, BLOCK)
    prefixes = Prefixes(pool, swap=swap_of(Pool(), 100))
    request = fake_request(0, range(15))
    prefixes.attach(request)
    request.block_ids.extend(pool.allocate("r0", 4))
    request.sequence.num_written = 14
    prefixes.publish(request)
    prefixes.retire(request)
    pool.free("other", pool.allocate("other", pool.num_free))
    prefixes.attach(request)
    assert (request.num_written, request.block_ids, pool.kept) == (14, [], frozenset())
    request.block_ids.extend(pool.allocate("r0", 4))
    return prefixes, request


def test_nothing_is_published_before_it_is_copied_back(resumed) -> None:
    prefixes, request = resumed
    prefixes.publish(request)
    assert prefixes._pool.kept == frozenset()
    prefixes.restore()
    prefixes.publish(request)
    assert prefixes._pool.kept == set(request.block_ids[:3])


def test_a_reset_leaves_the_copy_that_an_admitted_request_waits_for(resumed) -> None:
    prefixes, request = resumed
    prefixes.clear()
    prefixes.restore()
    assert prefixes.swap.stats.tokens_in == 14
    prefixes.publish(request)
    assert prefixes._pool.kept == frozenset()


@pytest.mark.parametrize("end", ["retire", "detach"])
def test_the_host_copy_outlives_an_admission_that_fails(resumed, end: str) -> None:
    prefixes, request = resumed
    getattr(prefixes, end)(request)
    prefixes.restore()
    assert len(prefixes.swap) == 1
    prefixes.attach(request)
    assert request.num_written == 14
    request.finished = True
    prefixes.forget(request)
    assert len(prefixes.swap) == 0


class Ticks:
    """A clock on which each look takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.mark.parametrize("num_blocks", [2, 20])
def test_the_probe_measures_and_changes_nothing(num_blocks: int) -> None:
    pool = Pool(num_blocks)
    before = pool.tensors[0].clone().view(torch.uint8)
    policy = SwapPolicy()
    swap = SwapSpace([pool], 1000, policy, clock=Ticks())
    assert torch.equal(pool.tensors[0].view(torch.uint8), before)
    assert policy.out.seconds(1) == pytest.approx(1.0)
    assert policy.back.seconds(min(PROBE_BLOCKS, num_blocks - 1)) == pytest.approx(1.0)
    assert swap.stats.num_swapped_out == 0
    assert PROBE_REPEATS > 1


def test_stats_count_seconds_saved() -> None:
    pool = Pool()
    swap = SwapSpace([pool], 10_000, SwapPolicy(True), clock=Ticks())
    swap.policy.record_step(10, 5.0)
    request = running(0, [1, 2, 3, 4], 14)
    swap.save(request)
    swap.restore(request, 1)
    assert (swap.stats.seconds_out, swap.stats.seconds_in) == (1.0, 1.0)
    assert swap.stats.seconds_saved == pytest.approx(10 * 0.5 - 2.0)
