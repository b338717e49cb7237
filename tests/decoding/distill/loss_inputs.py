"""Inputs of the distillation losses' tests."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pagedraft.decoding.distill.losses import LossResult, distill_loss
from pagedraft.tests.inputs import CPU, randn

NUM_TOKENS, EMBED_DIM, VOCAB_SIZE = 7, 12, 45


class Inputs(NamedTuple):
    """Random hidden states and heads; ``whole_VE``: the teacher's head with tokens that U lacks."""

    h_NE: torch.Tensor
    t_NE: torch.Tensor
    head_VE: torch.Tensor
    teacher_head_VE: torch.Tensor
    whole_VE: torch.Tensor
    weight_N: torch.Tensor


def loss_inputs(
    num_tokens: int = NUM_TOKENS, scale: float = 1.0, device: torch.device = CPU
) -> Inputs:
    """Seeded inputs; the teacher is wider than the student."""
    whole_VE = randn(VOCAB_SIZE + 20, EMBED_DIM + 3, seed=3, scale=0.5)
    given = Inputs(
        randn(num_tokens, EMBED_DIM, seed=1, scale=scale),
        randn(num_tokens, EMBED_DIM + 3, seed=2, scale=scale),
        randn(VOCAB_SIZE, EMBED_DIM, seed=4, scale=0.5),
        whole_VE[:VOCAB_SIZE],
        whole_VE,
        torch.arange(num_tokens).float() % 3,
    )
    return Inputs(*(tensor.to(device) for tensor in given))


def run_loss(loss: str, given: Inputs, **options: Any) -> tuple[LossResult, torch.Tensor]:
    """Return the result and d loss / d h_NE; ``options`` as of distill_loss."""
    h_NE = given.h_NE.clone().requires_grad_()
    options = {"teacher_head_VE": given.teacher_head_VE} | options
    result = distill_loss(h_NE, given.t_NE, given.head_VE, loss=loss, **options)
    (grad_NE,) = torch.autograd.grad(result.loss, h_NE)
    return result, grad_NE
