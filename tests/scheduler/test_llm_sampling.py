"""What a request asks of its tokens, through the front end: rules, defaults, limits, logprobs."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from pagedraft.decoding.params import SamplingParams
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.model.tiny import save_tiny
from pagedraft.tests.scheduler.runs import GREEDY

pytestmark = pytest.mark.usefixtures("cpu_path")


def test_a_bias_of_an_unknown_token_is_named(llm):
    with pytest.raises(ValueError, match="logit_bias: .* from 0 to 96, got 97"):
        llm.generate([5], SamplingParams(logit_bias={97: 1}))


def test_logprobs_are_those_of_the_model_whatever_a_request_does_to_its_logits(llm):
    plain = SamplingParams(max_tokens=1, temperature=0, logprobs=3)
    biased = SamplingParams(max_tokens=1, temperature=0, logprobs=3, logit_bias={41: 100})
    [first, second] = llm.generate([[5, 6, 7], [5, 6, 7]], [plain, biased])
    assert second.token_ids == [41] != first.token_ids
    likely = {k: v for k, v in second.logprobs[0].items() if k != 41 or k in first.logprobs[0]}
    assert likely == first.logprobs[0]
    assert second.logprobs[0][41] <= min(first.logprobs[0].values())


def test_min_tokens_and_banned_stop_tokens(llm):
    free = llm.generate([5, 6, 7], GREEDY)[0].token_ids
    stop = SamplingParams(max_tokens=8, temperature=0, stop_token_ids=(free[0],))
    assert llm.generate([5, 6, 7], stop)[0].token_ids == free[:1]
    longer = dataclasses.replace(stop, min_tokens=3)
    tokens = llm.generate([5, 6, 7], longer)[0].token_ids
    assert len(tokens) >= 3
    assert free[0] not in tokens[:3]


TEMPERATURES = {"zero": (0, 0.0), "half": (0.5, 0.5), "unset": (None, 1.0)}


@pytest.mark.parametrize("name", TEMPERATURES)
def test_the_default_temperature_is_the_models(tmp_path, name):
    value, expected = TEMPERATURES[name]
    save_tiny(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": value}))
    llm = LLM(tmp_path, kv_tokens=64)
    assert llm.submit([5], SamplingParams()).params.temperature == expected


def test_a_bad_default_temperature_names_its_file(tmp_path):
    save_tiny(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(TypeError, match="generation_config.json: temperature: expected a number"):
        LLM(tmp_path, kv_tokens=64)


def test_infinite_weights_are_not_made_finite(tmp_path):
    model = save_tiny(tmp_path, "llama")
    model.lm_head.weight.data[7] = torch.inf
    model.save_pretrained(tmp_path)
    completion = LLM(tmp_path, dtype="bf16", kv_tokens=64).generate([5, 6], GREEDY)[0]
    assert completion.finish_reason == "error" or 7 in completion.token_ids


def test_stop_ids_and_limits(llm):
    free = llm.generate([5, 6, 7], GREEDY)[0].token_ids
    stop = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, stop_token_ids=(free[3],))
    stopped = llm.generate([5, 6, 7], stop)[0]
    first = free.index(free[3])
    assert stopped.token_ids == free[: first + 1]
    assert stopped.finish_reason == "stop"


def test_the_context_limit_ends_a_request(target):
    llm = LLM(target, kv_tokens=256, k=7)
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    completion = llm.generate([5] * 100, params)[0]
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == 28


def test_logprobs_are_the_same_with_speculation(target):
    params = SamplingParams(max_tokens=8, temperature=0.8, seed=3, logprobs=4)
    rows = [
        LLM(target, speculate=mode, kv_tokens=128, k=3).generate([5, 6, 5, 6], params)[0]
        for mode in ("ngram", "off")
    ]
    assert rows[0].token_ids == rows[1].token_ids
    assert rows[0].logprobs == rows[1].logprobs
    assert len(rows[0].logprobs) == len(rows[0].token_ids)
    assert all(len(entry) in (4, 5) for entry in rows[0].logprobs)
    assert all(t in e for t, e in zip(rows[0].token_ids, rows[0].logprobs, strict=True))


def test_seeds_come_from_the_submission_index(target):
    params = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True)
    runs = [LLM(target, kv_tokens=128, seed=s).generate([[5, 6]] * 3, params) for s in (0, 0, 1)]
    first, again, other = [[c.token_ids for c in run] for run in runs]
    assert first == again
    assert first != other
    assert len({tuple(tokens) for tokens in first}) == 3


HUGE = {
    "top_k": {"top_k": 2**70},
    "stop_ids": {"stop_token_ids": (2**31, 2**70), "min_tokens": 4},
    "penalty": {"repetition_penalty": 1e6, "presence_penalty": 2},
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_numbers_of_one_request_stop_nobody(llm, name):
    alone = llm.generate([5, 6, 7], GREEDY)[0].token_ids
    huge = SamplingParams(max_tokens=4, temperature=1, seed=1, **HUGE[name])
    [first, second] = llm.generate([[5, 6, 7], [4, 5]], [GREEDY, huge])
    assert first.token_ids == alone
    assert (len(second.token_ids), second.finish_reason) == (4, "length")
