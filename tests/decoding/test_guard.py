"""What may come out of anybody's drafter, and what the engine is told of it."""

from __future__ import annotations

import pytest
import torch

from pagedraft.decoding.drafters.base import Proposal, learns
from pagedraft.decoding.drafters.guard import Contexts, learn_safely, propose_safely
from pagedraft.decoding.drafters.lookup import NgramDrafter
from pagedraft.decoding.drafters.suffix import SuffixDrafter
from pagedraft.decoding.drafters.suffix_automaton import SuffixAutomaton
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


def _cuts(sequences, num_drafts):
    del sequences[0].token_ids[1:]
    return [[3]]


def _empties_and_raises(sequences, num_drafts):
    sequences[0].token_ids.clear()
    raise KeyError(3)


def _replaces(sequences, num_drafts):
    sequences[0].token_ids = [9, 9, 9]
    return [[3]]


def _deletes(sequences, num_drafts):
    del sequences[0].token_ids
    return [[3]]


def _turns_the_end(sequences, num_drafts):
    sequences[0].token_ids[-1] = 0
    return [[3]]


MEDDLERS = {
    "an error without words": (_unsayable, [], "Unsayable"),
    "a longer context": (_appends, [], "ValueError: says: changed token_ids"),
    "a longer context and an error": (_appends_and_raises, [], "ValueError: says: changed"),
    "a shorter context": (_cuts, [], "ValueError: says: changed token_ids"),
    "no context and an error": (_empties_and_raises, [], "ValueError: says: changed"),
    "another context": (_replaces, [], "ValueError: says: changed"),
    "no attribute": (_deletes, [], "ValueError: says: changed"),
    "another last token": (_turns_the_end, [], "ValueError: says: changed"),
    "other counts": (lambda _, k: [[1] * k.pop()], [1, 1, 1], None),
    "larger counts": (lambda _, k: [[1] * 9] if k.append(9) is None else [], [1, 1, 1], None),
    "no sequences": (lambda s, _: [[1]] if s.clear() is None else [], [1], None),
}


@pytest.mark.parametrize("name", MEDDLERS)
def test_a_drafter_that_meddles(name):
    propose, tokens, message = MEDDLERS[name]
    token_ids = [1, 2, 4]
    sequence = Sequence(token_ids=token_ids, num_prompt=1, temperature=1.0, seed=0)
    [proposal], errors = propose_safely(Meddler(propose), [sequence], [3], VOCAB, CPU)
    assert proposal.tokens == tokens
    assert sequence.token_ids is token_ids
    assert token_ids == [1, 2, 4]
    assert (errors.get(0) or "").startswith(message or "")
    assert bool(errors) == (message is not None)


def test_kept_contexts_grow_with_their_sequence():
    """The context of a later call is restored too, and a call costs only what is new."""
    contexts, calls = Contexts(), []
    sequence = Sequence(token_ids=[1, 2], num_prompt=1, temperature=1.0, seed=0)

    def propose(sequences, num_drafts):
        calls.append(list(sequences[0].token_ids))
        return _cuts(sequences, num_drafts) if len(calls) > 1 else [[3]]

    options = (VOCAB, CPU, contexts)
    assert propose_safely(Meddler(propose), [sequence], [3], *options)[1] == {}
    sequence.append([3, 4])
    assert list(propose_safely(Meddler(propose), [sequence], [3], *options)[1]) == [0]
    assert sequence.token_ids == [1, 2, 3, 4]
    assert calls == [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4]]


def test_what_was_cut_off_is_lost_without_the_copy(monkeypatch):
    """Teeth: a copy that is the context itself restores nothing."""
    monkeypatch.setattr(Contexts, "copy_of", lambda self, sequence: sequence.token_ids)
    sequence = Sequence(token_ids=[1, 2, 4], num_prompt=1, temperature=1.0, seed=0)
    propose_safely(Meddler(_cuts), [sequence], [3], VOCAB, CPU)
    assert sequence.token_ids == [1]


