"""Drafters that know what will come, and say so, or not: acceptance is what a case asks for."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.sequence import Sequence

# name -> probability that a draft is the token that plain decoding draws there
REPLAYS: Mapping[str, float] = {
    "full": 1.0,
    "zero": 0.0,
    "half": 0.5,
    "most": 0.85,
    "raising": 0.85,  # raises at some lengths of an output, asked or taught, and told to forget
    "too many": 1.0,  # more drafts than it was asked for
    "no tokens": 1.0,  # ids that no model knows behind the first draft
    "with q": 0.5,  # says what it drew from: the draft or the token before it, evenly
    "bad q": 0.5,  # says so in a shape and a dtype that fit nothing
    "missing rows": 0.85,  # answers for all sequences but one
}


class Replay:
    """Proposes the plain output of each sequence, each token wrong with a probability.

    A wrong draft is the next token id, so it never equals what plain decoding draws.
    """

    name = "replay"

    def __init__(self, style: str, *, noise: int, vocab_size: int) -> None:
        self.style = style
        self.noise = noise
        self.vocab_size = vocab_size
        self.is_lookup = noise % 2 == 0
        self.outputs: dict[Sequence, list[int]] = {}

    def propose(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[Proposal]:
        """Drafts a row; may raise or break the rules, as its style says."""
        num_rows = len(sequences) - (self.style == "missing rows")
        rows = zip(sequences[:num_rows], num_drafts[:num_rows], strict=True)
        return [self._propose_one(sequence, k) for sequence, k in rows]

    def learn(self, sequences: Seq[Sequence]) -> None:
        """Nothing to learn; may raise."""
        lengths = [sequence.num_tokens - sequence.num_prompt for sequence in sequences]
        if self.style == "raising" and any(length % 8 == 4 for length in lengths):
            raise RuntimeError("a drafter that cannot learn")

    def on_free(self, sequence: Sequence) -> None:
        """Outputs stay: a preempted sequence drafts again."""
        if self.style == "raising":
            raise RuntimeError("a drafter that cannot forget")

    def _propose_one(self, sequence: Sequence, k: int) -> Proposal:
        done = sequence.num_tokens - sequence.num_prompt
        if self.style == "raising" and done % 3 == 2:
            raise RuntimeError("a drafter that fails")
        if self.style == "too many":
            k = 2 * k + 3
        choose = random.Random(f"{self.noise} {sequence.num_tokens}")
        drafts = [
            token if choose.random() < REPLAYS[self.style] else (token + 1) % self.vocab_size
            for token in self.outputs[sequence][done : done + k]
        ]
        if self.style == "no tokens":
            drafts[1:] = [(-1, self.vocab_size, 2**40)[done % 3]]
        return Proposal(drafts, self._q(drafts))

    def _q(self, drafts: list[int]) -> torch.Tensor | None:
        if self.style == "bad q":
            return torch.ones(len(drafts) + 2, 3, dtype=torch.float64)
        if self.style != "with q":
            return None
        q_KV = torch.zeros(len(drafts), self.vocab_size)
        for row, token in enumerate(drafts):
            q_KV[row, [token, token - 1]] = 0.5
        return q_KV
