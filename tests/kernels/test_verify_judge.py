"""Drafts that are not usable and residuals of zero, in every implementation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagedraft.kernels.dispatch import use_implementation
from pagedraft.kernels.philox import (
    ACCEPT,
    RESIDUAL,
    derived_seed,
    exponential,
    gumbel_noise_ref,
    philox4x32,
)
from pagedraft.kernels.sample import SampleBatch, sample_ref
from pagedraft.kernels.verify_drafts import Drafts
from pagedraft.tests.kernels.verify_inputs import (
    IGNORE_INFINITY,
    INF,
    NAN,
    RULES,
    assert_same,
    moved,
)

FAST = ["triton", "cpu"]
IMPLEMENTATIONS = [*FAST, "ref"]

# What makes draft 1 of three unusable: (place of the row, what is done to logits_LV, q_KV, tokens).
BROKEN = {
    "nan_in_q": lambda logits, q, tokens: q[1, 3:4].fill_(NAN),
    "negative_q": lambda logits, q, tokens: q[1].add_(torch.tensor([0.3, -0.3, 0, 0, 0])),
    "q_sums_to_less": lambda logits, q, tokens: q[1].mul_(0.998),
    "q_sums_to_more": lambda logits, q, tokens: q[1].mul_(1.002),
    "q_is_zero": lambda logits, q, tokens: q[1].zero_(),
    "q_of_the_draft_is_zero": lambda logits, q, tokens: q[1].copy_(torch.eye(5)[4]),
    "negative_id": lambda logits, q, tokens: tokens[1:2].fill_(-1),
    "id_past_the_vocabulary": lambda logits, q, tokens: tokens[1:2].fill_(5),
    "id_far_past_the_vocabulary": lambda logits, q, tokens: tokens[1:2].fill_(2**40),
    "infinite_logit": lambda logits, q, tokens: logits[1, 3:4].fill_(INF),
    "nan_in_logits": lambda logits, q, tokens: logits[1, 4:].fill_(NAN),
    "no_finite_logit": lambda logits, q, tokens: logits[1].fill_(-INF),
}
NO_TOKEN = ("nan_in_logits", "no_finite_logit")


def _broken(name: str, accepted_first: bool) -> tuple[torch.Tensor, Drafts]:
    """One row of three drafts, the second unusable; the first has p = q, or p = 0."""
    generator = torch.Generator().manual_seed(1)
    logits_LV = torch.randn(4, 5, generator=generator)
    q_KV, tokens_K = logits_LV[:3].softmax(-1), torch.tensor([1, 1, 1])
    BROKEN[name](logits_LV, q_KV, tokens_K)
    if not accepted_first:
        logits_LV[0, 1] = -INF
    starts_R1 = torch.tensor([0, 3], dtype=torch.int32)
    drafts = Drafts(tokens_K, starts_R1, torch.tensor([4]), torch.tensor([20]), q_KV=q_KV)
    return logits_LV, drafts


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", BROKEN)
@IGNORE_INFINITY
def test_an_unusable_draft_ends_the_row_with_the_plain_draw(
    name: str, rule: str, implementation: str, device: torch.device
) -> None:
    logits_LV, drafts = _broken(name, accepted_first=True)
    batch = SampleBatch(torch.ones(1), drafts.seed_R, drafts.position_R + 1)
    expected = -1 if name in NO_TOKEN else int(sample_ref(logits_LV[1:2], batch))
    with use_implementation(implementation):
        out = RULES[rule][0](logits_LV.to(device), moved(drafts, device))
    assert (int(out.num_accepted_R), int(out.next_token_R)) == (1, expected)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [*NO_TOKEN, "nan_in_q"])
def test_what_plain_decoding_does_not_reach_is_ignored(
    name: str, rule: str, implementation: str, device: torch.device
) -> None:
    logits_LV, drafts = _broken(name, accepted_first=False)
    start = replace(
        drafts,
        tokens_K=drafts.tokens_K[:1],
        starts_R1=drafts.starts_R1.clamp(max=1),
        q_KV=drafts.q_KV[:1],
    )
    expected = RULES[rule][1](logits_LV[:2].nan_to_num(0.0, neginf=-INF), start)
    with use_implementation(implementation):
        out = RULES[rule][0](logits_LV.to(device), moved(drafts, device))
    assert int(out.num_accepted_R) == 0
    assert_same(out, expected)


def _seed_with(threshold: float) -> int:
    """A seed whose draft 0 at position 20 is rejected at -log(p / q) = threshold."""
    seed_n = torch.arange(200_000)
    words = philox4x32((seed_n * 0, 20, ACCEPT, 0), (seed_n, seed_n >> 32))
    return int((exponential(words[0]) < threshold).nonzero()[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rule", RULES)
def test_a_residual_of_zero_falls_back_to_p(
    rule: str, implementation: str, device: torch.device
) -> None:
    """q sums to a little more than 1, within the tolerance, and lies above p everywhere."""
    p_V = torch.tensor([0.1, 0.2, 0.3, 0.25, 0.15])
    seed_R, position_R = torch.tensor([_seed_with(4e-4)]), torch.tensor([20])
    starts_R1 = torch.tensor([0, 1], dtype=torch.int32)
    drafts = Drafts(torch.tensor([2]), starts_R1, seed_R, position_R, q_KV=p_V[None] * 1.0005)
    residual_seed_R = derived_seed(seed_R, position_R, RESIDUAL)
    expected = (p_V.log() + gumbel_noise_ref(5, position_R, residual_seed_R)).argmax()
    with use_implementation(implementation):
        out = RULES[rule][0](p_V.log().repeat(2, 1).to(device), moved(drafts, device))
    assert (int(out.num_accepted_R), int(out.next_token_R)) == (0, int(expected))