class Learner(Says):
    """Learns as it was told."""

    def __init__(self, learn) -> None:
        super().__init__([])
        self.learn = learn


def _fails_on_zeros(sequences):
    if any(0 in sequence.token_ids for sequence in sequences):
        raise ZeroDivisionError("a zero")


LEARNERS = {
    "nothing wrong": (lambda sequences: None, {}),
    "an empty list": (lambda sequences: sequences.clear(), {}),
    "a row that fails": (_fails_on_zeros, {1: "learn: ZeroDivisionError: a zero"}),
    "no function": (None, dict.fromkeys(range(3), "learn: TypeError: ")),
    "contexts changed": (
        lambda sequences: [sequence.token_ids.append(1) for sequence in sequences],
        dict.fromkeys(range(3), "learn: ValueError: says: changed token_ids"),
    ),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_what_may_happen_when_a_drafter_learns(name):
    learn, messages = LEARNERS[name]
    contexts = [[1, 2], [1, 0], [3]]
    rows = [Sequence(token_ids=list(c), num_prompt=1, temperature=1.0, seed=0) for c in contexts]
    errors = learn_safely(Learner(learn), rows, Contexts())
    assert list(errors) == list(messages)
    assert all(errors[row].startswith(message) for row, message in messages.items())
    assert [row.token_ids for row in rows] == contexts


def test_an_interrupt_while_a_drafter_learns_goes_through():
    def learn(sequences):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn_safely(Learner(learn), [], Contexts())


def test_whether_it_learns_is_anybodys_answer():
    class Odd(Says):
        @property
        def learn(self):
            raise RuntimeError("not today")

    assert [learns(d) for d in (SuffixDrafter(), Says([]), Learner(3), Odd([]))] == [True] + [
        False
    ] * 3


class TestTrust:
    """Lookups of the project copy ids of the context; a class that inherits is checked as any."""

    @pytest.mark.parametrize("lookup", [NgramDrafter, SuffixDrafter])
    def test_a_subclass_is_not_trusted(self, lookup):
        class Own(lookup):
            def propose(self, sequences, num_drafts):
                return [[VOCAB + 1] for _ in sequences]

        sequence = Sequence(token_ids=[1], num_prompt=1, temperature=1.0, seed=0)
        [proposal], errors = propose_safely(Own(), [sequence], [3], VOCAB, CPU)
        assert (proposal.tokens, errors) == ([], {})

    @pytest.mark.parametrize("lookup", [NgramDrafter, SuffixDrafter])
    def test_what_lookups_say_would_pass(self, lookup):
        class Checked(lookup):
            pass

        tokens = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3]
        rows = [
            Sequence(token_ids=tokens[:n], num_prompt=1, temperature=1.0, seed=0) for n in range(12)
        ]
        ks = [n % 5 for n in range(12)]
        trusted = propose_safely(lookup(), rows, ks, VOCAB, CPU)
        assert trusted == propose_safely(Checked(), rows, ks, VOCAB, CPU)
        assert sum(map(len, (proposal.tokens for proposal in trusted[0]))) > 0

    def test_rows_still_fail_alone(self, monkeypatch):
        plain = SuffixAutomaton.propose

        def fails_on_zeros(index, k):
            if 0 in index.tokens:
                raise ZeroDivisionError
            return plain(index, k)

        monkeypatch.setattr(SuffixAutomaton, "propose", fails_on_zeros)
        rows = [
            Sequence(token_ids=tokens, num_prompt=1, temperature=1.0, seed=0)
            for tokens in ([1, 0], [1, 2, 1, 2])
        ]
        proposed, errors = propose_safely(SuffixDrafter(), rows, [2, 2], VOCAB, CPU)
        assert [proposal.tokens for proposal in proposed] == [[], [1, 2]]
        assert list(errors) == [0]
