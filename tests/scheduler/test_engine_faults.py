"""Faults at odd places of a step: what failed is undone, and the engine goes on as before."""

from __future__ import annotations

import pytest
import torch

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.params import SamplingParams
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.scheduler.runs import random_prompts

pytestmark = pytest.mark.usefixtures("cpu_path")
PARAMS = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
PROMPTS = random_prompts(97, (14, 6, 6, 6, 7, 6))
SWAPPING = {"speculate": "off", "block_size": 8, "prefix_cache": False, "swap_bytes": 2**24}


class Panic(BaseException):
    """As native code raises it."""


class Broken:
    """A drafter whose methods raise once."""

    name = "broken"

    def __init__(self, where: str, error: BaseException) -> None:
        self.where, self.error = where, error

    def _fail(self, where: str) -> None:
        if where == self.where:
            self.where = ""
            raise self.error

    def propose(self, sequences, num_drafts):
        self._fail("propose")
        return [Proposal([]) for _ in sequences]

    def on_free(self, sequence):
        self._fail("on_free")


def run_to_end(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    assert llm.engine.pool.num_free == llm.engine.pool.num_usable


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("gather"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", range(1, 7))
def test_a_copy_to_the_host_that_fails_inside_a_plan(target, at, error):
    """Its other victims are without blocks by then, and one of those before them ends."""
    expected = LLM(target, speculate="off", block_size=8).generate(PROMPTS, PARAMS)
    llm = LLM(target, kv_tokens=80, **SWAPPING)
    swap, num_calls = llm.engine.prefixes.swap, 0
    swap.policy.forced = True
    gather = swap._gather

    def failing(block_ids, rows):
        nonlocal num_calls
        num_calls += 1
        if num_calls == at:
            raise error
        gather(block_ids, rows)

    swap._gather = failing
    requests = [llm.submit(prompt, PARAMS) for prompt in PROMPTS]
    while llm.engine.has_work:
        try:
            llm.engine.step()
        except KeyboardInterrupt:
            llm.engine.check_integrity()
            if llm.engine.running:
                llm.engine.abort(llm.engine.running[0])
        llm.engine.check_integrity()
    assert num_calls >= at
    for request, completion in zip(requests, expected, strict=True):
        output_ids = request.sequence.output_ids
        assert output_ids == completion.token_ids[: len(output_ids)]
        assert request.finish_reason in ("length", "abort")


def test_memory_that_ends_while_kv_is_copied_back(target):
    llm = LLM(target, kv_tokens=256, **SWAPPING)
    expected = llm.generate(PROMPTS[0], PARAMS)[0].token_ids
    swap = llm.engine.prefixes.swap
    swap.policy.forced = True
    request = llm.submit(PROMPTS[0], PARAMS)
    llm.engine.step()
    llm.engine.preempt(request)

    def fail(block_ids, rows):
        raise torch.OutOfMemoryError("scatter")

    swap._scatter = fail
    run_to_end(llm)
    assert request.sequence.output_ids == expected
    assert request.finish_reason == "length"


@pytest.mark.parametrize("where", ["propose", "on_free"])
def test_a_panic_in_a_drafter_ends_drafting_only(target, where):
    expected = LLM(target, speculate="off", block_size=8).generate(PROMPTS, PARAMS)
    llm = LLM(target, drafter=Broken(where, Panic("native")), block_size=8, k=2)
    completions = llm.generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    num_errors = sum(len(c.stats.drafter_errors) for c in completions)
    assert num_errors == (where == "on_free")  # a batch that fails is asked again row by row


@pytest.mark.parametrize("where", ["propose", "on_free"])
def test_an_interrupt_in_a_drafter_loses_nothing(target, where):
    expected = LLM(target, speculate="off", block_size=8).generate(PROMPTS, PARAMS)
    llm = LLM(target, drafter=Broken(where, KeyboardInterrupt()), block_size=8, k=2)
    requests = [llm.submit(prompt, PARAMS) for prompt in PROMPTS]
    with pytest.raises(KeyboardInterrupt):
        run_to_end(llm)
    llm.engine.check_integrity()
    run_to_end(llm)
    assert [r.sequence.output_ids for r in requests] == [c.token_ids for c in expected]


def test_a_request_of_another_engine_is_refused(target):
    one, other = (LLM(target, block_size=8, kv_tokens=128) for _ in range(2))
    request = one.submit(PROMPTS[0], PARAMS)
    for _ in range(2):
        with pytest.raises(ValueError, match="'request-0': it was submitted before"):
            other.engine.add(request)
        with pytest.raises(ValueError, match="'request-0': expected one of this engine"):
            other.engine.abort(request)
        with pytest.raises(ValueError, match="'request-0': expected one that runs here"):
            other.engine.preempt(request)
        one.engine.step()
    assert not other.engine.has_work
    run_to_end(one)
    assert request.finish_reason == "length"


def test_a_fork_without_its_parent_is_refused(llm):
    _, fork = llm.prepare(PROMPTS[0], SamplingParams(n=2), 0)
    with pytest.raises(ValueError, match=r"expected its parent 'request-0.0' to be submitted"):
        llm.engine.add(fork)
    assert not llm.engine.has_work


def test_a_context_beyond_the_model_is_refused(llm):
    [request] = llm.prepare(PROMPTS[0], PARAMS, 0)
    request.max_context = 10**6
    with pytest.raises(ValueError, match="max_context: expected at most"):
        llm.engine.add(request)


def test_more_rows_than_the_engine_was_made_for_are_not_run(target):
    llm = LLM(target, speculate="off", block_size=8, kv_tokens=256, max_rows=2)
    llm.engine.max_rows = 4
    requests = [llm.submit(prompt, PARAMS) for prompt in PROMPTS]
    llm.engine.step()
    assert len(llm.engine.running) == 2
    run_to_end(llm)
    assert {request.finish_reason for request in requests} == {"length"}
