"""The chunked value and gradient of a distillation loss: products of tiles of tokens and columns.

What is computed: losses.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from pagedraft.kernels.distill_loss import (
    DistillSums,
    RunningLse,
    Write,
    distill_terms,
    update_lse,
)

Pair = tuple[torch.Tensor, torch.Tensor]  # of the student and of the teacher

# How far rounding may lift the sum of a teacher's probabilities over 1: 16 bits of a state move its
# logits by some hundredths, those of a product by up to a quarter where they are 64.
MASS_TOLERANCE = {torch.float32: 5e-2, torch.bfloat16: 0.5}


@dataclass(frozen=True)
class Loss:
    """A row's value as a function of a sum over the vocabulary, and that function's derivative.

    terms: the sum, as ``kernels/distill_loss.py`` names it. value(divergence_N, missing_N), where
    missing_N is the teacher's probability outside the V tokens. scale(divergence_N): None means 1.
    """

    terms: str
    value: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    scale: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class Problem:
    """The arguments of ``distill_loss`` that have no gradient."""

    t_NE: torch.Tensor
    head_VE: torch.Tensor
    teacher_head_VE: torch.Tensor
    teacher_lse_N: torch.Tensor | None
    weight_N: torch.Tensor
    loss: Loss
    temperature: float
    chunks: tuple[slice, ...]
    token_chunk: int


class _Logits:
    """Makes both sides' logits of a tile of tokens, chunk by chunk, in the same two buffers."""

    def __init__(self, problem: Problem) -> None:
        num_tokens, num_columns = len(problem.t_NE), problem.chunks[0].stop
        self._problem = problem
        size = min(problem.token_chunk, num_tokens) * num_columns
        self._buffers = [problem.t_NE.new_empty(size) for _ in range(2)]

    def __call__(self, h_nE: torch.Tensor, t_nE: torch.Tensor, columns: slice) -> Pair:
        """Return (student_nV, teacher_nV); what the last call returned is overwritten."""
        heads = self._problem.head_VE, self._problem.teacher_head_VE
        student_nV, teacher_nV = (
            _product(x_nE, head_VE[columns].T, self._view(buffer, len(x_nE), columns))
            for buffer, x_nE, head_VE in zip(self._buffers, (h_nE, t_nE), heads, strict=True)
        )
        return student_nV, teacher_nV

    @staticmethod
    def _view(buffer: torch.Tensor, num_rows: int, columns: slice) -> torch.Tensor:
        num_columns = columns.stop - columns.start
        return buffer[: num_rows * num_columns].view(num_rows, num_columns)


def _product(
    x_nK: torch.Tensor, weight_KM: torch.Tensor, out_nM: torch.Tensor | None = None
) -> torch.Tensor:
    """Return fp32 x_nK @ weight_KM, made in the weight's dtype, in ``out_nM`` if there is one."""
    if weight_KM.dtype == torch.float32:
        return torch.mm(x_nK, weight_KM, out=out_nM)
    made_nM = torch.mm(x_nK.to(weight_KM.dtype), weight_KM)
    return made_nM.float() if out_nM is None else out_nM.copy_(made_nM)


class _Rows(NamedTuple):
    """What a tile of tokens yields; defined_n is NaN where a log-sum-exp is."""

    value_n: torch.Tensor
    alpha_n: torch.Tensor
    agree_n: torch.Tensor
    mass_n: torch.Tensor
    defined_n: torch.Tensor


def _run_tile(
    problem: Problem,
    logits: _Logits,
    h_nE: torch.Tensor,
    tokens: slice,
    grad_nE: torch.Tensor | None,
) -> _Rows:
    """Return a tile's rows; write d (weighted value) / d hidden state to ``grad_nE``."""
    t_nE = problem.t_NE[tokens]
    if problem.temperature != 1:
        h_nE, t_nE = h_nE / problem.temperature, t_nE / problem.temperature
    student, teacher = (RunningLse.start(len(h_nE), h_nE.device) for _ in range(2))
    for columns in problem.chunks:
        student_nV, teacher_nV = logits(h_nE, t_nE, columns)
        update_lse(student_nV, student, columns.start)
        update_lse(teacher_nV, teacher, columns.start)
    own_lse_n, given_lse_N = teacher.lse(), problem.teacher_lse_N
    lse_n = student.lse(), own_lse_n if given_lse_N is None else given_lse_N[tokens]

    sums = DistillSums.start(len(h_nE), h_nE.device)
    if len(problem.chunks) == 1:
        _slope_of_whole(problem, (student_nV, teacher_nV), lse_n, sums, grad_nE)
    else:
        made = (logits(h_nE, t_nE, columns) for columns in problem.chunks)
        _slope_of_chunks(problem, made, lse_n, sums, grad_nE)
    if grad_nE is not None:
        scale_n = problem.weight_N[tokens] / problem.temperature
        if problem.loss.scale is not None:
            scale_n = scale_n * problem.loss.scale(sums.divergence_N)
        grad_nE.mul_(scale_n[:, None])

    mass_n = sums.mass_N
    missing_n = torch.zeros_like(mass_n) if given_lse_N is None else (1 - mass_n).clamp(min=0)
    value_n = problem.loss.value(sums.divergence_N, missing_n)
    is_same_n = student.best_N == teacher.best_N
    return _Rows(value_n, sums.alpha_N, is_same_n, mass_n, lse_n[0] + own_lse_n + value_n)


