"""Losses that pull a student's next-token distribution to a teacher's, with their gradient.

q = softmax(W h / T) over the V rows of the student's head W; p = exp(U t / T - lse) over the same
tokens' rows of the teacher's head U. With the teacher's log-sum-exp over its whole vocabulary p are
true probabilities, whose sum over a cut vocabulary is P <= 1; without, P = 1. q is 0 elsewhere.
``LOSSES``, each a row's value (T = 1 here; none is multiplied by T^2):

    forward_kl   sum p log(p / q) over the V tokens: infinite over the teacher's whole vocabulary
                 where P < 1. Least at q = p / P, where it is P log P: 0 for P = 1.
    reverse_kl   sum q log(q / p): the whole vocabulary's, at least -log P.
    jsd          half of sum p log(p / m) + q log(q / m), m = (p + q) / 2 (the generalised
                 Jensen-Shannon divergence at beta = 1/2): the whole vocabulary's, whose other
                 tokens add (1 - P) log(2) / 2. In [0, log 2].
    tv           1 - alpha, alpha = sum min(p, q): total variation over the whole vocabulary; alpha
                 is the probability that rejection sampling accepts a token drawn from q.
    acceptance   -log alpha >= tv. Its gradient is tv's over alpha: not small where hardly any draft
                 is accepted. Ends at alpha = 1.2e-38: flat below, never infinite.

tv and acceptance have a kink where p = q; there the slope of growing q is taken, so that the
gradient is 0 for equal distributions.

Cost: three products of [N, E] by [E, V] for value and gradient where one chunk holds the vocabulary
(two without a gradient), six where it does not: there the logits are made twice, and sum q g W and
sum q W are added up apart. Memory: two buffers of [token_chunk, vocab_chunk] fp32.
Sources: forward and reverse KL and JSD for language models: Agarwal et al., arXiv 2306.13649; total
variation for drafts: Zhou et al., arXiv 2310.08461.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from pagedraft.decoding.distill.loss_tiles import DistillLoss, Loss, Problem
from pagedraft.kernels.check import check_dtype, check_same_device, check_shape

# One AVX2 core, E 576, V 16384 and 49152: 128 is 4 to 9 % slower, 64 13 to 22 %, 512 2 to 5 %.
TOKEN_CHUNK = 256
VOCAB_CHUNK = 2**18  # the whole of every usual vocabulary
HEAD_DTYPES = (torch.float32, torch.bfloat16)
_SMALLEST = torch.finfo(torch.float32).tiny


class LossResult(NamedTuple):
    """loss: fp32 scalar. alpha_N fp32: sum min(p, q). agree_N bool: p and q have the same argmax.

    Only ``loss`` has a gradient, with respect to h_NE. Of equal logits the lowest row counts.
    """

    loss: torch.Tensor
    alpha_N: torch.Tensor
    agree_N: torch.Tensor


def _positive(minus_alpha_N: torch.Tensor) -> torch.Tensor:
    return (-minus_alpha_N).clamp(min=_SMALLEST)


LOSSES: dict[str, Loss] = {
    "forward_kl": Loss("forward_kl", lambda sum_N, missing_N: sum_N),
    "reverse_kl": Loss("reverse_kl", lambda sum_N, missing_N: sum_N),
    "jsd": Loss("jsd", lambda sum_N, missing_N: sum_N + math.log(2) / 2 * missing_N),
    "tv": Loss("overlap", lambda sum_N, missing_N: 1 + sum_N),
    "acceptance": Loss(
        "overlap",
        lambda sum_N, missing_N: -_positive(sum_N).log(),
        scale=lambda sum_N: 1 / _positive(sum_N),
    ),
}


def distill_loss(
    h_NE: torch.Tensor,
    t_NE: torch.Tensor,
    head_VE: torch.Tensor,
    *,
    loss: str,
    teacher_head_VE: torch.Tensor | None = None,
    teacher_lse_N: torch.Tensor | None = None,
    weight_N: torch.Tensor | None = None,
    temperature: float = 1.0,
    vocab_chunk: int = VOCAB_CHUNK,
    token_chunk: int = TOKEN_CHUNK,
) -> LossResult:
    """Return the mean loss of N tokens, weighted by ``weight_N``, and what to report of each.

    h_NE: the student's hidden states, the only argument that gets a gradient (once
    differentiable). t_NE: the teacher's, whose width may be another. head_VE: the student's head,
    frozen. teacher_head_VE: the same V tokens' rows of the teacher's; None: the student's.
    teacher_lse_N: log-sum-exp of the teacher's logits, divided by ``temperature``, over its whole
    vocabulary; None: over the V tokens. weight_N: at least 0 each, not all 0; None: equal. A token
    of weight 0 costs as much as any other and must be finite, too. temperature: divides both
    sides' logits. All tensors fp32 on one device; no tensor of more than token_chunk * vocab_chunk
    (or N * E) elements is made. The heads may be bf16: then products are rounded to bf16, which is
    twice as fast where the processor has such instructions, and everything else is as before.

    Raises ValueError or TypeError for arguments that do not fit, name the first row whose loss is
    not a finite number, or whose teacher's probabilities add up to more than 1.
    """
    if loss not in LOSSES:
        raise ValueError(f"loss: expected one of {list(LOSSES)}, got {loss!r}")
    teacher_head_VE = head_VE if teacher_head_VE is None else teacher_head_VE
    _check_tensors(h_NE, t_NE, head_VE, teacher_head_VE)
    _check_vectors(h_NE, teacher_lse_N, weight_N)
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature: expected a positive number, got {temperature}")
    for name, size in (("vocab_chunk", vocab_chunk), ("token_chunk", token_chunk)):
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")
    weight_N = h_NE.new_ones(len(h_NE)) if weight_N is None else weight_N
    vocab_size = len(head_VE)
    problem = Problem(
        t_NE,
        head_VE,
        teacher_head_VE,
        teacher_lse_N,
        weight_N / weight_N.sum(),
        LOSSES[loss],
        temperature,
        tuple(
            slice(first, min(first + vocab_chunk, vocab_size))
            for first in range(0, vocab_size, vocab_chunk)
        ),
        token_chunk,
    )
    has_grad = torch.is_grad_enabled() and h_NE.requires_grad
    return LossResult(*DistillLoss.apply(h_NE, problem, has_grad))


def _check_tensors(
    h_NE: torch.Tensor, t_NE: torch.Tensor, head_VE: torch.Tensor, teacher_head_VE: torch.Tensor
) -> None:
    frozen = {"t_NE": t_NE, "head_VE": head_VE, "teacher_head_VE": teacher_head_VE}
    for name, tensor in {"h_NE": h_NE, **frozen}.items():
        check_dtype(name, tensor, *(HEAD_DTYPES if "head" in name else HEAD_DTYPES[:1]))
        check_shape(name, tensor, (None, None))
        if 0 in tensor.shape:
            raise ValueError(f"{name}: expected no empty axis, got shape {tuple(tensor.shape)}")
    for name, tensor in frozen.items():
        if tensor.requires_grad:
            raise ValueError(f"{name}: gets no gradient, but requires_grad is set: detach it")
    check_shape("t_NE", t_NE, (len(h_NE), None))
    check_shape("head_VE", head_VE, (None, h_NE.shape[1]))
    check_shape("teacher_head_VE", teacher_head_VE, (len(head_VE), t_NE.shape[1]))
    check_same_device(h_NE=h_NE, **frozen)


def _check_vectors(
    h_NE: torch.Tensor, teacher_lse_N: torch.Tensor | None, weight_N: torch.Tensor | None
) -> None:
    for name, vector_N in (("teacher_lse_N", teacher_lse_N), ("weight_N", weight_N)):
        if vector_N is None:
            continue
        check_dtype(name, vector_N, torch.float32)
        check_shape(name, vector_N, (len(h_NE),))
        check_same_device(h_NE=h_NE, **{name: vector_N})
        if not bool(vector_N.isfinite().all()):
            raise ValueError(f"{name}: expected finite numbers, got {vector_N}")
    if weight_N is not None and not bool((weight_N >= 0).all() & (weight_N.sum() > 0)):
        raise ValueError(f"weight_N: expected weights of at least 0, not all 0, got {weight_N}")
