"""Logits processors through the engine: seen at drafted positions, failing alone and on time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagedraft.decoding.params import SamplingParams
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.scheduler.runs import random_prompts

pytestmark = pytest.mark.usefixtures("cpu_path")
[PROMPT] = random_prompts(97, (9,))
PARAMS = SamplingParams(max_tokens=10, temperature=0.8, seed=1, logprobs=1, ignore_eos=True)


@pytest.fixture
def make(target):
    def make(speculate: str = "draft", **options) -> LLM:
        draft = target if speculate == "draft" else None
        return LLM(target, draft, speculate=speculate, block_size=8, kv_tokens=256, k=3, **options)

    return make


def no_repeats(output_ids, logits_V):
    """Ban every token of the output: what is banned depends on the drafts before."""
    logits_V[list(output_ids)] = -torch.inf
    return logits_V


def fails_at(length: int):
    def fails(output_ids, logits_V):
        if len(output_ids) == length:
            raise RuntimeError("no more")
        return logits_V

    return fails


def facts(completion) -> tuple:
    c = completion
    return c.token_ids, c.finish_reason, c.error, c.logprobs


@pytest.mark.parametrize("accept", ["match", "rejection", "block"])
def test_drafts_are_part_of_the_output_that_it_sees(make, accept):
    params = replace(PARAMS, logits_processors=[no_repeats], accept=accept)
    [completion] = make().generate([PROMPT], params)
    assert len(set(completion.token_ids)) == 10
    assert completion.stats.accepted == completion.stats.drafted


def test_output_and_raw_logprobs_are_those_of_plain_decoding(make):
    params = replace(PARAMS, logits_processors=[no_repeats])
    plain, drafted = (make(name).generate([PROMPT], params)[0] for name in ("off", "draft"))
    assert facts(drafted) == facts(plain)
    assert sum(drafted.stats.accepted) > 0


@pytest.mark.parametrize("length", range(10))
def test_a_failure_counts_where_decoding_gets_to_it(make, length):
    params = replace(PARAMS, logits_processors=[fails_at(length)])
    good = replace(PARAMS, seed=2)
    llm = make()
    failed, other = llm.generate([PROMPT, PROMPT], [params, good])
    assert failed.finish_reason == "error"
    assert failed.error == (
        "logits_processors: fails_at.<locals>.fails raised RuntimeError: no more at position "
        f"{9 + length}"
    )
    assert facts(failed) == facts(make("off").generate([PROMPT], params)[0])
    assert facts(other) == facts(make("off").generate([PROMPT], good)[0])
    assert llm.engine.pool.num_free == llm.engine.pool.num_usable


@pytest.mark.parametrize("accept", ["match", "rejection", "block"])
def test_a_failure_behind_the_end_is_not_seen(make, accept):
    params = replace(PARAMS, logits_processors=[fails_at(4)], accept=accept)
    [completion] = make().generate([PROMPT], replace(params, max_tokens=4))
    assert (completion.finish_reason, completion.error) == ("length", None)


@pytest.mark.parametrize("accept", ["rejection", "block"])
def test_accepted_drafts_before_a_failure_are_not_drawn_again(make, accept):
    """Else continuations that fail would be less likely than they are."""
    params = replace(PARAMS, logits_processors=[fails_at(3)], accept=accept)
    [completion] = make().generate([PROMPT], params)
    assert completion.finish_reason == "error"
    assert len(completion.token_ids) == 3
    assert completion.stats.drafter_errors == []
    assert completion.stats.accepted == [1, 1]
