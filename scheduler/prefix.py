"""What a request need not compute: blocks of the prefix cache, and its parent's blocks for a fork.

A hit and a fork are the same to the rest of the engine: the request starts with blocks and with
``num_written`` above 0. It writes at positions from ``num_written`` on, and shared blocks are full
of tokens before that, so no shared block is written by the target again. The draft model may lack
the KV of a shared block and write it there while catching up: allowed, because in exact mode the
bits are the same whoever writes them.

Counts are tokens, but ``num_marked``, which is blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedraft.model.block_pool import BlockPool
from pagedraft.model.prefix_cache import Node, PrefixCache
from pagedraft.scheduler.request import Request


@dataclass
class _Chain:
    """A live request's part of the cache.

    nodes: one for each of its first blocks, as far as they are published. A node's block may be
        another than the request's: both wrote the same tokens at the same time.
    num_marked: how many of them were looked at for the draft model's KV.
    num_lookup, num_hit: what its admission added to the counts of all.
    """

    nodes: list[Node] = field(default_factory=list)
    num_marked: int = 0
    num_lookup: int = 0
    num_hit: int = 0


class Prefixes:
    """Attaches waiting requests to computed blocks, and publishes what running ones compute.

    is_enabled: whether there is a prefix cache; forks share their parent's blocks without one, too.
    num_lookup_tokens, num_hit_tokens: tokens of the admitted requests that were looked up in the
        cache, and how many of these it had.
    """

    def __init__(self, pool: BlockPool, is_enabled: bool = True) -> None:
        self.num_lookup_tokens = 0
        self.num_hit_tokens = 0
        self._pool = pool
        self._cache = PrefixCache(pool) if is_enabled else None
        self._chains: dict[Request, _Chain] = {}
        self._forks: list[tuple[int, Request, int]] = []  # source block, fork, index of its block

    def is_ready(self, request: Request) -> bool:
        """False for a fork whose parent lives and has not written the prompt up to its last token.

        A preempted parent counts as one that has yet to write it: it comes back before its forks.
        """
        parent = request.parent
        return parent is None or parent.finished or parent.num_written >= _num_shared(request)

    def attach(self, request: Request) -> None:
        """Give a waiting request, which owns no blocks, those that are computed for its tokens.

        Sets ``block_ids``, ``num_written`` and ``num_draft_written``. At least the last token stays
        pending: its logits are needed. Takes no free block, so it cannot fail.
        """
        nodes = self._match(request)
        parent = request.parent
        num_hit = len(nodes) * self._pool.block_size
        if parent is not None and parent.block_ids and num_hit <= _num_shared(request):
            self._fork(request, parent)
        else:
            self._adopt(request, nodes)

    def detach(self, request: Request) -> None:
        """Undo ``attach`` for a request that is not admitted; blocks granted since go back, too."""
        self._forks = [fork for fork in self._forks if fork[1] is not request]
        self._pool.free(request.request_id, request.block_ids)
        request.block_ids.clear()
        request.sequence.drop_kv()
        chain = self._chains.pop(request, _Chain())
        self.num_lookup_tokens -= chain.num_lookup
        self.num_hit_tokens -= chain.num_hit

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, destination) blocks that this step's forks need copied, in all KV pools.

        To be called after each plan and copied before anything is written: nothing ends or is
        preempted in between, because a plan that admits preempts nobody, so each source is still
        the parent's. Destinations are new blocks; a source is of a request that ran before.
        """
        copies = [(source, fork.block_ids[index]) for source, fork, index in self._forks]
        self._forks.clear()
        return copies

    def publish(self, request: Request) -> None:
        """Make the blocks that have become full known; to be called after each step, and at the end
        of a request before its blocks are freed. O(new blocks).

        Full of committed tokens that the target has written: ``num_written`` counts just these.
        """
        chain = self._chains.get(request)
        if chain is None or self._cache is None:
            return
        sequence, size = request.sequence, self._pool.block_size
        for index in range(len(chain.nodes), sequence.num_written // size):
            parent = chain.nodes[-1] if chain.nodes else None
            tokens = sequence.token_ids[index * size : (index + 1) * size]
            chain.nodes.append(self._cache.insert(parent, tokens, sequence.block_ids[index]))
        num_drafted = min(sequence.num_draft_written // size, len(chain.nodes))
        for index in range(chain.num_marked, num_drafted):
            node = chain.nodes[index]
            node.has_draft |= node.block_id == sequence.block_ids[index]
        chain.num_marked = max(chain.num_marked, num_drafted)

    def forget(self, request: Request) -> None:
        """Drop what is known of a request that has ended or was preempted. A no-op otherwise."""
        self._chains.pop(request, None)

    def clear(self) -> None:
        """Forget all content; requests that run now publish no more, those admitted later do."""
        self._chains.clear()
        if self._cache is not None:
            self._cache.clear()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless cache and pool agree on which blocks are kept."""
        if self._cache is not None:
            self._cache.check_integrity()

    def _match(self, request: Request) -> list[Node]:
        if self._cache is None:
            return []
        return self._cache.match(request.sequence.token_ids, request.num_tokens - 1)

    def _adopt(self, request: Request, nodes: list[Node]) -> None:
        """Start with the blocks of ``nodes``."""
        if self._cache is None:
            return
        sequence, size = request.sequence, self._pool.block_size
        num_drafted = next(
            (index for index, node in enumerate(nodes) if not node.has_draft), len(nodes)
        )
        self._share(request, [node.block_id for node in nodes])
        sequence.num_written = len(nodes) * size
        sequence.num_draft_written = num_drafted * size
        chain = _Chain(nodes, num_drafted, request.num_tokens, sequence.num_written)
        self._chains[request] = chain
        self.num_lookup_tokens += chain.num_lookup
        self.num_hit_tokens += chain.num_hit

    def _fork(self, request: Request, parent: Request) -> None:
        """Start with the parent's blocks of the prompt but its last token.

        The last of them may be partly full: a copy of it, because both write on in it.
        """
        sequence, num_shared = request.sequence, _num_shared(request)
        num_full, rest = divmod(num_shared, self._pool.block_size)
        self._share(request, parent.block_ids[:num_full])
        if rest:
            self._forks.append((parent.block_ids[num_full], request, num_full))
        sequence.num_written = num_shared
        sequence.num_draft_written = min(parent.sequence.num_draft_written, num_shared)
        chain = self._chains.get(parent)
        if chain is not None:
            self._chains[request] = _Chain(chain.nodes[:num_full])

    def _share(self, request: Request, block_ids: list[int]) -> None:
        self._pool.share(request.request_id, block_ids)
        request.block_ids.extend(block_ids)


def _num_shared(fork: Request) -> int:
    """Tokens that a fork takes from its parent: the prompt but its last, whose logits it needs."""
    return fork.sequence.num_prompt - 1
