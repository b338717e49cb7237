"""Who owns which block of the KV pool: a free list and a table of owners, in pure Python.

**Units**: every integer here is a block id or a number of blocks, but ``block_size`` and the
argument of ``blocks_for``, which are tokens. Block 0 is the *null block*: padded rows of a step
carry its slots, nobody writes there, and it is never handed out.

**Cost**: O(1) a block for ``allocate`` and ``free``; ``check_integrity`` walks the whole pool.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

NULL_BLOCK = 0


class PoolExhausted(RuntimeError):
    """Fewer blocks are free than were asked for; none was taken."""


class IntegrityError(RuntimeError):
    """A block is free twice, has the wrong owner, or is lost; the message names it."""


class BlockPool:
    """Hands out blocks ``1..num_blocks-1``, the block freed last first.

    ``num_blocks`` counts the null block too: it is the size of the pool's tensors.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks: expected the null block and more, got {num_blocks}")
        if block_size < 1:
            raise ValueError(f"block_size: expected at least 1 token, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))  # a stack: block 1 is on top
        self._owner: dict[int, Hashable] = {}  # owned blocks only

    @property
    def num_usable(self) -> int:
        """Blocks that requests can own: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can hand out now."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, owner_id: Hashable, count: int) -> list[int]:
        """Give ``count`` blocks to ``owner_id``; raise PoolExhausted, taking none, if too few."""
        if count < 0:
            raise ValueError(f"count: expected at least 0 blocks, got {count}")
        if count > self.num_free:
            raise PoolExhausted(
                f"{owner_id!r}: expected {count} free blocks, got {self.num_free} "
                f"of {self.num_usable}"
            )
        block_ids = [self._free.pop() for _ in range(count)]
        self._owner.update(dict.fromkeys(block_ids, owner_id))
        return block_ids

    def free(self, owner_id: Hashable, block_ids: Sequence[int]) -> None:
        """Take ``block_ids`` back from ``owner_id``.

        Raises IntegrityError, and frees none, where a block is not owned by ``owner_id`` (free
        already, another's, the null block, unknown) or is listed twice.
        """
        seen: set[int] = set()
        for block in block_ids:
            self._check_owned(block, owner_id)
            if block in seen:
                raise IntegrityError(f"block {block}: freed twice by {owner_id!r} in one call")
            seen.add(block)
        for block in reversed(block_ids):
            del self._owner[block]
            self._free.append(block)

    def check_integrity(self, owners: Mapping[Hashable, Sequence[int]]) -> None:
        """Raise IntegrityError unless every usable block is free once or owned as ``owners`` says.

        ``owners`` maps every owner to all blocks that it believes to own. O(num_blocks).
        """
        places: dict[int, str] = {}
        for block, place in self._all_places(owners):
            if not NULL_BLOCK < block < self.num_blocks:
                raise IntegrityError(f"block {block}: {place}, but is no usable block")
            if block in places:
                raise IntegrityError(f"block {block}: {place}, but also {places[block]}")
            places[block] = place
        for owner_id, block_ids in owners.items():
            for block in block_ids:
                self._check_owned(block, owner_id)
        for block in range(NULL_BLOCK + 1, self.num_blocks):
            if block not in places:
                holder = f"owned by {self._owner[block]!r}" if block in self._owner else "lost"
                raise IntegrityError(f"block {block}: {holder}, but not free and in no list")

    def _all_places(self, owners: Mapping[Hashable, Sequence[int]]) -> Iterator[tuple[int, str]]:
        for block in self._free:
            yield block, "in the free list"
        for owner_id, block_ids in owners.items():
            for block in block_ids:
                yield block, f"listed by {owner_id!r}"

    def _check_owned(self, block: int, owner_id: Hashable) -> None:
        if block == NULL_BLOCK:
            raise IntegrityError(f"block {block}: the null block, {owner_id!r} cannot own it")
        if block not in self._owner:
            raise IntegrityError(f"block {block}: expected owner {owner_id!r}, got a free block")
        if self._owner[block] != owner_id:
            raise IntegrityError(
                f"block {block}: expected owner {owner_id!r}, got {self._owner[block]!r}"
            )
