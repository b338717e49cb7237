"""Steps that run out of device memory: they are run again in parts, and nothing is lost."""

from __future__ import annotations

import pytest
import torch

from pagedraft.decoding.params import SamplingParams
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.step_limit import GROW_STEPS, StepLimit, is_out_of_memory
from pagedraft.tests.scheduler.runs import random_prompts

pytestmark = pytest.mark.usefixtures("cpu_path")
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = random_prompts(97, (30, 5, 17, 9))


def make_llm(target, **options) -> LLM:
    return LLM(target, block_size=8, kv_tokens=512, k=3, **options)


def limit_memory(llm: LLM, fits) -> list[int]:
    """Let passes fail that ``fits`` refuses by the tokens they feed; returns what they fed."""
    fed: list[int] = []

    def forward(batch, cache):
        fed.append(batch.num_tokens)
        if not fits(batch.num_tokens):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return llm.target.forward(batch, cache)

    llm.engine.launcher.forward = forward
    return fed


@pytest.mark.parametrize("speculate", ["off", "ngram"])
@pytest.mark.parametrize("most", [1, 3, 16])
def test_steps_shrink_until_they_fit(target, most, speculate):
    expected = make_llm(target, speculate="off").generate(PROMPTS, PARAMS)
    llm = make_llm(target, speculate=speculate)
    fed = limit_memory(llm, lambda num_tokens: num_tokens <= most)
    completions = llm.generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    assert llm.engine.stats.num_out_of_memory > 0
    assert fed[0] > most
    llm.engine.check_integrity()
    assert llm.engine.pool.num_free == llm.engine.pool.num_usable


def test_rows_beyond_the_limit_are_preempted_and_come_back(target):
    llm = make_llm(target, speculate="off")
    requests = [llm.submit(prompt, PARAMS) for prompt in PROMPTS]
    llm.engine.step()
    llm.engine.step()
    limit_memory(llm, lambda num_tokens: num_tokens <= 2)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    assert [r.stats.num_preemptions > 0 for r in requests] == [False, False, True, True]
    assert {r.finish_reason for r in requests} == {"length"}


def test_a_token_that_does_not_fit_alone_fails_its_request_only(target):
    expected = make_llm(target, speculate="off").generate(PROMPTS[:2], PARAMS)
    llm = make_llm(target, speculate="off", max_rows=1)
    failing = [True]
    limit_memory(llm, lambda num_tokens: not failing[0])
    bad = llm.submit(PROMPTS[2], PARAMS)
    while not bad.finished:
        llm.engine.step()
        llm.engine.check_integrity()
    failing[0] = False
    assert bad.finish_reason == "error"
    assert "out of memory: CUDA out of memory" in bad.error
    completions = llm.generate(PROMPTS[:2], PARAMS)
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]


def test_memory_that_ends_where_the_result_is_read(target, monkeypatch):
    """Also after callbacks of the step before have run."""
    from pagedraft.scheduler.launch import Launched

    expected = make_llm(target, speculate="off").generate(PROMPTS, PARAMS)
    llm = make_llm(target, speculate="off")
    llm.engine.overlap = True
    read, calls = Launched.read, []

    def failing(launched):
        calls.append(launched)
        if len(calls) in (2, 5):
            raise torch.OutOfMemoryError("late")
        return read(launched)

    monkeypatch.setattr(Launched, "read", failing)
    completions = llm.generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    assert llm.engine.stats.num_out_of_memory == 2


def test_other_errors_are_not_swallowed(target):
    llm = make_llm(target, speculate="off")

    def forward(batch, cache):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    llm.engine.launcher.forward = forward
    with pytest.raises(RuntimeError, match="illegal memory access"):
        llm.generate(PROMPTS, PARAMS)
    llm.engine.check_integrity()
    assert not llm.engine.has_work


ERRORS = {
    "cuda": (torch.OutOfMemoryError("x"), True),
    "host": (MemoryError(), True),
    "cpu_allocator": (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"), True),
    "other": (RuntimeError("CUDA error: device-side assert triggered"), False),
    "value": (ValueError("DefaultCPUAllocator"), False),
    "interrupt": (KeyboardInterrupt(), False),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_counts(case):
    error, expected = ERRORS[case]
    assert is_out_of_memory(error) is expected


def test_the_limit_comes_back():
    limit = StepLimit()
    assert limit.cap(512) == 512
    limit.shrink(400)
    assert limit.cap(512) == 200
    limit.shrink(2)
    limit.shrink(1)
    assert limit.cap(512) == 1
    caps = []
    for _ in range(9):
        for _ in range(GROW_STEPS):
            limit.note_step(512)
        caps.append(limit.cap(512))
    assert caps == [2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert limit.cap(1024) == 1024
