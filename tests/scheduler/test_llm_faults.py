"""Aborts, callbacks, interrupts and failing requests: nothing leaks, the others go on."""

from __future__ import annotations

import re

import pytest
import torch

from pagedraft.decoding.params import SamplingParams
from pagedraft.tests.scheduler.runs import GREEDY

pytestmark = pytest.mark.usefixtures("cpu_path")


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_at_any_time(llm, steps):
    request = llm.submit([5] * 20, GREEDY)
    other = llm.submit([6, 7], GREEDY)
    for _ in range(steps):
        llm.engine.step()
    llm.engine.abort(request)
    llm.engine.abort(request)
    assert llm.completion(request).finish_reason == "abort"
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.check_integrity()
    assert other.sequence.output_ids == llm.generate([6, 7], GREEDY)[0].token_ids


def test_a_callback_that_raises_ends_its_own_request(llm):
    def fail(tokens: list[int]) -> None:
        raise OSError("client gone")

    bad = llm.submit([5, 6, 7], GREEDY, on_tokens=fail)
    good = llm.submit([5, 6, 7], GREEDY)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    assert bad.finish_reason == "error"
    assert re.search("OSError: client gone", bad.error)
    assert good.finish_reason == "length"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_callback_may_abort_another_request_of_its_step(llm, overlap):
    """It keeps the tokens of the step, which is over, hears of them, and gets no more."""
    llm.engine.overlap = overlap
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    heard, requests = [], {}
    llm.submit([5, 6, 7], params, on_tokens=lambda tokens: llm.engine.abort(requests["other"]))
    requests["other"] = llm.submit([8, 9], params, on_tokens=heard.extend)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    assert requests["other"].finish_reason == "abort"
    assert heard == requests["other"].sequence.output_ids
    assert len(heard) == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_callback_comes_too_late_to_abort_what_its_step_ended(llm, overlap):
    llm.engine.overlap = overlap
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    heard, requests = [], {}
    llm.submit([5, 6, 7], params, on_tokens=lambda tokens: llm.engine.abort(requests["other"]))
    requests["other"] = llm.submit([8, 9], params, on_tokens=heard.extend)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    assert heard == requests["other"].sequence.output_ids
    assert requests["other"].finish_reason == "length"


def test_a_step_inside_a_step_is_refused(llm):
    request = llm.submit([5, 6], GREEDY, on_tokens=lambda tokens: llm.engine.step())
    while llm.engine.has_work:
        llm.engine.step()
    assert request.finish_reason == "error"
    assert "called while a step runs, by a callback" in request.error


def test_an_interrupt_inside_a_step_loses_nothing(llm):
    """Ctrl-C in a callback: the rows behind it go on in the next step with the same tokens."""
    expected = llm.generate([8, 9], GREEDY)[0].token_ids

    def interrupt(tokens):
        raise KeyboardInterrupt

    llm.submit([5, 6, 7], GREEDY, on_tokens=interrupt)
    other = llm.submit([8, 9], GREEDY)
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    llm.engine.abort(llm.engine.running[0])
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    assert other.sequence.output_ids == expected


def test_an_error_inside_a_step_leaves_no_blocks_behind(llm, monkeypatch):
    def fail(batch, cache):
        raise RuntimeError("device lost")

    monkeypatch.setattr(llm.target, "forward", fail)
    with pytest.raises(RuntimeError, match="device lost"):
        llm.generate([[5, 6, 7], [8]], GREEDY)
    assert llm.engine.pool.num_free == llm.engine.pool.num_usable


def test_nan_logits_end_that_request_only(llm, monkeypatch):
    expected = llm.generate([[8, 9]], GREEDY)[0].token_ids
    forward = llm.target.forward

    def poisoned(batch, cache):
        logits_QV = forward(batch, cache).clone()
        logits_QV[batch.tokens_T[batch.logit_rows_Q[: batch.num_logits]] == 96] = torch.nan
        return logits_QV

    monkeypatch.setattr(llm.target, "forward", poisoned)
    bad = llm.submit([8, 96], GREEDY)
    good = llm.submit([8, 9], GREEDY)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    assert bad.finish_reason == "error"
    assert "position 2" in bad.error
    assert good.finish_reason == "length" or 96 in expected
