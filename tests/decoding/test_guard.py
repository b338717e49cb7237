"""What may come out of anybody's drafter, and what the engine is told of it."""

from __future__ import annotations

import pytest
import torch

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.drafters.guard import propose_safely
from pagedraft.decoding.sequence import Sequence

VOCAB, CPU = 5, torch.device("cpu")


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
    [proposal], errors = propose_safely(Says(row), [sequence], [k], VOCAB, CPU)
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


LEARNT = torch.full((3, VOCAB), 0.2, requires_grad=True)
ODD_Q = {"learnt": LEARNT, "transposed": torch.full((VOCAB, 3), 0.2).T}


@pytest.mark.parametrize("name", ODD_Q)
def test_a_q_is_a_plain_tensor_afterwards(name):
    proposal, error = ask(Proposal([1, 2, 3], ODD_Q[name]))
    assert error is None
    assert proposal.q_KV.is_contiguous()
    assert not proposal.q_KV.requires_grad


def test_a_q_that_holds_nothing():
    proposal, error = ask(Proposal([1, 2, 3], q_of(3).to("meta")))
    assert proposal.tokens == []
    assert "meta" in error


class Unsayable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Meddler(Says):
    """Changes what it is given."""

    def propose(self, sequences, num_drafts):
        return self.row(sequences, num_drafts)


def _unsayable(sequences, num_drafts):
    raise Unsayable


def _appends(sequences, num_drafts):
    sequences[0].token_ids.append(3)
    return [[3]]


def _appends_and_raises(sequences, num_drafts):
    sequences[0].token_ids += [3, 3]
    raise KeyError(3)


MEDDLERS = {
    "an error without words": (_unsayable, [], "Unsayable"),
    "a longer context": (_appends, [], "ValueError: says: changed token_ids"),
    "a longer context and an error": (_appends_and_raises, [], "ValueError: says: changed"),
    "other counts": (lambda _, k: [[1] * k.pop()], [1, 1, 1], None),
    "larger counts": (lambda _, k: [[1] * 9] if k.append(9) is None else [], [1, 1, 1], None),
    "no sequences": (lambda s, _: [[1]] if s.clear() is None else [], [1], None),
}


@pytest.mark.parametrize("name", MEDDLERS)
def test_a_drafter_that_meddles(name):
    propose, tokens, message = MEDDLERS[name]
    sequence = Sequence(token_ids=[1], num_prompt=1, temperature=1.0, seed=0)
    [proposal], errors = propose_safely(Meddler(propose), [sequence], [3], VOCAB, CPU)
    assert proposal.tokens == tokens
    assert sequence.token_ids == [1]
    assert (errors.get(0) or "").startswith(message or "")
    assert bool(errors) == (message is not None)
