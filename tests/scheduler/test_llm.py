"""The front end: bad input named, one prompt or many, streaming, order."""

from __future__ import annotations

import pytest
import torch

from pagedraft.scheduler.llm import LLM
from pagedraft.tests.scheduler.runs import GREEDY, random_prompts, run_together

pytestmark = pytest.mark.usefixtures("cpu_path")


BAD_PROMPTS = {
    "empty": ([], "prompt: expected at least one token, got none"),
    "text without a tokenizer": ("hello", "text needs a tokenizer"),
    "id past the vocabulary": ([5, 97], r"prompt\[1\]: expected a token id from 0 to 96, got 97"),
    "negative id": ([-1], r"prompt\[0\]: expected a token id"),
    "not ids": ([1.5], "expected text or a list of token ids"),
    "longer than the context": ([5] * 128, "128 tokens leave no room .* context of 128"),
    "longer than the pool": ([5] * 100, "need 14 KV blocks of 8 tokens; the pool has 12"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompt_is_named_and_leaves_nothing(llm, name):
    prompt, message = BAD_PROMPTS[name]
    with pytest.raises((ValueError, TypeError), match=message):
        llm.generate([[5, 6, 7], prompt], GREEDY)
    assert not llm.engine.has_work
    assert llm.engine.pool.num_free == llm.engine.pool.num_usable
    llm.engine.check_integrity()


NO_OPTIONS = {
    "stats": (None, "stats: expected one of priority, .* on_tokens, got an unknown option"),
    "row": (3, "row: expected one of priority"),
    "parent": ("x", "parent: expected one of priority"),
    "on_tokens": (5, "on_tokens: expected a callable or None, got 5"),
}


@pytest.mark.parametrize("name", NO_OPTIONS)
def test_options_that_are_none_of_a_submission_are_named(llm, name):
    value, message = NO_OPTIONS[name]
    with pytest.raises(TypeError, match=message):
        llm.submit([5], GREEDY, **{name: value})
    assert not llm.engine.has_work


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_other_requests_go_on(llm, name):
    prompt, message = BAD_PROMPTS[name]
    alone = llm.generate([5, 6, 7], GREEDY)[0].token_ids
    request = llm.submit([5, 6, 7], GREEDY)
    llm.engine.step()
    with pytest.raises((ValueError, TypeError), match=message):
        llm.submit(prompt, GREEDY)
    while llm.engine.has_work:
        llm.engine.step()
    assert request.sequence.output_ids == alone


BAD_OPTIONS = {
    "speculate": ({"speculate": "magic"}, "speculate: expected one of .*got 'magic'"),
    "draft missing": ({"speculate": "draft"}, "needs a draft model"),
    "k": ({"k": -1}, 'k: expected "auto" or an integer >= 0, got -1'),
    "block size": ({"block_size": 12}, "block_size: expected one of .*got 12"),
    "no block size": ({"block_size": 0}, "block_size: expected one of .*got 0"),
    "kv_tokens": ({"kv_tokens": 0}, "kv_tokens: expected an integer >= 1, got 0"),
    "half a kv_token": ({"kv_tokens": 1.5}, "kv_tokens: expected an integer >= 1, got 1.5"),
    "max_rows": ({"max_rows": 0}, "max_rows: expected an integer >= 1, got 0"),
    "token_budget": ({"token_budget": 0}, "token_budget: expected an integer >= 1, got 0"),
    "chunk_tokens": ({"chunk_tokens": 0}, "chunk_tokens: expected an integer >= 1, got 0"),
    "seed": ({"seed": None}, "seed: expected an integer"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_are_named(target, name):
    options, message = BAD_OPTIONS[name]
    with pytest.raises((ValueError, TypeError), match=message):
        LLM(target, **options)


BAD_ARGUMENTS = {
    "an array": ((torch.tensor([5, 6]), GREEDY), "prompts: expected text.*got a Tensor"),
    "nothing": ((None, GREEDY), "prompts: expected text.*got a NoneType"),
    "a dict": (({"a": 1}, GREEDY), "prompts: expected text.*got a dict"),
    "params as a dict": (([5], {"max_tokens": 3}), "params: expected SamplingParams"),
    "params of None": (([5], [None]), r"prompts\[0\]: params: expected SamplingParams, got None"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_are_named(llm, name):
    arguments, message = BAD_ARGUMENTS[name]
    with pytest.raises(TypeError, match=message):
        llm.generate(*arguments)


def test_generate_takes_one_prompt_or_many(llm):
    one = llm.generate([5, 6, 7], GREEDY)
    many = llm.generate([[5, 6, 7], [8, 9]], GREEDY)
    assert [c.token_ids for c in one] == [many[0].token_ids]
    assert llm.generate([], GREEDY) == []


def test_number_of_params_must_match(llm):
    with pytest.raises(ValueError, match="params: expected 2 as there are prompts, got 1"):
        llm.generate([[5], [6]], [GREEDY])


def test_stream_yields_what_generate_returns(llm):
    expected = llm.generate([5, 6, 7], GREEDY)[0].token_ids
    parts = list(llm.stream([5, 6, 7], GREEDY))
    assert sum(parts, []) == expected
    assert all(parts)


def test_closing_a_stream_gives_the_blocks_back(llm):
    stream = llm.stream([5, 6, 7], GREEDY)
    next(stream)
    assert llm.engine.pool.num_free < llm.engine.pool.num_usable
    stream.close()
    assert llm.engine.pool.num_free == llm.engine.pool.num_usable
    assert not llm.engine.has_work


def test_an_ended_request_is_not_taken_again(llm):
    request = llm.submit([5, 6], GREEDY)
    llm.engine.abort(request)
    with pytest.raises(ValueError, match="has ended: abort"):
        llm.engine.add(request)


def test_a_priority_that_is_no_number_is_refused(llm):
    with pytest.raises(TypeError, match="priority: expected an integer, got 'high'"):
        llm.submit([5, 6], GREEDY, priority="high")
    assert not llm.engine.has_work


def test_priority_runs_first(llm):
    llm.engine.max_rows = 1
    late = llm.submit([5, 6], GREEDY)
    urgent = llm.submit([7, 8], GREEDY, priority=-1)
    run = []
    while llm.engine.has_work:
        run += llm.engine.step()
    assert run.index(urgent) < run.index(late)


def test_more_requests_than_rows(target):
    llm = LLM(target, block_size=8, kv_tokens=96, k=3, max_rows=2)
    prompts = random_prompts(97, (3, 5, 7, 9, 11, 4))
    outcome = run_together(llm, prompts, [GREEDY] * 6)
    assert outcome.token_ids == [llm.generate(p, GREEDY)[0].token_ids for p in prompts]
