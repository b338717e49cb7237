"""The distillation losses: closed forms, relations, and fp64 autograd of the plain formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pagedraft.decoding.distill.losses import LOSSES, LossResult, distill_loss
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.tests.decoding.distill.loss_inputs import (
    NUM_TOKENS,
    VOCAB_SIZE,
    Inputs,
    loss_inputs,
    run_loss,
)
from pagedraft.tests.inputs import CPU, randn

pytestmark = pytest.mark.usefixtures("cpu_path")


# name: (cut vocabulary, temperature, weighted, vocab_chunk, token_chunk, tokens)
CASES = {
    "whole": (False, 1.0, False, 1000, 1000, 7),
    "token_tiles": (False, 1.0, True, 1000, 3, 7),
    "vocabulary_chunks": (False, 1.0, True, 16, 1000, 7),
    "tiles_and_chunks": (True, 1.0, True, 7, 2, 7),
    "one_column_left": (False, 1.0, False, VOCAB_SIZE - 1, 4, 7),
    "one_column_a_chunk": (False, 1.0, False, 1, 7, 7),
    "exact_fit": (False, 1.0, False, VOCAB_SIZE, 7, 7),
    "cut_vocabulary": (True, 1.0, True, 1000, 1000, 7),
    "warm": (False, 2.5, True, 1000, 4, 7),
    "cool_and_chunked": (False, 0.5, True, 20, 4, 7),
    "warm_and_cut": (True, 2.0, False, 20, 4, 7),
    "one_token": (False, 1.0, False, 1000, 1000, 1),
    "one_token_in_chunks": (True, 1.0, False, 11, 1, 1),
}


def _plain(
    loss: str, h_NE: torch.Tensor, given: Inputs, lse_N: torch.Tensor | None, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values_N, alpha_N) of the formulas as they are written, in fp64."""
    log_q_NV = (h_NE @ given.head_VE.double().T / temperature).log_softmax(-1)
    logits_NV = given.t_NE.double() @ given.teacher_head_VE.double().T / temperature
    lse_N = logits_NV.logsumexp(-1) if lse_N is None else lse_N.double()
    log_p_NV = logits_NV - lse_N[:, None]
    q_NV, p_NV = log_q_NV.exp(), log_p_NV.exp()
    log_m_NV = ((p_NV + q_NV) / 2).log()
    alpha_N = torch.minimum(p_NV, q_NV).sum(-1)
    # The jsd of the whole vocabulary: q is 0 on the other tokens, where p has the rest.
    jsd_NV = (p_NV * (log_p_NV - log_m_NV) + q_NV * (log_q_NV - log_m_NV)) / 2
    value_N = {
        "forward_kl": (p_NV * (log_p_NV - log_q_NV)).sum(-1),
        "reverse_kl": (q_NV * (log_q_NV - log_p_NV)).sum(-1),
        "jsd": jsd_NV.sum(-1) + (1 - p_NV.sum(-1)) * math.log(2) / 2,
        "tv": 1 - alpha_N,
        "acceptance": -alpha_N.log(),
    }[loss]
    return value_N, alpha_N


