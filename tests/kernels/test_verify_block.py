"""The block rule: emits the target's distribution, accepts no fewer than the rejection rule."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from pagedraft.kernels.philox import gumbel_noise_ref
from pagedraft.kernels.verify_block import judge_block, verify_block_cost, verify_block_ref
from pagedraft.kernels.verify_drafts import Drafts, proposal_seed
from pagedraft.kernels.verify_rejection import verify_rejection_cost
from pagedraft.tests.kernels.test_verify_rejection import DRAFTERS, TARGET, make_row
from pagedraft.tests.kernels.verify_inputs import chi_square, repeated_rows
from pagedraft.tests.kernels.verify_oracle import (
    Distribution,
    Model,
    block_rule,
    emitted,
    normalised,
    paths,
    prefix_tests,
    residual,
    table_model,
    token_rule,
)

# The paper's example: two tokens, both models without memory.
PAPER_TARGET, PAPER_DRAFTER = table_model([[1, 2]] * 3), table_model([[2, 1]] * 3)
P_V, Q_V = torch.tensor([1.0, 2.0]) / 3, torch.tensor([2.0, 1.0]) / 3
NUM_ROWS = 2000


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_emitted_tokens_have_exactly_the_targets_distribution(name: str, num_drafts: int) -> None:
    joint, _ = emitted(block_rule, TARGET, DRAFTERS[name], num_drafts, 3)
    assert joint == dict(paths(TARGET, num_drafts + 1, 3))


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_accepts_at_least_as_many_as_the_rejection_rule(name: str, num_drafts: int) -> None:
    means = [
        emitted(rule, TARGET, DRAFTERS[name], num_drafts, 3)[1] for rule in (block_rule, token_rule)
    ]
    assert (means[0] > means[1]) == (name == "other" and num_drafts > 1)
    assert means[0] >= means[1]


def test_accepts_as_many_as_the_paper_says() -> None:
    means = [
        emitted(rule, PAPER_TARGET, PAPER_DRAFTER, 2, 2)[1] for rule in (block_rule, token_rule)
    ]
    assert means == [Fraction(11, 9), Fraction(10, 9)]


def test_a_residual_without_its_scale_does_not_emit_the_target() -> None:
    """Teeth: the enumeration notices the rejection rule's residual."""

    drafter = DRAFTERS["other"]

    def unscaled(drafts: tuple[int, ...], num: int) -> Distribution:
        p = TARGET(drafts[:num])
        return p if num == len(drafts) else normalised(residual(p, drafter(drafts[:num]), 1), p)

    def wrong(drafts: tuple[int, ...], target: Model, drafter: Model) -> list:
        outcomes = block_rule(drafts, target, drafter)
        return [(num, weight, unscaled(drafts, num)) for num, weight, _ in outcomes]

    joint, _ = emitted(wrong, TARGET, drafter, 2, 3)
    assert joint != dict(paths(TARGET, 3, 3))


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("tokens", [(0, 2, 2), (2, 0, 2), (1, 0, 0), (0, 1, 0)], ids=str)
def test_the_reference_accepts_at_the_oracles_probabilities(
    tokens: tuple[int, ...], num: int
) -> None:
    """Only the prefix of ``num`` drafts may pass: all others have E = 0, which passes at 1 only."""
    drafter = DRAFTERS["other"]
    tests = prefix_tests(tokens, TARGET, drafter)
    p, h = tests[num - 1]
    threshold = -math.log(h) if h else math.inf
    sure = [i for i, (_, other) in enumerate(tests, start=1) if other == 1]
    rest = max([0, *(i for i in sure if i != num)])

    def judged(e: float) -> tuple[int, float | None]:
        exponentials = [0.0] * len(tokens)
        exponentials[num - 1] = e
        return tuple(judge_block(make_row(tokens, TARGET, drafter, exponentials)))

    scale = None if num == len(tokens) else pytest.approx(float(p))
    if 0 < threshold < math.inf:
        assert judged(threshold * (1 - 1e-9))[0] == rest
        assert judged(threshold * (1 + 1e-9)) == (max(num, rest), scale) or rest > num
    else:
        assert (judged(40.0)[0] >= num) == (h == 1 or rest > num)


def _generated(num_tokens: int, *, has_own_noise: bool) -> torch.Tensor:
    """The first tokens of NUM_ROWS requests of the paper's models, in steps of two drafts."""
    out_RT = torch.full((NUM_ROWS, num_tokens + 2), -1)
    lens_R = torch.zeros(NUM_ROWS, dtype=torch.int64)
    while bool((lens_R < num_tokens).any()):
        row_r = (lens_R < num_tokens).nonzero()[:, 0]
        position_r = lens_R[row_r]
        draft_seed_r = proposal_seed(row_r, position_r) if has_own_noise else row_r
        noises = [gumbel_noise_ref(2, position_r + i, draft_seed_r) for i in (0, 1)]
        tokens_rK = torch.stack([(Q_V.log() + noise).argmax(-1) for noise in noises], dim=1)
        num_rows = len(row_r)
        drafts = Drafts(
            tokens_rK.flatten(),
            2 * torch.arange(num_rows + 1, dtype=torch.int32),
            row_r,
            position_r,
            q_KV=Q_V.repeat(2 * num_rows, 1),
        )
        accepted_r, next_r = verify_block_ref(P_V.log().repeat(3 * num_rows, 1), drafts)
        # What is not accepted is overwritten by the next token or the next step.
        out_RT[row_r, position_r], out_RT[row_r, position_r + 1] = tokens_rK.T
        out_RT[row_r, position_r + accepted_r] = next_r
        lens_R[row_r] += accepted_r + 1
    return out_RT[:, :num_tokens]


def _chi_square_of_three(out_R3: torch.Tensor) -> float:
    code_R = out_R3 @ torch.tensor([4, 2, 1])
    bits_n3 = torch.arange(8)[:, None] >> torch.tensor([2, 1, 0]) & 1
    return chi_square(torch.bincount(code_R, minlength=8), P_V[bits_n3].prod(1) * NUM_ROWS)


def test_tokens_of_several_steps_follow_the_target() -> None:
    assert abs(_chi_square_of_three(_generated(3, has_own_noise=True))) < 4


def test_drafts_with_the_noise_of_their_position_fail() -> None:
    """Teeth: a step's outcome depends on drafts it drops; drawn again the same, they are biased."""
    assert _chi_square_of_three(_generated(3, has_own_noise=False)) > 8


def test_mean_acceptance_is_the_papers() -> None:
    logits_QV, drafts = repeated_rows(P_V.expand(3, -1), Q_V.expand(2, -1), NUM_ROWS)
    accepted_R = verify_block_ref(logits_QV, drafts).num_accepted_R.double()
    deviation = float(accepted_R.std()) / math.sqrt(NUM_ROWS)
    assert abs(float(accepted_R.mean()) - 11 / 9) < 4 * deviation < 0.1


def test_cost_reads_dense_drafts_twice() -> None:
    dense = {"has_q": True}
    assert verify_block_cost(2, 3, 100) == verify_rejection_cost(2, 3, 100)
    more = (
        verify_block_cost(2, 3, 100, **dense).bytes
        - verify_rejection_cost(2, 3, 100, **dense).bytes
    )
    assert more == 2 * 4 * 100 * 3
