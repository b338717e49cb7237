"""The prefix cache under a real engine: warm equals cold, for tokens, logprobs and acceptance."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedraft.decoding.params import SamplingParams
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.scheduler.runs import GREEDY, random_prompts

pytestmark = pytest.mark.usefixtures("cpu_path")
PARAMS = SamplingParams(max_tokens=10, temperature=0.9, seed=5, logprobs=2, ignore_eos=True)
[PROMPT] = random_prompts(97, (40,))


@pytest.fixture
def make(target):
    def make(draft=None, **options) -> LLM:
        defaults = {"block_size": 8, "kv_tokens": 512, "k": 3}
        return LLM(target, draft, **(defaults | options))

    return make


def facts(completion) -> tuple:
    return completion.token_ids, completion.finish_reason, completion.logprobs


@pytest.mark.parametrize("length", [1, 8, 9, 16, 31, 40])
def test_a_warm_prompt_gives_what_a_cold_one_gives(make, length):
    llm = make()
    [cold] = llm.generate([PROMPT[:length]], PARAMS)
    [warm] = llm.generate([PROMPT[:length]], PARAMS)
    assert facts(warm) == facts(cold)
    assert cold.stats.num_cached_tokens == 0
    assert warm.stats.num_cached_tokens == (length - 1) // 8 * 8
    llm.engine.check_integrity()


def test_a_conversation_goes_on_from_its_own_output(make):
    llm = make()
    [first] = llm.generate([PROMPT[:15]], PARAMS)
    longer = [*PROMPT[:15], *first.token_ids, 5, 6, 7]
    [second] = llm.generate([longer], PARAMS)
    assert second.stats.num_cached_tokens == 24
    assert facts(second) == facts(make(prefix_cache=False).generate([longer], PARAMS)[0])


def test_a_prompt_that_parts_in_the_middle(make):
    llm = make()
    llm.generate([PROMPT], PARAMS)
    other = [*PROMPT[:20], 9, *PROMPT[21:]]
    [warm] = llm.generate([other], PARAMS)
    assert warm.stats.num_cached_tokens == 16
    assert facts(warm) == facts(make(prefix_cache=False).generate([other], PARAMS)[0])


def test_prompts_that_arrive_while_the_first_runs(make):
    llm = make()
    first = llm.submit(PROMPT, PARAMS)
    llm.engine.step()
    second = llm.submit(PROMPT, PARAMS)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    assert second.stats.num_cached_tokens == 32
    assert first.sequence.output_ids == second.sequence.output_ids


def test_off_and_reset(make):
    llm = make(prefix_cache=False)
    llm.generate([PROMPT], PARAMS)
    assert llm.generate([PROMPT], PARAMS)[0].stats.num_cached_tokens == 0
    llm = make()
    llm.generate([PROMPT], PARAMS)
    llm.reset_prefix_cache()
    assert llm.generate([PROMPT], PARAMS)[0].stats.num_cached_tokens == 0
    llm.engine.check_integrity()


def test_a_full_pool_evicts(make):
    llm = make(kv_tokens=64)
    prompts = random_prompts(97, (40, 39, 38, 37), seed=1)
    expected = [make(prefix_cache=False).generate([p], PARAMS)[0].token_ids for p in prompts]
    for prompt, want in zip(prompts * 2, expected * 2, strict=True):
        assert llm.generate([prompt], PARAMS)[0].token_ids == want
        llm.engine.check_integrity()
    assert llm.engine.pool.num_free == llm.engine.pool.num_usable


def test_acceptance_right_after_a_hit_is_the_cold_one(make, target):
    """The draft is the target: with its KV restored too, every draft is accepted at once."""
    llm = make(target, speculate="draft")
    params = replace(GREEDY, max_tokens=13)
    [cold] = llm.generate([PROMPT], params)
    [warm] = llm.generate([PROMPT], params)
    assert warm.stats.num_cached_tokens == 32
    assert warm.stats.accepted == warm.stats.drafted == cold.stats.drafted
    assert warm.token_ids == cold.token_ids


def test_a_hit_without_the_drafts_kv_is_caught_up(make, target):
    llm = make(target, speculate="draft")
    params = replace(GREEDY, max_tokens=13)
    [plain] = llm.generate([PROMPT], replace(params, speculate=False))
    [warm] = llm.generate([PROMPT], params)
    assert warm.stats.num_cached_tokens == 32
    assert warm.token_ids == plain.token_ids
    assert warm.stats.accepted == warm.stats.drafted
    assert sum(warm.stats.drafted) > 0


def test_teeth_a_hit_of_other_tokens_is_seen(make):
    """The comparison must notice KV of another prompt."""
    llm = make()
    llm.generate([PROMPT], PARAMS)
    request = llm.submit(PROMPT, PARAMS)
    for cache in llm.engine.caches[0].tensors:
        cache.copy_(cache.roll(1, 0))
    while llm.engine.has_work:
        llm.engine.step()
    assert request.sequence.output_ids != make().generate([PROMPT], PARAMS)[0].token_ids
