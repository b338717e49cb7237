"""The Triton kernels of the distillation losses; what they compute: distill_loss.py.

One program owns a row. What it overwrites it does not read again, which would need a barrier: where
the slope needs the row's own sums first, the row is read twice and written the second time.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

_LOG_2 = tl.constexpr(math.log(2))
_NO_ID = tl.constexpr(2**31 - 1)  # above every id


@triton.jit(do_not_specialize=["first_id"])
def update_lse_kernel(
    logits_ptr, max_ptr, sum_ptr, best_ptr, stride_n, vocab_size, first_id, BLOCK_V: tl.constexpr
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride_n
    m_v = tl.full((BLOCK_V,), float("-inf"), tl.float32)
    l_v = tl.zeros((BLOCK_V,), tl.float32)
    best_v = tl.full((BLOCK_V,), _NO_ID, tl.int32)
    for first in range(0, vocab_size, BLOCK_V):
        offs_v = first + tl.arange(0, BLOCK_V)
        logit = tl.load(row_ptr + offs_v, mask=offs_v < vocab_size, other=float("-inf"))
        best_v = tl.where(logit > m_v, offs_v, best_v)
        m_new = tl.maximum(m_v, logit)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        l_v = l_v * tl.exp(m_v - shift) + tl.exp(logit - shift)  # NaN stays
        m_v = m_new
    m_i = tl.max(m_v, axis=0)
    best = first_id + tl.min(tl.where(m_v == m_i, best_v, _NO_ID), axis=0).to(tl.int64)
    m_old = tl.load(max_ptr + row)
    m_new = tl.maximum(m_old, m_i)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    l_i = tl.sum(l_v * tl.exp(m_v - shift), axis=0)
    l_i += tl.load(sum_ptr + row) * tl.exp(m_old - shift)
    tl.store(sum_ptr + row, l_i)
    tl.store(max_ptr + row, m_new)
    tl.store(best_ptr + row, tl.where(m_i > m_old, best, tl.load(best_ptr + row)))


@triton.jit
def _terms(student_row_ptr, teacher_row_ptr, lse_q, lse_p, offs_v, mask_v, TERMS: tl.constexpr):
    """Return q, p, q g and the divergence of a tile of columns, 0 past the last one."""
    log_q = tl.load(student_row_ptr + offs_v, mask=mask_v, other=0.0) - lse_q
    log_p = tl.load(teacher_row_ptr + offs_v, mask=mask_v, other=0.0) - lse_p
    q = tl.where(mask_v, tl.exp(log_q), 0.0)  # [BLOCK_V] fp32
    p = tl.where(mask_v, tl.exp(log_p), 0.0)  # [BLOCK_V] fp32
    log_ratio = log_q - log_p
    if TERMS == "forward_kl":
        slope = -p
        divergence = slope * log_ratio
    elif TERMS == "reverse_kl":
        slope = q * log_ratio
        divergence = slope
    elif TERMS == "jsd":
        e = tl.exp(-tl.abs(log_ratio))
        log1p_e = tl.log(1.0 + e) + (e - ((1.0 + e) - 1.0)) / (1.0 + e)  # with what 1 + e lost
        softplus = tl.maximum(log_ratio, 0.0) + log1p_e
        log_p_over_m = _LOG_2 - softplus
        slope = 0.5 * q * (log_p_over_m + log_ratio)
        divergence = 0.5 * p * log_p_over_m + slope
    else:
        slope = tl.where(log_ratio < 0, -q, 0.0)
        divergence = -tl.minimum(p, q)
    return q, p, slope, divergence


@triton.jit
def distill_terms_kernel(
    student_ptr,
    teacher_ptr,
    student_lse_ptr,
    teacher_lse_ptr,
    divergence_ptr,
    alpha_ptr,
    slope_ptr,
    mass_ptr,
    stride_sn,
    stride_tn,
    vocab_size,
    TERMS: tl.constexpr,
    WRITE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0)
    student_row_ptr = student_ptr + row.to(tl.int64) * stride_sn
    teacher_row_ptr = teacher_ptr + row.to(tl.int64) * stride_tn
    lse_q, lse_p = tl.load(student_lse_ptr + row), tl.load(teacher_lse_ptr + row)
    divergence_v = tl.zeros((BLOCK_V,), tl.float32)
    alpha_v = tl.zeros((BLOCK_V,), tl.float32)
    slope_v = tl.zeros((BLOCK_V,), tl.float32)
    mass_v = tl.zeros((BLOCK_V,), tl.float32)
    for first in range(0, vocab_size, BLOCK_V):
        offs_v = first + tl.arange(0, BLOCK_V)
        mask_v = offs_v < vocab_size
        q, p, slope, divergence = _terms(
            student_row_ptr, teacher_row_ptr, lse_q, lse_p, offs_v, mask_v, TERMS
        )
        divergence_v += divergence
        alpha_v += tl.minimum(p, q)
        slope_v += slope
        mass_v += p
        if WRITE == "parts":
            tl.store(student_row_ptr + offs_v, q, mask=mask_v)
            tl.store(teacher_row_ptr + offs_v, slope, mask=mask_v)
    slope_sum = tl.sum(slope_v, axis=0)
    tl.store(divergence_ptr + row, tl.load(divergence_ptr + row) + tl.sum(divergence_v, axis=0))
    tl.store(alpha_ptr + row, tl.load(alpha_ptr + row) + tl.sum(alpha_v, axis=0))
    tl.store(slope_ptr + row, tl.load(slope_ptr + row) + slope_sum)
    tl.store(mass_ptr + row, tl.load(mass_ptr + row) + tl.sum(mass_v, axis=0))
    if WRITE == "gradient":
        for first in range(0, vocab_size, BLOCK_V):
            offs_v = first + tl.arange(0, BLOCK_V)
            mask_v = offs_v < vocab_size
            q, p, slope, divergence = _terms(
                student_row_ptr, teacher_row_ptr, lse_q, lse_p, offs_v, mask_v, TERMS
            )
            tl.store(student_row_ptr + offs_v, slope - slope_sum * q, mask=mask_v)
