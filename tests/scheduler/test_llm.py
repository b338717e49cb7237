"""The front end: bad input named, nothing leaked, streaming, aborts, failing requests."""

from __future__ import annotations

import re

import pytest
import torch

from pagedraft.decoding.params import SamplingParams
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.model.tiny import save_tiny
from pagedraft.tests.scheduler.runs import random_prompts, run_together

pytestmark = pytest.mark.usefixtures("cpu_path")
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Transformer:
    folder = tmp_path_factory.mktemp("llm") / "target"
    save_tiny(folder, "llama")
    with use_implementation("cpu"):
        return Transformer.from_folder(folder)


@pytest.fixture
def llm(target) -> LLM:
    return LLM(target, block_size=8, kv_tokens=96, k=3)


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


BAD_PARAMS = {
    "no tokens": (ValueError, {"max_tokens": 0}, "max_tokens: expected an integer >= 1, got 0"),
    "float tokens": (TypeError, {"max_tokens": 1.5}, "max_tokens: expected an integer"),
    "negative temperature": (ValueError, {"temperature": -0.1}, "temperature: .*got -0.1"),
    "nan temperature": (ValueError, {"temperature": float("nan")}, "temperature: .*got nan"),
    "text temperature": (TypeError, {"temperature": "hot"}, "temperature: expected a number"),
    "negative seed": (ValueError, {"seed": -1}, "seed: .*got -1"),
    "wide seed": (ValueError, {"seed": 2**64}, "seed: expected an integer from 0 to"),
    "negative stop id": (ValueError, {"stop_token_ids": (-5,)}, "stop_token_ids: .*got -5"),
    "many logprobs": (ValueError, {"logprobs": 21}, "logprobs: .*from 0 to 20, got 21"),
}


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_bad_params_are_named(name):
    error, fields, message = BAD_PARAMS[name]
    with pytest.raises(error, match=message):
        SamplingParams(**fields)


BAD_OPTIONS = {
    "speculate": ({"speculate": "magic"}, "speculate: expected one of .*got 'magic'"),
    "draft missing": ({"speculate": "draft"}, "needs a draft model"),
    "k": ({"k": -1}, 'k: expected "auto" or an integer >= 0, got -1'),
    "block size": ({"block_size": 12}, "block_size: expected 8, 16, 32, 64 or 128"),
    "kv_tokens": ({"kv_tokens": 0}, "kv_tokens: expected at least 1, got 0"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_are_named(target, name):
    options, message = BAD_OPTIONS[name]
    with pytest.raises(ValueError, match=message):
        LLM(target, **options)


def test_draft_with_another_vocabulary_is_refused(target, tmp_path):
    save_tiny(tmp_path / "draft", "llama", vocab_size=2048)
    with pytest.raises(ValueError, match="vocabulary of 2048 tokens does not agree .* 97"):
        LLM(target, tmp_path / "draft", kv_tokens=64)


def test_draft_with_a_padded_vocabulary_is_welcome(target, tmp_path):
    save_tiny(tmp_path / "draft", "llama", vocab_size=128)
    llm = LLM(target, tmp_path / "draft", kv_tokens=128, k=3)
    plain = LLM(target, speculate="off", kv_tokens=128)
    prompts = random_prompts(97, (5, 9))
    assert [c.token_ids for c in llm.generate(prompts, GREEDY)] == [
        c.token_ids for c in plain.generate(prompts, GREEDY)
    ]


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


class BrokenDrafter:
    """Raises for sequences that start with one token, and drafts nonsense for the others."""

    name = "broken"

    def __init__(self, poison: int) -> None:
        self.poison = poison

    def propose(self, sequences, num_drafts):
        if any(sequence.token_ids[0] == self.poison for sequence in sequences):
            raise RuntimeError("no drafts today")
        return [[10**6, 3, -7][:k] for k in num_drafts]

    def on_free(self, sequence):
        pass


def test_a_failing_drafter_is_turned_off_for_that_request(llm):
    expected = [c.token_ids for c in llm.generate([[5, 6, 7], [8, 9]], GREEDY)]
    llm.engine.drafter = BrokenDrafter(poison=5)
    completions = llm.generate([[5, 6, 7], [8, 9]], GREEDY)
    assert [c.token_ids for c in completions] == expected
    assert completions[0].stats.drafter_errors == ["RuntimeError: no drafts today"]
    assert completions[1].stats.drafter_errors == []
    assert llm.engine.stats.num_drafter_errors == 1


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


def test_an_error_inside_a_step_leaves_no_blocks_behind(llm, monkeypatch):
    def fail(batch, cache):
        raise RuntimeError("device lost")

    monkeypatch.setattr(llm.target, "forward", fail)
    with pytest.raises(RuntimeError, match="device lost"):
        llm.generate([[5, 6, 7], [8]], GREEDY)
    assert llm.engine.pool.num_free == llm.engine.pool.num_usable


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
