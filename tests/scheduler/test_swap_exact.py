"""Swapping under a real engine: the bits come back, so nothing of it can be seen in the output."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from pagedraft.decoding.params import SamplingParams
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.swap import SwapSpace
from pagedraft.scheduler.swap_policy import SwapPolicy
from pagedraft.tests.model.tiny import save_tiny
from pagedraft.tests.scheduler.runs import GREEDY, mixed_params, random_prompts, run_alone

pytestmark = pytest.mark.usefixtures("cpu_path")
LENGTHS = (1, 7, 12, 23, 40)
PROMPTS, PARAMS = random_prompts(97, LENGTHS), mixed_params(len(LENGTHS), 10)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    root = tmp_path_factory.mktemp("swap")
    save_tiny(root / "target", "llama", seed=0)
    save_tiny(root / "draft", "llama", seed=1)

    def load(name: str, dtype: torch.dtype) -> Transformer:
        with use_implementation("cpu"):
            return Transformer.from_folder(root / name, dtype=dtype)

    return load


def use_swap(llm: LLM, max_bytes: int = 2**30, forced: bool | None = True) -> SwapSpace:
    swap = SwapSpace(llm.engine.caches, max_bytes, SwapPolicy(forced))
    llm.engine.prefixes.swap = swap
    return swap


def run_preempted_always(llm: LLM, requests: list, seed: int = 0) -> list[list[int]]:
    """Before every step every running request, or a random one, loses its KV."""
    engine, choose = llm.engine, random.Random(seed)
    while engine.has_work:
        victims = list(engine.running)
        if choose.random() < 0.5:
            victims = victims and [choose.choice(victims)]
        for request in victims:
            engine.preempt(request)
        engine.step()
        engine.check_integrity()
    assert [request.error for request in requests] == [None] * len(requests)
    swap = engine.prefixes.swap
    assert (len(swap), swap.num_bytes) == (0, 0)
    return [request.sequence.output_ids for request in requests]


CASES = {
    "fp32": (torch.float32, "auto", {"speculate": "off"}),
    "fp32, no prefix cache": (torch.float32, "auto", {"speculate": "off", "prefix_cache": False}),
    "fp32, ngram": (torch.float32, "auto", {"speculate": "ngram"}),
    "fp32, draft model": (torch.float32, "auto", {"speculate": "draft"}),
    "bf16, draft model": (torch.bfloat16, "auto", {"speculate": "draft"}),
    "int8, draft model": (torch.bfloat16, "int8", {"speculate": "draft", "prefix_cache": False}),
    "fp8, ngram": (torch.float32, "fp8", {"speculate": "ngram"}),
    "small chunks": (torch.float32, "auto", {"speculate": "draft", "chunk_tokens": 3}),
    "a full pool": (torch.float32, "auto", {"speculate": "draft", "kv_tokens": 96}),
}


@pytest.mark.parametrize("dtype, kv_dtype, options", CASES.values(), ids=CASES)
def test_preempted_before_every_step(load, dtype, kv_dtype, options) -> None:
    target = load("target", dtype)
    common = {"block_size": 8, "kv_dtype": kv_dtype}
    plain = run_alone(LLM(target, speculate="off", kv_tokens=256, **common), PROMPTS, PARAMS)
    draft = load("draft", dtype) if options["speculate"] == "draft" else None
    llm = LLM(target, draft, **{"k": 3, "kv_tokens": 512, **common, **options})
    swap = use_swap(llm)
    requests = [llm.submit(*pair) for pair in zip(PROMPTS, PARAMS, strict=True)]
    assert run_preempted_always(llm, requests) == plain.token_ids
    assert swap.stats.num_swapped_in > 20
    assert swap.stats.tokens_in > 20


def test_forks(load) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.9, seed=3, n=3, ignore_eos=True)
    target = load("target", torch.float32)
    plain = LLM(target, speculate="off", block_size=8, kv_tokens=512).generate([PROMPTS[3]], params)
    llm = LLM(target, load("draft", torch.float32), speculate="draft", block_size=8, kv_tokens=512)
    swap = use_swap(llm)
    requests = llm.submit_all(PROMPTS[3], params)
    assert run_preempted_always(llm, requests) == [row.token_ids for row in plain]
    assert swap.stats.num_swapped_in > 10


def preempted_once(llm: LLM, prompt: list[int], num_steps: int = 6):
    """A request that ran for some steps and lost its KV."""
    request = llm.submit(prompt, replace(GREEDY, max_tokens=16))
    for _ in range(num_steps):
        llm.engine.step()
    llm.engine.preempt(request)
    return request


def finish(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()


def test_no_token_is_computed_twice(load) -> None:
    """And the draft model's KV is back, too: its drafts are accepted at once (it is the target)."""
    target = load("target", torch.float32)
    llm = LLM(target, target, speculate="draft", k=3, block_size=8, kv_tokens=512)
    swap = use_swap(llm)
    request = preempted_once(llm, PROMPTS[4], num_steps=3)
    num_written = request.num_tokens - 1
    num_fed = llm.engine.stats.num_fed
    llm.engine.step()
    assert llm.engine.stats.num_fed - num_fed <= 4
    assert swap.stats.tokens_in == num_written - num_written // 8 * 8
    finish(llm)
    assert request.stats.accepted == request.stats.drafted


