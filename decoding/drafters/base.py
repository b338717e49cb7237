"""What a drafter is: something that proposes tokens the target may accept.

A drafter can be as wrong as it likes: under the match rule every emitted token is the target's own
draw, so a drafter changes speed and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from pagedraft.decoding.sequence import Sequence


class Drafter(Protocol):
    """Proposes drafts for a batch of sequences.

    name: what error messages call it.
    """

    name: str

    def propose(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[list[int]]:
        """Return at most ``num_drafts[i]`` tokens that may follow ``sequences[i]``.

        Fewer, also none, is a normal answer. Must not change ``token_ids``. The sequence owns
        blocks for ``num_tokens + num_drafts[i]`` tokens.
        """

    def on_free(self, sequence: Sequence) -> None:
        """The sequence has ended or lost its KV: drop what is kept for it."""
