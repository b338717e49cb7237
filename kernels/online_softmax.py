"""The arithmetic of attention in Triton: softmax states of a tile of queries and how they grow.

A state of BLOCK_M packed query rows is (row maximum [M] of the raw scores, row sum [M, 8] in equal
columns, weighted values [M, BLOCK_D]), all fp32. ``scale`` takes raw scores to powers of
two. Every change of a state is one of the functions below, so that two launches that see the same
keys in the same tree of steps round alike: fp fusion is off, and where it is wanted, spelled out.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def empty_state(q):
    """State of no keys for the rows of ``q`` [M, BLOCK_D]."""
    BLOCK_M: tl.constexpr = q.shape[0]
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M, 8], tl.float32)
    return m_i, l_i, tl.zeros([BLOCK_M, q.shape[1]], tl.float32)


@triton.jit
def merge(state_a, state_b, scale):
    """State b behind state a. An empty b leaves a's bits alone, an empty a gives b's."""
    m_a, l_a, acc_a = state_a
    m_b, l_b, acc_b = state_b
    m = tl.maximum(m_a, m_b)
    finite = tl.where(m == float("-inf"), 0.0, m)
    weight_a = tl.exp2((m_a - finite) * scale)[:, None]
    weight_b = tl.exp2((m_b - finite) * scale)[:, None]
    weight_l = tl.broadcast_to(weight_a, l_a.shape)
    weight_acc = tl.broadcast_to(weight_a, acc_a.shape)
    l_i = tl.fma(l_a, weight_l, l_b * weight_b)
    return m, l_i, tl.fma(acc_a, weight_acc, acc_b * weight_b)


@triton.jit
def _tanh(y):
    """tanh(y ln(2) / 2); near 0 a series, where 1 - 2 / (1 + 2^y) cancels."""
    x = y * 0.34657359027997264
    square = x * x
    series = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(square < 0.0225, series, 1.0 - 2.0 / (1.0 + tl.exp2(tl.minimum(y, 64.0))))


@triton.jit
def softmax_step(q, keys, values, state, is_visible, scales):
    """State after one more tile of keys.

    keys, values: ([BLOCK_N, BLOCK_D], factor of each [BLOCK_N] or None).
    is_visible: [BLOCK_M, BLOCK_N] or None where every query sees every key.
    scales: (scale, tanh_scale). tanh_scale is None without a soft cap, else it takes raw scores to
    2 log2(e) x of tanh(x); a score is then tanh(x), in [-1, 1], and ``scale`` carries the cap.
    """
    m_i, l_i, acc = state
    k, k_factor = keys
    v, v_factor = values
    scale, tanh_scale = scales
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")  # [BLOCK_M, BLOCK_N] fp32
    if k_factor is not None:
        scores *= k_factor[None, :]
    if tanh_scale is not None:
        scores = _tanh(scores * tanh_scale)
    if is_visible is not None:
        scores = tl.where(is_visible, scores, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, axis=1))
    finite = m_new
    if is_visible is not None:
        finite = tl.where(m_new == float("-inf"), 0.0, m_new)
    weight = tl.exp2((m_i - finite) * scale)[:, None]
    factor = tl.full(scores.shape, scale, tl.float32)
    shift = tl.broadcast_to((-finite * scale)[:, None], scores.shape)
    p = tl.exp2(tl.fma(scores, factor, shift))
    # Row sums by a dot: tl.sum adds in another order when a tile's rows are spread over the warps.
    ones = tl.full([k.shape[0], 8], 1.0, q.dtype)
    l_i = tl.dot(p.to(q.dtype), ones, l_i * weight, input_precision="ieee")
    if v_factor is not None and q.dtype == tl.float16:
        # p * factor would fall among fp16's subnormals; a value itself does not.
        v = v.to(tl.float32) * v_factor[:, None]
    elif v_factor is not None:
        p *= v_factor[None, :]
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * weight, input_precision="ieee")
    return m_new, l_i, acc


@triton.jit
def normalize(m_i, l_i, acc, sink, scale):
    """Outputs [M, BLOCK_D] of a finished state; zeros for a row that saw no key.

    l_i: [M]. sink: None, or one more logit a row [M] in powers of two.
    """
    if sink is not None:
        # A sink far above all scores: shrink the sums instead of overflowing the sink's term.
        top = tl.maximum(tl.maximum(m_i * scale, sink), -1e30)
        shrink = tl.exp2(m_i * scale - top)
        acc *= shrink[:, None]
        l_i = l_i * shrink + tl.exp2(sink - top)
    return acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
