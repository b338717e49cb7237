"""Triton side of the logit edits (logit_edits.py), in one launch.

**Grid.** (Q, ceil(vocabulary / COLUMNS)): a program owns COLUMNS columns of a row and takes from
every list what falls into them. A token may be in several lists, and threads do not wait for each
other: so one place alone writes a token's number (that of its context, else of the drafts, else of
the bias) and looks up what the other lists say of it; banned tokens get nothing but -inf.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedraft.kernels.sample_batch import SampleBatch

COLUMNS = 16384
_LIST_BLOCK = 1024
_PREFIX_BLOCK = tl.constexpr(16)


@triton.jit
def _apply_allowed(row_ptr, words_ptr, first, end, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, COLUMNS, BLOCK):
        token = first + start + tl.arange(0, BLOCK)
        mask = token < end
        word = tl.load(words_ptr + token // 32, mask=mask, other=-1)
        is_allowed = (word >> (token % 32)) & 1
        tl.store(row_ptr + token, float("-inf"), mask=mask & (is_allowed == 0))


@triton.jit
def _list_ends(starts_ptr, index):
    return tl.load(starts_ptr + index), tl.load(starts_ptr + index + 1)


@triton.jit
def _owned_ids(ids_ptr, offs_n, stop, first, end):
    """A list's ids at ``offs_n`` and which of them fall into columns first..end."""
    token = tl.load(ids_ptr + offs_n, mask=offs_n < stop, other=-1).to(tl.int32)
    return token, (token >= first) & (token < end)


@triton.jit
def _ban(row_ptr, first, end, banned, BLOCK: tl.constexpr):
    ids_ptr, start, stop = banned
    for place in range(start, stop, BLOCK):
        token, mask = _owned_ids(ids_ptr, place + tl.arange(0, BLOCK), stop, first, end)
        tl.store(row_ptr + token, float("-inf"), mask=mask)


