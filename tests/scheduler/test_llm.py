"""The front end: bad input named, nothing leaked, streaming, aborts, failing requests."""

from __future__ import annotations

import dataclasses
import json
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
    "huge temperature": (ValueError, {"temperature": 10**400}, "temperature: expected from 0"),
    "stop ids as a number": (TypeError, {"stop_token_ids": 5}, "stop_token_ids: .*got 5"),
    "no stop ids": (TypeError, {"stop_token_ids": None}, "stop_token_ids: .*got None"),
    "nan temperature": (ValueError, {"temperature": float("nan")}, "temperature: .*got nan"),
    "top_k": (ValueError, {"top_k": -2}, "top_k: expected an integer >= -1, got -2"),
    "top_p of 0": (ValueError, {"top_p": 0}, "top_p: expected above 0 to 1, got 0"),
    "top_p above 1": (ValueError, {"top_p": 1.1}, "top_p: expected above 0 to 1, got 1.1"),
    "min_p": (ValueError, {"min_p": -0.1}, "min_p: expected from 0 to 1, got -0.1"),
    "repetition": (ValueError, {"repetition_penalty": 0}, "repetition_penalty: expected above 0"),
    "presence": (ValueError, {"presence_penalty": 3}, "presence_penalty: expected from -2 to 2"),
    "frequency": (TypeError, {"frequency_penalty": "1"}, "frequency_penalty: expected a number"),
    "bias as a list": (TypeError, {"logit_bias": [5]}, "logit_bias: expected token ids to numb"),
    "bias of text": (TypeError, {"logit_bias": {"5": 1}}, "logit_bias: expected an integer"),
    "huge bias": (ValueError, {"logit_bias": {5: 101}}, r"logit_bias\[5\]: expected from -100 to"),
    "min_tokens": (ValueError, {"min_tokens": 17}, "min_tokens: expected an integer from 0 to 16"),
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


BROKEN_ROWS = {
    "floats": lambda k: [3.5] * k,
    "text": lambda k: "abc",
    "none": lambda k: [None],
    "no row": lambda k: None,
}


class OddDrafter(BrokenDrafter):
    """Every row of its proposals is ``make(k)``."""

    def __init__(self, make) -> None:
        self.make = make

    def propose(self, sequences, num_drafts):
        return [self.make(k) for k in num_drafts]


@pytest.mark.parametrize("name", BROKEN_ROWS)
def test_drafts_that_are_no_token_ids(llm, name):
    expected = [c.token_ids for c in llm.generate([[5, 6, 7], [8, 9]], GREEDY)]
    llm.engine.drafter = OddDrafter(BROKEN_ROWS[name])
    completions = llm.generate([[5, 6, 7], [8, 9]], GREEDY)
    assert [c.token_ids for c in completions] == expected
    assert all(len(c.stats.drafter_errors) == 1 for c in completions)


def test_your_own_drafter_by_the_front_door(target):
    class RepeatLast:
        name = "repeat-last"

        def propose(self, sequences, num_drafts):
            return [[s.token_ids[-1]] * k for s, k in zip(sequences, num_drafts, strict=True)]

        def on_free(self, sequence):
            pass

    plain = LLM(target, kv_tokens=64, speculate="off").generate([5, 6, 7], GREEDY)[0]
    own = LLM(target, kv_tokens=64, drafter=RepeatLast(), k=3).generate([5, 6, 7], GREEDY)[0]
    assert own.token_ids == plain.token_ids
    assert sum(own.stats.drafted) > 0


def test_emitted_tokens_are_plain_integers(llm):
    expected = llm.generate([5, 6, 7], GREEDY)[0].token_ids
    follow = iter([expected[1:]])
    llm.engine.drafter = OddDrafter(lambda k: torch.tensor(next(follow, [])[:k]))
    completion = llm.generate([5, 6, 7], GREEDY)[0]
    assert completion.token_ids == expected
    assert sum(completion.stats.accepted) > 0
    assert {type(token) for token in completion.token_ids} == {int}


def test_a_drafter_that_cannot_let_go_leaks_nothing(llm, monkeypatch):
    def fail(sequence):
        raise RuntimeError("still needed")

    monkeypatch.setattr(llm.engine.drafter, "on_free", fail)
    completion = llm.generate([5, 6, 7], GREEDY)[0]
    assert completion.finish_reason == "length"
    assert completion.stats.drafter_errors == ["on_free: RuntimeError: still needed"]
    assert llm.engine.pool.num_free == llm.engine.pool.num_usable


def test_a_rejected_draft_with_nan_weights_is_not_seen(tmp_path):
    """Its keys and values are NaN, which 0 * NaN would carry into the rows before it."""
    model = save_tiny(tmp_path, "llama")
    plain = LLM(tmp_path, kv_tokens=64).generate([5, 6, 7], GREEDY)[0].token_ids
    bad = next(token for token in range(3, 97) if token not in (5, 6, 7, *plain))
    model.model.embed_tokens.weight.data[bad] = torch.nan
    model.save_pretrained(tmp_path)
    llm = LLM(tmp_path, kv_tokens=64, k=3)
    llm.engine.drafter = OddDrafter(lambda k: [bad] * k)
    completion = llm.generate([5, 6, 7], GREEDY)[0]
    assert completion.token_ids == plain
    assert completion.stats.drafter_errors == ["NaN in a step with drafts"]


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_a_callback_may_abort_another_request_of_its_step(llm, max_tokens):
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    heard, requests = [], {}
    llm.submit([5, 6, 7], params, on_tokens=lambda tokens: llm.engine.abort(requests["other"]))
    requests["other"] = llm.submit([8, 9], params, on_tokens=heard.extend)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    assert heard == []
    assert requests["other"].finish_reason == "abort"
    assert requests["other"].sequence.output_ids == []


def test_a_step_inside_a_step_is_refused(llm):
    request = llm.submit([5, 6], GREEDY, on_tokens=lambda tokens: llm.engine.step())
    while llm.engine.has_work:
        llm.engine.step()
    assert request.finish_reason == "error"
    assert "called from a callback" in request.error


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


def test_an_ended_request_is_not_taken_again(llm):
    request = llm.submit([5, 6], GREEDY)
    llm.engine.abort(request)
    with pytest.raises(ValueError, match="has ended: abort"):
        llm.engine.add(request)


def test_a_priority_that_is_no_number_is_refused(llm):
    with pytest.raises(TypeError, match="priority: expected an integer, got 'high'"):
        llm.submit([5, 6], GREEDY, priority="high")
    assert not llm.engine.has_work


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
