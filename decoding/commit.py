"""The output contract: which of a step's tokens a request keeps, and whether it ends there.

A step yields the accepted drafts plus one token. However the steps cut the stream, the kept tokens
and the finish reason are those of decoding one token at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Commit:
    """Tokens that a step adds to a request's output, and why the request ends, if it does.

    stop_reason: the stop id or stop string that ended it; None for a limit.
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


def commit(
    tokens: Sequence[int],
    *,
    num_output: int,
    num_context: int,
    max_tokens: int,
    max_context: int,
    stop_ids: Container[int],
    push: Callable[[int], str | None] | None = None,
) -> Commit:
    """Keep ``tokens`` up to the first that ends the request.

    A request ends with a stop id, with the token that completes a stop string, with output number
    ``max_tokens``, or when its context holds ``max_context`` tokens; that token is kept. Of several
    reasons at one token the first in this order is reported.

    push: called once with each kept token, in order; returns the stop string that it completes
        (``OutputText.push``). A stop id is pushed too, and its text is cut where it completes one.

    **Units**: all integers are tokens. ``num_output`` and ``num_context`` (prompt and output) are
    counts before this step.

    Raises ValueError for no tokens, a negative count, or a request that had ended before.
    """
    if not tokens:
        raise ValueError("tokens: expected at least one, got none")
    _check_counts(num_output=num_output, num_context=num_context)
    if num_output >= max_tokens or num_context >= max_context:
        raise ValueError(
            f"request had ended: {num_output} of {max_tokens} outputs, "
            f"{num_context} of {max_context} context tokens"
        )
    for count, token in enumerate(tokens, start=1):
        outputs = num_output + count
        stop_string = push(token) if push is not None else None
        if token in stop_ids:
            return Commit(tuple(tokens[:count]), "stop", token)
        if stop_string is not None:
            return Commit(tuple(tokens[:count]), "stop", stop_string)
        if outputs >= max_tokens or num_context + count >= max_context:
            return Commit(tuple(tokens[:count]), "length")
    return Commit(tuple(tokens))


def max_drafts(
    k: int, *, num_output: int, max_tokens: int, num_context: int, max_context: int
) -> int:
    """Drafts worth verifying: ``k``, cut so that drafts plus one token can all be kept; >= 0."""
    _check_counts(k=k, num_output=num_output, num_context=num_context)
    return max(0, min(k, max_tokens - num_output - 1, max_context - num_context - 1))


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 0:
            raise ValueError(f"{name}: expected at least 0, got {count}")
