"""The block pool: every block is free once or has one owner, and misuse names the block."""

from __future__ import annotations

import random

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
    "null block": ("a", [0], "block 0: the null block"),
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


BAD_TABLES = {
    "leak of one block": ({"a": [1], "b": [3]}, "block 2: owned by 'a', but not free"),
    "leak of an owner": ({"a": [1, 2]}, "block 3: owned by 'b', but not free"),
    "two owners": ({"a": [1, 2], "b": [3, 2]}, "block 2: listed by 'b', but also listed by 'a'"),
    "owners swapped": ({"a": [1, 3], "b": [2]}, "block 3: expected owner 'a', got 'b'"),
    "free block in use": ({"a": [1, 2], "b": [3, 4]}, "block 4: listed by 'b', but also in the f"),
    "listed twice": ({"a": [1, 2, 2], "b": [3]}, "block 2: listed by 'a', but also listed by 'a'"),
    "null block": ({"a": [1, 2, 0], "b": [3]}, "block 0: listed by 'a', but is no usable block"),
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


BROKEN_POOLS = {
    "lost": (lose_block, "block 5: lost"),
    "free twice": (free_block_twice, "block 5: in the free list, but also in the free list"),
    "null block free": (free_null_block, "block 0: in the free list, but is no usable block"),
}


@pytest.mark.parametrize("damage, message", BROKEN_POOLS.values(), ids=BROKEN_POOLS)
def test_integrity_check_has_teeth(damage, message: str) -> None:
    pool = pool_with_two_owners()
    damage(pool)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity({"a": [1, 2], "b": [3]})


class PoolMachine(RuleBasedStateMachine):
    """Random owners take and return blocks in any order; a plain dict is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=9, block_size=2)
        self.owned: dict[int, list[int]] = {}

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

    @invariant()
    def every_block_has_one_place(self) -> None:
        self.pool.check_integrity(self.owned)
        assert self.pool.num_free + sum(map(len, self.owned.values())) == self.pool.num_usable


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPoolMachine = PoolMachine.TestCase
