"""The Triton kernels of the rejection and the block rule; what they compute: verify_drafts.py.

Two launches, three for the block rule with a dense q:

1. ``sums_kernel``: over SPLIT columns of a row of logits, their maximum and sum of exponentials,
   and the sum of the draft's q, NaN if one is no probability.
2. ``overlap_kernel``: over as many, the block rule's sum s of max(0, p_i * p - q) for i > 0.
3. ``draw_kernel``: judges its row from these sums (verify_judge.py), then scores a tile of columns
   of the one position that is drawn from. A program's best column is one 64-bit key; an atomic
   maximum merges the keys, in any order, and the program that comes last stores the token.

Sums run over fixed splits and in a fixed order inside one, so a row's bits depend on its own inputs
only. Names: place, a row of logits, and draft count over all rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedraft.kernels.paged_attention_reduce import find_row
from pagedraft.kernels.philox import (
    NOISE_CHUNK,
    RESIDUAL,
    gumbel_noise_jit,
    philox4x32_jit,
)
from pagedraft.kernels.sample import INVALID_TOKEN
from pagedraft.kernels.verify_judge import (
    NUM_STATS,
    is_dense,
    judge_block_jit,
    judge_tokens_jit,
    log_ratio_jit,
    ordered_sum,
    row_sum,
)

_RESIDUAL = tl.constexpr(RESIDUAL)
_NOISE_CHUNK = tl.constexpr(NOISE_CHUNK)
_INVALID_TOKEN = tl.constexpr(INVALID_TOKEN)
_NUM_STATS = tl.constexpr(NUM_STATS)
_LOWEST_KEY = tl.constexpr(-(2**63))
_LAST_ID = tl.constexpr(2**31 - 1)
# Where the order of ``_keys`` puts -inf and +inf; NaN is above.
_MINUS_INFINITY = tl.constexpr(0x007FFFFF)
_INFINITY = tl.constexpr(0xFF800000)


@triton.jit(do_not_specialize=["num_rows"])
def sums_kernel(
    logits_ptr,
    start_ptr,
    q_ptr,
    has_q_ptr,
    stats_ptr,
    best_ptr,
    num_arrived_ptr,
    stride_l,
    stride_q,
    num_rows,
    vocab_size,
    SPLIT: tl.constexpr,
    LOG_V: tl.constexpr,
):
    place, split = tl.program_id(0), tl.program_id(1)
    num_splits = tl.num_programs(1)
    BLOCK_V: tl.constexpr = 2**LOG_V
    if (place < num_rows) & (split == 0):
        tl.store(best_ptr + place, _LOWEST_KEY)
        tl.store(num_arrived_ptr + place, 0)
    row = find_row(start_ptr, num_rows, place, 1, 1)
    draft = place - row
    num_left = tl.load(start_ptr + row + 1) - draft  # drafts from here to the row's end
    end = tl.where(num_left >= 0, tl.minimum((split + 1) * SPLIT, vocab_size), 0)
    has_q = (num_left > 0) & is_dense(row, q_ptr, has_q_ptr)
    row_ptr = logits_ptr + place.to(tl.int64) * stride_l
    lane_v = tl.arange(0, BLOCK_V)
    m_v = tl.full((BLOCK_V,), float("-inf"), tl.float32)
    l_v = tl.zeros((BLOCK_V,), tl.float32)
    q_v = tl.zeros((BLOCK_V,), tl.float32)
    for first in range(split * SPLIT, end, BLOCK_V):
        offs_v = first + lane_v
        logit = tl.load(row_ptr + offs_v, mask=offs_v < end, other=float("-inf"))
        m_new = tl.maximum(m_v, logit)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        l_v = l_v * tl.exp(m_v - shift) + tl.exp(logit - shift)  # NaN stays
        m_v = m_new
        if q_ptr is not None:
            q_row_ptr = q_ptr + draft.to(tl.int64) * stride_q
            q = tl.load(q_row_ptr + offs_v, mask=(offs_v < end) & has_q, other=0.0)
            q_v += tl.where(q >= 0, q, float("nan"))
    if num_left >= 0:
        m_i = tl.max(m_v, axis=0)
        l_v = l_v * tl.exp(m_v - tl.where(m_i == float("-inf"), 0.0, m_i))
        stat_ptr = stats_ptr + place * _NUM_STATS * num_splits + split
        tl.store(stat_ptr, m_i)
        tl.store(stat_ptr + num_splits, ordered_sum(l_v, LOG_V))
        if q_ptr is not None:
            tl.store(stat_ptr + 2 * num_splits, ordered_sum(q_v, LOG_V))


@triton.jit(do_not_specialize=["num_rows"])
def overlap_kernel(
    logits_ptr,
    token_ptr,
    start_ptr,
    q_ptr,
    has_q_ptr,
    stats_ptr,
    stride_l,
    stride_q,
    num_rows,
    vocab_size,
    SPLIT: tl.constexpr,
    LOG_V: tl.constexpr,
    LOG_S: tl.constexpr,
):
    draft, split = tl.program_id(0), tl.program_id(1)
    num_splits = tl.num_programs(1)
    BLOCK_V: tl.constexpr = 2**LOG_V
    row = find_row(start_ptr, num_rows, draft, 1, 0)
    start = tl.load(start_ptr + row)
    is_row = draft < tl.load(start_ptr + row + 1)
    if is_row & (draft > start) & is_dense(row, q_ptr, has_q_ptr):
        sums = (stats_ptr, num_splits)
        sources = (logits_ptr, token_ptr, q_ptr, stride_l, stride_q, vocab_size)
        log_p = 0.0
        for earlier in range(start, draft):
            log_ratio = log_ratio_jit(earlier, row, True, sources, sums, LOG_S)
            log_p = tl.minimum(log_p + log_ratio, 0.0)
        m_i, log_l = row_sum(draft + row, sums, LOG_S)
        row_ptr = logits_ptr + (draft + row).to(tl.int64) * stride_l
        q_row_ptr = q_ptr + draft.to(tl.int64) * stride_q
        end = tl.minimum((split + 1) * SPLIT, vocab_size)
        lane_v = tl.arange(0, BLOCK_V)
        s_v = tl.zeros((BLOCK_V,), tl.float32)
        for first in range(split * SPLIT, end, BLOCK_V):
            offs_v = first + lane_v
            logit = tl.load(row_ptr + offs_v, mask=offs_v < end, other=float("-inf"))
            q = tl.load(q_row_ptr + offs_v, mask=offs_v < end, other=0.0)
            s_v += tl.maximum(tl.exp(logit - m_i - log_l + log_p) - q, 0.0)
        stat_ptr = stats_ptr + ((draft + row) * _NUM_STATS + 3) * num_splits + split
        tl.store(stat_ptr, ordered_sum(s_v, LOG_V))


@triton.jit
def _keys(score, token, is_first):
    """int64 keys: all of ``is_first`` above the others, then NaN, larger scores, lower tokens."""
    score = tl.where(score == score, score, float("nan"))  # one bit pattern
    bits = score.to(tl.int32, bitcast=True).to(tl.int64)
    order = tl.where(bits < 0, ~bits, bits + 2147483648)
    key = (order << 31) | (token ^ _LAST_ID).to(tl.int64)  # a lower token counts more
    return tl.where(is_first, key, key + _LOWEST_KEY)


@triton.jit
def _token_of(key):
    """The token of a key, _INVALID_TOKEN where its score is NaN or -inf."""
    order = (key & 0x7FFFFFFFFFFFFFFF) >> 31
    is_valid = (order > _MINUS_INFINITY) & (order <= _INFINITY)
    return tl.where(is_valid, (key & _LAST_ID) ^ _LAST_ID, _INVALID_TOKEN)


@triton.jit
def draw_kernel(
    logits_ptr,
    token_ptr,
    start_ptr,
    q_ptr,
    has_q_ptr,
    seed_ptr,
    position_ptr,
    index_ptr,
    stats_ptr,
    best_ptr,
    num_arrived_ptr,
    accepted_ptr,
    next_ptr,
    stride_l,
    stride_q,
    vocab_size,
    num_splits,
    IS_BLOCK: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
    LOG_S: tl.constexpr,
):
    row, share = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row).to(tl.uint32)
    index = tl.zeros((), tl.uint32)
    if index_ptr is not None:
        index = tl.load(index_ptr + row).to(tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    noise = (position, index, k0, k1)
    sums = (stats_ptr, num_splits)
    sources = (logits_ptr, token_ptr, q_ptr, stride_l, stride_q, vocab_size)
    has_q = is_dense(row, q_ptr, has_q_ptr)
    if IS_BLOCK:
        judged = judge_block_jit(row, start, end, has_q, sources, sums, noise, LOG_S)
    else:
        judged = judge_tokens_jit(row, start, end, has_q, sources, sums, noise, LOG_S)
    num_accepted, is_residual, log_p = judged
    if is_residual:
        zero, purpose = tl.zeros((), tl.uint32), tl.full((), _RESIDUAL, tl.uint32)
        k0, k1, _, _ = philox4x32_jit(zero, position, purpose, index, k0, k1)
    chunk = share * TILE_CHUNKS + tl.arange(0, TILE_CHUNKS)[:, None]
    token = chunk * _NOISE_CHUNK + tl.arange(0, _NOISE_CHUNK)[None, :]  # [TILE_CHUNKS, NOISE_CHUNK]
    place = start + row + num_accepted
    logit = tl.load(
        logits_ptr + place.to(tl.int64) * stride_l + token,
        mask=token < vocab_size,
        other=float("-inf"),
    )
    position = position + num_accepted.to(tl.uint32)
    gumbel = gumbel_noise_jit(chunk.to(tl.uint32), token.to(tl.uint32), position, index, k0, k1)
    weight, is_first = logit, token >= 0
    if is_residual:
        weight, is_first = _residual(
            logit, token, start + num_accepted, place, has_q, log_p, sources, sums, LOG_S
        )
    top = tl.max(tl.max(_keys(weight + gumbel, token, is_first), axis=1), axis=0)
    tl.atomic_max(best_ptr + row, top)
    if tl.atomic_add(num_arrived_ptr + row, 1) == tl.num_programs(1) - 1:
        top = tl.atomic_max(best_ptr + row, _LOWEST_KEY)
        tl.store(accepted_ptr + row, num_accepted)
        tl.store(next_ptr + row, _token_of(top))


@triton.jit
def _residual(logit, token, draft, place, has_q, log_p, sources, sums, LOG_S: tl.constexpr):
    """Return (log of max(0, p_i * p - q), where it is above -inf); elsewhere the logits."""
    logits_ptr, token_ptr, q_ptr, stride_l, stride_q, vocab_size = sources
    is_left = (token != tl.load(token_ptr + draft)) & (logit > float("-inf"))
    weight = logit
    if q_ptr is not None:
        m_i, log_l = row_sum(place, sums, LOG_S)
        q_ptrs = q_ptr + draft.to(tl.int64) * stride_q + token
        q = tl.load(q_ptrs, mask=(token < vocab_size) & has_q, other=0.0)
        left = tl.exp(logit - m_i - log_l + log_p) - q
        is_left = tl.where(has_q, left > 0, is_left)
        log_left = tl.log(tl.where(left > 0, left, 1.0))
        weight = tl.where(has_q & is_left, log_left, logit)
    return weight, is_left
