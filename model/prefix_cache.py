"""Which full blocks of tokens the KV pool still holds: a chain of nodes from the first block on.

A node is found by its parent node and the tokens of its block, so a hit has compared every token
from the first on: two contexts share a block only where all tokens before it agree, too. The tokens
are compared, not a hash of them.

The pool evicts the least recently used block that nobody owns and tells the cache, which removes
its node. A node whose parent is gone cannot be reached; its block stays evictable and goes in its
turn. ``BlockPool.free`` returns the end of a chain first, so this is rare.

**Units**: block ids; ``max_tokens`` is tokens.
**Cost**: O(block_size) a block for ``match`` and ``insert``, O(1) for an eviction.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from pagedraft.model.block_pool import BlockPool, IntegrityError

_Key = tuple[int, Hashable, tuple[int, ...]]  # the parent's serial, the salt of a root, tokens
_ROOT = 0  # the serial that stands for "no parent"


@dataclass(eq=False, slots=True)
class Node:
    """A full block whose content is known.

    serial: its own number, never given again, so the children of a removed node stay unreachable.
    has_draft: whether the draft model's KV of the block is computed, not the target's alone.
    """

    block_id: int
    serial: int
    key: _Key
    has_draft: bool = False


class PrefixCache:
    """Knows the content of blocks of one pool, and keeps them there while there is room."""

    def __init__(self, pool: BlockPool) -> None:
        if pool.on_evict is not None:
            raise ValueError("pool: expected one without a prefix cache, got one that has another")
        self._pool = pool
        self._nodes: dict[_Key, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._last_serial = _ROOT
        pool.on_evict = self._remove

    def __len__(self) -> int:
        """Number of blocks known."""
        return len(self._nodes)

    def match(self, token_ids: Sequence[int], max_tokens: int, salt: Hashable = None) -> list[Node]:
        """Nodes of the longest known run of full blocks from the first token on.

        max_tokens: the blocks cover at most so many tokens. salt: contexts of different salts
        never match. The blocks may be nobody's: ``share`` them before the next ``allocate``.
        """
        size = self._pool.block_size
        nodes: list[Node] = []
        for end in range(size, min(max_tokens, len(token_ids)) + 1, size):
            parent = nodes[-1] if nodes else None
            node = self._nodes.get(_key(parent, token_ids[end - size : end], salt))
            if node is None:
                break
            nodes.append(node)
        return nodes

    def insert(
        self, parent: Node | None, tokens: Sequence[int], block_id: int, salt: Hashable = None
    ) -> Node:
        """Make an owned block, full of ``tokens`` after ``parent`` (None: at the start), known.

        Where the content is known already its node is returned and ``block_id`` stays private to
        its owner; the caller tells by ``node.block_id``. salt: counts where there is no parent.
        """
        if len(tokens) != self._pool.block_size:
            raise ValueError(
                f"tokens: expected a full block of {self._pool.block_size}, got {len(tokens)}"
            )
        key = _key(parent, tokens, salt)
        node = self._nodes.get(key)
        if node is None:
            self._pool.keep(block_id)
            self._last_serial += 1
            node = Node(block_id, self._last_serial, key)
            self._nodes[key] = self._by_block[block_id] = node
        return node

    def clear(self) -> None:
        """Forget all content; blocks that nobody owns become free."""
        for block in self._by_block:
            self._pool.forget(block)
        self._nodes.clear()
        self._by_block.clear()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the pool keeps exactly the blocks of the nodes."""
        for block in sorted(self._pool.kept ^ self._by_block.keys()):
            who = "the cache" if block in self._by_block else "the pool"
            raise IntegrityError(f"block {block}: kept by {who} alone")
        for node in self._nodes.values():
            if self._by_block.get(node.block_id) is not node:
                raise IntegrityError(f"block {node.block_id}: node {node.serial} is not its own")

    def _remove(self, block: int) -> None:
        del self._nodes[self._by_block.pop(block).key]


def _key(parent: Node | None, tokens: Sequence[int], salt: Hashable) -> _Key:
    return (_ROOT, salt, tuple(tokens)) if parent is None else (parent.serial, None, tuple(tokens))
