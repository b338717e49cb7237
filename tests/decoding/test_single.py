"""The two teaching functions: against transformers, and against each other."""

from __future__ import annotations

import copy

import pytest
import torch

from pagedraft.decoding import SamplingParams, generate_with_kv_cache, speculative_decode
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.transformer import Transformer
from pagedraft.tests.model.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("cpu_path")
PROMPT = [5, 9, 33, 7, 60, 61, 5, 9]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("single")
    reference = save_tiny(root / "target", "qwen3", seed=0)
    save_tiny(root / "draft", "llama", seed=1, num_hidden_layers=1)
    with use_implementation("cpu"):
        return reference, *(Transformer.from_folder(root / name) for name in ("target", "draft"))


def test_greedy_equals_transformers(models):
    reference, target, _ = models
    expected = reference.generate(
        torch.tensor([PROMPT]), do_sample=False, max_length=40, pad_token_id=0
    )[0].tolist()
    assert generate_with_kv_cache(target, PROMPT, 40) == expected


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_short_prompts_equal_transformers_in_bf16_weights(models, tmp_path, length):
    """The oracle itself must be right where prompts are shorter than a padded batch."""
    reference, target, _ = models
    rounded = copy.deepcopy(reference).to(torch.bfloat16).to(torch.float32)
    narrow = Transformer.from_folder(target.folder, dtype=torch.bfloat16)
    expected = rounded.generate(
        torch.tensor([PROMPT[:length]]), do_sample=False, max_length=12, pad_token_id=0
    )[0].tolist()
    assert generate_with_kv_cache(narrow, PROMPT[:length], 12) == expected


def test_a_draft_that_does_not_know_a_token_stays_out(models, tmp_path):
    _, target, _ = models
    save_tiny(tmp_path, "llama", seed=1, vocab_size=60)
    prompt = [5, 96, 7]
    got = speculative_decode(prompt, tmp_path, target, max_length=20)
    assert got == generate_with_kv_cache(target, prompt, 20)


def by_length(output_ids, logits_V):
    """A processor that makes tokens more likely by how much output there is."""
    logits_V[len(output_ids) % 7 :: 7] += 2.0
    return logits_V


SAMPLING = {
    "greedy": None,
    "processor": SamplingParams(temperature=0.8, seed=5, logits_processors=(by_length,)),
    "warm": SamplingParams(temperature=0.8, seed=7),
    "hot": SamplingParams(temperature=1.5, seed=2**64 - 1),
}


@pytest.mark.parametrize("num_drafts", [0, 1, 4, 9])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_speculation_changes_nothing(models, sampling, num_drafts):
    _, target, draft = models
    params = SAMPLING[sampling]
    expected = generate_with_kv_cache(target, PROMPT, 40, params=params)
    got = speculative_decode(
        PROMPT, draft, target, num_drafts=num_drafts, max_length=40, params=params
    )
    assert got == expected
    assert expected[: len(PROMPT)] == PROMPT


@pytest.mark.parametrize("accept", ["rejection", "block"])
def test_greedy_drafts_are_judged_as_if_they_were_matched(models, accept):
    _, target, draft = models
    params = SamplingParams(temperature=0, accept=accept, repetition_penalty=1.1)
    expected = generate_with_kv_cache(target, PROMPT, 40, params=params)
    got = speculative_decode(PROMPT, draft, target, max_length=40, params=params)
    assert got == expected


@pytest.mark.parametrize("accept", ["rejection", "block"])
def test_judged_samples_are_not_the_plain_ones(models, accept):
    """Each rule is really asked for, and its output depends on the seed alone."""
    _, target, draft = models
    params = SamplingParams(temperature=1.0, seed=3, accept=accept)
    got = [
        speculative_decode(PROMPT, draft, target, max_length=40, params=params) for _ in range(2)
    ]
    assert got[0] == got[1]
    assert got[0] != generate_with_kv_cache(target, PROMPT, 40, params=params)


def test_each_sample_of_a_prompt_is_another(models):
    _, target, draft = models
    params = SamplingParams(temperature=1.0, seed=3)
    samples = [
        generate_with_kv_cache(target, PROMPT, 30, params=params, sample_index=index)
        for index in (0, 1)
    ]
    assert samples[0] != samples[1]
    got = speculative_decode(PROMPT, draft, target, max_length=30, params=params, sample_index=1)
    assert got == samples[1]


def broken(output_ids, logits_V):
    return logits_V if len(output_ids) < 5 else None


def test_a_processor_that_fails_says_so(models):
    _, target, draft = models
    params = SamplingParams(temperature=0, logits_processors=(broken,), ignore_eos=True)
    message = r"logits_processors: broken expected to return .* at position 13"
    with pytest.raises(ValueError, match=message):
        generate_with_kv_cache(target, PROMPT, 30, params=params)
    with pytest.raises(ValueError, match=message):
        speculative_decode(PROMPT, draft, target, max_length=30, params=params)
    whole = generate_with_kv_cache(target, PROMPT, 13, params=params)
    assert speculative_decode(PROMPT, draft, target, max_length=13, params=params) == whole


def test_max_length_defaults_to_the_prompt_plus_max_tokens(models):
    _, target, draft = models
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    got = speculative_decode(PROMPT, draft, target, params=params)
    assert len(got) == len(PROMPT) + 5


def test_the_prompt_is_left_alone(models):
    _, target, _ = models
    prompt = list(PROMPT)
    generate_with_kv_cache(target, prompt, 12)
    assert prompt == PROMPT


BAD = {
    "empty prompt": (([], 10), "at least one token"),
    "id out of range": (([500], 10), "token ids from 0 to 96, got 500"),
    "too long": ((PROMPT, 1000), "max_length: expected at most 128 positions, got 1000"),
    "text without tokenizer": (("hi", 10), "needs a tokenizer"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(models, name):
    (prompt, max_length), message = BAD[name]
    with pytest.raises(ValueError, match=message):
        generate_with_kv_cache(models[1], prompt, max_length)


def test_a_model_is_found_or_named(tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match="nowhere"):
        generate_with_kv_cache(tmp_path / "nowhere", PROMPT, 10)