def _slope_of_whole(
    problem: Problem, pair: Pair, lse_n: Pair, sums: DistillSums, grad_nE: torch.Tensor | None
) -> None:
    """Fill ``sums`` and ``grad_nE`` from both sides' logits over the whole vocabulary."""
    write: Write = "nothing" if grad_nE is None else "gradient"
    distill_terms(*pair, *lse_n, sums, terms=problem.loss.terms, write=write)
    if grad_nE is not None:
        _product(pair[0], problem.head_VE, grad_nE)


def _slope_of_chunks(
    problem: Problem,
    made: Iterable[Pair],
    lse_n: Pair,
    sums: DistillSums,
    grad_nE: torch.Tensor | None,
) -> None:
    """As ``_slope_of_whole``, from logits made anew: sum q g is known after the last chunk only."""
    write: Write = "nothing" if grad_nE is None else "parts"
    mean_nE = None if grad_nE is None else torch.zeros_like(grad_nE)
    for columns, pair in zip(problem.chunks, made, strict=True):
        distill_terms(*pair, *lse_n, sums, terms=problem.loss.terms, write=write)
        if grad_nE is not None and mean_nE is not None:
            grad_nE.add_(_product(pair[1], problem.head_VE[columns]))
            mean_nE.add_(_product(pair[0], problem.head_VE[columns]))
    if grad_nE is not None and mean_nE is not None:
        grad_nE.addcmul_(mean_nE, sums.slope_N[:, None], value=-1)


class DistillLoss(torch.autograd.Function):
    """Value and gradient in one pass; the backward pass multiplies by a scalar."""

    @staticmethod
    def forward(ctx: Any, h_NE: torch.Tensor, problem: Problem, has_grad: bool) -> Any:
        h_NE = h_NE.detach()
        grad_NE = torch.zeros_like(h_NE) if has_grad else None
        logits = _Logits(problem)
        tiles = []
        for first in range(0, len(h_NE), problem.token_chunk):
            tokens = slice(first, first + problem.token_chunk)
            grad_nE = None if grad_NE is None else grad_NE[tokens]
            tiles.append(_run_tile(problem, logits, h_NE[tokens], tokens, grad_nE))
        rows = _Rows(*(torch.cat(parts) for parts in zip(*tiles, strict=True)))
        _check_rows(rows, 1 + MASS_TOLERANCE[problem.teacher_head_VE.dtype])
        ctx.save_for_backward(grad_NE)
        ctx.mark_non_differentiable(rows.alpha_n, rows.agree_n)
        return (rows.value_n * problem.weight_N).sum(), rows.alpha_n, rows.agree_n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> Any:
        (grad_NE,) = ctx.saved_tensors
        return grad_loss * grad_NE, None, None


def _check_rows(rows: _Rows, max_mass: float) -> None:
    is_bad_N = ~rows.defined_n.isfinite()
    if bool(is_bad_N.any()):
        row = int(is_bad_N.nonzero()[0])
        raise ValueError(
            f"h_NE, t_NE or a head: expected finite logits, got some of row {row} that are not "
            f"(its loss: {rows.value_n[row].item()})"
        )
    is_over_N = rows.mass_n > max_mass
    if bool(is_over_N.any()):
        row = int(is_over_N.nonzero()[0])
        raise ValueError(
            f"teacher_lse_N: the teacher's probabilities of row {row} add up to "
            f"{rows.mass_n[row].item():.6g}, expected at most 1"
        )
