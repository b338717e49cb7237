"""Greedy tokens of the real demo model in fp32 equal transformers' ``generate``.

Six prompts of 8 to 700 tokens in one batch of requests that arrive at different steps. Two right
implementations may part where the two best logits are nearer than rounding: such a difference is
allowed where transformers' own top two are within 1e-4, at most twice in all, and behind it our
tokens must still be transformers' choice given our own prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from pagedraft.decoding.params import SamplingParams
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.demo import demo_folder
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.scheduler.runs import run_staggered

pytestmark = [pytest.mark.demo_model, pytest.mark.usefixtures("cpu_path")]
NUM_TOKENS = 64
MAX_GAP = 1e-4
MAX_TIES = 2
LENGTHS = (8, 31, 64, 150, 333, 700)


@dataclass(frozen=True)
class Reference:
    """transformers' model, the prompts, and its greedy continuations."""

    model: object
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def reference() -> Reference:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = demo_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with open(torch.nn.functional.__file__) as file:
        source = tokenizer.encode(file.read(40_000))
    prompts = [source[200 * i : 200 * i + length] for i, length in enumerate(LENGTHS)]
    assert [len(prompt) for prompt in prompts] == list(LENGTHS)
    expected = [
        model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=-1,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    return Reference(model, prompts, expected)


@pytest.fixture(scope="module")
def target() -> Transformer:
    with use_implementation("cpu"):
        return Transformer.from_folder(demo_folder(), dtype=torch.float32)


@pytest.mark.parametrize("speculate", ["off", "ngram"])
@pytest.mark.parametrize("chunk_tokens", [32, None], ids=["chunks of 32", "whole prompts"])
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_greedy_tokens(reference, target, block_size, chunk_tokens, speculate):
    llm = LLM(
        target,
        speculate=speculate,
        block_size=block_size,
        kv_tokens=2048,
        chunk_tokens=chunk_tokens,
        token_budget=2048,
    )
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    outcome = run_staggered(llm, reference.prompts, [params] * len(LENGTHS), gap=3)
    ties = [
        count_ties(reference.model, prompt, got, want)
        for prompt, got, want in zip(
            reference.prompts, outcome.token_ids, reference.expected, strict=True
        )
    ]
    assert sum(ties) <= MAX_TIES
    assert (outcome.num_accepted > 0) == (speculate == "ngram")


def count_ties(model, prompt: list[int], got: list[int], want: list[int]) -> int:
    """0 for equal tokens; else check every token under teacher forcing and count the ties."""
    assert len(got) == len(want) == NUM_TOKENS
    if got == want:
        return 0
    with torch.inference_mode():
        logits_SV = model(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1]
    best_S, _ = logits_SV.max(dim=1)
    chosen_S = logits_SV.gather(1, torch.tensor(got)[:, None])[:, 0]
    gaps_S = best_S - chosen_S
    assert float(gaps_S.max()) < MAX_GAP, f"not a tie: {gaps_S.max():.2e} below the best logit"
    first = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
    top_2 = logits_SV[first].topk(2).values
    assert float(top_2[0] - top_2[1]) < MAX_GAP
    return max(1, int((gaps_S > 0).sum()))


def test_teeth_a_wrong_token_is_no_tie(reference):
    wrong = list(reference.expected[0])
    wrong[5] = (wrong[5] + 1) % 49152
    with pytest.raises(AssertionError, match="not a tie"):
        count_ties(reference.model, reference.prompts[0], wrong, reference.expected[0])
