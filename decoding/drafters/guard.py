"""Calling a drafter that may be anybody's code: its failures end drafting, never a request."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import cast

import torch

from pagedraft.decoding.drafters.base import Drafter, Proposal
from pagedraft.decoding.failure import INTERRUPTS, describe
from pagedraft.decoding.sequence import Sequence


class Contexts:
    """Copies of the contexts that drafters see, from which changes are undone.

    A copy grows with its context: a call costs what is new since the last one.
    """

    def __init__(self) -> None:
        self._copies: weakref.WeakKeyDictionary[Sequence, list[int]] = weakref.WeakKeyDictionary()

    def copy_of(self, sequence: Sequence) -> list[int]:
        """The context as it is now; not to be changed."""
        copy = self._copies.setdefault(sequence, [])
        copy += sequence.token_ids[len(copy) :]
        return copy


def propose_safely(
    drafter: Drafter,
    sequences: Seq[Sequence],
    num_drafts: Seq[int],
    vocab_size: int,
    device: torch.device,
    contexts: Contexts | None = None,
) -> tuple[Seq[Proposal], dict[int, str]]:
    """Return usable drafts a row, and an error message for each row whose drafter failed.

    A batch that raises is asked again row by row, so that only the guilty rows lose their drafts.
    Drafts end before the first id that is no token of the target, and at ``num_drafts``.
    vocab_size, device: of the target's logits, where each q goes.
    contexts: kept from call to call by who calls for the same sequences more than once.
    """
    contexts = contexts or Contexts()
    target = (vocab_size, device)
    errors: dict[int, str] = {}
    try:
        return _propose(drafter, sequences, num_drafts, target, contexts), errors
    except INTERRUPTS:
        raise
    except BaseException:  # a panic in native code is no Exception
        proposed: list[Proposal] = []
    for row, (sequence, k) in enumerate(zip(sequences, num_drafts, strict=True)):
        try:
            proposed += _propose(drafter, [sequence], [k], target, contexts)
        except INTERRUPTS:
            raise
        except BaseException as error:
            proposed.append(Proposal([]))
            errors[row] = describe(error)
    return proposed, errors


def learn_safely(drafter: Drafter, sequences: Seq[Sequence], contexts: Contexts) -> dict[int, str]:
    """Let the drafter learn; return an error message for each row whose drafter failed.

    A batch that raises is told again row by row. contexts: as for ``propose_safely``.
    """
    errors: dict[int, str] = {}
    try:
        _learn(drafter, sequences, contexts)
        return errors
    except INTERRUPTS:
        raise
    except BaseException:  # a panic in native code is no Exception
        pass
    for row, sequence in enumerate(sequences):
        try:
            _learn(drafter, [sequence], contexts)
        except INTERRUPTS:
            raise
        except BaseException as error:
            errors[row] = f"learn: {describe(error)}"
    return errors


def free_safely(drafter: Drafter, sequence: Sequence) -> str | None:
    """Tell the drafter that ``sequence`` is gone; return the error message if it fails."""
    try:
        drafter.on_free(sequence)
    except INTERRUPTS:
        raise
    except BaseException as error:
        return f"on_free: {describe(error)}"
    return None


def _propose(
    drafter: Drafter,
    sequences: Seq[Sequence],
    num_drafts: Seq[int],
    target: tuple[int, torch.device],
    contexts: Contexts,
) -> Seq[Proposal]:
    """Propose, as plain integers: what is emitted later must not be the drafter's own objects."""
    if _is_trusted(drafter):
        return cast("Seq[Proposal]", drafter.propose(sequences, num_drafts))
    before = [(sequence.token_ids, contexts.copy_of(sequence)) for sequence in sequences]
    try:
        proposed = drafter.propose(list(sequences), list(num_drafts))
    finally:
        _restore(drafter, sequences, before)
    if len(proposed) != len(sequences):
        raise ValueError(f"{drafter.name}: expected {len(sequences)} rows, got {len(proposed)}")
    return [
        _usable(row if isinstance(row, Proposal) else Proposal(row), k, *target)
        for row, k in zip(proposed, num_drafts, strict=True)
    ]


def _learn(drafter: Drafter, sequences: Seq[Sequence], contexts: Contexts) -> None:
    learn: Callable[[Seq[Sequence]], None] = drafter.learn  # type: ignore[attr-defined]
    if _is_trusted(drafter):
        learn(sequences)
        return
    before = [(sequence.token_ids, contexts.copy_of(sequence)) for sequence in sequences]
    try:
        learn(list(sequences))
    finally:
        _restore(drafter, sequences, before)


def _is_trusted(drafter: Drafter) -> bool:
    """Whether it only copies ids of contexts: by this very class, not one that a user derived."""
    return bool(vars(type(drafter)).get("copies_contexts", False))


def _restore(
    drafter: Drafter, sequences: Seq[Sequence], before: Seq[tuple[list[int], list[int]]]
) -> None:
    """Take back what a drafter did to the length or the end of a context; ValueError for it."""
    changed = False
    for sequence, (token_ids, copy) in zip(sequences, before, strict=True):
        is_same = getattr(sequence, "token_ids", None) is token_ids
        if not is_same or len(token_ids) != len(copy) or token_ids[-1:] != copy[-1:]:
            token_ids[:] = copy
            sequence.token_ids = token_ids
            changed = True
    if changed:
        raise ValueError(f"{drafter.name}: changed token_ids, which are not a drafter's to change")


def _usable(proposal: Proposal, k: int, vocab_size: int, device: torch.device) -> Proposal:
    q_KV, num_drafts = proposal.q_KV, len(proposal.tokens)
    if q_KV is not None:
        if (q_KV.dtype, q_KV.shape) != (torch.float32, (num_drafts, vocab_size)):
            raise ValueError(
                f"q_KV: expected fp32 of shape {(num_drafts, vocab_size)}, got {q_KV.dtype} of "
                f"{tuple(q_KV.shape)}"
            )
        q_KV = q_KV.detach().to(device).contiguous()
    tokens = [operator.index(token) for token in proposal.tokens][:k]
    bad = next((i for i, token in enumerate(tokens) if not 0 <= token < vocab_size), None)
    return cut(Proposal(tokens, q_KV, int(proposal.evidence)), bad)


def cut(proposal: Proposal, num_drafts: int | None) -> Proposal:
    """The first ``num_drafts`` drafts of ``proposal``; None: all."""
    tokens = proposal.tokens[:num_drafts]
    q_KV = None if proposal.q_KV is None else proposal.q_KV[: len(tokens)]
    return Proposal(tokens, q_KV, proposal.evidence)
