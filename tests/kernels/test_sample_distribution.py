"""sample draws from the distribution that plain sorting gives: chi-square over 200,000 draws for
every parameter, in one batch with all others."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from pagedraft.kernels.dispatch import use_implementation
from pagedraft.kernels.sample import SampleBatch, sample, sample_ref
from pagedraft.tests.inputs import randn
from pagedraft.tests.kernels.sample_inputs import INF, Row, plain_probabilities, sample_batch

VOCAB_SIZE = 12
NUM_DRAWS = 200_000
# Rows in one call: each parameter set draws several times in it.
REPEATS = 2000

RULES = {
    "temperature": Row(temperature=0.7),
    "hot": Row(temperature=3.0),
    "top_k": Row(top_k=5),
    "top_p": Row(top_p=0.8),
    "min_p": Row(min_p=0.1),
    "repetition": Row(repetition=1.8, prompt=(2, 3), output=(5, 5)),
    "presence": Row(presence=0.9, prompt=(0, 3), output=(5, 5, 7)),
    "frequency": Row(frequency=0.6, output=(5, 5, 7), drafts=(2, 5)),
    "bias": Row(bias={1: 1.0, 8: -0.5, 4: -INF}),
    "min_tokens": Row(banned=(2, 11)),
    "grammar": Row(allowed=(0, 2, 3, 5, 7, 11)),
    "cuts": Row(temperature=1.3, top_k=8, top_p=0.9, min_p=0.03),
    "everything": Row(
        **{"temperature": 1.4, "top_k": 8, "top_p": 0.95, "min_p": 0.02, "repetition": 1.2},
        **{"presence": 0.3, "frequency": 0.2, "bias": {3: 1.0}, "banned": (6,)},
        **{"allowed": tuple(range(1, 12)), "prompt": (1, 2), "output": (2, 3), "drafts": (3, 4)},
    ),
}
LOGITS_V = randn(VOCAB_SIZE, seed=4) * 1.2


def _numbered(batch: SampleBatch, first: int) -> SampleBatch:
    """The batch with a position of its own a row; a row draws anew in every call."""
    position_Q = first + torch.arange(len(batch.position_Q))
    return replace(batch, position_Q=position_Q, seed_Q=torch.full_like(position_Q, 77))


@cache
def _draws() -> torch.Tensor:
    """Tokens [rules, NUM_DRAWS]: rows of all rules alternate within every call."""
    batch = sample_batch(list(RULES.values()) * REPEATS, VOCAB_SIZE)
    num_rows = len(batch.position_Q)
    logits_QV = LOGITS_V.expand(num_rows, VOCAB_SIZE)
    calls = [
        sample_ref(logits_QV, _numbered(batch, call * num_rows)).view(REPEATS, len(RULES))
        for call in range(NUM_DRAWS // REPEATS)
    ]
    return torch.cat(calls).T


def _chi_square(tokens_n: torch.Tensor, probs_V: torch.Tensor) -> float:
    """How many standard deviations the chi-square statistic lies above its mean.

    Infinite if a token was drawn that has no probability.
    """
    observed_V = torch.bincount(tokens_n, minlength=len(probs_V))
    is_kept_V = probs_V > 0
    if int(observed_V[~is_kept_V].sum()):
        return INF
    expected_V = probs_V[is_kept_V] * len(tokens_n)
    statistic = ((observed_V[is_kept_V] - expected_V) ** 2 / expected_V).sum()
    freedom = int(is_kept_V.sum()) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("name", RULES)
def test_draws_follow_the_distribution(name: str) -> None:
    tokens_n = _draws()[list(RULES).index(name)]
    assert len(tokens_n) == NUM_DRAWS
    assert _chi_square(tokens_n, plain_probabilities(LOGITS_V, RULES[name])) < 4


# name: (rule, the same rule slightly off)
WRONG = {
    "temperature": replace(RULES["temperature"], temperature=0.72),
    "top_k": replace(RULES["top_k"], top_k=6),
    "top_p": replace(RULES["top_p"], top_p=0.6),
    "repetition": replace(RULES["repetition"], repetition=1.9),
    "frequency": replace(RULES["frequency"], drafts=(2,)),
    "bias": replace(RULES["bias"], bias={1: 1.05, 8: -0.5, 4: -INF}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_slightly_wrong_parameter_is_noticed(name: str) -> None:
    """Teeth: the draws of a rule do not pass for those of its neighbour."""
    tokens_n = _draws()[list(RULES).index(name)]
    assert _chi_square(tokens_n, plain_probabilities(LOGITS_V, WRONG[name])) > 8


@pytest.mark.parametrize("implementation", ["triton", "cpu"])
def test_implementations_draw_the_same_tokens(implementation: str, device: torch.device) -> None:
    """The tokens counted above, from the other implementations."""
    repeats = {"triton": 4, "cpu": 100}[implementation]
    batch = sample_batch(list(RULES.values()) * repeats, VOCAB_SIZE)
    numbered = _numbered(batch, 0)
    logits_QV = LOGITS_V.repeat(len(batch.position_Q), 1)
    on_device = sample_batch(list(RULES.values()) * repeats, VOCAB_SIZE, device)
    on_device = replace(
        on_device, position_Q=numbered.position_Q.to(device), seed_Q=numbered.seed_Q.to(device)
    )
    with use_implementation(implementation):
        tokens_Q = sample(logits_QV.to(device), on_device).cpu()
    expected_Q = _draws().T[:repeats].flatten()
    assert torch.equal(tokens_Q, expected_Q)
