"""Speculation cannot be seen in the output: the first promise, on tiny random models.

Every run is compared with the plainest loop, one sequence at a time without drafts.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from pagedraft.decoding import draw, verify
from pagedraft.kernels.dispatch import INTERPRETED, use_implementation
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.model.tiny import save_tiny
from pagedraft.tests.scheduler.runs import (
    mixed_params,
    plain_outputs,
    random_prompts,
    run_alone,
    run_preempted,
    run_staggered,
    run_together,
)

LENGTHS = (1, 7, 12, 23, 40)
MAX_TOKENS = 20
VOCAB = 97
RUNS = {"together": run_together, "staggered": run_staggered, "alone": run_alone}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    save_tiny(root / "target", "llama", seed=0)
    save_tiny(root / "other", "llama", seed=1)
    return {"target": root / "target", "other": root / "other"}


@pytest.fixture(scope="module")
def load(folders):
    @cache
    def load(name: str, dtype: torch.dtype) -> Transformer:
        with use_implementation("cpu"):
            return Transformer.from_folder(folders[name], dtype=dtype)

    return load


@pytest.fixture(scope="module")
def expected(load):
    prompts, params = random_prompts(VOCAB, LENGTHS), mixed_params(len(LENGTHS), MAX_TOKENS)

    @cache
    def outputs(dtype: torch.dtype) -> list[list[int]]:
        with use_implementation("cpu"):
            return plain_outputs(load("target", dtype), prompts, params)

    return outputs


def make_llm(load, drafter: str, k: int | str, dtype: torch.dtype, **options) -> LLM:
    draft = {"self": "target", "other": "other"}.get(drafter)
    return LLM(
        load("target", dtype),
        None if draft is None else load(draft, dtype),
        speculate=drafter if draft is None else "draft",
        k=k,
        **({"block_size": 8, "kv_tokens": 1024} | options),
    )


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("drafter", ["ngram", "suffix", "layers", "self", "other"])
class TestAgainstPlainDecoding:
    prompts = random_prompts(VOCAB, LENGTHS)
    params = mixed_params(len(LENGTHS), MAX_TOKENS)

    @pytest.mark.parametrize("run", RUNS)
    def test_enough_blocks(self, load, expected, drafter, k, dtype, run):
        llm = make_llm(load, drafter, k, dtype)
        outcome = RUNS[run](llm, self.prompts, self.params)
        assert outcome.token_ids == expected(dtype)
        assert outcome.num_drafted > 0

    def test_a_pool_that_one_request_fills(self, load, expected, drafter, k, dtype):
        llm = make_llm(load, drafter, k, dtype, kv_tokens=64, chunk_tokens=16)
        outcome = run_together(llm, self.prompts, self.params)
        assert outcome.token_ids == expected(dtype)
        assert outcome.num_preemptions > 0

    def test_preempted_at_most_steps(self, load, expected, drafter, k, dtype):
        llm = make_llm(load, drafter, k, dtype)
        outcome = run_preempted(llm, self.prompts, self.params)
        assert outcome.token_ids == expected(dtype)
        assert outcome.num_preemptions >= outcome.num_passes / 2


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("chunk_tokens", [1, 5, None])
def test_chunks_and_blocks(load, expected, block_size, chunk_tokens):
    llm = make_llm(
        load, "ngram", "auto", torch.float32, block_size=block_size, chunk_tokens=chunk_tokens
    )
    prompts, params = random_prompts(VOCAB, LENGTHS), mixed_params(len(LENGTHS), MAX_TOKENS)
    assert run_together(llm, prompts, params).token_ids == expected(torch.float32)


@pytest.mark.usefixtures("cpu_path")
def test_self_draft_is_always_accepted(load):
    """A draft that is the target shares its noise, so it must agree at any temperature."""
    llm = make_llm(load, "self", 3, torch.float32)
    prompts, params = random_prompts(VOCAB, LENGTHS), mixed_params(len(LENGTHS), MAX_TOKENS)
    outcome = run_together(llm, prompts, params)
    lost = outcome.num_drafted - outcome.num_accepted
    assert lost <= 3 * len(prompts), "only drafts behind an EOS may be lost"


@pytest.mark.usefixtures("cpu_path")
def test_teeth_a_reused_noise_is_seen(load, expected, monkeypatch):
    """The comparison must notice a verifier that draws with another position's noise."""

    def shifted(logits_QV, sequences, drafts, known=None):
        rows, positions, prefixes = draw.rows_of_logits(sequences, drafts)
        return draw.draw(logits_QV, rows, [p + 1 for p in positions], prefixes)

    monkeypatch.setattr(verify, "draw_spans", shifted)
    llm = make_llm(load, "ngram", 3, torch.float32)
    prompts, params = random_prompts(VOCAB, LENGTHS), mixed_params(len(LENGTHS), MAX_TOKENS)
    assert run_together(llm, prompts, params).token_ids != expected(torch.float32)


@pytest.mark.usefixtures("cpu_path")
def test_teeth_penalties_that_do_not_see_drafts_are_seen(load, expected, monkeypatch):
    """The comparison must notice a verifier whose rows all see the committed context only."""

    def blind(logits_QV, sequences, drafts, known=None):
        rows, positions, _ = draw.rows_of_logits(sequences, drafts)
        return draw.draw(logits_QV, rows, positions)

    monkeypatch.setattr(verify, "draw_spans", blind)
    llm = make_llm(load, "self", 3, torch.float32)
    prompts, params = random_prompts(VOCAB, LENGTHS), mixed_params(len(LENGTHS), MAX_TOKENS)
    assert run_together(llm, prompts, params).token_ids != expected(torch.float32)


@pytest.fixture(scope="module")
def interpreted(folders):
    """Loader, prompts, parameters and plain outputs on interpreted kernels in fp16, kept small."""

    @cache
    def load(name: str, dtype: torch.dtype) -> Transformer:
        return Transformer.from_folder(folders[name], dtype=dtype)

    prompts, params = random_prompts(VOCAB, (2, 9)), mixed_params(2, 4)
    return load, prompts, params, plain_outputs(load("target", torch.float16), prompts, params)


@pytest.mark.skipif(not INTERPRETED, reason="kernels run compiled here; see bench/gpu_check.py")
@pytest.mark.parametrize("drafter", ["ngram", "self", "other"])
def test_fp16_on_interpreted_kernels(interpreted, drafter):
    load, prompts, params, expected = interpreted
    llm = make_llm(load, drafter, 3, torch.float16, kv_tokens=64)
    outcome = run_preempted(llm, prompts, params)
    assert outcome.token_ids == expected
    assert outcome.num_preemptions > 0