@pytest.mark.parametrize("has_cache", [True, False])
def test_only_what_the_pool_has_lost_is_copied_back(load, has_cache: bool) -> None:
    target = load("target", torch.float32)
    options = {"speculate": "off", "block_size": 8, "kv_tokens": 256, "prefix_cache": has_cache}
    llm = LLM(target, **options)
    swap = use_swap(llm)
    request = preempted_once(llm, PROMPTS[4])
    num_written, block_bytes = 40 + 5, swap.stats.bytes_out // 6
    assert swap.num_bytes == swap.stats.bytes_out
    finish(llm)
    assert swap.stats.bytes_in == (1 if has_cache else 6) * block_bytes
    assert swap.stats.tokens_in == (num_written % 8 if has_cache else num_written)
    expected = LLM(target, **options).generate([PROMPTS[4]], replace(GREEDY, max_tokens=16))
    assert request.sequence.output_ids == expected[0].token_ids


def test_an_aborted_request_leaves_nothing(load) -> None:
    llm = LLM(load("target", torch.float32), speculate="off", block_size=8, kv_tokens=256)
    swap = use_swap(llm)
    request = preempted_once(llm, PROMPTS[4])
    assert len(swap) == 1
    llm.engine.abort(request)
    assert (len(swap), swap.num_bytes) == (0, 0)
    llm.engine.check_integrity()


def test_a_reset_forgets_the_host_copy(load) -> None:
    llm = LLM(load("target", torch.float32), speculate="off", block_size=8, kv_tokens=256)
    swap = use_swap(llm)
    request = preempted_once(llm, PROMPTS[4])
    llm.reset_prefix_cache()
    assert (len(swap), swap.num_bytes) == (0, 0)
    finish(llm)
    assert request.stats.num_cached_tokens == 0
    assert swap.stats.num_swapped_in == 0


def test_a_failing_copy_leaves_the_request_waiting(load, monkeypatch) -> None:
    """What was copied in part is nobody's; the host copy serves the next try."""
    llm = LLM(load("target", torch.float32), speculate="off", block_size=8, kv_tokens=256)
    swap = use_swap(llm)
    request = preempted_once(llm, PROMPTS[4])

    def fail(block_ids, rows):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(swap, "_scatter", fail)
        with pytest.raises(KeyboardInterrupt):
            llm.engine.step()
    llm.engine.check_integrity()
    assert (request.block_ids, request.num_written, len(swap)) == ([], 0, 1)
    finish(llm)
    [expected] = LLM(load("target", torch.float32), speculate="off", kv_tokens=256).generate(
        [PROMPTS[4]], replace(GREEDY, max_tokens=16)
    )
    assert request.sequence.output_ids == expected.token_ids
    assert swap.stats.num_swapped_in == 1


def test_teeth_other_bits_are_seen(load) -> None:
    llm = LLM(
        load("target", torch.float32),
        speculate="off",
        block_size=8,
        kv_tokens=256,
        prefix_cache=False,
    )
    swap = use_swap(llm)
    request = preempted_once(llm, PROMPTS[4])
    for row in swap.find(request, 0).rows:
        row.copy_(row.roll(1, 0))
    finish(llm)
    [expected] = LLM(load("target", torch.float32), speculate="off", kv_tokens=256).generate(
        [PROMPTS[4]], replace(GREEDY, max_tokens=16)
    )
    assert request.sequence.output_ids != expected.token_ids
