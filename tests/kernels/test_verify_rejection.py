"""The rejection rule: emits the target's distribution, accepts with probability 1 - TV(p, q)."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from pagedraft.kernels import verify_drafts
from pagedraft.kernels.verify_drafts import Row
from pagedraft.kernels.verify_rejection import (
    judge_tokens,
    verify_rejection,
    verify_rejection_cost,
    verify_rejection_ref,
)
from pagedraft.tests.kernels.verify_inputs import chi_square, moved, repeated_rows
from pagedraft.tests.kernels.verify_oracle import (
    Distribution,
    Model,
    emitted,
    paths,
    point_model,
    table_model,
    token_rule,
)

TARGET = table_model([[1, 2, 3], [4, 1, 1], [0, 2, 5], [1, 1, 1]])
DRAFTERS = {
    "other": table_model([[2, 2, 1], [1, 1, 4], [1, 0, 1], [1, 1, 1]]),
    "same": TARGET,
    "deterministic": point_model(TARGET),
    "disjoint": table_model([[1, 0, 0]] * 4),
}
P_V = torch.tensor([0.05, 0.3, 0.1, 0.25, 0.0, 0.3])
Q_V = torch.tensor([0.3, 0.1, 0.2, 0.05, 0.2, 0.15])
ACCEPTANCE = float(torch.minimum(P_V, Q_V).sum())  # 1 - TV
NUM_ROWS = 3000


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_emitted_tokens_have_exactly_the_targets_distribution(name: str, num_drafts: int) -> None:
    joint, _ = emitted(token_rule, TARGET, DRAFTERS[name], num_drafts, 3)
    assert joint == dict(paths(TARGET, num_drafts + 1, 3))


@pytest.mark.parametrize("name", DRAFTERS)
def test_expected_acceptance_of_a_draft_is_one_minus_the_total_variation(name: str) -> None:
    _, mean = emitted(token_rule, TARGET, DRAFTERS[name], 1, 3)
    p, q = TARGET(()), DRAFTERS[name](())
    assert mean == 1 - sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


def test_a_rule_that_draws_from_p_after_a_rejection_does_not_emit_the_target() -> None:
    """Teeth: the enumeration notices a wrong residual."""

    def wrong(drafts: tuple[int, ...], target: Model, drafter: Model) -> list:
        outcomes = token_rule(drafts, target, drafter)
        return [(num, weight, target(drafts[:num])) for num, weight, _ in outcomes]

    joint, _ = emitted(wrong, TARGET, DRAFTERS["other"], 2, 3)
    assert joint != dict(paths(TARGET, 3, 3))


def make_row(
    tokens: tuple[int, ...], target: Model, drafter: Model, exponentials: list[float]
) -> Row:
    """A row of the reference in fp64."""

    def table(model: Model, length: int) -> torch.Tensor:
        rows: list[Distribution] = [model(tokens[:i]) for i in range(length)]
        return torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64)

    num = len(tokens)
    return Row(table(target, num + 1).log(), list(tokens), table(drafter, num), exponentials)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("tokens", [(0, 2, 2), (2, 0, 1), (2, 1, 0), (0, 1, 0)], ids=str)
def test_the_reference_accepts_at_the_oracles_probabilities(
    tokens: tuple[int, ...], place: int
) -> None:
    """Drafts before ``place`` pass with a large E; its own lies just below or above -log(p / q)."""
    drafter = DRAFTERS["other"]
    p, q = TARGET(tokens[:place])[tokens[place]], drafter(tokens[:place])[tokens[place]]
    threshold = -math.log(min(p / q, Fraction(1))) if p else math.inf

    def num_accepted(e: float) -> int:
        exponentials = [50.0] * place + [e] + [0.0] * 2
        return judge_tokens(make_row(tokens, TARGET, drafter, exponentials)).num_accepted

    assert (num_accepted(min(threshold * (1 - 1e-9), 50.0)) == place) == (p < q)
    assert (num_accepted(min(threshold * (1 + 1e-9) + 1e-12, 50.0)) > place) == (p > 0)


def _first_tokens(
    num_rows: int, device: torch.device, *, has_own_noise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_QV, drafts = repeated_rows(
        P_V.expand(2, -1), Q_V[None], num_rows, has_own_noise=has_own_noise
    )
    run = verify_rejection if device.type == "cuda" else verify_rejection_ref
    out = run(logits_QV.to(device), moved(drafts, device))
    accepted_R, next_R = out.num_accepted_R.cpu(), out.next_token_R.cpu()
    return torch.where(accepted_R == 1, drafts.tokens_K, next_R), accepted_R


@pytest.mark.parametrize("has_own_noise", [True, False], ids=["draft noise", "sampling noise"])
def test_first_tokens_follow_the_target(has_own_noise: bool) -> None:
    token_R, accepted_R = _first_tokens(NUM_ROWS, torch.device("cpu"), has_own_noise=has_own_noise)
    observed_V = torch.bincount(token_R, minlength=len(P_V))
    assert abs(chi_square(observed_V, P_V * NUM_ROWS)) < 4
    deviation = math.sqrt(ACCEPTANCE * (1 - ACCEPTANCE) / NUM_ROWS)
    assert abs(float(accepted_R.double().mean()) - ACCEPTANCE) < 4 * deviation


def test_a_residual_with_the_noise_of_the_draft_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: a rejected draft says something about its noise."""
    monkeypatch.setattr(verify_drafts, "derived_seed", lambda seed_R, *args: seed_R)
    token_R, _ = _first_tokens(NUM_ROWS, torch.device("cpu"), has_own_noise=False)
    observed_V = torch.bincount(token_R, minlength=len(P_V))
    assert chi_square(observed_V, P_V * NUM_ROWS) > 8


@pytest.mark.parametrize("draft", [1, 2])
def test_first_tokens_after_a_deterministic_draft_follow_the_target(draft: int) -> None:
    logits_QV, drafts = repeated_rows(P_V.expand(2, -1), torch.eye(6)[draft][None], NUM_ROWS)
    drafts.__dict__["q_KV"] = None
    out = verify_rejection_ref(logits_QV, drafts)
    token_R = torch.where(out.num_accepted_R == 1, draft, out.next_token_R)
    assert abs(chi_square(torch.bincount(token_R, minlength=6), P_V * NUM_ROWS)) < 4


@pytest.mark.cuda
def test_cuda_first_tokens_follow_the_target() -> None:
    num_rows = 200_000
    token_R, accepted_R = _first_tokens(num_rows, torch.device("cuda"), has_own_noise=False)
    assert abs(chi_square(torch.bincount(token_R, minlength=6), P_V * num_rows)) < 4
    deviation = math.sqrt(ACCEPTANCE * (1 - ACCEPTANCE) / num_rows)
    assert abs(float(accepted_R.double().mean()) - ACCEPTANCE) < 4 * deviation


def test_cost_reads_logits_and_q_once() -> None:
    small = 8 * 3 + 4 * 3 + 28 * 2
    assert verify_rejection_cost(2, 3, 100).bytes == 4 * 100 * 5 + small
    assert verify_rejection_cost(2, 3, 100, has_q=True).bytes == 4 * 100 * 8 + small
