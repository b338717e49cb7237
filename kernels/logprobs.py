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
import triton
import triton.language as tl

from pagedraft.kernels.check import (
    check_contiguous,
    check_dtype,
    check_same_device,
    check_shape,
)
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.dispatch import implementation
from pagedraft.kernels.philox import NOISE_CHUNK
from pagedraft.kernels.sample_cpu import chunk_logits, largest_of_chunks

MAX_TOP_N = 20

# Fixed, not chosen from the number of rows: then a row's bits do not depend on it.
SPLIT_COLUMNS = 4096
BLOCK_COLUMNS = 1024
_NO_ID = tl.constexpr(2**31 - 1)  # above every id


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
    logits_QV = logits_QV.detach().float()
    logprobs_QV = logits_QV.log_softmax(-1)
    chosen_Q = _chosen(logprobs_QV, tokens_Q)
    num_rows, vocab_size = logits_QV.shape
    if top_n == 0:
        return Logprobs(chosen_Q, tokens_Q.new_empty(num_rows, 0), chosen_Q.new_empty(num_rows, 0))
    largest_QC = largest_of_chunks(logits_QV)
    order_QC = largest_QC.sort(dim=-1, descending=True, stable=True).indices
    chunk_Qn = order_QC[:, :top_n].sort(dim=-1).values  # ascending: equal logits keep id order
    row_Qn = torch.arange(num_rows)[:, None].expand_as(chunk_Qn)
    places = (row_Qn.flatten().numpy(), chunk_Qn.flatten().numpy())
    logits_n = torch.from_numpy(chunk_logits(logits_QV.numpy(), *places))
    lane_L = torch.arange(NOISE_CHUNK)
    token_Qn = (chunk_Qn[:, :, None] * NOISE_CHUNK + lane_L).flatten(1)
    order_Qn = logits_n.view_as(token_Qn).sort(dim=-1, descending=True, stable=True).indices
    top_ids_Qn = token_Qn.gather(1, order_Qn[:, : min(top_n, vocab_size)])
    is_undefined_Q1 = logprobs_QV[:, :1].isnan()
    return Logprobs(
        chosen_Q,
        top_ids_Qn.masked_fill(is_undefined_Q1, -1),
        logprobs_QV.gather(1, top_ids_Qn.clamp(max=vocab_size - 1)),
    )


