"""Losses between a student's and a teacher's next-token distributions: sums and slopes of logits.

q = softmax of the student's logits, p = exp(teacher's logits - their log-sum-exp). Two ops on a
chunk of columns of both: ``update_lse`` reads the log-sum-exp, ``distill_terms`` then adds up a
divergence and leaves its slope in the logits' place. TERMS names what is summed over a row and
g, its derivative with respect to q, up to a constant of the row (which the softmax takes out):

    forward_kl   sum p log(p / q)                       g = -p / q
    reverse_kl   sum q log(q / p)                       g = log(q / p)
    jsd          half of sum p log(p / m) + q log(q / m), m = (p + q) / 2;  g = log(q / m) / 2
    overlap      -sum min(p, q)                         g = -1 where q < p, else 0

**Shapes** (N tokens, V columns of this chunk): student_NV, teacher_NV fp32, unit stride in V; a
log-sum-exp a row, fp32. Logits are finite; what underflows counts as 0, never as NaN.

**Returns** Both ops add to a state in place (RunningLse, DistillSums), chunk by chunk.
``distill_terms`` overwrites the logits. write="gradient", for chunks that hold the whole row:
student_NV becomes d divergence / d logit = q (g - sum q g). write="parts": student_NV becomes q,
teacher_NV q g. What is not named may be anything afterwards.

**Cost.** Bytes: update_lse N V 4; distill_terms 8 N V read, twice for "gradient", and 4 N V written
for "gradient", 8 N V for "parts". Bandwidth-bound.

**Grid.** One program a row. "gradient" reads the row again, now that it knows sum q g.

**Source.** Online softmax: Milakov and Gimelshein, arXiv 1805.02867. Losses: losses.py in
decoding/distill. Kernels: distill_loss_triton.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from pagedraft.kernels.check import check_dtype, check_same_device, check_shape, check_vector
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.dispatch import implementation
from pagedraft.kernels.distill_loss_triton import distill_terms_kernel, update_lse_kernel
from pagedraft.kernels.sample_cpu import first_largest, largest_of_chunks

TERMS = ("forward_kl", "reverse_kl", "jsd", "overlap")
Write = Literal["nothing", "parts", "gradient"]
WRITES = ("nothing", "parts", "gradient")
STATE_DTYPES = (torch.float32, torch.float32, torch.int64)

# Eight fp32 logits a thread: 16-byte loads of both chunks without spills in offline compiles.
BLOCK_COLUMNS = 1024
# Logits that the CPU path treats at once, so that a dozen elementwise passes stay in the cache.
CPU_GROUP = 2**18


class RunningLse(NamedTuple):
    """Of the columns read so far, a row each.

    max_N fp32: the largest logit. sum_N fp32: of exp(logit - max). best_N int64: the lowest id of
    the largest logit, -1 before any.
    """

    max_N: torch.Tensor
    sum_N: torch.Tensor
    best_N: torch.Tensor

    @classmethod
    def start(cls, num_rows: int, device: torch.device) -> RunningLse:
        """The state before the first chunk."""
        return cls(
            torch.full((num_rows,), float("-inf"), device=device),
            torch.zeros(num_rows, device=device),
            torch.full((num_rows,), -1, device=device),
        )

    def lse(self) -> torch.Tensor:
        """Log-sum-exp of the columns read so far, [N] fp32; NaN where a logit was NaN."""
        return self.max_N + self.sum_N.log()


class DistillSums(NamedTuple):
    """Sums over the columns read so far, each [N] fp32.

    divergence_N: of TERMS. alpha_N: of min(p, q). slope_N: of q g. mass_N: of p.
    """

    divergence_N: torch.Tensor
    alpha_N: torch.Tensor
    slope_N: torch.Tensor
    mass_N: torch.Tensor

    @classmethod
    def start(cls, num_rows: int, device: torch.device) -> DistillSums:
        """The state before the first chunk, each in memory of its own: aligned for every N."""
        return cls(*(torch.zeros(num_rows, device=device) for _ in range(4)))


def update_lse_ref(logits_NV: torch.Tensor, state: RunningLse, first_id: int = 0) -> RunningLse:
    """Plain PyTorch: return the new state and leave the old one."""
    chunk_max_N, chunk_best_N = logits_NV.max(1)
    max_N = torch.maximum(state.max_N, chunk_max_N)
    rest_N = (logits_NV - max_N[:, None]).exp().sum(1)
    is_better_N = chunk_max_N > state.max_N
    return RunningLse(
        max_N,
        state.sum_N * (state.max_N - max_N).exp() + rest_N,
        torch.where(is_better_N, chunk_best_N + first_id, state.best_N),
    )


def distill_terms_ref(
    student_NV: torch.Tensor,
    teacher_NV: torch.Tensor,
    student_lse_N: torch.Tensor,
    teacher_lse_N: torch.Tensor,
    terms: str,
) -> tuple[DistillSums, torch.Tensor, torch.Tensor]:
    """Plain PyTorch in the dtype of its inputs; return (sums of this chunk, q_NV, (q g)_NV)."""
    log_p_NV = teacher_NV - teacher_lse_N[:, None]
    log_ratio_NV = student_NV - student_lse_N[:, None]
    q_NV, p_NV = log_ratio_NV.exp(), log_p_NV.exp()
    log_ratio_NV -= log_p_NV
    alpha_N = torch.minimum(p_NV, q_NV).sum(1)
    if terms == "forward_kl":
        slope_NV = -p_NV
        divergence_N = (slope_NV * log_ratio_NV).sum(1)
    elif terms == "reverse_kl":
        slope_NV = q_NV * log_ratio_NV
        divergence_N = slope_NV.sum(1)
    elif terms == "jsd":
        log_p_over_m_NV = math.log(2) - F.softplus(log_ratio_NV)
        divergence_N = (p_NV * log_p_over_m_NV).sum(1) / 2
        slope_NV = q_NV * log_p_over_m_NV.add_(log_ratio_NV).div_(2)
        divergence_N += slope_NV.sum(1)
    else:
        slope_NV = torch.lt(log_ratio_NV, 0, out=log_ratio_NV).mul_(q_NV).neg_()
        divergence_N = -alpha_N
    sums = DistillSums(divergence_N, alpha_N, slope_NV.sum(1), p_NV.sum(1))
    return sums, q_NV, slope_NV


def update_lse_cpu(logits_NV: torch.Tensor, state: RunningLse, first_id: int = 0) -> None:
    """As ``update_lse_ref``: ids of the largest logits from maxima of chunks, sums by groups."""
    largest_NC = largest_of_chunks(logits_NV)
    best_N = torch.from_numpy(first_largest(logits_NV.numpy(), largest_NC.numpy()))
    chunk_max_N = largest_NC.amax(1)
    max_N = torch.maximum(state.max_N, chunk_max_N)
    state.sum_N.mul_((state.max_N - max_N).exp_())
    for rows in _row_groups(logits_NV):
        state.sum_N[rows] += (logits_NV[rows] - max_N[rows, None]).exp_().sum(1)
    is_better_N = chunk_max_N > state.max_N
    torch.where(is_better_N, best_N + first_id, state.best_N, out=state.best_N)
    state.max_N.copy_(max_N)


def distill_terms_cpu(
    student_NV: torch.Tensor,
    teacher_NV: torch.Tensor,
    student_lse_N: torch.Tensor,
    teacher_lse_N: torch.Tensor,
    sums: DistillSums,
    terms: str,
    write: Write,
    groups: Sequence[slice] | None = None,
) -> None:
    """The reference by ``groups`` of rows (None: such as stay in the cache), then in place."""
    for rows in _row_groups(student_NV) if groups is None else groups:
        chunk, q_NV, slope_NV = distill_terms_ref(
            student_NV[rows], teacher_NV[rows], student_lse_N[rows], teacher_lse_N[rows], terms
        )
        for total_N, part_N in zip(sums, chunk, strict=True):
            total_N[rows] += part_N
        if write == "gradient":
            slope_NV.addcmul_(q_NV, chunk.slope_N[:, None], value=-1)
            student_NV[rows] = slope_NV
        elif write == "parts":
            student_NV[rows], teacher_NV[rows] = q_NV, slope_NV


def _row_groups(logits_NV: torch.Tensor) -> list[slice]:
    num_rows, num_columns = logits_NV.shape
    step = max(1, CPU_GROUP // num_columns)
    return [slice(first, first + step) for first in range(0, num_rows, step)]


def update_lse(logits_NV: torch.Tensor, state: RunningLse, first_id: int = 0) -> None:
    """Add a chunk of columns to ``state``, whose first column has token id ``first_id``.

    Raises ValueError or TypeError for shapes, dtypes or devices that do not fit.
    """
    _check_logits("logits_NV", logits_NV)
    num_rows, vocab_size = logits_NV.shape
    for name, vector, dtype in zip(state._fields, state, STATE_DTYPES, strict=True):
        check_vector(name, vector, dtype, num_rows)
    check_same_device(logits_NV=logits_NV, **state._asdict())
    choice = implementation("distill_loss", logits_NV.device, has_cpu=True)
    if num_rows == 0:
        return
    if choice == "cpu":
        update_lse_cpu(logits_NV, state, first_id)
    elif choice == "ref":
        for old, new in zip(state, update_lse_ref(logits_NV, state, first_id), strict=True):
            old.copy_(new)
    else:
        update_lse_kernel[(num_rows,)](
            logits_NV,
            *state,
            logits_NV.stride(0),
            vocab_size,
            first_id,
            BLOCK_V=BLOCK_COLUMNS,
            num_warps=4,
        )


def distill_terms(
    student_NV: torch.Tensor,
    teacher_NV: torch.Tensor,
    student_lse_N: torch.Tensor,
    teacher_lse_N: torch.Tensor,
    sums: DistillSums,
    *,
    terms: str,
    write: Write = "nothing",
) -> None:
    """Add a chunk of columns to ``sums`` and overwrite it; see the module docstring.

    The log-sum-exps are those of whole rows. Raises ValueError or TypeError for shapes, dtypes,
    devices or names that do not fit.
    """
    _check_terms(student_NV, teacher_NV, student_lse_N, teacher_lse_N, sums, terms, write)
    choice = implementation("distill_loss", student_NV.device, has_cpu=True)
    num_rows, vocab_size = student_NV.shape
    operands = student_NV, teacher_NV, student_lse_N, teacher_lse_N
    if num_rows == 0:
        return
    if choice == "cpu":
        distill_terms_cpu(*operands, sums, terms, write)
    elif choice == "ref":
        distill_terms_cpu(*operands, sums, terms, write, groups=[slice(None)])
    else:
        distill_terms_kernel[(num_rows,)](
            *operands,
            *sums,
            student_NV.stride(0),
            teacher_NV.stride(0),
            vocab_size,
            TERMS=terms,
            WRITE=write,
            BLOCK_V=BLOCK_COLUMNS,
            num_warps=4,
        )


def _check_logits(name: str, logits_NV: torch.Tensor) -> None:
    check_dtype(name, logits_NV, torch.float32)
    check_shape(name, logits_NV, (None, None))
    if logits_NV.shape[1] == 0 or logits_NV.stride(1) != 1:
        raise ValueError(
            f"{name}: expected at least one column and unit stride in V, got shape "
            f"{tuple(logits_NV.shape)}, strides {logits_NV.stride()}"
        )


def _check_terms(
    student_NV: torch.Tensor,
    teacher_NV: torch.Tensor,
    student_lse_N: torch.Tensor,
    teacher_lse_N: torch.Tensor,
    sums: DistillSums,
    terms: str,
    write: str,
) -> None:
    for name, value, known in (("terms", terms, TERMS), ("write", write, WRITES)):
        if value not in known:
            raise ValueError(f"{name}: expected one of {list(known)}, got {value!r}")
    _check_logits("student_NV", student_NV)
    _check_logits("teacher_NV", teacher_NV)
    check_shape("teacher_NV", teacher_NV, tuple(student_NV.shape))
    vectors = {"student_lse_N": student_lse_N, "teacher_lse_N": teacher_lse_N, **sums._asdict()}
    for name, vector in vectors.items():
        check_vector(name, vector, torch.float32, student_NV.shape[0])
    check_same_device(student_NV=student_NV, teacher_NV=teacher_NV, **vectors)


def update_lse_cost(num_rows: int, vocab_size: int) -> Cost:
    """Lower bound of one call: the logits read once, three operations each."""
    return Cost(bytes=num_rows * (4 * vocab_size + 32), flops=3 * num_rows * vocab_size)


def distill_terms_cost(num_rows: int, vocab_size: int, write: Write = "nothing") -> Cost:
    """Lower bound of one call: both chunks read once, ``write``'s results written."""
    num_logits = num_rows * vocab_size
    num_written = {"nothing": 0, "gradient": 1, "parts": 2}[write]
    return Cost(bytes=4 * (2 + num_written) * num_logits + 40 * num_rows, flops=12 * num_logits)
