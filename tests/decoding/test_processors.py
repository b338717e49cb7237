"""Logits processors: what they get, what counts of what they return, and whom their faults hurt."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from pagedraft.decoding.draw import draw
from pagedraft.decoding.logit_rules import NEUTRAL, LogitRules
from pagedraft.decoding.processors import run_processors
from pagedraft.decoding.sequence import Sequence
from pagedraft.tests.inputs import randn

pytestmark = pytest.mark.usefixtures("cpu_path")

VOCAB_SIZE = 8


def _sequence(*processors, rules: LogitRules = NEUTRAL) -> Sequence:
    return Sequence([5, 6, 7], 1, 0.0, seed=3, rules=rules, processors=processors)


def _favour(token: int, seen: list | None = None):
    """A processor that makes ``token`` certain, and notes what it was called with."""

    def favour(output_ids, logits_V):
        if seen is not None:
            seen.append((output_ids, logits_V.clone()))
        logits_V[token] = 99.0
        return logits_V

    return favour


def test_they_get_output_and_drafts_and_raw_logits():
    seen: list = []
    rules = LogitRules(bias=((2, 5.0),), repetition_penalty=2.0)
    row, logits_QV = _sequence(_favour(3, seen), rules=rules), randn(2, VOCAB_SIZE)
    before = logits_QV.clone()
    assert draw(logits_QV, [row, row], [3, 4], [[], [4]]).tolist() == [3, 3]
    assert [ids for ids, _ in seen] == [[6, 7], [6, 7, 4]]
    assert torch.equal(torch.stack([logits_V for _, logits_V in seen]), before)


def test_rules_apply_to_what_they_return():
    row = _sequence(_favour(3), rules=LogitRules(bias=((4, 100.0),)))
    assert draw(torch.zeros(1, VOCAB_SIZE), [row], [3]).tolist() == [4]


def test_each_goes_on_from_the_last():
    double = lambda ids, logits_V: logits_V * 2  # noqa: E731
    logits_QV = randn(1, VOCAB_SIZE)
    expected = 2 * logits_QV + 1
    run_processors(logits_QV, [_sequence(double, lambda ids, logits_V: logits_V + 1)], [3])
    assert torch.equal(logits_QV, expected)


def test_only_rows_that_have_them_pay():
    seen: list = []
    rows = [_sequence(), _sequence(_favour(1, seen)), _sequence()]
    logits_QV = randn(3, VOCAB_SIZE)
    before = logits_QV.clone()
    run_processors(logits_QV, rows, [3, 3, 3])
    assert len(seen) == 1
    assert torch.equal(logits_QV[::2], before[::2])


def test_what_they_keep_reaches_nobody():
    """The row that a processor gets is its own, and so is the list."""
    kept: list = []

    def keep(output_ids, logits_V):
        output_ids.append(0)
        kept.append(logits_V)
        return logits_V

    seen: list = []
    row, logits_QV = _sequence(keep, _favour(2, seen)), randn(2, VOCAB_SIZE)
    before = logits_QV[1].clone()
    run_processors(logits_QV, [row, _sequence()], [3, 3])
    kept[0].untyped_storage().fill_(0)
    assert [ids for ids, _ in seen] == [[6, 7]]
    assert row.token_ids == [5, 6, 7]
    assert logits_QV[0, 2] == 99.0
    assert torch.equal(logits_QV[1], before)


class Odd:
    """A processor that is an object."""

    def __call__(self, output_ids, logits_V):
        return logits_V[:3]


def boom(output_ids, logits_V):
    raise ArithmeticError("no logits today")


class Unsayable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def unsayable(output_ids, logits_V):
    raise Unsayable


WANTED = r"expected to return float32 of shape \(8,\) on cpu, got "
FAULTS = {
    "raises": (boom, r"boom raised ArithmeticError: no logits today"),
    "another shape": (Odd(), rf"Odd {WANTED}float32 of shape \(3,\) on cpu"),
    "a batch of one": (lambda ids, x: x[None], WANTED + r"float32 of shape \(1, 8\)"),
    "bf16": (lambda ids, x: x.bfloat16(), WANTED + "bfloat16 of shape"),
    "integers": (lambda ids, x: x.long(), WANTED + "int64 of shape"),
    "nothing": (lambda ids, x: None, WANTED + "no tensor but NoneType"),
    "numbers": (lambda ids, x: x.tolist(), WANTED + "no tensor but list"),
    "nan": (lambda ids, x: x.fill_(torch.nan), "left no token to draw: NaN, or -inf alone"),
    "one nan": (lambda ids, x: x.index_fill_(0, torch.tensor(2), torch.nan), "left no token"),
    "nothing allowed": (lambda ids, x: x.fill_(-torch.inf), "left no token to draw"),
    "its own row resized": (lambda ids, x: x.resize_(3), WANTED + r"float32 of shape \(3,\)"),
    "sparse": (lambda ids, x: x.to_sparse(), WANTED + "float32 torch.sparse_coo of shape"),
    "an error without words": (unsayable, "unsayable raised Unsayable"),
    "a partial": (functools.partial(boom), "partial raised ArithmeticError"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_leaves_its_row_without_a_token_and_says_why(name):
    processor, message = FAULTS[name]
    logits_QV = randn(3, VOCAB_SIZE)
    expected = draw(logits_QV.clone(), [_sequence()] * 3, [3, 4, 5]).tolist()
    faulty = _sequence(processor)
    tokens = draw(logits_QV, [_sequence(), faulty, _sequence()], [3, 4, 5], [[], [1], []])
    assert tokens.tolist() == [expected[0], -1, expected[2]]
    assert list(faulty.failures) == [4]
    assert re.fullmatch(f"logits_processors: .*({message}).* at position 4", faulty.failures[4])


def test_nan_that_was_there_before_is_not_their_fault():
    row, logits_QV = _sequence(lambda ids, x: x), randn(1, VOCAB_SIZE)
    logits_QV[0, 2] = torch.nan
    assert draw(logits_QV, [row], [3]).tolist() == [-1]
    assert not row.failures


def test_a_draw_that_succeeds_forgets_an_earlier_failure():
    """A draft model's logits may break a processor that the target's do not."""
    fails = iter([True, False])

    def sometimes(output_ids, logits_V):
        return boom(output_ids, logits_V) if next(fails) else logits_V

    row = _sequence(sometimes)
    assert draw(randn(1, VOCAB_SIZE), [row], [3]).tolist() == [-1]
    assert draw(randn(1, VOCAB_SIZE), [row], [3]).tolist() != [-1]
    assert not row.failures