def _exact(
    loss: str,
    given: Inputs,
    lse_N: torch.Tensor | None,
    temperature: float,
    weight_N: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, gradient, alpha_N) by autograd in fp64."""
    h_NE = given.h_NE.double().requires_grad_()
    value_N, alpha_N = _plain(loss, h_NE, given, lse_N, temperature)
    weight_N = h_NE.new_ones(len(h_NE)) if weight_N is None else weight_N
    mean = (value_N * weight_N.double()).sum() / weight_N.double().sum()
    (grad_NE,) = torch.autograd.grad(mean, h_NE)
    return mean.detach(), grad_NE, alpha_N.detach()


def _case(name: str, device: torch.device = CPU) -> tuple[Inputs, dict[str, Any]]:
    is_cut, temperature, is_weighted, vocab_chunk, token_chunk, num_tokens = CASES[name]
    given = loss_inputs(num_tokens, device=device)
    lse_N = (given.t_NE.double() @ given.whole_VE.double().T / temperature).logsumexp(-1).float()
    return given, {
        "teacher_lse_N": lse_N if is_cut else None,
        "weight_N": given.weight_N if is_weighted else None,
        "temperature": temperature,
        "vocab_chunk": vocab_chunk,
        "token_chunk": token_chunk,
    }


def _assert_exact(loss: str, given: Inputs, options: dict[str, Any]) -> None:
    result, grad_NE = run_loss(loss, given, **options)
    mean, exact_NE, alpha_N = _exact(
        loss, given, options["teacher_lse_N"], options["temperature"], options["weight_N"]
    )
    torch.testing.assert_close(result.loss.detach().double(), mean, rtol=2e-6, atol=5e-7)
    torch.testing.assert_close(result.alpha_N.double(), alpha_N, rtol=2e-6, atol=5e-7)
    assert (grad_NE.double() - exact_NE).abs().max() <= 2e-6 * exact_NE.abs().max()
    logits = (given.h_NE @ given.head_VE.T, given.t_NE @ given.teacher_head_VE.T)
    assert torch.equal(result.agree_N, logits[0].argmax(-1) == logits[1].argmax(-1))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_autograd_in_fp64(name: str, loss: str) -> None:
    given, options = _case(name)
    _assert_exact(loss, given, options)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["tiles_and_chunks", "token_tiles"])
@pytest.mark.parametrize("implementation", ["triton", "ref"])
def test_other_implementations(
    implementation: str, name: str, loss: str, device: torch.device
) -> None:
    given, options = _case(name, device)
    with use_implementation(implementation):
        _assert_exact(loss, given, options)


def test_a_gradient_of_another_loss_is_refused() -> None:
    """Teeth: the comparison tells tv from acceptance, whose gradients differ by a factor only."""
    given, options = _case("one_token")
    _, grad_NE = run_loss("tv", given, **options)
    _, exact_NE, alpha_N = _exact("acceptance", given, None, 1.0, None)
    assert (grad_NE.double() - exact_NE).abs().max() > 1e-2 * exact_NE.abs().max()
    torch.testing.assert_close(grad_NE.double() / alpha_N, exact_NE)


def _logits(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows).log()


def _of_probabilities(loss: str, p: list[float], q: list[float], **options: Any) -> LossResult:
    """A loss of two distributions given as such: hidden states are logits, the head is 1."""
    head_VE = torch.eye(len(p))
    return distill_loss(_logits([q]), _logits([p]), head_VE, loss=loss, **options)


# name: (p, q, value of each loss)
BERNOULLI = {
    "half_against_quarter": (
        [0.5, 0.5],
        [0.25, 0.75],
        {
            "forward_kl": 0.5 * math.log(2) + 0.5 * math.log(2 / 3),
            "reverse_kl": 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2),
            "jsd": (0.5 * math.log(0.5 / 0.375) + 0.5 * math.log(0.5 / 0.625)) / 2
            + (0.25 * math.log(0.25 / 0.375) + 0.75 * math.log(0.75 / 0.625)) / 2,
            "tv": 0.25,
            "acceptance": -math.log(0.75),
        },
    ),
    # A third of the teacher's mass is on tokens that the draft lacks.
    "cut": (
        [1 / 3, 1 / 3],
        [0.5, 0.5],
        {
            "forward_kl": 2 / 3 * math.log(2 / 3),
            "reverse_kl": math.log(3 / 2),
            "jsd": (2 / 3 * math.log(4 / 5) + math.log(6 / 5) + math.log(2) / 3) / 2,
            "tv": 1 / 3,
            "acceptance": -math.log(2 / 3),
        },
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", BERNOULLI)
def test_two_tokens_by_hand(name: str, loss: str) -> None:
    p, q, values = BERNOULLI[name]
    result = _of_probabilities(loss, p, q, teacher_lse_N=torch.zeros(1))
    assert result.loss.item() == pytest.approx(values[loss], abs=1e-6)
    assert result.alpha_N.item() == pytest.approx(1 - values["tv"], abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_relations_between_the_losses(seed: int) -> None:
    """tv = 1 - alpha; -log alpha >= tv; Pinsker, Bretagnolle-Huber; jsd below tv log 2."""
    p, q = (randn(30, seed=seed + shift, scale=2.0).softmax(-1).tolist() for shift in (0, 50))
    results = {loss: _of_probabilities(loss, p, q) for loss in LOSSES}
    value = {loss: result.loss.item() for loss, result in results.items()}
    alpha = results["tv"].alpha_N.item()
    assert value["tv"] == pytest.approx(1 - alpha, abs=1e-7)
    assert value["acceptance"] == pytest.approx(-math.log(1 - value["tv"]), abs=1e-6)
    assert value["acceptance"] > value["tv"] > 0.1
    kl = min(value["forward_kl"], value["reverse_kl"])
    assert value["tv"] <= math.sqrt(kl / 2)
    assert value["tv"] <= math.sqrt(1 - math.exp(-kl))
    assert value["tv"] ** 2 / 2 <= value["jsd"] <= value["tv"] * math.log(2)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("vocab_chunk", [1000, 16])
def test_equal_distributions_have_no_loss_and_no_gradient(loss: str, vocab_chunk: int) -> None:
    given = loss_inputs(scale=3.0)
    given = given._replace(t_NE=given.h_NE, teacher_head_VE=given.head_VE)
    result, grad_NE = run_loss(loss, given, vocab_chunk=vocab_chunk)
    assert abs(result.loss.item()) <= 1e-6
    assert grad_NE.abs().max() <= 1e-6
    assert bool(result.agree_N.all())
    torch.testing.assert_close(result.alpha_N, torch.ones(NUM_TOKENS), rtol=0, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_different_distributions_have_a_loss(loss: str) -> None:
    result, grad_NE = run_loss(loss, loss_inputs())
    assert result.loss.item() > 0.05
    assert grad_NE.abs().max() > 1e-3


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("vocab_chunk", [1000, 2])
def test_what_underflows_is_zero_and_not_nan(loss: str, vocab_chunk: int) -> None:
    """Logits 400 apart: q or p of a token is 0 in fp32, of both on one row, of most on another."""
    h_NV = torch.tensor([[0.0, 400, 0, 0], [400.0, 0, 0, 0], [0.0, 0, 0, 0]], requires_grad=True)
    t_NV = torch.tensor([[400.0, 0, 0, 0], [400.0, 0, 0, 0], [400.0, 0, 0, 0]])
    result = distill_loss(h_NV, t_NV, torch.eye(4), loss=loss, vocab_chunk=vocab_chunk)
    (grad_NV,) = torch.autograd.grad(result.loss, h_NV)
    assert bool(grad_NV.isfinite().all())
    smallest = math.log(torch.finfo(torch.float32).tiny)
    of_rows = {
        "forward_kl": 400 + 0 + math.log(4),
        "reverse_kl": 400 + 0 + 300 - math.log(4),
        "jsd": math.log(2) + (math.log(8 / 5) + math.log(2 / 5) / 4 + 0.75 * math.log(2)) / 2,
        "tv": 1 + 0 + 0.75,
        "acceptance": -smallest + math.log(4),
    }
    assert result.loss.item() == pytest.approx(of_rows[loss] / 3, rel=1e-5)
    torch.testing.assert_close(result.alpha_N, torch.tensor([0.0, 1.0, 0.25]))
    assert grad_NV[1].abs().max() <= 1e-6


def test_a_step_along_the_gradient_lowers_each_loss() -> None:
    given = loss_inputs()
    before = {loss: run_loss(loss, given) for loss in LOSSES}
    moved = {loss: given._replace(h_NE=given.h_NE - 0.1 * g) for loss, (_, g) in before.items()}
    after = {loss: run_loss(loss, moved[loss])[0].loss.item() for loss in LOSSES}
    assert all(after[loss] < before[loss][0].loss.item() for loss in LOSSES)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["whole", "tiles_and_chunks", "warm_and_cut"])
def test_bf16_heads_round_products_and_nothing_else(name: str, loss: str) -> None:
    given, options = _case(name)
    halves = given._replace(
        head_VE=given.head_VE.bfloat16(), teacher_head_VE=given.teacher_head_VE.bfloat16()
    )
    result, grad_NE = run_loss(loss, halves, **options)
    mean, exact_NE, alpha_N = _exact(
        loss, given, options["teacher_lse_N"], options["temperature"], options["weight_N"]
    )
    assert result.loss.dtype == grad_NE.dtype == torch.float32
    torch.testing.assert_close(result.loss.detach().double(), mean, rtol=0.03, atol=0.03)
    torch.testing.assert_close(result.alpha_N.double(), alpha_N, rtol=0.03, atol=0.03)
    assert (grad_NE.double() - exact_NE).abs().max() <= 0.15 * exact_NE.abs().max()
    assert not torch.equal(result.loss.detach(), run_loss(loss, given, **options)[0].loss.detach())
