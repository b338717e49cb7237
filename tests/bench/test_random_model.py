"""Models of real sizes with random weights: their sizes, and output that a bench can rely on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagedraft.bench.random_model import empty_weights, random_draft, random_model, random_weights
from pagedraft.bench.real_sizes_bed import SETTINGS
from pagedraft.bench.shapes import CONFIGS
from pagedraft.decoding.params import SamplingParams
from pagedraft.model.quant_scheme import QuantScheme
from pagedraft.scheduler.llm import LLM

pytestmark = pytest.mark.usefixtures("cpu_path")
CPU = torch.device("cpu")
META = torch.device("meta")
CONFIG = replace(SETTINGS["tiny"].config, vocab_size=1000, num_layers=4)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
# Layers, E, H, G, D, F, V and parameters of the models themselves.
REAL = {
    "llama-8b": ((32, 4096, 32, 8, 128, 14336, 128256), 8_030_261_248),
    "llama-1b": ((16, 2048, 32, 8, 64, 8192, 128256), 1_235_814_400),
}


@pytest.mark.parametrize("name", REAL)
def test_sizes_are_those_of_the_model(name):
    config, (sizes, num_parameters) = CONFIGS[name], REAL[name]
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    found = (config.num_layers, config.embed_dim, *heads, config.mlp_dim, config.vocab_size)
    assert found == sizes
    weights = empty_weights(config, dtype=torch.bfloat16, device=META)
    assert sum(weight.numel() for weight in weights.values()) == num_parameters


@pytest.mark.parametrize("tied", [False, True])
def test_greedy_output_is_finite_and_varied(tied):
    """Also with a tied head, where a model of another scale repeats the token that it has read."""
    model = random_model(replace(CONFIG, tied_head=tied), dtype=torch.float32, device=CPU)
    prompts = [[5, 6, 7], [900, 1, 7], list(range(0, 1000, 40))]
    completions = LLM(model, speculate="off", kv_tokens=512).generate(prompts, GREEDY)
    outputs = [completion.token_ids for completion in completions]
    assert [completion.error for completion in completions] == [None] * 3
    assert min(len(set(output)) for output in outputs) > 12
    assert outputs[0] != outputs[1]  # the last token of their prompts is the same


def test_a_seed_fixes_the_weights():
    same, again, other = (
        random_weights(CONFIG, seed=seed, dtype=torch.float32, device=CPU) for seed in (1, 1, 2)
    )
    assert all(torch.equal(same[name], again[name]) for name in same)
    assert not any(torch.equal(same[name], other[name]) for name in same)
    assert all(bool(weight.isfinite().all()) for weight in same.values())


def test_weights_that_no_checkpoint_would_have_are_refused():
    config = replace(CONFIG, quantization=QuantScheme("fp8", "scaled", "fp8"))
    with pytest.raises(ValueError, match="quantization: expected None"):
        random_weights(config, device=CPU)


def test_a_draft_shares_and_changes_nothing():
    target = random_model(CONFIG, dtype=torch.float32, device=CPU)
    draft = random_draft(target, 1)
    assert draft.embed_VE is target.embed_VE
    assert draft.head is target.head
    assert len(draft.layers) == 1
    [plain] = LLM(target, speculate="off", kv_tokens=128).generate([5, 6, 7], GREEDY)
    [drafted] = LLM(target, draft, speculate="draft", k=2, kv_tokens=128).generate(
        [5, 6, 7], GREEDY
    )
    assert drafted.token_ids == plain.token_ids
    assert sum(drafted.stats.drafted) > 0
