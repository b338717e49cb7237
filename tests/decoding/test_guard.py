"""What may come out of anybody's drafter, and what the engine is told of it."""

from __future__ import annotations

import pytest
import torch

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.drafters.guard import propose_safely
from pagedraft.decoding.sequence import Sequence

VOCAB = 5


class Says:
    """Every row of its proposals is what it was made with."""

    name = "says"

    def __init__(self, row) -> None:
        self.row = row

    def propose(self, sequences, num_drafts):
        return [self.row for _ in sequences]

    def on_free(self, sequence):
        pass


def ask(row, k: int = 3) -> tuple[Proposal, str | None]:
    sequence = Sequence(token_ids=[1], num_prompt=1, temperature=1.0, seed=0)
    [proposal], errors = propose_safely(Says(row), [sequence], [k], VOCAB)
    return proposal, errors.get(0)


def q_of(num_drafts: int, vocab_size: int = VOCAB, dtype=torch.float32) -> torch.Tensor:
    return torch.full((num_drafts, vocab_size), 1 / vocab_size, dtype=dtype)


@pytest.mark.parametrize("tokens", [[], [4], [0, 1, 2]])
def test_lists_and_proposals_are_alike(tokens):
    assert ask(tokens) == ask(Proposal(tokens)) == (Proposal(tokens), None)


CUTS = {
    "more than asked": ([1, 2, 3, 4], [1, 2, 3]),
    "past the vocabulary": ([1, 5, 2], [1]),
    "negative": ([-1, 2], []),
}


@pytest.mark.parametrize("name", CUTS)
def test_drafts_end_where_they_cannot_be_used(name):
    tokens, expected = CUTS[name]
    proposal, error = ask(Proposal(tokens, q_of(len(tokens)), evidence=7))
    assert error is None
    assert (proposal.tokens, proposal.evidence) == (expected, 7)
    assert proposal.q_KV.shape == (len(expected), VOCAB)


BAD_Q = {
    "too few rows": q_of(2),
    "too many rows": q_of(4),
    "another vocabulary": q_of(3, VOCAB + 1),
    "fp64": q_of(3, dtype=torch.float64),
    "one dimension": q_of(3).flatten(),
    "a list": [[0.2] * VOCAB] * 3,
}


@pytest.mark.parametrize("name", BAD_Q)
def test_a_q_that_cannot_be_used_is_an_error_of_the_drafter(name):
    proposal, error = ask(Proposal([1, 2, 3], BAD_Q[name]))
    assert proposal.tokens == []
    assert error.startswith(("ValueError: q_KV: expected fp32", "AttributeError"))
