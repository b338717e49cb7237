"""Quantised KV pools under the engine: the same output with and without speculation, the right
bytes, errors that name the option."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from pagedraft.kernels.dispatch import INTERPRETED, use_implementation
from pagedraft.model.batch import Span, build_step_batch
from pagedraft.model.kv_cache import KVCache, kv_bytes_per_token
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler import memory
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.model.tiny import save_tiny
from pagedraft.tests.scheduler.runs import (
    mixed_params,
    random_prompts,
    run_alone,
    run_preempted,
    run_staggered,
    run_together,
)

LENGTHS = (1, 7, 12, 23, 40)
MAX_TOKENS = 16
VOCAB = 97
INT8, FP8 = torch.int8, torch.float8_e4m3fn
RUNS = {"together": run_together, "staggered": run_staggered, "preempted": run_preempted}
PROMPTS, PARAMS = random_prompts(VOCAB, LENGTHS), mixed_params(len(LENGTHS), MAX_TOKENS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    save_tiny(root / "target", "llama", seed=0)
    save_tiny(root / "other", "llama", seed=1)
    return {"target": root / "target", "other": root / "other"}


@pytest.fixture(scope="module")
def load(folders):
    @cache
    def load(name: str, dtype: torch.dtype = torch.float32) -> Transformer:
        with use_implementation("cpu"):
            return Transformer.from_folder(folders[name], dtype=dtype)

    return load


@pytest.fixture(scope="module")
def expected(load):
    """Each prompt alone, without drafts, from a pool of the same dtype."""

    @cache
    def outputs(kv_dtype: str, dtype: torch.dtype) -> list[list[int]]:
        with use_implementation("cpu"):
            llm = LLM(load("target", dtype), speculate="off", kv_dtype=kv_dtype, kv_tokens=256)
            return run_alone(llm, PROMPTS, PARAMS).token_ids

    return outputs


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("draft", [None, "other"], ids=["ngram", "draft model"])
@pytest.mark.parametrize("run", RUNS)
def test_speculation_changes_nothing(load, expected, run, draft, kv_dtype, dtype):
    llm = LLM(
        load("target", dtype),
        None if draft is None else load(draft, dtype),
        k=3,
        kv_dtype=kv_dtype,
        block_size=8,
        kv_tokens=1024,
    )
    outcome = RUNS[run](llm, PROMPTS, PARAMS)
    assert outcome.token_ids == expected(kv_dtype, dtype)
    assert outcome.num_drafted > 0
    assert run != "preempted" or outcome.num_preemptions > 0


@pytest.mark.skipif(not INTERPRETED, reason="kernels run compiled here; see bench/gpu_check.py")
def test_int8_on_interpreted_kernels(folders):
    model = Transformer.from_folder(folders["target"], dtype=torch.float16)
    prompts, params = random_prompts(VOCAB, (2, 9)), mixed_params(2, 4)
    options = {"kv_dtype": "int8", "block_size": 8, "kv_tokens": 64}
    plain = run_alone(LLM(model, speculate="off", **options), prompts, params)
    drafted = run_preempted(LLM(model, k=3, **options), prompts, params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.num_preemptions > 0


def logits(model: Transformer, kv_dtype: torch.dtype) -> torch.Tensor:
    """Of 12 tokens, fed as a prompt of 9 and a row of 3."""
    pool = KVCache(model.config, 4, 8, kv_dtype, model.device)
    for tensor in pool.tensors:
        tensor.view(torch.uint8).fill_(0xFF)
    rows = []
    for start, tokens in ((0, [5, 9, 33, 7, 60, 61, 5, 9, 33]), (9, [8, 20, 90])):
        span = Span(tokens, start, [3, 1], len(tokens))
        batch = build_step_batch([span], block_size=8, device=model.device)
        rows.append(model.forward(batch, pool))
    return torch.cat(rows)


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("kv_dtype", [INT8, FP8], ids=["int8", "fp8"])
def test_logits_are_near_those_of_floats_and_not_equal(load, kv_dtype):
    model = load("target")
    exact, stored = logits(model, torch.float32), logits(model, kv_dtype)
    error = (stored - exact).abs().max() / exact.abs().max()
    # Half a step is 1/254 of a head's largest value, or 1/16 of a value: errors average out.
    assert 0 < float(error) < (0.02 if kv_dtype == INT8 else 0.1)


@pytest.mark.parametrize("kv_dtype", [INT8, FP8], ids=["int8", "fp8"])
def test_cpu_path_is_the_reference(load, kv_dtype):
    model = load("target")
    with use_implementation("cpu"):
        path = logits(model, kv_dtype)
    with use_implementation("ref"):
        reference = logits(model, kv_dtype)
    torch.testing.assert_close(path, reference, rtol=1e-4, atol=1e-4)


POOLS = {
    "auto": ("auto", torch.float32),
    "int8": ("int8", INT8),
    "fp8": ("fp8", FP8),
    "a torch dtype": (INT8, INT8),
}


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize(("option", "stored"), POOLS.values(), ids=POOLS)
def test_target_and_draft_pools_store_it(load, option, stored):
    llm = LLM(load("target"), load("other"), kv_dtype=option, kv_tokens=64)
    assert llm.engine.cache.k[0].dtype == llm.engine.cache.v[-1].dtype == stored
    assert llm.engine.caches[1].k[0].dtype == stored


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("draft", [None, "other"])
@pytest.mark.parametrize(("option", "stored"), POOLS.values(), ids=POOLS)
def test_memory_is_counted_in_the_pools_bytes(load, monkeypatch, option, stored, draft):
    budget = 200_000
    monkeypatch.setattr(memory, "_free_bytes", lambda device: budget / memory.CPU_SHARE)
    draft_model = None if draft is None else load(draft)
    llm = LLM(load("target"), draft_model, kv_dtype=option, block_size=8)
    num_models = 1 if draft is None else 2
    per_token = num_models * kv_bytes_per_token(load("target").config, stored)
    num_tokens = min(budget // per_token, 1024 * 64)
    assert llm.engine.pool.num_usable == -(-num_tokens // 8)


BAD = {
    "unknown": ("int4", "kv_dtype: expected one of .*auto.*int8.*fp8.*got 'int4'"),
    "a float dtype": (torch.bfloat16, "kv_dtype: expected one of .*got torch.bfloat16"),
    "nothing": (None, "kv_dtype: expected one of .*got None"),
}


@pytest.mark.parametrize(("option", "error"), BAD.values(), ids=BAD)
def test_bad_dtype_is_named(load, option, error):
    with pytest.raises(ValueError, match=error):
        LLM(load("target"), kv_dtype=option)


def test_fp8_is_refused_on_an_older_gpu(load, monkeypatch):
    monkeypatch.setattr("pagedraft.model.kv_cache.gpu_arch", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r'fp8 .*8\.9 .*"int8"'):
        LLM(load("target"), kv_dtype="fp8", kv_tokens=64)
