"""What a request need not compute: cached blocks, its parent's for a fork, its own from the host.

A hit and a fork are the same to the rest of the engine: the request starts with blocks and with
``num_written`` above 0. It writes at positions from ``num_written`` on, and shared blocks are full
of tokens before that, so no shared block is written by the target again. The draft model may lack
the KV of a shared block and write it there while catching up: allowed, because in exact mode the
bits are the same whoever writes them.

Counts are tokens, but those of a ``_Chain``'s nodes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from pagedraft.model.block_pool import BlockPool
from pagedraft.model.prefix_cache import Node, PrefixCache
from pagedraft.scheduler.request import Request
from pagedraft.scheduler.swap import Saved, SwapSpace
from pagedraft.scheduler.window import Window


@dataclass(slots=True)
class _Chain:
    """A live request's part of the cache.

    nodes: one for each of its first blocks, as far as they are published. A node's block may be
        another than the request's: both wrote the same tokens at the same time.
    num_marked: how many of them were looked at for the draft model's KV.
    num_lookup, num_hit: what its admission added to the counts of all.
    next_written, next_drafted: tokens at which there is more to publish or to mark.
    """

    nodes: list[Node] = field(default_factory=list)
    num_marked: int = 0
    num_lookup: int = 0
    num_hit: int = 0
    next_written: int = 0
    next_drafted: int = 0


class Prefixes:
    """Attaches waiting requests to computed blocks, and publishes what running ones compute.

    is_enabled: whether there is a prefix cache; forks share their parent's blocks without one, too.
    window, has_draft: see Window; the attribute ``window`` is one.
    swap: where the KV of preempted requests may wait (swap.py); None: it is computed anew.
    num_lookup_tokens, num_hit_tokens: tokens of the admitted requests that were looked up in the
        cache, and how many of these it had.
    """

    def __init__(
        self,
        pool: BlockPool,
        is_enabled: bool = True,
        *,
        window: int | None = None,
        has_draft: bool = False,
        swap: SwapSpace | None = None,
    ) -> None:
        self.num_lookup_tokens = 0
        self.num_hit_tokens = 0
        self.window = Window(pool, window, has_draft)
        self.swap = swap
        self._pool = pool
        self._cache = PrefixCache(pool) if is_enabled else None
        self._chains: dict[Request, _Chain] = {}
        self._forks: list[tuple[int, Request, int]] = []  # source block, fork, index of its block
        self._resumes: dict[Request, int] = {}  # index of the first block to copy back

    def is_ready(self, request: Request) -> bool:
        """False for a fork whose parent lives and has not written the prompt up to its last token.

        A preempted parent counts as one that has yet to write it: it comes back before its forks.
        """
        parent = request.parent
        return parent is None or parent.finished or parent.num_written >= _num_shared(request)

    def attach(self, request: Request) -> None:
        """Give a waiting request, which owns no blocks, those that are computed for its tokens.

        Sets ``block_ids``, ``num_written`` and ``num_draft_written``. At least the last token stays
        pending: its logits are needed. Takes no free block, so it cannot fail. KV that waits on the
        host counts as written although its blocks are yet to be granted: see ``restore``.
        """
        nodes = self._match(request)
        num_hit = len(nodes) * self._pool.block_size
        num_forked = self._num_forkable(request)
        saved = None if self.swap is None else self.swap.find(request, max(num_hit, num_forked))
        if saved is None and request.parent is not None and num_hit <= num_forked:
            self._fork(request, request.parent)
        else:
            self._adopt(request, nodes, saved)

    def detach(self, request: Request) -> None:
        """Undo ``attach`` for a request that is not admitted; blocks granted since go back, too."""
        self._forks = [fork for fork in self._forks if fork[1] is not request]
        chain = self._chains.get(request, _Chain())
        self.num_lookup_tokens -= chain.num_lookup
        self.num_hit_tokens -= chain.num_hit
        self._give_back(request)
        request.sequence.drop_kv()

    def retire(self, request: Request, save: bool = True) -> None:
        """Preempt: take a running request's blocks, and copy their KV to the host if that pays.

        save: False where a step failed before the request's own KV was complete.
        """
        if save and self.swap is not None and request not in self._resumes:
            self.swap.save(request, keep=self._resumes)
        self._give_back(request)
        request.drop_kv()

    def drop_saved(self, request: Request) -> None:
        """Forget KV on the host that could not be copied back: it is computed again."""
        self._resumes.pop(request, None)
        if self.swap is not None:
            self.swap.drop(request)

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, destination) blocks that this step's forks need copied, in all KV pools.

        To be called after each plan and copied before anything is written: nothing ends or is
        preempted in between, because a plan that admits preempts nobody, so each source is still
        the parent's. Destinations are new blocks; a source is of a request that ran before.
        """
        copies = [(source, fork.block_ids[index]) for source, fork, index in self._forks]
        self._forks.clear()
        return copies

    def restore(self) -> None:
        """Copy admitted requests' KV back from the host: after each plan, before any is used."""
        while self._resumes and self.swap is not None:
            request, first = next(iter(self._resumes.items()))
            self.swap.restore(request, first)
            del self._resumes[request]

    def publish(self, request: Request) -> None:
        """Make the blocks that have become full known, before a request's blocks are freed.

        Full of committed tokens that the target has written: ``num_written`` counts just these.
        """
        chain = self._chains.get(request)
        if chain is not None:
            self._extend(chain, request)

    def settle(self, running: Collection[Request]) -> None:
        """After a step: publish what has become full, and give back what lies left of a window.

        O(new blocks), and next to nothing for a request without any: few rows of a step have one.
        """
        for request, chain in self._chains.items():
            sequence = request.sequence
            if (
                sequence.num_written >= chain.next_written
                or sequence.num_draft_written >= chain.next_drafted
            ):
                self._extend(chain, request)
        if self.window.num_tokens is not None:
            for request in running:
                self.release_left(request, needs_draft=bool(request.drafters))

    def release_left(self, request: Request, needs_draft: bool = True) -> None:
        """Give back the blocks that no later query of a running request sees. O(released blocks).

        needs_draft: False where the draft model will not run for the request any more.
        """
        sequence, window = request.sequence, self.window
        if window.num_tokens is None:
            return
        drafted = sequence.num_draft_written if needs_draft else sequence.num_written
        end = window.left_edge(sequence.num_written, drafted)
        if end > window.num_released(request):
            self.publish(request)
            window.release(request, end)

    def forget(self, request: Request) -> None:
        """Drop what is known of a request that was preempted, and its host copy if it has ended."""
        self._chains.pop(request, None)
        self.window.forget(request)
        if self.swap is not None and request.finished:
            self._resumes.pop(request, None)
            self.swap.drop(request)

    def clear(self) -> None:
        """Forget all content; requests that run now publish no more, those admitted later do."""
        self._chains.clear()
        if self._cache is not None:
            self._cache.clear()
        if self.swap is not None:
            self.swap.clear(keep=self._resumes)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless cache and pool agree on which blocks are kept."""
        if self._cache is not None:
            self._cache.check_integrity()

    def _match(self, request: Request) -> list[Node]:
        if self._cache is None:
            return []
        token_ids, salt = request.sequence.token_ids, _salt(request)
        return self._cache.match(token_ids, request.num_tokens - 1, salt)

    def _adopt(self, request: Request, nodes: list[Node], saved: Saved | None) -> None:
        """Start with the blocks of ``nodes``, and with what is saved of the tokens after them."""
        sequence, size = request.sequence, self._pool.block_size
        num_released = 0
        if saved is not None and len(nodes) < saved.first_block:  # all of them left of the window
            nodes, num_released = [], saved.first_block
        num_marked = next((i for i, node in enumerate(nodes) if not node.has_draft), len(nodes))
        sequence.num_written, sequence.num_draft_written = len(nodes) * size, num_marked * size
        if saved is not None:
            sequence.num_written = saved.num_written
            if num_marked == len(nodes):
                sequence.num_draft_written = max(num_marked * size, saved.num_draft_written)
        left_edge = self.window.left_edge(sequence.num_written, sequence.num_draft_written)
        num_released = max(num_released, left_edge)
        self._share(request, [node.block_id for node in nodes], num_released)
        if saved is not None:
            self._resumes[request] = len(request.block_ids)
        if self._cache is not None and len(nodes) >= num_released:
            chain = _Chain(nodes, num_marked, request.num_tokens, len(nodes) * size)
            self._start(request, chain)
            self.num_lookup_tokens += chain.num_lookup
            self.num_hit_tokens += chain.num_hit

    def _num_forkable(self, request: Request) -> int:
        """Tokens that a fork can take from its parent's blocks; -1 for none and for no fork."""
        parent, num_shared = request.parent, _num_shared(request)
        if parent is None or not parent.block_ids:
            return -1
        num_drafted = min(parent.sequence.num_draft_written, num_shared)
        is_whole = self.window.num_released(parent) <= self.window.left_edge(
            num_shared, num_drafted
        )
        return num_shared if is_whole else -1

    def _fork(self, request: Request, parent: Request) -> None:
        """Start with the parent's blocks of the prompt but its last token.

        The last of them may be partly full: a copy of it, because both write on in it.
        """
        sequence, num_shared = request.sequence, _num_shared(request)
        num_full, rest = divmod(num_shared, self._pool.block_size)
        sequence.num_written = num_shared
        sequence.num_draft_written = min(parent.sequence.num_draft_written, num_shared)
        num_released = self.window.left_edge(num_shared, sequence.num_draft_written)
        self._share(request, parent.block_ids[:num_full], num_released)
        if rest:
            self._forks.append((parent.block_ids[num_full], request, num_full))
        chain = self._chains.get(parent)
        if chain is not None:
            self._start(request, _Chain(chain.nodes[:num_full]))

    def _share(self, request: Request, block_ids: list[int], num_released: int = 0) -> None:
        """Own ``block_ids`` but the first ``num_released``, which lie left of the window."""
        self.window.open(request, num_released)
        self._pool.share(request.request_id, block_ids[num_released:])
        request.block_ids.extend(block_ids[num_released:])

    def _start(self, request: Request, chain: _Chain) -> None:
        self._chains[request] = chain
        self._extend(chain, request)

    def _extend(self, chain: _Chain, request: Request) -> None:
        """Publish and mark what is new, and set when there is more."""
        assert self._cache is not None
        if request in self._resumes:  # an interrupted step: what counts as written is not there yet
            return
        sequence, size, nodes = request.sequence, self._pool.block_size, chain.nodes
        for index in range(len(nodes), sequence.num_written // size):
            parent = nodes[-1] if nodes else None
            tokens = sequence.token_ids[index * size : (index + 1) * size]
            block = sequence.block_ids[index]
            nodes.append(self._cache.insert(parent, tokens, block, _salt(request)))
        num_drafted = min(sequence.num_draft_written // size, len(nodes))
        for index in range(chain.num_marked, num_drafted):
            nodes[index].has_draft |= nodes[index].block_id == sequence.block_ids[index]
        chain.num_marked = max(chain.num_marked, num_drafted)
        chain.next_written = (len(nodes) + 1) * size
        chain.next_drafted = (chain.num_marked + 1) * size

    def _give_back(self, request: Request) -> None:
        self._pool.free(request.request_id, request.block_ids)
        request.block_ids.clear()
        self._chains.pop(request, None)
        self.window.forget(request)
        self._resumes.pop(request, None)


def _num_shared(fork: Request) -> int:
    """Tokens that a fork takes from its parent: the prompt but its last, whose logits it needs."""
    return fork.sequence.num_prompt - 1


def _salt(request: Request) -> str | None:
    """What its blocks are found under: a fork's are its parent's."""
    return request.cache_salt if request.parent is None else request.parent.cache_salt
