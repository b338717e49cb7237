"""How many drafts each running request could keep in the next step."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from pagedraft.scheduler.request import OFF, PROMPT, Request

# A request that decodes, and the most drafts to ask for: at most 0 for one that must not draft.
Decoding = tuple[Request, int]


def reset(request: Request) -> None:
    """Take back what was decided for the last step."""
    request.num_drafts = 0
    if request.offers:
        request.offers = {}
    request.choice = PROMPT if request.drafters else OFF


def begin_decision(running: Seq[Request], k: int) -> list[Decoding]:
    """Take back the decisions of the last step; return the requests that decode, with limits.

    The limit is ``max_drafts`` of the output contract without a call for each number: this is done
    for every request in every step. k: drafts of a request that does not ask for a number.
    """
    decoding = []
    for request in running:
        reset(request)
        sequence = request.sequence
        num_tokens = len(sequence.token_ids)
        if num_tokens - sequence.num_written != 1:
            continue
        limit = 0
        if request.drafters:
            own_k = request.params.k
            limit = k if own_k is None else own_k
            num_left = request.max_total - num_tokens - 1
            limit = num_left if num_left < limit else limit
        decoding.append((request, limit))
    return decoding
