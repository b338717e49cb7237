"""The block pool: every block is free, owned or evictable, and misuse names the block."""

from __future__ import annotations

import random
from itertools import chain

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagedraft.model.block_pool import BlockPool, IntegrityError, PoolExhausted


def pool_with_two_owners() -> BlockPool:
    """Blocks 1, 2 belong to "a", block 3 to "b", blocks 4 and 5 are free."""
    pool = BlockPool(num_blocks=6, block_size=4)
    assert pool.allocate("a", 2) == [1, 2]
    assert pool.allocate("b", 1) == [3]
    return pool


def test_counts_exclude_the_null_block() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    assert (pool.num_usable, pool.num_free) == (5, 5)
    assert sorted(pool.allocate("a", 5)) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0


@pytest.mark.parametrize("num_tokens, blocks", [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_rounds_up(num_tokens: int, blocks: int) -> None:
    assert BlockPool(num_blocks=6, block_size=4).blocks_for(num_tokens) == blocks


def test_exhausted_pool_takes_nothing() -> None:
    pool = pool_with_two_owners()
    with pytest.raises(PoolExhausted, match="'b': expected 3 free blocks, got 2 of 5"):
        pool.allocate("b", 3)
    assert pool.num_free == 2
    pool.check_integrity({"a": [1, 2], "b": [3]})


def test_freed_blocks_are_handed_out_in_the_same_order() -> None:
    pool = pool_with_two_owners()
    pool.free("a", [1, 2])
    assert pool.allocate("c", 3) == [1, 2, 4]


BAD_SIZES = {
    "only the null block": (1, 4, "num_blocks"),
    "no blocks": (0, 4, "num_blocks"),
    "empty blocks": (4, 0, "block_size"),
}


@pytest.mark.parametrize("num_blocks, block_size, name", BAD_SIZES.values(), ids=BAD_SIZES)
def test_bad_sizes_are_named(num_blocks: int, block_size: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        BlockPool(num_blocks, block_size)


def test_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="count: expected at least 0 blocks, got -1"):
        pool_with_two_owners().allocate("a", -1)


BAD_FREES = {
    "free already": ("a", [1, 4], "block 4: expected owner 'a', got a free block"),
    "twice in one call": ("a", [1, 2, 1], "block 1: freed twice"),
    "of another owner": ("a", [1, 3], "block 3: expected owner 'a', got 'b'"),
    "behind a null block": ("a", [0, 4], "block 4: expected owner 'a', got a free block"),
    "twice behind null blocks": ("a", [0, 0, 1, 1], "block 1: freed twice"),
    "unknown": ("a", [6], "block 6: expected owner 'a'"),
}


@pytest.mark.parametrize("owner, block_ids, message", BAD_FREES.values(), ids=BAD_FREES)
def test_bad_free_names_the_block_and_frees_none(
    owner: str, block_ids: list[int], message: str
) -> None:
    pool = pool_with_two_owners()
    with pytest.raises(IntegrityError, match=message):
        pool.free(owner, block_ids)
    pool.check_integrity({"a": [1, 2], "b": [3]})


def test_null_blocks_of_a_table_are_nobodys() -> None:
    """They stand for blocks that a sliding window has left behind."""
    pool = pool_with_two_owners()
    pool.free("a", [0, 0, 2])
    pool.check_integrity({"a": [0, 0, 1], "b": [3], "c": [0], "d": []})
    pool.free("c", [0])
    pool.free("a", [0, 0, 1])
    assert pool.num_free == 4
    assert pool.allocate("c", 4) == [1, 2, 4, 5]


BAD_TABLES = {
    "leak of one block": ({"a": [1], "b": [3]}, "block 2: owned by 'a', but not free"),
    "leak of an owner": ({"a": [1, 2]}, "block 3: owned by 'b', but not free"),
    "one owner too many": ({"a": [1, 2], "b": [3, 2]}, "block 2: expected owner 'b', got 'a'"),
    "owners swapped": ({"a": [1, 3], "b": [2]}, "block 3: expected owner 'a', got 'b'"),
    "free block in use": ({"a": [1, 2], "b": [3, 4]}, "block 4: listed by 'b', but also in the f"),
    "listed twice": ({"a": [1, 2, 2], "b": [3]}, "block 2: listed twice by 'a'"),
    "null block at the end": ({"a": [1, 2, 0], "b": [3]}, "block 0: the null block, listed by 'a'"),
    "null block between": ({"a": [1, 0, 2], "b": [3]}, "block 0: the null block, listed by 'a' af"),
    "null block for another": ({"a": [0, 2], "b": [3]}, "block 1: owned by 'a', but not free"),
    "past the pool": ({"a": [1, 2], "b": [3, 6]}, "block 6: listed by 'b', but is no usable block"),
}


@pytest.mark.parametrize("owners, message", BAD_TABLES.values(), ids=BAD_TABLES)
def test_integrity_check_finds(owners: dict[str, list[int]], message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        pool_with_two_owners().check_integrity(owners)


def lose_block(pool: BlockPool) -> None:
    pool._free.remove(5)


def free_block_twice(pool: BlockPool) -> None:
    pool._free.append(5)


def free_null_block(pool: BlockPool) -> None:
    pool._free.append(0)


def free_owned_block(pool: BlockPool) -> None:
    pool._free.append(2)


def evict_free_block(pool: BlockPool) -> None:
    pool._evictable[4] = None


def evict_unkept_block(pool: BlockPool) -> None:
    pool._free.remove(5)
    pool._evictable[5] = None


def keep_free_block(pool: BlockPool) -> None:
    pool._kept.add(4)


BROKEN_POOLS = {
    "lost": (lose_block, "block 5: lost"),
    "free twice": (free_block_twice, "block 5: in the free list, but also in the free list"),
    "null block free": (free_null_block, "block 0: in the free list, but is no usable block"),
    "owned and free": (free_owned_block, "block 2: listed by 'a', but also in the free list"),
    "free and evictable": (evict_free_block, "block 4: evictable, but also in the free list"),
    "evictable, not kept": (evict_unkept_block, "block 5: evictable, but not kept"),
    "kept and free": (keep_free_block, "block 4: kept, but neither owned nor evictable"),
}


@pytest.mark.parametrize("damage, message", BROKEN_POOLS.values(), ids=BROKEN_POOLS)
def test_integrity_check_has_teeth(damage, message: str) -> None:
    pool = pool_with_two_owners()
    damage(pool)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity({"a": [1, 2], "b": [3]})


def shared_pool() -> BlockPool:
    """Block 1 is evictable, block 2 belongs to "a" and "b", block 3 to "b", 4 and 5 are free."""
    pool = pool_with_two_owners()
    pool.keep(1)
    pool.share("b", [2])
    pool.free("a", [1])
    return pool


def test_a_shared_block_is_free_when_its_last_owner_returns_it() -> None:
    pool = shared_pool()
    pool.free("a", [2])
    assert pool.num_free == 3
    pool.check_integrity({"b": [3, 2]})
    pool.free("b", [3, 2])
    assert pool.num_free == 5


def test_a_kept_block_is_free_to_allocate_and_can_be_shared_again() -> None:
    pool = shared_pool()
    assert (pool.num_free, pool.num_evictable, pool.kept) == (3, 1, {1})
    pool.share("c", [1])
    assert (pool.num_free, pool.num_evictable, pool.kept) == (2, 0, {1})
    pool.check_integrity({"a": [2], "b": [3, 2], "c": [1]})


def test_free_blocks_go_before_evictable_ones() -> None:
    pool, evicted = shared_pool(), []
    pool.on_evict = evicted.append
    assert pool.allocate("c", 2) == [4, 5]
    assert evicted == []
    assert pool.allocate("c", 1) == evicted == [1]
    assert pool.kept == frozenset()


def test_the_least_recently_used_goes_first_and_of_a_chain_its_end() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    old, new = pool.allocate("old", 3), pool.allocate("new", 2)
    for block in old + new:
        pool.keep(block)
    pool.free("new", new)
    pool.free("old", old)
    pool.share("again", new[:1])
    pool.free("again", new[:1])
    assert pool.allocate("x", 5) == [new[1], *reversed(old), new[0]]


def test_forget_frees_an_evictable_block() -> None:
    pool = shared_pool()
    pool.forget(1)
    assert (pool.num_free, pool.num_evictable) == (3, 0)
    pool.check_integrity({"a": [2], "b": [3, 2]})


def test_forget_leaves_an_owned_block_to_its_owners() -> None:
    pool = shared_pool()
    pool.keep(3)
    pool.forget(3)
    pool.free("b", [3])
    assert pool.num_evictable == 1


BAD_CALLS = {
    "share a free block": (lambda p: p.share("a", [1, 4]), "block 4: expected a block in use"),
    "share one's own": (lambda p: p.share("a", [1, 2]), "block 2: 'a' owns it already"),
    "share twice": (lambda p: p.share("a", [1, 3, 1]), "block 1: shared twice with 'a'"),
    "share the null block": (lambda p: p.share("a", [0]), "block 0: .* got the null block"),
    "share an unknown block": (lambda p: p.share("a", [6]), "block 6: .* got no block of the pool"),
    "keep a free block": (lambda p: p.keep(4), "block 4: .* to keep, got a free block"),
    "keep an evictable block": (lambda p: p.keep(1), "block 1: .* to keep, got a kept one"),
    "forget an owned block": (lambda p: p.forget(2), "block 2: .* to forget, got 'a', 'b'"),
    "free an evictable block": (lambda p: p.free("a", [1]), "block 1: .* got an evictable block"),
    "free another's": (lambda p: p.free("c", [2]), "block 2: expected owner 'c', got 'a', 'b'"),
}


@pytest.mark.parametrize("call, message", BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_bad_call_names_the_block_and_changes_nothing(call, message: str) -> None:
    pool = shared_pool()
    with pytest.raises(IntegrityError, match=message):
        call(pool)
    pool.check_integrity({"a": [2], "b": [3, 2]})
    assert (pool.num_free, pool.kept) == (3, {1})


def test_an_owner_of_a_shared_block_that_does_not_list_it_is_found() -> None:
    with pytest.raises(IntegrityError, match="block 2: owned by 'b', but not free and not in"):
        shared_pool().check_integrity({"a": [2], "b": [3]})


class PoolMachine(RuleBasedStateMachine):
    """Random owners take, share and return blocks in any order; a plain dict is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=9, block_size=2)
        self.owned: dict[int, list[int]] = {}

    @property
    def in_use(self) -> list[int]:
        return sorted(set(chain.from_iterable(self.owned.values())))

    @rule(owner=st.integers(0, 3), count=st.integers(0, 5))
    def allocate(self, owner: int, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(PoolExhausted):
                self.pool.allocate(owner, count)
        else:
            self.owned.setdefault(owner, []).extend(self.pool.allocate(owner, count))

    @precondition(lambda self: any(self.owned.values()))
    @rule(seed=st.integers(0, 2**16))
    def free_some(self, seed: int) -> None:
        rng = random.Random(seed)
        owner = rng.choice([o for o, blocks in self.owned.items() if blocks])
        returned = rng.sample(self.owned[owner], rng.randint(1, len(self.owned[owner])))
        self.pool.free(owner, returned)
        self.owned[owner] = [b for b in self.owned[owner] if b not in returned]
        with pytest.raises(IntegrityError, match=f"block {returned[0]}:"):
            self.pool.free(owner, returned)

    @precondition(lambda self: self.in_use)
    @rule(owner=st.integers(0, 3), seed=st.integers(0, 2**16))
    def share_some(self, owner: int, seed: int) -> None:
        rng = random.Random(seed)
        own = self.owned.setdefault(owner, [])
        shared = [block for block in self.in_use if block not in own and rng.random() < 0.5]
        self.pool.share(owner, shared)
        own.extend(shared)

    @invariant()
    def every_block_has_one_place(self) -> None:
        self.pool.check_integrity(self.owned)
        assert self.pool.num_free + len(self.in_use) == self.pool.num_usable


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPoolMachine = PoolMachine.TestCase
