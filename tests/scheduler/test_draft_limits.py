"""Limits of drafts: those of the output contract, for whoever decodes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedraft.decoding.commit import max_drafts
from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.params import SamplingParams
from pagedraft.decoding.sequence import Sequence
from pagedraft.scheduler.draft_limits import begin_decision
from pagedraft.scheduler.request import OFF, PROMPT, Request


@dataclass(frozen=True)
class Case:
    num_prompt: int = 3
    num_output: int = 1
    max_tokens: int = 20
    max_context: int = 100
    k: int | None = None
    num_pending: int = 1
    drafters: tuple[str, ...] = ("suffix",)


def request_of(case: Case) -> Request:
    tokens = list(range(case.num_prompt + case.num_output))
    sequence = Sequence(token_ids=tokens, num_prompt=case.num_prompt, temperature=0.0, seed=0)
    sequence.num_written = len(tokens) - case.num_pending
    params = SamplingParams(max_tokens=case.max_tokens, k=case.k)
    request = Request("a", sequence, params, frozenset(), case.max_context)
    request.max_total = min(case.num_prompt + case.max_tokens, case.max_context)
    request.drafters = case.drafters
    return request


# case, drafts by default -> limit, None where the request does not decode
CASES = {
    "as many as by default": (Case(), 4, 4),
    "its own number": (Case(k=7), 4, 7),
    "none of its own": (Case(k=0), 4, 0),
    "the last token": (Case(num_output=19), 4, 0),
    "the last but one": (Case(num_output=18), 4, 1),
    "the end of the context": (Case(max_context=6), 4, 1),
    "no drafters": (Case(drafters=()), 4, 0),
    "a prompt": (Case(num_pending=2), 4, None),
    "all of the context again": (Case(num_pending=4), 4, None),
    "a first token that is all there is": (Case(num_prompt=1, num_output=0), 4, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_limit(name):
    case, k, expected = CASES[name]
    limits = [limit for _, limit in begin_decision([request_of(case)], k)]
    assert limits == ([] if expected is None else [expected])


@given(
    k=st.integers(0, 20),
    own=st.none() | st.integers(0, 20),
    num_prompt=st.integers(1, 9),
    num_output=st.integers(0, 30),
    max_tokens=st.integers(1, 40),
    max_context=st.integers(2, 40),
)
def test_limits_are_those_of_the_contract(k, own, num_prompt, num_output, max_tokens, max_context):
    case = Case(num_prompt, num_output, max_tokens, max_context, own)
    [(_, limit)] = begin_decision([request_of(case)], k)
    expected = max_drafts(
        k if own is None else own,
        num_output=num_output,
        max_tokens=max_tokens,
        num_context=num_prompt + num_output,
        max_context=max_context,
    )
    assert max(0, limit) == expected


def test_the_last_decision_is_taken_back():
    prompt, off = request_of(Case(num_pending=3)), request_of(Case(drafters=()))
    for request in (prompt, off):
        request.num_drafts, request.offers = 3, {"suffix": Proposal([1, 2, 3])}
    begin_decision([prompt, off], 4)
    assert [(r.num_drafts, r.offers) for r in (prompt, off)] == [(0, {})] * 2
    assert (prompt.choice, off.choice) == (PROMPT, OFF)


def test_nobody():
    assert begin_decision([], 4) == []
