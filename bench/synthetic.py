"""A drafter with an acceptance that is set, not measured: for benches of what acceptance is worth.

It knows the plain output, recorded beforehand, and spoils a set share of it. Every figure or table
row that comes of it says ``SYNTHETIC``: no real drafter was part of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.sequence import Sequence

SYNTHETIC = "synthetic acceptance: drafts are the recorded output, spoiled at random"


class SyntheticDrafter:
    """Proposes each token of the plain output with probability ``alpha``, else a wrong one.

    continuations: (prompt token ids, plain output token ids) of every request. A prompt that is not
        among them gets no drafts.
    seed: which tokens are spoiled. Fixed by it, by the order of the continuations and by a token's
        index in its output: not by when or how often it is drafted.
    """

    is_lookup = True

    def __init__(
        self, continuations: Iterable[tuple[Seq[int], Seq[int]]], alpha: float, seed: int = 0
    ) -> None:
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"alpha: expected a probability from 0 to 1, got {alpha}")
        self.name = f"synthetic({alpha:.2f})"
        choose = random.Random(seed)
        self._drafts = {
            tuple(prompt): [token if choose.random() < alpha else _wrong(token) for token in output]
            for prompt, output in continuations
        }

    def propose(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[Proposal]:
        """What comes next in the recorded outputs, spoiled."""
        return [
            Proposal(self._next(sequence, k))
            for sequence, k in zip(sequences, num_drafts, strict=True)
        ]

    def on_free(self, sequence: Sequence) -> None:
        """Nothing is kept."""

    def _next(self, sequence: Sequence, k: int) -> list[int]:
        drafts = self._drafts.get(tuple(sequence.token_ids[: sequence.num_prompt]), [])
        done = sequence.num_tokens - sequence.num_prompt
        return drafts[done : done + k]


def expected_tokens_per_pass(alpha: float, k: int) -> float:
    """Tokens a pass with ``k`` drafts that are right independently: 1 + alpha + ... + alpha**k.

    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023.
    """
    return sum(alpha**i for i in range(k + 1))


def _wrong(token: int) -> int:
    """Another id that every vocabulary with ``token`` has."""
    return token - 1 if token > 0 else 1
