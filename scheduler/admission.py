"""Whether an engine can run a request at all: checked before it is queued."""

from __future__ import annotations

from pagedraft.model.block_pool import BlockPool
from pagedraft.model.config import ModelConfig
from pagedraft.scheduler.pace import check_target
from pagedraft.scheduler.plan import fits_pool
from pagedraft.scheduler.request import Request
from pagedraft.scheduler.window import Window


def check_request(
    request: Request,
    config: ModelConfig,
    pool: BlockPool,
    window: Window | None = None,
    max_span: int = 1,
) -> None:
    """Raise ValueError or TypeError, naming what is wrong, unless the request can run here.

    window: where there is one, what a request owns at once is less than all of its blocks.
    max_span: most tokens that one request feeds in a step; counts only with a window.
    """
    _check_fields(request)
    _check_is_new(request)
    sequence, vocab_size = request.sequence, config.vocab_size
    if not sequence.token_ids:
        raise ValueError("prompt: expected at least one token, got none")
    if min(sequence.token_ids) < 0 or max(sequence.token_ids) >= vocab_size:
        bad = [i for i, token in enumerate(sequence.token_ids) if not 0 <= token < vocab_size]
        raise ValueError(
            f"prompt[{bad[0]}]: expected a token id from 0 to {vocab_size - 1}, "
            f"got {sequence.token_ids[bad[0]]}"
        )
    if request.max_context > config.max_positions:
        raise ValueError(
            f"max_context: expected at most {config.max_positions}, got {request.max_context}"
        )
    if sequence.num_tokens >= request.max_context:
        raise ValueError(
            f"prompt: {sequence.num_tokens} tokens leave no room to generate in a context of "
            f"{request.max_context}"
        )
    total = min(sequence.num_tokens + request.params.max_tokens, request.max_context)
    if window is not None and window.most_blocks(total, max_span) <= pool.num_usable:
        return
    if not fits_pool(total, pool):
        raise ValueError(
            f"prompt: {sequence.num_tokens} tokens and up to {total - sequence.num_tokens} new "
            f"ones need {pool.blocks_for(total)} KV blocks of {pool.block_size} "
            f"tokens; the pool has {pool.num_usable}"
        )


def _check_is_new(request: Request) -> None:
    """Raise unless nobody runs the request yet, and somebody does or did its parent."""
    if request.arrival >= 0 or request.row >= 0 or request.block_ids:
        raise ValueError(f"request {request.request_id!r}: it was submitted before")
    parent = request.parent
    if parent is not None and parent.arrival < 0 and not parent.finished:
        raise ValueError(
            f"request {request.request_id!r}: expected its parent {parent.request_id!r} to be "
            "submitted before it"
        )


def _check_fields(request: Request) -> None:
    """Raise unless what the submitter set of the request itself, its prompt apart, makes sense."""
    if request.finished:
        raise ValueError(f"request {request.request_id!r}: it has ended: {request.finish_reason}")
    if isinstance(request.priority, bool) or not isinstance(request.priority, int):
        raise TypeError(f"priority: expected an integer, got {request.priority!r}")
    for name in ("tenant", "cache_salt"):
        value = getattr(request, name)
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name}: expected a string or None, got {value!r}")
    for name in ("ttft_ms", "itl_ms"):
        check_target(name, getattr(request, name))
    parent = request.parent
    if parent is not None and request.cache_salt not in (None, parent.cache_salt):
        raise ValueError(
            f"cache_salt: expected that of the parent, {parent.cache_salt!r}, or None, "
            f"got {request.cache_salt!r}"
        )
