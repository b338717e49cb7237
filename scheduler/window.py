"""Blocks left of a sliding window: which they are, and giving them back.

Where every layer of every model has a window, no later query sees what lies left of it. Such blocks
go back to the pool, and null blocks stand for them in the request's table, which keeps its length:
the index of a token's block is its position over the block size, as ever.

Queries come at ``num_written`` and after, drafts and retries too, so the query at ``num_written``
sees furthest to the left: ``window`` tokens, its own included.
"""

from __future__ import annotations

from pagedraft.model.block_pool import NULL_BLOCK, BlockPool
from pagedraft.scheduler.request import Request


class Window:
    """The window of one engine, and how many blocks each request has given back.

    num_tokens: what a query sees in any layer of any model, its own token included; None: all.
    has_draft: whether a draft model reads the same blocks.
    """

    def __init__(self, pool: BlockPool, num_tokens: int | None, has_draft: bool = False) -> None:
        if num_tokens is not None and num_tokens < 1:
            raise ValueError(f"window: expected at least 1 token or None, got {num_tokens}")
        self.num_tokens = num_tokens
        self.has_draft = has_draft
        self._pool = pool
        self._num_released: dict[Request, int] = {}

    def most_blocks(self, num_tokens_total: int, max_span: int) -> int:
        """Most blocks that a request of so many tokens owns at once.

        max_span: most tokens that it feeds in a step. A draft model may lag by any number of
        tokens, so with one the window bounds nothing.
        """
        blocks = self._pool.blocks_for(num_tokens_total)
        if self.num_tokens is None or self.has_draft:
            return blocks
        # An interval of n tokens touches one block more than n - 1 tokens fill.
        return min(blocks, self._pool.blocks_for(self.num_tokens - 1 + max_span - 1) + 1)

    def left_edge(self, num_written: int, num_draft_written: int) -> int:
        """Blocks that no query of either model sees after so many written tokens."""
        if self.num_tokens is None:
            return 0
        first_query = min(num_written, num_draft_written) if self.has_draft else num_written
        return max(0, first_query - self.num_tokens + 1) // self._pool.block_size

    def num_released(self, request: Request) -> int:
        """Null blocks at the beginning of a request's table."""
        return self._num_released.get(request, 0)

    def open(self, request: Request, num_released: int) -> None:
        """Begin a request's empty table with null blocks."""
        if num_released:
            request.block_ids.extend([NULL_BLOCK] * num_released)
            self._num_released[request] = num_released

    def release(self, request: Request, end: int) -> None:
        """Give back the blocks before index ``end``. O(released blocks)."""
        first, block_ids = self.num_released(request), request.block_ids
        self._pool.free(request.request_id, block_ids[first:end])
        block_ids[first:end] = [NULL_BLOCK] * (end - first)
        self._num_released[request] = end

    def forget(self, request: Request) -> None:
        """Drop what is known of a request whose table is empty or will be."""
        self._num_released.pop(request, None)
