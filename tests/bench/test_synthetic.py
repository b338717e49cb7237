"""The synthetic drafter's acceptance is what it was set to, and its output is the plain one."""

from __future__ import annotations

import pytest

from pagedraft.bench.synthetic import SYNTHETIC, SyntheticDrafter, expected_tokens_per_pass
from pagedraft.decoding.params import SamplingParams
from pagedraft.decoding.sequence import Sequence
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.model.tiny import save_tiny

PROMPT = [5, 6, 7]
OUTPUT = [token % 97 for token in range(0, 60_000, 3)]


def run(drafter: SyntheticDrafter, output: list[int], k: int) -> float:
    """Tokens a pass, accepting what equals ``output``."""
    sequence = Sequence(list(PROMPT), len(PROMPT), temperature=0.0, seed=0)
    done = passes = 0
    while done < len(output):
        [proposal] = drafter.propose([sequence], [k])
        pairs = zip(proposal.tokens, output[done:], strict=False)
        accepted = next((i for i, (a, b) in enumerate(pairs) if a != b), len(proposal.tokens))
        emitted = output[done : done + accepted + 1]
        sequence.append(emitted)
        done += len(emitted)
        passes += 1
    return done / passes


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7, 0.9, 1.0])
def test_tokens_per_pass(alpha, k):
    """20,000 tokens: the mean of a pass is within 3 % of the sum of the powers of alpha."""
    drafter = SyntheticDrafter([(PROMPT, OUTPUT)], alpha, seed=1)
    measured = run(drafter, OUTPUT, k)
    assert measured == pytest.approx(expected_tokens_per_pass(alpha, k), rel=0.03)


def test_teeth_another_alpha_is_seen():
    drafter = SyntheticDrafter([(PROMPT, OUTPUT)], 0.75, seed=1)
    assert run(drafter, OUTPUT, 4) != pytest.approx(expected_tokens_per_pass(0.7, 4), rel=0.03)


def test_drafts_do_not_depend_on_when_they_are_asked_for():
    drafter = SyntheticDrafter([(PROMPT, OUTPUT)], 0.5)
    sequence = Sequence(list(PROMPT), len(PROMPT), temperature=0.0, seed=0)
    [first] = drafter.propose([sequence], [8])
    sequence.append(OUTPUT[:3])
    [later] = drafter.propose([sequence], [5])
    assert first.tokens[3:] == later.tokens
    assert first.q_KV is None


def test_every_wrong_draft_is_another_token():
    [proposal] = SyntheticDrafter([(PROMPT, OUTPUT)], 0.0).propose(
        [Sequence(list(PROMPT), len(PROMPT), temperature=0.0, seed=0)], [97]
    )
    assert all(a != b for a, b in zip(proposal.tokens, OUTPUT[:97], strict=True))
    assert all(0 <= token < 97 for token in proposal.tokens)


def test_it_says_what_it_is():
    assert SyntheticDrafter([], 0.7).name == "synthetic(0.70)"
    assert SYNTHETIC.startswith("synthetic")


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_refused(alpha):
    with pytest.raises(ValueError, match="alpha: expected a probability from 0 to 1"):
        SyntheticDrafter([], alpha)


@pytest.mark.usefixtures("cpu_path")
def test_the_output_is_the_plain_one(tmp_path):
    save_tiny(tmp_path, "llama")
    with use_implementation("cpu"):
        target = Transformer.from_folder(tmp_path)
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True)
    [plain] = LLM(target, speculate="off", kv_tokens=64).generate(PROMPT, params)
    drafter = SyntheticDrafter([(PROMPT, plain.token_ids)], 0.6)
    [other] = LLM(target, drafter=drafter, k=4, kv_tokens=64).generate(PROMPT, params)
    assert other.token_ids == plain.token_ids
    assert 0 < sum(other.stats.accepted) < sum(other.stats.drafted)