@triton.jit
def _is_open(token, mask, words_ptr, banned):
    """Which of the masked tokens are allowed and not banned."""
    if words_ptr is not None:
        word = tl.load(words_ptr + token // 32, mask=mask, other=0)
        mask = mask & (((word >> (token % 32)) & 1) == 1)
    if banned is not None:
        ids_ptr, start, stop = banned
        for place in range(start, stop):
            mask = mask & (token != tl.load(ids_ptr + place))
    return mask


@triton.jit
def _place_in_list(ids_ptr, start, stop, token):
    """Where each token stands in the ascending list, by binary search; ``stop`` if it does not."""
    low = tl.zeros_like(token) + start
    high = tl.zeros_like(token) + stop
    length = stop - start
    while length > 0:
        middle = (low + high) // 2
        is_open = low < high
        is_below = is_open & (tl.load(ids_ptr + middle, mask=is_open, other=0) < token)
        high = tl.where(is_open & (is_below == 0), middle, high)
        low = tl.where(is_below, middle + 1, low)
        length = length // 2
    is_found = (low < stop) & (tl.load(ids_ptr + low, mask=low < stop, other=0) == token)
    return tl.where(is_found, low, stop)


@triton.jit
def _times_in(token, prefix):
    """How often each token is among the row's drafts."""
    drafts_ptr, num_drafts = prefix
    times = tl.zeros_like(token)
    for draft in range(num_drafts):
        times += (token == tl.load(drafts_ptr + draft)).to(tl.int32)
    return times


@triton.jit
def _biased(row_ptr, token, mask, bias):
    """Logits of tokens with the request's bias."""
    logit = tl.load(row_ptr + token, mask=mask, other=0.0)
    if bias is not None:
        ids_ptr, values_ptr, start, stop = bias
        place = _place_in_list(ids_ptr, start, stop, token)
        logit += tl.load(values_ptr + place, mask=mask & (place < stop), other=0.0)
    return logit


@triton.jit
def _penalized(logit, count, penalties):
    """Logits of tokens in the context; ``penalties``: (repetition, presence, frequency)."""
    repetition, presence, frequency = penalties
    divisor = tl.zeros_like(logit) + repetition
    logit = tl.where(logit > 0, tl.div_rn(logit, divisor), logit * repetition)
    logit = logit - frequency * count.to(tl.float32)
    return logit - presence * (count > 0).to(tl.float32)


@triton.jit
def _edit_context(
    row_ptr, first, end, seen, prefix, penalties, bias, words_ptr, banned, BLOCK: tl.constexpr
):
    """Tokens of the committed context."""
    ids_ptr, counts_ptr, start, stop = seen
    for place in range(start, stop, BLOCK):
        offs_n = place + tl.arange(0, BLOCK)
        token, mask = _owned_ids(ids_ptr, offs_n, stop, first, end)
        mask = _is_open(token, mask, words_ptr, banned)
        count = tl.load(counts_ptr + offs_n, mask=mask, other=0)
        if prefix is not None:
            count += _times_in(token, prefix)
        logit = _biased(row_ptr, token, mask, bias)
        tl.store(row_ptr + token, _penalized(logit, count, penalties), mask=mask)


@triton.jit
def _edit_prefix(row_ptr, first, end, seen, prefix, penalties, bias, words_ptr, banned):
    """Drafts that the committed context does not hold, each at its first place."""
    ids_ptr, _, start, stop = seen
    drafts_ptr, num_drafts = prefix
    for place in range(0, num_drafts, _PREFIX_BLOCK):
        offs_p = place + tl.arange(0, _PREFIX_BLOCK)
        token, mask = _owned_ids(drafts_ptr, offs_p, num_drafts, first, end)
        for draft in range(num_drafts):
            is_same = token == tl.load(drafts_ptr + draft)
            mask = mask & ((is_same & (draft < offs_p)) == 0)
        mask = mask & (_place_in_list(ids_ptr, start, stop, token) == stop)
        mask = _is_open(token, mask, words_ptr, banned)
        logit = _penalized(_biased(row_ptr, token, mask, bias), _times_in(token, prefix), penalties)
        tl.store(row_ptr + token, logit, mask=mask)


@triton.jit
def _edit_biased(row_ptr, first, end, seen, prefix, bias, words_ptr, banned, BLOCK: tl.constexpr):
    """Tokens with a bias that neither the context nor the drafts hold."""
    ids_ptr, values_ptr, start, stop = bias
    for place in range(start, stop, BLOCK):
        offs_n = place + tl.arange(0, BLOCK)
        token, mask = _owned_ids(ids_ptr, offs_n, stop, first, end)
        mask = _is_open(token, mask, words_ptr, banned)
        if seen is not None:
            seen_ids_ptr, _, seen_start, seen_stop = seen
            mask = mask & (_place_in_list(seen_ids_ptr, seen_start, seen_stop, token) == seen_stop)
        if prefix is not None:
            mask = mask & (_times_in(token, prefix) == 0)
        logit = tl.load(row_ptr + token, mask=mask, other=0.0)
        logit += tl.load(values_ptr + offs_n, mask=mask, other=0.0)
        tl.store(row_ptr + token, logit, mask=mask)


@triton.jit
def _edit_kernel(
    logits_ptr,
    request_ptr,
    allowed_ptr,
    bias_starts_ptr,
    bias_ids_ptr,
    bias_values_ptr,
    banned_starts_ptr,
    banned_ids_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    seen_starts_ptr,
    seen_ids_ptr,
    seen_counts_ptr,
    drafts_ptr,
    prefix_starts_ptr,
    prefix_lens_ptr,
    stride_q,
    stride_allowed,
    vocab_size,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    first = tl.program_id(1) * COLUMNS
    end = tl.minimum(first + COLUMNS, vocab_size)
    row_ptr = logits_ptr + row.to(tl.int64) * stride_q
    request = row
    if request_ptr is not None:
        request = tl.load(request_ptr + row)
    words_ptr, bias, banned, seen, prefix = None, None, None, None, None
    if allowed_ptr is not None:
        words_ptr = allowed_ptr + row.to(tl.int64) * stride_allowed
        _apply_allowed(row_ptr, words_ptr, first, end, COLUMNS, BLOCK)
    if banned_ids_ptr is not None:
        start, stop = _list_ends(banned_starts_ptr, row)
        banned = (banned_ids_ptr, start, stop)
        _ban(row_ptr, first, end, banned, BLOCK)
    if bias_ids_ptr is not None:
        start, stop = _list_ends(bias_starts_ptr, request)
        bias = (bias_ids_ptr, bias_values_ptr, start, stop)
    if drafts_ptr is not None:
        prefix = (drafts_ptr + tl.load(prefix_starts_ptr + row), tl.load(prefix_lens_ptr + row))
    if seen_ids_ptr is not None:
        start, stop = _list_ends(seen_starts_ptr, request)
        seen = (seen_ids_ptr, seen_counts_ptr, start, stop)
        repetition, presence = tl.load(repetition_ptr + row), tl.load(presence_ptr + row)
        penalties = (repetition, presence, tl.load(frequency_ptr + row))
        _edit_context(row_ptr, first, end, seen, prefix, penalties, bias, words_ptr, banned, BLOCK)
        if prefix is not None:
            _edit_prefix(row_ptr, first, end, seen, prefix, penalties, bias, words_ptr, banned)
    if bias is not None:
        _edit_biased(row_ptr, first, end, seen, prefix, bias, words_ptr, banned, BLOCK)


def edit_logits_triton(logits_QV: torch.Tensor, batch: SampleBatch) -> None:
    """Edit checked fp32 logits in place, in one launch."""
    num_rows, num_columns = logits_QV.shape
    vocab_size = batch.num_tokens(num_columns)
    bias, banned, penalties = batch.bias, batch.banned, batch.penalties
    prefix = penalties.prefix if penalties else None
    allowed_QW = batch.allowed_QW
    _edit_kernel[(num_rows, triton.cdiv(vocab_size, COLUMNS))](
        logits_QV,
        batch.request_Q,
        allowed_QW,
        *((bias.starts_R1, bias.ids_n, bias.values_n) if bias else (None,) * 3),
        *((banned.starts_Q1, banned.ids_n) if banned else (None,) * 2),
        *((penalties.repetition_Q, penalties.presence_Q) if penalties else (None,) * 2),
        penalties.frequency_Q if penalties else None,
        *((penalties.starts_R1, penalties.ids_n) if penalties else (None,) * 2),
        penalties.counts_n if penalties else None,
        *((prefix.drafts_n, prefix.starts_Q, prefix.lens_Q) if prefix else (None,) * 3),
        logits_QV.stride(0),
        0 if allowed_QW is None else allowed_QW.stride(0),
        vocab_size,
        COLUMNS=COLUMNS,
        BLOCK=_LIST_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,  # the same bits everywhere
    )