@triton.jit(do_not_specialize=["top_n"])
def _split_kernel(
    logits_ptr,
    max_ptr,
    sum_ptr,
    value_ptr,
    id_ptr,
    stride_q,
    vocab_size,
    top_n,
    SPLIT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row, split = tl.program_id(0), tl.program_id(1)
    row_ptr = logits_ptr + row.to(tl.int64) * stride_q
    partial = row * tl.num_programs(1) + split
    end = tl.minimum((split + 1) * SPLIT, vocab_size)
    lane_v = tl.arange(0, BLOCK_V)
    m_v = tl.full((BLOCK_V,), float("-inf"), tl.float32)
    l_v = tl.zeros((BLOCK_V,), tl.float32)
    for first in range(split * SPLIT, end, BLOCK_V):
        offs_v = first + lane_v
        logit = tl.load(row_ptr + offs_v, mask=offs_v < end, other=float("-inf")).to(tl.float32)
        m_new = tl.maximum(m_v, logit)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        l_v = l_v * tl.exp(m_v - shift) + tl.exp(logit - shift)  # NaN stays
        m_v = m_new
    m_i = tl.max(m_v, axis=0)
    l_i = tl.sum(l_v * tl.exp(m_v - tl.where(m_i == float("-inf"), 0.0, m_i)), axis=0)
    tl.store(max_ptr + partial, m_i)
    tl.store(sum_ptr + partial, l_i)

    last, last_id = tl.full((), float("inf"), tl.float32), -1
    for place in range(top_n):
        best = tl.full((BLOCK_V,), float("-inf"), tl.float32)
        best_id = tl.full((BLOCK_V,), _NO_ID, tl.int32)
        for first in range(split * SPLIT, end, BLOCK_V):
            offs_v = first + lane_v
            mask_v = offs_v < end
            logit = tl.load(row_ptr + offs_v, mask=mask_v, other=float("-inf")).to(tl.float32)
            is_next = mask_v & _precedes(last, last_id, logit, offs_v)
            is_better = is_next & _precedes(logit, offs_v, best, best_id)
            best = tl.where(is_better, logit, best)
            best_id = tl.where(is_better, offs_v, best_id)
        last = tl.max(best, axis=0)
        last_id = tl.min(tl.where(best == last, best_id, _NO_ID), axis=0)
        tl.store(value_ptr + partial * top_n + place, last)
        tl.store(id_ptr + partial * top_n + place, last_id)


@triton.jit
def _precedes(value, token, other, other_token):
    """Order of the top list: larger values first, of equal ones the lower id."""
    return (value > other) | ((value == other) & (token < other_token))


@triton.jit(do_not_specialize=["top_n", "num_splits"])
def _merge_kernel(
    logits_ptr,
    token_ptr,
    max_ptr,
    sum_ptr,
    value_ptr,
    id_ptr,
    chosen_ptr,
    top_id_ptr,
    top_logprob_ptr,
    stride_q,
    vocab_size,
    num_splits,
    top_n,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0)
    offs_s = tl.arange(0, BLOCK_S)
    mask_s = offs_s < num_splits
    m_s = tl.load(max_ptr + row * num_splits + offs_s, mask=mask_s, other=float("-inf"))
    l_s = tl.load(sum_ptr + row * num_splits + offs_s, mask=mask_s, other=0.0)
    m_i = tl.max(m_s, axis=0)
    l_i = tl.sum(l_s * tl.exp(m_s - tl.where(m_i == float("-inf"), 0.0, m_i)), axis=0)
    is_defined = (l_i == l_i) & (m_i > float("-inf")) & (m_i < float("inf"))
    log_l = tl.log(l_i)

    token = tl.load(token_ptr + row)
    is_known = is_defined & (token >= 0) & (token < vocab_size)
    chosen_ptr_in = logits_ptr + row.to(tl.int64) * stride_q + token
    chosen = tl.load(chosen_ptr_in, mask=is_known, other=0.0).to(tl.float32)
    tl.store(chosen_ptr + row, tl.where(is_known, chosen - m_i - log_l, float("nan")))

    offs_n = tl.arange(0, BLOCK_N)[None, :]
    mask_sn = mask_s[:, None] & (offs_n < top_n)
    offs_sn = (row * num_splits + offs_s[:, None]) * top_n + offs_n
    value = tl.load(value_ptr + offs_sn, mask=mask_sn, other=float("-inf"))
    ids = tl.load(id_ptr + offs_sn, mask=mask_sn, other=_NO_ID)  # [BLOCK_S, BLOCK_N] int32
    for place in range(top_n):
        best = tl.max(value)
        best_id = tl.min(tl.where(value == best, ids, _NO_ID))
        is_best = ids == best_id
        value = tl.where(is_best, float("-inf"), value)
        ids = tl.where(is_best, _NO_ID, ids)
        logprob = tl.where(is_defined, best - m_i - log_l, float("nan"))
        tl.store(top_logprob_ptr + row * top_n + place, logprob)
        tl.store(top_id_ptr + row * top_n + place, tl.where(is_defined, best_id, -1).to(tl.int64))


def logprobs(logits_QV: torch.Tensor, tokens_Q: torch.Tensor, top_n: int = 0) -> Logprobs:
    """Return log-probabilities; see the module docstring.

    Raises ValueError or TypeError for shapes, dtypes, devices or a top_n that do not fit.
    """
    _check(logits_QV, tokens_Q, top_n)
    choice = implementation("logprobs", logits_QV.device, has_cpu=True)
    if choice == "cpu":
        return logprobs_cpu(logits_QV, tokens_Q, top_n)
    if choice == "ref":
        return logprobs_ref(logits_QV, tokens_Q, top_n)
    num_rows, vocab_size = logits_QV.shape
    top_n = min(top_n, vocab_size)
    num_splits = triton.cdiv(vocab_size, SPLIT_COLUMNS)
    chosen_Q = torch.empty(num_rows, device=logits_QV.device)
    result = Logprobs(
        chosen_Q, tokens_Q.new_empty(num_rows, top_n), chosen_Q.new_empty(num_rows, top_n)
    )
    if num_rows == 0:
        return result
    max_QS, sum_QS = (chosen_Q.new_empty(num_rows, num_splits) for _ in range(2))
    value_QSn = chosen_Q.new_empty(num_rows, num_splits, top_n)
    id_QSn = torch.empty_like(value_QSn, dtype=torch.int32)
    partials = (max_QS, sum_QS, value_QSn, id_QSn)
    _split_kernel[(num_rows, num_splits)](
        logits_QV,
        *partials,
        logits_QV.stride(0),
        vocab_size,
        top_n,
        SPLIT=SPLIT_COLUMNS,
        BLOCK_V=BLOCK_COLUMNS,
        num_warps=4,
    )
    _merge_kernel[(num_rows,)](
        logits_QV,
        tokens_Q,
        *partials,
        *result,
        logits_QV.stride(0),
        vocab_size,
        num_splits,
        top_n,
        BLOCK_S=triton.next_power_of_2(num_splits),
        BLOCK_N=triton.next_power_of_2(MAX_TOP_N),
        num_warps=4,
    )
    return result


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


def logprobs_cost(num_rows: int, vocab_size: int, itemsize: int, top_n: int = 0) -> Cost:
    """Bytes and operations of one call: three a logit for the sum, one for each top_n scan."""
    num_bytes = num_rows * (vocab_size * itemsize + 12 + 12 * top_n)
    return Cost(bytes=num_bytes, flops=num_rows * vocab_size * (3 + top_n))
