"""Calling a drafter that may be anybody's code: its failures end drafting, never a request."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from pagedraft.decoding.drafters.base import Drafter
from pagedraft.decoding.sequence import Sequence


def propose_safely(
    drafter: Drafter, sequences: Seq[Sequence], num_drafts: Seq[int], vocab_size: int
) -> tuple[list[list[int]], dict[int, str]]:
    """Return usable drafts a row, and an error message for each row whose drafter failed.

    A batch that raises is asked again row by row, so that only the guilty rows lose their drafts.
    Drafts end before the first id that is no token of the target, and at ``num_drafts``.
    """
    errors: dict[int, str] = {}
    try:
        proposed = _propose(drafter, sequences, num_drafts)
    except Exception:
        proposed = []
        for row, (sequence, k) in enumerate(zip(sequences, num_drafts, strict=True)):
            try:
                proposed += _propose(drafter, [sequence], [k])
            except Exception as error:
                proposed.append([])
                errors[row] = f"{type(error).__name__}: {error}"
    limits = zip(proposed, num_drafts, strict=True)
    return [_usable(tokens[:k], vocab_size) for tokens, k in limits], errors


def _propose(drafter: Drafter, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[list[int]]:
    proposed = drafter.propose(sequences, num_drafts)
    if len(proposed) != len(sequences):
        raise ValueError(f"{drafter.name}: expected {len(sequences)} rows, got {len(proposed)}")
    return [list(tokens) for tokens in proposed]


def _usable(tokens: list[int], vocab_size: int) -> list[int]:
    bad = next((i for i, token in enumerate(tokens) if not 0 <= token < vocab_size), None)
    return tokens[:bad]
