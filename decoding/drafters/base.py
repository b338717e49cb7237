"""What a drafter is: something that proposes tokens the target may accept.

A drafter can be as wrong as it likes: under the match rule every emitted token is the target's own
draw, so a drafter changes speed and nothing else. Under the rejection and the block rule the output
has the target's distribution as long as a drafter that samples says what it sampled from.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from pagedraft.decoding.sequence import Sequence


@dataclass(slots=True)
class Proposal:
    """The drafts of one sequence. Not to be changed: the engine may hold it in several places.

    tokens: what may follow its committed context, in order; none is a normal answer.
    q_KV: fp32 [len(tokens), V] over the target's vocabulary, what each token was drawn from; None
        where the drafter did not draw (q is 1 at the draft). Read under the rejection and the block
        rule only.
    evidence: how much speaks for the proposal, in a unit of the drafter's own (a lookup: the length
        of its match in tokens). The controller learns how often each amount is right.
    """

    tokens: list[int]
    q_KV: torch.Tensor | None = None
    evidence: int = 0


NOTHING = Proposal([])


class Drafter(Protocol):
    """Proposes drafts for a batch of sequences.

    name: what statistics and error messages call it.

    A drafter that runs no model (an attribute ``is_lookup = True``; the default is False) is asked
    at every step, before the plan, and owns no blocks for its drafts: what it proposes costs
    nothing until it is verified. Others are asked for what the plan granted.

    A drafter may also have ``learn(sequences)``. It is called at every step, with rows that are
    prompts or draft, when the step is under way: a good time for work that no proposal waits for.
    The contexts are those before the step, and must not be changed.
    """

    name: str

    def propose(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> Seq[list[int] | Proposal]:
        """Return at most ``num_drafts[i]`` tokens that may follow ``sequences[i]``.

        Fewer, also none, is a normal answer. Must not change ``token_ids``: what is appended or
        cut off is undone, and counts as a failure. Unless it is a lookup, the sequence owns blocks
        for ``num_tokens + num_drafts[i]`` tokens.
        """

    def on_free(self, sequence: Sequence) -> None:
        """The sequence has ended or lost its KV: drop what is kept for it."""


def is_lookup(drafter: Drafter) -> bool:
    """Whether the drafter runs no model and may be asked at every step."""
    try:
        return bool(getattr(drafter, "is_lookup", False))
    except Exception:  # anybody's code
        return False


def learns(drafter: Drafter) -> bool:
    """Whether the drafter has ``learn``."""
    try:
        return callable(getattr(drafter, "learn", None))
    except Exception:  # anybody's code
        return False


def check_drafter(drafter: object) -> None:
    """Raise TypeError unless ``drafter`` has what a Drafter has."""
    has_methods = all(callable(getattr(drafter, name, None)) for name in ("propose", "on_free"))
    has_name = isinstance(getattr(drafter, "name", None), str)
    if isinstance(drafter, type) or not has_methods or not has_name:
        raise TypeError(
            "drafter: expected an object with a name, propose and on_free, got "
            f"{drafter!r} (drafters that have a name in the table go to speculate)"
        )
