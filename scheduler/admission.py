"""Whether an engine can run a request at all: checked before it is queued."""

from __future__ import annotations

from pagedraft.model.block_pool import BlockPool
from pagedraft.scheduler.plan import fits_pool
from pagedraft.scheduler.request import Request


def check_request(request: Request, vocab_size: int, pool: BlockPool) -> None:
    """Raise ValueError or TypeError, naming what is wrong, unless the request can run here."""
    if request.finished:
        raise ValueError(f"request {request.request_id!r}: it has ended: {request.finish_reason}")
    if isinstance(request.priority, bool) or not isinstance(request.priority, int):
        raise TypeError(f"priority: expected an integer, got {request.priority!r}")
    sequence = request.sequence
    if not sequence.token_ids:
        raise ValueError("prompt: expected at least one token, got none")
    for index, token in enumerate(sequence.token_ids):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"prompt[{index}]: expected a token id from 0 to {vocab_size - 1}, got {token}"
            )
    if sequence.num_tokens >= request.max_context:
        raise ValueError(
            f"prompt: {sequence.num_tokens} tokens leave no room to generate in a context of "
            f"{request.max_context}"
        )
    total = min(sequence.num_tokens + request.params.max_tokens, request.max_context)
    if not fits_pool(total, pool):
        raise ValueError(
            f"prompt: {sequence.num_tokens} tokens and up to {total - sequence.num_tokens} new "
            f"ones need {pool.blocks_for(total)} KV blocks of {pool.block_size} "
            f"tokens; the pool has {pool.num_usable}"
        )
