"""What the rejection and the block rule share: the drafts that they judge, and how the token after
the accepted ones is drawn.

**Judging.** Draft x of a row is *usable* unless its id lies outside [0, V), the target's
probabilities p at its position are undefined (the logits hold NaN or +inf, or -inf only), or its q
is no distribution that can have yielded it: q holds NaN or a negative number, its sum differs from
1 by more than Q_TOLERANCE, or q(x) = 0. The first unusable draft ends its row's drafts: the row is
judged as if it had only those before, so an error counts only where plain decoding gets to it.

**Drawing.** A row that accepts all its usable drafts draws as plain decoding does, with the noise
of the position. Any other draws from the residual max(0, scale * p - q) at the position of the
first draft that is not accepted; one that is 0 everywhere falls back to p.

**Noise.** philox.py with key seed_R and these counters; i counts the drafts of the row:

    acceptance of draft i   (i, position_R, ACCEPT, sample index), word 0
    residual                noise of tokens at position_R + i under the seed that is derived at
                            (0, position_R, RESIDUAL, sample index)
    after all i drafts      noise of tokens at position_R + i under seed_R

position_R only grows from step to step of a request, so no acceptance or residual is decided twice
by the same noise. The draws that made the drafts must be independent of all three: see
``proposal_seed``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagedraft.kernels.check import check_dtype, check_same_device, check_shape, check_vector
from pagedraft.kernels.philox import (
    ACCEPT,
    DRAFT,
    RESIDUAL,
    derived_seed,
    exponential,
    gumbel_noise_ref,
    philox4x32,
)
from pagedraft.kernels.sample import INVALID_TOKEN, SampleBatch, sample_cpu
from pagedraft.kernels.verify import Verified

Q_TOLERANCE = 1e-3
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Drafts:
    """The drafts of R rows and how they are judged; all tensors contiguous, on one device.

    tokens_K: int64, the drafts of all rows one after the other.
    starts_R1: int32 prefix sums from 0: row r has starts[r+1] - starts[r] >= 0 drafts.
    seed_R: int64, the request's.
    position_R: int64, index of the row's first draft in its context.
    sample_index_R: int64, which of a request's n samples; None is 0 everywhere.
    q_KV: fp32, the probabilities that each draft was really drawn from; unit stride in V. None: all
        drafters are deterministic, q is 1 at the draft.
    has_q_R: bool, the rows that q_KV speaks for, the others are deterministic; None is all rows.
    """

    tokens_K: torch.Tensor
    starts_R1: torch.Tensor
    seed_R: torch.Tensor
    position_R: torch.Tensor
    sample_index_R: torch.Tensor | None = None
    q_KV: torch.Tensor | None = None
    has_q_R: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.starts_R1.shape[0] - 1


def proposal_seed(
    seed_R: torch.Tensor, position_R: torch.Tensor, sample_index_R: torch.Tensor | int = 0
) -> torch.Tensor:
    """Return the seeds that a drafter samples with, in place of the requests' own.

    position_R: as in Drafts, the same for all drafts of a row.

    The block rule needs them: whether it accepts a draft depends on the drafts after it, whose
    positions are drafted anew in the next step, so their noise must not come again. Under the
    rejection rule seed_R itself serves as well.
    """
    return derived_seed(seed_R, position_R, DRAFT, sample_index_R)


def check_drafts(logits_QV: torch.Tensor, drafts: Drafts) -> None:
    """Raise ValueError or TypeError for shapes, dtypes or devices that do not fit.

    The values of starts_R1 are not read.
    """
    check_dtype("logits_QV", logits_QV, torch.float32)
    check_shape("logits_QV", logits_QV, (None, None))
    _check_columns("logits_QV", logits_QV)
    dtypes = {"starts_R1": torch.int32, "has_q_R": torch.bool}
    vectors = {
        "tokens_K": drafts.tokens_K,
        "starts_R1": drafts.starts_R1,
        "seed_R": drafts.seed_R,
        "position_R": drafts.position_R,
        "sample_index_R": drafts.sample_index_R,
        "has_q_R": drafts.has_q_R,
    }
    if drafts.starts_R1.ndim == 1 and drafts.num_rows < 0:
        raise ValueError("starts_R1: expected R + 1 prefix sums, got an empty tensor")
    for name, vector in vectors.items():
        if vector is not None:
            size = None if name in ("tokens_K", "starts_R1") else drafts.num_rows
            check_vector(name, vector, dtypes.get(name, torch.int64), size)
    if logits_QV.shape[0] < drafts.num_rows:
        raise ValueError(
            f"logits_QV: expected at least a row of logits for each of {drafts.num_rows} rows, got "
            f"{logits_QV.shape[0]}"
        )
    if drafts.q_KV is not None:
        check_dtype("q_KV", drafts.q_KV, torch.float32)
        check_shape("q_KV", drafts.q_KV, (drafts.tokens_K.shape[0], logits_QV.shape[1]))
        _check_columns("q_KV", drafts.q_KV)
    elif drafts.has_q_R is not None:
        raise ValueError("has_q_R: expected None without q_KV, got a tensor")
    check_same_device(logits_QV=logits_QV, q_KV=drafts.q_KV, **vectors)


def _check_columns(name: str, tensor: torch.Tensor) -> None:
    if tensor.shape[1] == 0 or tensor.stride(1) != 1:
        raise ValueError(
            f"{name}: expected at least one column and unit stride in V, got shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()}"
        )


@dataclass(frozen=True)
class Row:
    """One row's drafts: logits_LV before each and after the last; q_KV None if deterministic.

    exponentials: for each draft, E with P(E >= e) = exp(-e), which decides its acceptance.
    """

    logits_LV: torch.Tensor
    tokens: list[int]
    q_KV: torch.Tensor | None
    exponentials: list[float]

    def log_ratio(self, place: int) -> float:
        """log p(x) - log q(x) of the draft x at ``place``; NaN if it is not usable."""
        token = self.tokens[place]
        if not 0 <= token < self.logits_LV.shape[1]:
            return math.nan
        p = float(self.logits_LV[place].softmax(-1)[token])  # NaN where undefined
        log_p = math.log(p) if p else -math.inf
        if self.q_KV is None:
            return log_p
        q_V = self.q_KV[place]
        is_distribution = bool(q_V.amin() >= 0) and abs(float(q_V.sum()) - 1) <= Q_TOLERANCE
        q = float(q_V[token])
        return log_p - math.log(q) if is_distribution and q > 0 else math.nan

    def residual_V(self, place: int, scale: float) -> torch.Tensor:
        """max(0, scale * p - q) at a usable draft."""
        p_V = self.logits_LV[place].softmax(-1)
        if self.q_KV is None:
            p_V[self.tokens[place]] = 0
            return p_V.mul_(scale)
        return p_V.mul_(scale).sub_(self.q_KV[place]).clamp_(min=0)


class Judgement(NamedTuple):
    """How many drafts a row accepts, and the scale of its residual; None: it draws plainly."""

    num_accepted: int
    scale: float | None


def _rows(logits_QV: torch.Tensor, drafts: Drafts) -> Iterator[Row]:
    starts, tokens = drafts.starts_R1.tolist(), drafts.tokens_K.tolist()
    has_q = [True] * drafts.num_rows if drafts.has_q_R is None else drafts.has_q_R.tolist()
    exponentials = _exponentials(drafts).tolist()
    for row, (start, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        is_dense = drafts.q_KV is not None and has_q[row]
        yield Row(
            logits_QV[start + row : end + row + 1],
            tokens[start:end],
            drafts.q_KV[start:end] if is_dense else None,
            exponentials[start:end],
        )


def _exponentials(drafts: Drafts) -> torch.Tensor:
    start_R = drafts.starts_R1[:-1].long()
    k_R = drafts.starts_R1[1:] - start_R
    row_K = torch.arange(drafts.num_rows, device=k_R.device).repeat_interleave(k_R)
    place_K = torch.arange(row_K.shape[0], device=k_R.device) - start_R[row_K]
    index_K = 0 if drafts.sample_index_R is None else drafts.sample_index_R[row_K]
    seed_K = drafts.seed_R[row_K]
    counter = (place_K, drafts.position_R[row_K], ACCEPT, index_K)
    return exponential(philox4x32(counter, (seed_K, seed_K >> 32))[0])


def _scores(row: Row, judged: Judgement) -> torch.Tensor:
    """Logits of what the row draws from, [V]."""
    logits_V = row.logits_LV[judged.num_accepted]
    if judged.scale is None:
        return logits_V
    log_residual_V = _log(row.residual_V(judged.num_accepted, judged.scale))
    return log_residual_V if log_residual_V.amax() > -math.inf else logits_V


def _log(residual_V: torch.Tensor) -> torch.Tensor:
    """Logarithms in place; -inf below the normal numbers, where a CPU takes ten times as long."""
    is_zero_V = residual_V < _SMALLEST
    return residual_V.clamp_(min=_SMALLEST).log_().masked_fill_(is_zero_V, -math.inf)


def _draw_ref(scores_RV: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """Draw with dense noise."""
    noise_RV = gumbel_noise_ref(
        scores_RV.shape[1], batch.position_Q, batch.seed_Q, batch.sample_index_Q
    )
    scores_RV = scores_RV + noise_RV
    is_valid_R = scores_RV.amax(-1) > -math.inf
    return scores_RV.argmax(-1).masked_fill(~is_valid_R, INVALID_TOKEN)


def judge_rows(
    judge: Callable[[Row], Judgement],
    logits_QV: torch.Tensor,
    drafts: Drafts,
    draw: Callable[[torch.Tensor, SampleBatch], torch.Tensor] = _draw_ref,
) -> Verified:
    """Judge row by row, then draw for all rows from [R, V] scores."""
    rows = list(_rows(logits_QV, drafts))
    if not rows:
        return Verified(drafts.starts_R1.new_empty(0), drafts.seed_R.new_empty(0))
    judged = [judge(row) for row in rows]
    scores_RV = torch.stack([_scores(row, how) for row, how in zip(rows, judged, strict=True)])
    num_accepted_R = drafts.starts_R1.new_tensor([how.num_accepted for how in judged])
    is_residual_R = torch.tensor([how.scale is not None for how in judged], device=logits_QV.device)
    index_R = drafts.sample_index_R
    index_R = torch.zeros_like(drafts.seed_R) if index_R is None else index_R
    residual_seed_R = derived_seed(drafts.seed_R, drafts.position_R, RESIDUAL, index_R)
    batch = SampleBatch(
        temperature_Q=torch.ones_like(num_accepted_R, dtype=torch.float32),
        seed_Q=torch.where(is_residual_R, residual_seed_R, drafts.seed_R),
        position_Q=drafts.position_R + num_accepted_R,
        sample_index_Q=index_R,
    )
    return Verified(num_accepted_R, draw(scores_RV, batch))


def judge_rows_cpu(
    judge: Callable[[Row], Judgement], logits_QV: torch.Tensor, drafts: Drafts
) -> Verified:
    """As ``judge_rows``, drawing through the CPU path of the sample op."""
    return judge_rows(judge, logits_QV, drafts, draw=sample_cpu)
