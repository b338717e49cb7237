"""Drafters in the engine where theory says what is accepted: an oracle, and the target itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedraft.decoding.drafters.layers import LayersDrafter
from pagedraft.decoding.params import SamplingParams
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.decoding.oracle import OracleDrafter
from pagedraft.tests.model.tiny import save_tiny
from pagedraft.tests.scheduler.runs import (
    plain_outputs,
    random_prompts,
    run_preempted,
    run_together,
    use_drafter,
)

pytestmark = pytest.mark.usefixtures("cpu_path")

PROMPTS = random_prompts(97, (5, 12, 23))
SAMPLED = SamplingParams(max_tokens=16, temperature=0.9, seed=3, ignore_eos=True)
# Tokens of each pass for 16 tokens with at most 3 drafts; the first pass ends the prompt, and one
# that comes near the end drafts no more than can be kept. Corrupted output tokens, then passes.
PASSES = {
    "always right": ([], [1, 4, 4, 4, 3]),
    "the first draft": ([1], [1, 1, 4, 4, 4, 2]),
    "a draft in the middle": ([2], [1, 2, 4, 4, 4, 1]),
    "the last draft": ([3], [1, 3, 4, 4, 4]),
    "the token that comes for free": ([4], [1, 4, 4, 4, 3]),
    "every second": (range(1, 16, 2), [1, 1, 2, 2, 2, 2, 2, 2, 2]),
    "never right": (range(16), [1] * 16),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Transformer:
    folder = tmp_path_factory.mktemp("oracle")
    save_tiny(folder, "llama")
    with use_implementation("cpu"):
        return Transformer.from_folder(folder)


@pytest.fixture(scope="module")
def outputs(target) -> list[list[int]]:
    with use_implementation("cpu"):
        return plain_outputs(target, PROMPTS, [SAMPLED] * len(PROMPTS))


@pytest.mark.parametrize("wrong, expected", PASSES.values(), ids=PASSES)
def test_accepted_as_planned(target, outputs, wrong, expected):
    known = {tuple(p): output for p, output in zip(PROMPTS, outputs, strict=True)}
    llm = LLM(target, drafter=OracleDrafter(known, wrong), k=3, kv_tokens=512)
    completions = llm.generate(PROMPTS, SAMPLED)
    assert [c.token_ids for c in completions] == outputs
    assert [[n for _, n in c.stats.emissions] for c in completions] == [expected] * len(PROMPTS)


def test_no_drafts_for_what_the_oracle_does_not_know(target, outputs):
    llm = LLM(target, drafter=OracleDrafter({}), k=3, kv_tokens=512)
    completions = llm.generate(PROMPTS, SAMPLED)
    assert [c.token_ids for c in completions] == outputs
    assert not any(c.stats.drafted for c in completions)


def self_draft(target: Transformer, name: str, **options) -> LLM:
    """The target drafts for itself: as a second model, or with all of its layers."""
    options = {"k": 3, "kv_tokens": 512, "block_size": 8} | options
    if name == "draft":
        return LLM(target, target, speculate="draft", **options)
    llm = LLM(target, speculate="off", **options)
    use_drafter(llm, LayersDrafter(target, llm.engine.cache, num_layers=len(target.layers)))
    return llm


@pytest.mark.parametrize("name", ["draft", "layers"])
@pytest.mark.parametrize("accept", ["match", "rejection", "block"])
class TestTheTargetItselfIsAlwaysAccepted:
    def test_in_a_batch(self, target, name, accept):
        params = [replace(SAMPLED, accept=accept)] * len(PROMPTS)
        outcome = run_together(self_draft(target, name), PROMPTS, params)
        assert outcome.num_accepted == outcome.num_drafted > 0
        assert outcome.num_passes == 5

    def test_after_preemption(self, target, name, accept):
        params = [replace(SAMPLED, accept=accept)] * len(PROMPTS)
        outcome = run_preempted(self_draft(target, name), PROMPTS, params)
        assert outcome.num_preemptions > 0
        assert outcome.num_accepted == outcome.num_drafted > 0

    @pytest.mark.parametrize("first_speculates", [True, False])
    def test_after_a_prefix_hit(self, target, name, accept, first_speculates):
        """Also where the cached blocks hold none of the draft model's KV."""
        llm = self_draft(target, name, prefix_cache=True)
        params = replace(SAMPLED, accept=accept)
        llm.generate(PROMPTS[2], replace(params, speculate=first_speculates))
        [warm] = llm.generate(PROMPTS[2], params)
        assert warm.stats.num_cached_tokens >= 16
        assert [n for _, n in warm.stats.emissions] == [1, 4, 4, 4, 3]


def test_one_layer_drafts_and_nobody_sees_it(target, outputs):
    llm = LLM(target, speculate="layers", k=3, kv_tokens=64, block_size=8)
    outcome = run_preempted(llm, PROMPTS, [SAMPLED] * len(PROMPTS))
    assert outcome.token_ids == outputs
    assert outcome.num_drafted > outcome.num_accepted


def test_planned_counts_have_teeth(target, outputs):
    """An oracle of other outputs misses the plan, and the output stays."""
    known = {tuple(PROMPTS[0]): outputs[1]}
    llm = LLM(target, drafter=OracleDrafter(known), k=3, kv_tokens=512)
    [completion] = llm.generate(PROMPTS[0], SAMPLED)
    assert completion.token_ids == outputs[0]
    assert [n for _, n in completion.stats.emissions] != PASSES["always right"][1]
