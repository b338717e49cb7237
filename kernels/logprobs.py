"""Logprobs: log-probability of a chosen token a row, and of the n most probable ones.

Log-softmax in fp32 of the raw logits: before temperature and any other processing.

**Shapes.** logits_QV fp32, fp16 or bf16, unit stride in V; tokens_Q int64 in [0, V), where any
other id (INVALID_TOKEN) yields NaN; top_n in 0..MAX_TOP_N.

**Returns** Logprobs(chosen_Q fp32, top_ids_Qn int64, top_logprobs_Qn fp32), most probable first, of
equal logits the lowest id first; n is min(top_n, V). A row whose softmax is undefined (it holds NaN
or +inf, or -inf only) has NaN log-probabilities and ids of -1.

**Cost.** Q*V*itemsize bytes read, once for the sums and once more for each of the top_n passes over
a split's columns, which caches hold; no [Q, V] result is written.

**Grid.** (Q, splits): a program owns its share of one row's columns and writes its maximum, its sum
of exponentials and its own top_n; a second launch, (Q,), merges a row's partials.

**Source.** Online softmax: Milakov and Gimelshein, arXiv 1805.02867.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagedraft.kernels.check import (
    check_contiguous,
    check_dtype,
    check_same_device,
    check_shape,
)
from pagedraft.kernels.dispatch import implementation
from pagedraft.kernels.philox import NOISE_CHUNK
from pagedraft.kernels.sample_cpu import chunk_logits, largest_of_chunks

MAX_TOP_N = 20


class Logprobs(NamedTuple):
    """chosen_Q fp32, top_ids_Qn int64, top_logprobs_Qn fp32; see the module docstring."""

    chosen_Q: torch.Tensor
    top_ids_Qn: torch.Tensor
    top_logprobs_Qn: torch.Tensor


def logprobs_ref(logits_QV: torch.Tensor, tokens_Q: torch.Tensor, top_n: int = 0) -> Logprobs:
    """Write the whole log-softmax and sort it: the oracle; fp64 logits give the exact answer."""
    dtype = torch.float64 if logits_QV.dtype == torch.float64 else torch.float32
    logprobs_QV = logits_QV.to(dtype).log_softmax(-1)
    sorted_QV = logits_QV.sort(dim=-1, descending=True, stable=True)
    top_ids_Qn = sorted_QV.indices[:, :top_n]
    is_undefined_Q1 = logprobs_QV.isnan().any(-1, keepdim=True)
    return Logprobs(
        _chosen(logprobs_QV, tokens_Q),
        top_ids_Qn.masked_fill(is_undefined_Q1, -1),
        logprobs_QV.gather(1, top_ids_Qn),
    )


def _chosen(logprobs_QV: torch.Tensor, tokens_Q: torch.Tensor) -> torch.Tensor:
    last = logprobs_QV.shape[1] - 1
    chosen_Q = logprobs_QV.gather(1, tokens_Q.clamp(0, last)[:, None])[:, 0]
    return chosen_Q.masked_fill((tokens_Q < 0) | (tokens_Q > last), float("nan"))


def logprobs_cpu(logits_QV: torch.Tensor, tokens_Q: torch.Tensor, top_n: int = 0) -> Logprobs:
    """As ``logprobs_ref``, but sort only the top_n chunks of columns with the largest maxima."""
    logprobs_QV = logits_QV.float().log_softmax(-1)
    chosen_Q = _chosen(logprobs_QV, tokens_Q)
    num_rows, vocab_size = logits_QV.shape
    if top_n == 0:
        return Logprobs(chosen_Q, tokens_Q.new_empty(num_rows, 0), chosen_Q.new_empty(num_rows, 0))
    largest_QC = largest_of_chunks(logits_QV)
    order_QC = largest_QC.sort(dim=-1, descending=True, stable=True).indices
    chunk_Qn = order_QC[:, :top_n].sort(dim=-1).values  # ascending: equal logits keep id order
    row_Qn = torch.arange(num_rows)[:, None].expand_as(chunk_Qn)
    logits_n = chunk_logits(logits_QV, row_Qn.flatten(), chunk_Qn.flatten()).view(num_rows, -1)
    lane_L = torch.arange(NOISE_CHUNK)
    token_Qn = (chunk_Qn[:, :, None] * NOISE_CHUNK + lane_L).flatten(1)
    best = logits_n.sort(dim=-1, descending=True, stable=True).indices[:, : min(top_n, vocab_size)]
    top_ids_Qn = token_Qn.gather(1, best)
    is_undefined_Q1 = logprobs_QV[:, :1].isnan()
    return Logprobs(
        chosen_Q,
        top_ids_Qn.masked_fill(is_undefined_Q1, -1),
        logprobs_QV.gather(1, top_ids_Qn.clamp(max=vocab_size - 1)),
    )


def logprobs(logits_QV: torch.Tensor, tokens_Q: torch.Tensor, top_n: int = 0) -> Logprobs:
    """Return log-probabilities; see the module docstring.

    Raises ValueError or TypeError for shapes, dtypes, devices or a top_n that do not fit.
    """
    _check(logits_QV, tokens_Q, top_n)
    choice = implementation("logprobs", logits_QV.device, has_cpu=True)
    if choice == "cpu":
        return logprobs_cpu(logits_QV, tokens_Q, top_n)
    return logprobs_ref(logits_QV, tokens_Q, top_n)


def _check(logits_QV: torch.Tensor, tokens_Q: torch.Tensor, top_n: int) -> None:
    check_dtype("logits_QV", logits_QV, torch.float32, torch.float16, torch.bfloat16)
    check_shape("logits_QV", logits_QV, (None, None))
    if logits_QV.shape[1] == 0 or logits_QV.stride(1) != 1:
        raise ValueError(
            "logits_QV: expected at least one column and unit stride in V, got shape "
            f"{tuple(logits_QV.shape)}, strides {logits_QV.stride()}"
        )
    check_dtype("tokens_Q", tokens_Q, torch.int64)
    check_shape("tokens_Q", tokens_Q, (logits_QV.shape[0],))
    check_contiguous("tokens_Q", tokens_Q)
    check_same_device(logits_QV=logits_QV, tokens_Q=tokens_Q)
    if not 0 <= top_n <= MAX_TOP_N:
        raise ValueError(f"top_n: expected 0..{MAX_TOP_N}, got {top_n}")
