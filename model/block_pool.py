"""Who owns which block of the KV pool: a free list, a table of owners and what can be evicted.

A usable block is in one place: *free*, *owned* by one or more requests, or *evictable*: nobody
owns it, but somebody knows its content (``keep``) and it stays readable until the room is needed.

**Units**: every integer here is a block id or a number of blocks, but ``block_size`` and the
argument of ``blocks_for``, which are tokens. Block 0 is the *null block*: padded rows of a step
carry its slots, nobody writes there, and it is never handed out. In a table of a request's blocks
it stands for one that was given back because a sliding window has left it behind.

**Cost**: O(1) a block for all but ``check_integrity``, which walks the whole pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

NULL_BLOCK = 0


class PoolExhausted(RuntimeError):
    """Fewer blocks are free than were asked for; none was taken."""


class IntegrityError(RuntimeError):
    """A block is in two places, has the wrong owners, or is lost; the message names it."""


class BlockPool:
    """Hands out blocks ``1..num_blocks-1``: the free block freed last first, then evictable ones.

    ``num_blocks`` counts the null block too: it is the size of the pool's tensors.
    ``on_evict`` is called with each kept block that ``allocate`` hands out anew; whoever keeps
    blocks sets it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks: expected the null block and more, got {num_blocks}")
        if block_size < 1:
            raise ValueError(f"block_size: expected at least 1 token, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_evict: Callable[[int], None] | None = None
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))  # a stack: block 1 is on top
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._owners: dict[int, set[Hashable]] = {}  # owned blocks only
        self._kept: set[int] = set()

    @property
    def num_usable(self) -> int:
        """Blocks that requests can own: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can hand out now: free and evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_evictable(self) -> int:
        """Blocks that nobody owns and whose content is kept."""
        return len(self._evictable)

    @property
    def kept(self) -> frozenset[int]:
        """All blocks whose content is kept, owned or evictable. O(kept blocks)."""
        return frozenset(self._kept)

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, owner_id: Hashable, count: int) -> list[int]:
        """Give ``count`` blocks to ``owner_id`` alone, evicting the least recently used if need be.

        Raises PoolExhausted, taking none, if fewer can be had.
        """
        if count < 0:
            raise ValueError(f"count: expected at least 0 blocks, got {count}")
        if count > self.num_free:
            raise PoolExhausted(
                f"{owner_id!r}: expected {count} free blocks, got {self.num_free} "
                f"of {self.num_usable}"
            )
        block_ids = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in block_ids:
            self._owners[block] = {owner_id}
        return block_ids

    def share(self, owner_id: Hashable, block_ids: Sequence[int]) -> None:
        """Make ``owner_id`` one more owner of blocks that are owned or evictable.

        Raises IntegrityError, and shares none, where a block is free, the null block, unknown,
        owned by ``owner_id`` already or listed twice.
        """
        self._check_distinct(block_ids, f"shared twice with {owner_id!r}")
        for block in block_ids:
            if block not in self._owners and block not in self._evictable:
                raise IntegrityError(
                    f"block {block}: expected a block in use to share with {owner_id!r}, "
                    f"got {self._state(block)}"
                )
            if owner_id in self._owners.get(block, ()):
                raise IntegrityError(f"block {block}: {owner_id!r} owns it already")
        for block in block_ids:
            self._evictable.pop(block, None)
            self._owners.setdefault(block, set()).add(owner_id)

    def free(self, owner_id: Hashable, block_ids: Sequence[int]) -> None:
        """Take ``block_ids`` back from ``owner_id``; those of no other owner can be handed out.

        The last block goes first, so the end of a chain of kept blocks is evicted before its
        beginning. Null blocks are passed over. Raises IntegrityError, and frees none, where a
        block is not owned by ``owner_id`` (free already, another's, unknown) or is listed twice.
        """
        block_ids = _owned(block_ids)
        for block in block_ids:
            self._check_owned(block, owner_id)
        self._check_distinct(block_ids, f"freed twice by {owner_id!r}")
        for block in reversed(block_ids):
            owners = self._owners[block]
            owners.remove(owner_id)
            if not owners:
                del self._owners[block]
                self._release(block)

    def keep(self, block: int) -> None:
        """Let an owned block become evictable, not free, when its last owner returns it."""
        if block not in self._owners or block in self._kept:
            state = "a kept one" if block in self._kept else self._state(block)
            raise IntegrityError(f"block {block}: expected an owned block to keep, got {state}")
        self._kept.add(block)

    def forget(self, block: int) -> None:
        """Undo ``keep``: the content is not needed any more; an evictable block becomes free."""
        if block not in self._kept:
            raise IntegrityError(
                f"block {block}: expected a kept block to forget, got {self._state(block)}"
            )
        self._kept.remove(block)
        if block in self._evictable:
            del self._evictable[block]
            self._free.append(block)

    def check_integrity(self, owners: Mapping[Hashable, Sequence[int]]) -> None:
        """Raise IntegrityError unless every usable block is free once, evictable or as owned.

        ``owners`` maps every owner to its table: all blocks that it believes to own, after null
        blocks or none. O(blocks and owners).
        """
        places: dict[int, str] = {}
        for block, place in self._unowned_places():
            self._check_usable(block, place)
            if block in places:
                raise IntegrityError(f"block {block}: {place}, but also {places[block]}")
            places[block] = place
        for owner_id, table in owners.items():
            block_ids = _owned(table)
            _check_null_blocks(owner_id, table, len(table) - len(block_ids))
            for block in block_ids:
                self._check_usable(block, f"listed by {owner_id!r}")
                if block in places:
                    raise IntegrityError(
                        f"block {block}: listed by {owner_id!r}, but also {places[block]}"
                    )
                self._check_owned(block, owner_id)
            self._check_distinct(block_ids, f"listed twice by {owner_id!r}")
        self._check_nothing_is_lost(places, {owner: set(ids) for owner, ids in owners.items()})
        self._check_kept()

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        self._kept.remove(block)
        if self.on_evict is not None:
            self.on_evict(block)
        return block

    def _release(self, block: int) -> None:
        if block in self._kept:
            self._evictable[block] = None  # at the end: the most recently used
        else:
            self._free.append(block)

    def _unowned_places(self) -> Iterator[tuple[int, str]]:
        for block in self._free:
            yield block, "in the free list"
        for block in self._evictable:
            yield block, "evictable"

    def _state(self, block: int) -> str:
        """What a block is, for messages."""
        if block == NULL_BLOCK:
            return "the null block"
        if block in self._owners:
            return ", ".join(sorted(map(repr, self._owners[block])))
        if block in self._evictable:
            return "an evictable block"
        return "a free block" if 0 < block < self.num_blocks else "no block of the pool"

    def _check_owned(self, block: int, owner_id: Hashable) -> None:
        if owner_id not in self._owners.get(block, ()):
            raise IntegrityError(
                f"block {block}: expected owner {owner_id!r}, got {self._state(block)}"
            )

    def _check_usable(self, block: int, place: str) -> None:
        if not NULL_BLOCK < block < self.num_blocks:
            raise IntegrityError(f"block {block}: {place}, but is no usable block")

    def _check_distinct(self, block_ids: Sequence[int], problem: str) -> None:
        if len(set(block_ids)) < len(block_ids):
            block = next(block for block in block_ids if block_ids.count(block) > 1)
            raise IntegrityError(f"block {block}: {problem}")

    def _check_nothing_is_lost(
        self, places: Mapping[int, str], listed: Mapping[Hashable, set[int]]
    ) -> None:
        for block in range(NULL_BLOCK + 1, self.num_blocks):
            owners = self._owners.get(block, set())
            for owner_id in owners:
                if block not in listed.get(owner_id, ()):
                    raise IntegrityError(
                        f"block {block}: owned by {owner_id!r}, but not free and not in its list"
                    )
            if not owners and block not in places:
                raise IntegrityError(f"block {block}: lost, not free, evictable or owned")

    def _check_kept(self) -> None:
        """A kept block has an owner or is evictable, and only kept blocks are evictable."""
        for block in sorted(self._kept - self._owners.keys() - self._evictable.keys()):
            raise IntegrityError(f"block {block}: kept, but neither owned nor evictable")
        for block in sorted(self._evictable.keys() - self._kept):
            raise IntegrityError(f"block {block}: evictable, but not kept")


def _owned(table: Sequence[int]) -> Sequence[int]:
    """A table without its null blocks."""
    return [block for block in table if block != NULL_BLOCK] if NULL_BLOCK in table else table


def _check_null_blocks(owner_id: Hashable, table: Sequence[int], count: int) -> None:
    if any(block != NULL_BLOCK for block in table[:count]):
        raise IntegrityError(
            f"block {NULL_BLOCK}: the null block, listed by {owner_id!r} after one that it owns"
        )
