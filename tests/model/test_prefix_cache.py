"""The prefix cache: a hit is the longest run of known blocks, and no block of the pool is lost."""

from __future__ import annotations

import pytest

from pagedraft.model.block_pool import BlockPool, IntegrityError
from pagedraft.model.prefix_cache import Node, PrefixCache

BLOCK = 2
TOKENS = [1, 2, 3, 4, 5, 6]


def filled(num_blocks: int = 6) -> tuple[BlockPool, PrefixCache]:
    """TOKENS lie in blocks 1, 2, 3, which nobody owns any more."""
    pool = BlockPool(num_blocks, BLOCK)
    cache = PrefixCache(pool)
    insert_all(cache, TOKENS, pool.allocate("a", 3))
    pool.free("a", [1, 2, 3])
    return pool, cache


def insert_all(cache: PrefixCache, tokens: list[int], blocks: list[int], salt=None) -> list[Node]:
    nodes: list[Node] = []
    for index, block in enumerate(blocks):
        part = tokens[index * BLOCK : (index + 1) * BLOCK]
        nodes.append(cache.insert(nodes[-1] if nodes else None, part, block, salt))
    return nodes


def blocks(nodes: list[Node]) -> list[int]:
    return [node.block_id for node in nodes]


# tokens looked up, how many of them at most -> blocks
MATCHES = {
    "all of it": (TOKENS, 6, [1, 2, 3]),
    "a longer context": ([*TOKENS, 7, 8], 8, [1, 2, 3]),
    "a shorter context": (TOKENS[:4], 4, [1, 2]),
    "half a block is none": (TOKENS[:5], 5, [1, 2]),
    "at most so many": (TOKENS, 5, [1, 2]),
    "at most none": (TOKENS, 0, []),
    "more than there are": (TOKENS, 100, [1, 2, 3]),
    "another first token": ([9, *TOKENS[1:]], 6, []),
    "another last token": ([*TOKENS[:5], 9], 6, [1, 2]),
    "a known block elsewhere": (TOKENS[2:], 4, []),
    "blocks in another order": ([3, 4, 1, 2], 4, []),
    "nothing": ([], 6, []),
}


@pytest.mark.parametrize("tokens, max_tokens, expected", MATCHES.values(), ids=MATCHES)
def test_match(tokens: list[int], max_tokens: int, expected: list[int]) -> None:
    _, cache = filled()
    assert blocks(cache.match(tokens, max_tokens)) == expected


def test_salts_do_not_match_each_other() -> None:
    pool, cache = filled()
    insert_all(cache, TOKENS, pool.allocate("b", 2), salt="x")
    assert blocks(cache.match(TOKENS, 6)) == [1, 2, 3]
    assert blocks(cache.match(TOKENS, 6, salt="x")) == [4, 5]
    assert blocks(cache.match(TOKENS, 6, salt="y")) == []


def test_branches_of_one_prefix() -> None:
    pool, cache = filled()
    (first, *_) = cache.match(TOKENS, 6)
    (block,) = pool.allocate("b", 1)
    cache.insert(first, [9, 9], block)
    assert blocks(cache.match([1, 2, 9, 9], 4)) == [1, block]
    assert blocks(cache.match(TOKENS, 6)) == [1, 2, 3]


def test_known_content_stays_where_it_is() -> None:
    pool, cache = filled()
    own = pool.allocate("b", 2)
    assert blocks(insert_all(cache, TOKENS, own)) == [1, 2]
    pool.free("b", own)
    assert (len(cache), pool.num_evictable) == (3, 3)


def test_the_end_of_a_chain_is_evicted_first() -> None:
    pool, cache = filled()
    assert pool.allocate("b", 3)[-1] == 3  # two were free
    assert blocks(cache.match(TOKENS, 6)) == [1, 2]
    cache.check_integrity()


def test_a_node_without_its_parent_is_unreachable_and_goes_in_its_turn() -> None:
    """Also when its parent's content comes back: that is another node."""
    pool, cache = filled(num_blocks=4)
    pool.share("b", [2, 3])
    new = pool.allocate("c", 1)
    assert new == [1]
    assert cache.match(TOKENS, 6) == []
    insert_all(cache, TOKENS, new)
    assert blocks(cache.match(TOKENS, 6)) == [1]
    pool.free("b", [2, 3])
    assert pool.allocate("d", 2) == [3, 2]
    assert blocks(cache.match(TOKENS, 6)) == [1]
    cache.check_integrity()


def test_clear_frees_what_nobody_owns() -> None:
    pool, cache = filled()
    pool.share("b", [1, 2])
    cache.clear()
    assert (len(cache), pool.num_evictable, pool.num_free) == (0, 0, 3)
    assert cache.match(TOKENS, 6) == []
    cache.check_integrity()
    pool.check_integrity({"b": [1, 2]})


def test_only_a_full_block_can_be_known() -> None:
    pool, cache = filled()
    with pytest.raises(ValueError, match="tokens: expected a full block of 2, got 1"):
        cache.insert(None, [9], pool.allocate("b", 1)[0])


def test_a_block_holds_one_content() -> None:
    pool, cache = filled()
    pool.share("b", [1])
    with pytest.raises(IntegrityError, match="block 1: expected an owned block to keep"):
        cache.insert(None, [9, 9], 1)


def test_a_pool_has_one_cache() -> None:
    pool, _ = filled()
    with pytest.raises(ValueError, match="pool: expected one without a prefix cache"):
        PrefixCache(pool)


def lose_node(pool: BlockPool, cache: PrefixCache) -> None:
    del cache._by_block[2]


def lose_block(pool: BlockPool, cache: PrefixCache) -> None:
    pool.forget(2)


def mix_blocks(pool: BlockPool, cache: PrefixCache) -> None:
    cache._by_block[2] = cache._by_block[1]


DAMAGES = {
    "no node": (lose_node, "block 2: kept by the pool alone"),
    "no block": (lose_block, "block 2: kept by the cache alone"),
    "wrong node": (mix_blocks, "block 2: node 2 is not its own"),
}


@pytest.mark.parametrize("damage, message", DAMAGES.values(), ids=DAMAGES)
def test_integrity_check_has_teeth(damage, message: str) -> None:
    pool, cache = filled()
    damage(pool, cache)
    with pytest.raises(IntegrityError, match=message):
        cache.check_integrity()
