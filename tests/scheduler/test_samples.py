"""n samples of one prompt: noise of their own, shared prompt blocks, order, aborts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedraft.decoding.params import SamplingParams
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.scheduler.runs import random_prompts

pytestmark = pytest.mark.usefixtures("cpu_path")
SAMPLED = SamplingParams(max_tokens=8, temperature=1.0, seed=3, n=4, ignore_eos=True)
PROMPT = random_prompts(97, (21,))[0]


@pytest.fixture
def make(target):
    def make(**options) -> LLM:
        return LLM(target, **({"block_size": 8, "kv_tokens": 512, "k": 3} | options))

    return make


def outputs(llm: LLM, params: SamplingParams, prompt=PROMPT) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate([prompt], params)]


def test_samples_are_the_first_and_others(make):
    rows = outputs(make(), SAMPLED)
    assert len({tuple(row) for row in rows}) == 4
    assert rows[:1] == outputs(make(), replace(SAMPLED, n=1))
    assert rows[:2] == outputs(make(), replace(SAMPLED, n=2))


def test_samples_come_prompt_by_prompt(make):
    llm = make()
    completions = llm.generate([PROMPT, PROMPT[:5]], [SAMPLED, replace(SAMPLED, n=2)])
    assert [completion.index for completion in completions] == [0, 1, 2, 3, 0, 1]
    assert [c.token_ids for c in completions[4:]] == outputs(
        make(), replace(SAMPLED, n=2), PROMPT[:5]
    )


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("length", [1, 8, 9, 16, 17, 21])
def test_forks_share_the_prompt(make, prefix_cache, length):
    llm = make(prefix_cache=prefix_cache)
    requests = llm.submit_all(PROMPT[:length], SAMPLED)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    assert [request.stats.num_cached_tokens for request in requests[1:]] == [length - 1] * 3
    expected = outputs(make(speculate="off", prefix_cache=False), SAMPLED, PROMPT[:length])
    assert [request.sequence.output_ids for request in requests] == expected
    assert llm.engine.pool.num_free == llm.engine.pool.num_usable


def test_shared_blocks_are_owned_once(make):
    llm = make()
    requests = llm.submit_all(PROMPT[:17], SAMPLED)
    llm.engine.step()
    llm.engine.step()
    assert all(len(request.block_ids) == 3 for request in requests)
    assert len({block for request in requests for block in request.block_ids}) == 2 + 4


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_sample_may_be_aborted(make, steps, victim):
    expected = outputs(make(), SAMPLED)
    llm = make()
    requests = llm.submit_all(PROMPT, SAMPLED)
    for _ in range(steps):
        llm.engine.step()
    llm.engine.abort(requests[victim])
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    others = [index for index in range(4) if index != victim]
    assert [requests[i].sequence.output_ids for i in others] == [expected[i] for i in others]
    assert llm.engine.pool.num_free == llm.engine.pool.num_usable


def test_a_pool_that_one_sample_fills(make):
    llm = make(kv_tokens=32, chunk_tokens=8)
    requests = llm.submit_all(PROMPT, SAMPLED)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    assert [request.sequence.output_ids for request in requests] == outputs(make(), SAMPLED)
    assert sum(request.stats.num_preemptions for request in requests) > 0


def test_greedy_samples_are_alike(make):
    rows = outputs(make(), replace(SAMPLED, temperature=0))
    assert rows == rows[:1] * 4


def test_streams_are_of_one_sample(make):
    llm = make()
    with pytest.raises(ValueError, match="n: expected 1, got 4"):
        next(llm.stream(PROMPT, SAMPLED))
    assert not llm.engine.has_work


def test_an_interrupt_before_the_copy_loses_no_sample(make, monkeypatch):
    """A fork whose block was not copied would read what another request left there."""
    expected = outputs(make(), SAMPLED)
    llm = make()
    requests = llm.submit_all(PROMPT, SAMPLED)

    def interrupted(tensors, pairs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pagedraft.scheduler.launch.copy_blocks", interrupted)
        llm.engine.step()
        with pytest.raises(KeyboardInterrupt):
            llm.engine.step()
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    assert [request.sequence.output_ids for request in requests] == expected
