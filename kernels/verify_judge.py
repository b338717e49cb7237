"""How many of its drafts a row accepts, in Triton, from the sums over the vocabulary.

Called by the kernels of verify_triton.py, which fill the sums; the rules: verify_rejection.py and
verify_block.py. Names: ``sources`` is (logits, tokens, q, their row strides, vocabulary size),
``sums`` (stats [places, 4, splits], splits), ``noise`` (position, sample index, seed words); draft
counts over all rows and has its logits at place draft + row; ``num`` counts in its row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedraft.kernels.philox import ACCEPT, exponential_jit, philox4x32_jit
from pagedraft.kernels.verify_drafts import Q_TOLERANCE

# A row's partial sums, each [splits]: maximum, sum of exponentials, sum of q, the block rule's s.
NUM_STATS = 4

_ACCEPT = tl.constexpr(ACCEPT)
_NUM_STATS = tl.constexpr(NUM_STATS)
_Q_TOLERANCE = tl.constexpr(Q_TOLERANCE)


@triton.jit
def ordered_sum(x, LOG: tl.constexpr):
    """Sum of [2**LOG] by halving: in an order that no layout changes."""
    for step in tl.static_range(LOG):
        even, odd = tl.split(tl.reshape(x, (2 ** (LOG - 1 - step), 2)))
        x = even + odd
    return tl.sum(x, axis=0)  # one element


@triton.jit
def is_dense(row, q_ptr, has_q_ptr):
    """Whether q speaks for the row."""
    has_q = row < 0
    if q_ptr is not None:
        has_q = row >= 0
        if has_q_ptr is not None:
            has_q = tl.load(has_q_ptr + row) != 0
    return has_q


@triton.jit
def _stat(place, number, other, sums, LOG_S: tl.constexpr):
    stats_ptr, num_splits = sums
    offs_s = tl.arange(0, 2**LOG_S)
    stat_ptrs = stats_ptr + (place * _NUM_STATS + number) * num_splits + offs_s
    return tl.load(stat_ptrs, mask=offs_s < num_splits, other=other)


@triton.jit
def row_sum(place, sums, LOG_S: tl.constexpr):
    """Return (m, log l): p = exp(logit - m - log l); log l is NaN where p is undefined."""
    m_s = _stat(place, 0, float("-inf"), sums, LOG_S)
    m_i = tl.max(m_s, axis=0)
    shift = tl.where(m_i == float("-inf"), 0.0, m_i)
    l_i = ordered_sum(_stat(place, 1, 0.0, sums, LOG_S) * tl.exp(m_s - shift), LOG_S)
    is_defined = (l_i > 0) & (l_i < float("inf"))
    log_l = tl.where(is_defined, tl.log(tl.where(is_defined, l_i, 1.0)), float("nan"))
    return tl.where(is_defined, m_i, 0.0), log_l


@triton.jit
def log_ratio_jit(draft, row, has_q, sources, sums, LOG_S: tl.constexpr):
    """log p(x) - log q(x) of a draft x; NaN if it is not usable."""
    logits_ptr, token_ptr, q_ptr, stride_l, stride_q, vocab_size = sources
    place = row + draft
    q_row = (place - row).to(tl.int64)
    token = tl.load(token_ptr + draft)
    is_known = (token >= 0) & (token < vocab_size)
    m_i, log_l = row_sum(place, sums, LOG_S)
    logit_ptr = logits_ptr + place.to(tl.int64) * stride_l + token
    log_ratio = tl.load(logit_ptr, mask=is_known, other=float("nan")) - m_i - log_l
    if q_ptr is not None:
        mask = is_known & has_q
        q = tl.load(q_ptr + q_row * stride_q + token, mask=mask, other=0.0)
        q_sum = ordered_sum(_stat(place, 2, 0.0, sums, LOG_S), LOG_S)
        is_good = (q > 0) & (tl.abs(q_sum - 1) <= _Q_TOLERANCE)
        log_q = tl.where(is_good, tl.log(tl.where(is_good, q, 1.0)), float("nan"))
        log_ratio -= tl.where(has_q, log_q, 0.0)
    return log_ratio


@triton.jit
def _exponential(num, noise):
    """The E that decides on the row's draft ``num``."""
    position, index, k0, k1 = noise
    purpose = tl.full((), _ACCEPT, tl.uint32)
    word, _, _, _ = philox4x32_jit(num.to(tl.uint32), position, purpose, index, k0, k1)
    return exponential_jit(word)


@triton.jit
def judge_tokens_jit(row, start, end, has_q, sources, sums, noise, LOG_S: tl.constexpr):
    """Return (accepted drafts, whether the residual is drawn from, log of its scale: 0)."""
    num_accepted = start * 0
    is_residual = start < 0
    for draft in range(start, end):
        if draft == start + num_accepted:
            log_ratio = log_ratio_jit(draft, row, has_q, sources, sums, LOG_S)
            is_usable = log_ratio == log_ratio
            is_accepted = is_usable & (_exponential(num_accepted, noise) >= -log_ratio)
            is_residual = is_usable & (is_accepted == 0)
            num_accepted += is_accepted.to(tl.int32)
    return num_accepted, is_residual, 0.0


@triton.jit
def judge_block_jit(row, start, end, has_q, sources, sums, noise, LOG_S: tl.constexpr):
    """Return (accepted drafts, whether the residual is drawn from, log p of the accepted)."""
    num_accepted, num_usable = start * 0, start * 0
    log_p = tl.zeros((), tl.float32)
    accepted_log_p = tl.zeros((), tl.float32)
    for draft in range(start, end):
        if draft == start + num_usable:
            log_ratio = log_ratio_jit(draft, row, has_q, sources, sums, LOG_S)
            if log_ratio == log_ratio:
                if num_usable > 0:
                    # A prefix that is not the last.
                    s = tl.exp(log_p) * (1 - tl.exp(log_ratio))
                    if has_q:
                        s = ordered_sum(_stat(draft + row, 3, 0.0, sums, LOG_S), LOG_S)
                    u = tl.exp(-_exponential(num_usable - 1, noise))
                    is_accepted = u * (s + 1 - tl.exp(log_p)) <= s
                    num_accepted = tl.where(is_accepted, num_usable, num_accepted)
                    accepted_log_p = tl.where(is_accepted, log_p, accepted_log_p)
                log_p = tl.minimum(log_p + log_ratio, 0.0)
                num_usable += 1
    is_accepted = (num_usable > 0) & (_exponential(num_usable - 1, noise) >= -log_p)
    num_accepted = tl.where(is_accepted, num_usable, num_accepted)
    return num_accepted, num_accepted < num_usable, accepted_log_p
