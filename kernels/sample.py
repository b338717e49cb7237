"""Sample: draw one token a row from logits, greedily or by Gumbel-max with counter-based noise.

**Shapes.** logits_QV fp32, fp16 or bf16, unit stride in V; temperature_Q fp32; seed_Q, position_Q
and sample_index_Q int64.

**Returns** tokens_Q int64. A row with temperature below MIN_TEMPERATURE takes its largest logit,
any other the largest score ``logit / temperature + noise``, in fp32. Equal values: the lowest id.
Columns of -inf are never drawn; +inf wins over everything finite, the lowest id of several first. A
row that holds NaN, or nothing above -inf, yields INVALID_TOKEN.

A row's token depends on its own logits and parameters only: not on the other rows, not on how the
vocabulary is split, not on the device. The noise is a function of (seed, position, sample index,
token id), see philox.py.

**Units.** position counts tokens: the index that the drawn token takes in its context.

**Cost.** Q*V*itemsize bytes read, once; 8*Q written. Memory-bound; noise adds about 150 integer and
100 floating-point operations a logit of a sampled row, none to greedy rows.

**Grid.** (Q, splits): a program scans its share of one row's columns and writes its best score and
id; a second launch, (Q,), merges a row's partials.

**Source.** Gumbel-max: Maddison et al., "A* Sampling" (NeurIPS 2014).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedraft.kernels.check import check_contiguous, check_dtype, check_same_device, check_shape
from pagedraft.kernels.dispatch import implementation
from pagedraft.kernels.philox import gumbel_noise_ref
from pagedraft.kernels.sample_cpu import Rows, draw, first_largest, largest_of_chunks

INVALID_TOKEN = -1
# Below it a row is greedy: noise would move a logit by at most 3e-4, and 1 / temperature overflow.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SampleBatch:
    """How each row draws; all tensors on the device of the logits.

    temperature_Q: fp32; 0 is greedy.
    seed_Q: int64, the request's.
    position_Q: int64, index of the drawn token in its context.
    sample_index_Q: int64, which of a request's n samples; None is 0 everywhere.
    """

    temperature_Q: torch.Tensor
    seed_Q: torch.Tensor
    position_Q: torch.Tensor
    sample_index_Q: torch.Tensor | None = None


def sample_ref(logits_QV: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """Draw with dense noise: the oracle."""
    logits_QV = logits_QV.float()
    noise_QV = gumbel_noise_ref(
        logits_QV.shape[1], batch.position_Q, batch.seed_Q, _sample_index(batch)
    )
    inverse_Q1 = (1.0 / batch.temperature_Q)[:, None]
    is_greedy_Q1 = ~_is_sampled(batch)[:, None]
    scores_QV = torch.where(is_greedy_Q1, logits_QV, logits_QV * inverse_Q1 + noise_QV)
    is_valid_Q = scores_QV.amax(-1) > float("-inf")
    return scores_QV.argmax(-1).masked_fill(~is_valid_Q, INVALID_TOKEN)


def sample_cpu(logits_QV: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """Draw as ``sample_ref`` does, reading the logits about once and pruning the noise."""
    logits_QV = logits_QV.float()
    largest_QC = largest_of_chunks(logits_QV)
    top_Q = largest_QC.amax(-1)
    first_Q = first_largest(logits_QV, largest_QC)
    tokens_Q = first_Q.masked_fill(~(top_Q > float("-inf")), INVALID_TOKEN)
    rows_S = (_is_sampled(batch) & top_Q.isfinite()).nonzero()[:, 0]
    if rows_S.shape[0] == 0:
        return tokens_Q
    rows = Rows(
        1.0 / batch.temperature_Q[rows_S],
        batch.position_Q[rows_S],
        batch.seed_Q[rows_S],
        _sample_index(batch)[rows_S],
    )
    is_all = rows_S.shape[0] == logits_QV.shape[0]
    logits_SV = logits_QV if is_all else logits_QV[rows_S]
    drawn_S, score_S = draw(logits_SV, largest_QC[rows_S], first_Q[rows_S], rows)
    tokens_Q[rows_S] = drawn_S.masked_fill_(score_S == float("-inf"), INVALID_TOKEN)
    return tokens_Q


def _is_sampled(batch: SampleBatch) -> torch.Tensor:
    return batch.temperature_Q >= MIN_TEMPERATURE


def _sample_index(batch: SampleBatch) -> torch.Tensor:
    if batch.sample_index_Q is None:
        return torch.zeros_like(batch.position_Q)
    return batch.sample_index_Q


def sample(logits_QV: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """Draw a token for each row; see the module docstring.

    Raises ValueError or TypeError for shapes, dtypes or devices that do not fit.
    """
    _check(logits_QV, batch)
    choice = implementation("sample", logits_QV.device, has_cpu=True)
    if choice == "cpu":
        return sample_cpu(logits_QV, batch)
    return sample_ref(logits_QV, batch)


def _check(logits_QV: torch.Tensor, batch: SampleBatch) -> None:
    check_dtype("logits_QV", logits_QV, torch.float32, torch.float16, torch.bfloat16)
    check_shape("logits_QV", logits_QV, (None, None))
    num_rows, vocab_size = logits_QV.shape
    if vocab_size == 0 or logits_QV.stride(1) != 1:
        raise ValueError(
            "logits_QV: expected at least one column and unit stride in V, got shape "
            f"{tuple(logits_QV.shape)}, strides {logits_QV.stride()}"
        )
    check_dtype("temperature_Q", batch.temperature_Q, torch.float32)
    vectors = {
        "temperature_Q": batch.temperature_Q,
        "seed_Q": batch.seed_Q,
        "position_Q": batch.position_Q,
    }
    if batch.sample_index_Q is not None:
        vectors["sample_index_Q"] = batch.sample_index_Q
    for name, vector in vectors.items():
        check_shape(name, vector, (num_rows,))
        check_contiguous(name, vector)
        if name != "temperature_Q":
            check_dtype(name, vector, torch.int64)
    check_same_device(logits_QV=logits_QV, **vectors)
