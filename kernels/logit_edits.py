"""Logit edits: which tokens a row may draw, and what its request and its context say of them.

In this order, for each row: tokens that its grammar does not allow become -inf; its request's bias
is added; banned tokens become -inf; penalties. A penalised logit l of a token that occurs c times
in the output, drafts before the row's position included, becomes

    l / repetition if l > 0 else l * repetition       where the token is in prompt or output
    l - frequency * c, then l - presence if c > 0

in fp32, each operation rounded, none fused: the same bits everywhere.

**Shapes.** logits_QV fp32, edited in place; the rest: sample_batch.py.

**Cost.** For each row, 4 bytes a word of its allowed mask, 16 a bias entry, 12 a ban, 16 a token of
its context, each read by all programs of the row, of which one writes the logit.

**Grid.** (Q, ceil(vocabulary / COLUMNS)): a program owns COLUMNS columns of a row and takes from
every list what falls into them. Its stages meet at barriers: a token may be in several lists.

**Source.** Repetition: Keskar et al., arXiv 1909.05858; the others as in the OpenAI API.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedraft.kernels.cost import Cost
from pagedraft.kernels.sample_batch import Penalties, SampleBatch

COLUMNS = 16384
_LIST_BLOCK = 1024
_PREFIX_BLOCK = tl.constexpr(16)


def edit_logits_ref(logits_QV: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """Return edited logits, through dense [Q, V] counts: the oracle."""
    num_rows, num_columns = logits_QV.shape
    logits_QV = logits_QV.clone()
    request_Q = torch.arange(num_rows, device=logits_QV.device)
    if batch.request_Q is not None:
        request_Q = batch.request_Q.long()
    if batch.allowed_QW is not None:
        logits_QV.masked_fill_(~_allowed_ref(batch.allowed_QW, num_columns), float("-inf"))
    if batch.bias is not None:
        bias = batch.bias
        logits_QV += _dense(bias.starts_R1, bias.ids_n, bias.values_n, num_columns)[request_Q]
    if batch.banned is not None:
        ones_n = torch.ones_like(batch.banned.ids_n)
        banned_QV = _dense(batch.banned.starts_Q1, batch.banned.ids_n, ones_n, num_columns)
        logits_QV.masked_fill_(banned_QV[:num_rows] > 0, float("-inf"))
    if batch.penalties is not None:
        logits_QV = _penalized_ref(logits_QV, batch.penalties, request_Q)
    return logits_QV


def _allowed_ref(allowed_QW: torch.Tensor, num_columns: int) -> torch.Tensor:
    bits_QW32 = allowed_QW[:, :, None] >> torch.arange(32, device=allowed_QW.device)
    allowed_QV = (bits_QW32 & 1).bool().flatten(1)
    missing = max(0, num_columns - allowed_QV.shape[1])  # padding columns
    return torch.nn.functional.pad(allowed_QV, (0, missing), value=True)[:, :num_columns]


def _dense(
    starts_1: torch.Tensor, ids_n: torch.Tensor, values_n: torch.Tensor, num_columns: int
) -> torch.Tensor:
    """The lists as rows of a dense matrix, 0 elsewhere."""
    num_lists = starts_1.shape[0] - 1
    dense = torch.zeros(num_lists, num_columns, dtype=values_n.dtype, device=ids_n.device)
    place_n = torch.arange(ids_n.shape[0], device=ids_n.device)
    list_n = torch.searchsorted(starts_1, place_n, right=True) - 1
    is_used_n = (list_n >= 0) & (list_n < num_lists) & (ids_n >= 0) & (ids_n < num_columns)
    dense[list_n[is_used_n], ids_n[is_used_n].long()] = values_n[is_used_n]
    return dense


def _penalized_ref(
    logits_QV: torch.Tensor, penalties: Penalties, request_Q: torch.Tensor
) -> torch.Tensor:
    num_columns = logits_QV.shape[1]
    # One more than the count: 0 where the context does not hold the token.
    seen_n = penalties.counts_n + 1
    seen_QV = _dense(penalties.starts_R1, penalties.ids_n, seen_n, num_columns)[request_Q]
    count_QV = (seen_QV - 1).clamp(min=0)
    is_seen_QV = seen_QV > 0
    if penalties.prefix is not None:
        prefix = penalties.prefix
        place_n = torch.arange(prefix.drafts_n.shape[0], device=logits_QV.device)
        end_Q = prefix.starts_Q + prefix.lens_Q
        is_mine_Qn = (place_n >= prefix.starts_Q[:, None]) & (place_n < end_Q[:, None])
        is_mine_Qn &= (prefix.drafts_n >= 0) & (prefix.drafts_n < num_columns)
        token_Qn = prefix.drafts_n.clamp(0, num_columns - 1).expand_as(is_mine_Qn)
        count_QV = count_QV.scatter_add(1, token_Qn, is_mine_Qn.to(count_QV.dtype))
        is_seen_QV = is_seen_QV | (count_QV > 0)
    repetition_Q1 = penalties.repetition_Q[:, None]
    repeated_QV = torch.where(logits_QV > 0, logits_QV / repetition_Q1, logits_QV * repetition_Q1)
    logits_QV = torch.where(is_seen_QV, repeated_QV, logits_QV)
    logits_QV = logits_QV - penalties.frequency_Q[:, None] * count_QV.float()
    return logits_QV - penalties.presence_Q[:, None] * (count_QV > 0).float()


@triton.jit
def _apply_allowed(row_ptr, words_ptr, first, end, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, COLUMNS, BLOCK):
        token = first + start + tl.arange(0, BLOCK)
        mask = token < end
        word = tl.load(words_ptr + token // 32, mask=mask, other=-1)
        is_banned = ((word >> (token % 32)) & 1) == 0
        tl.store(row_ptr + token, float("-inf"), mask=mask & is_banned)


@triton.jit
def _owned_ids(ids_ptr, offs_n, stop, first, end):
    """A list's ids at ``offs_n`` and which of them fall into columns first..end."""
    token = tl.load(ids_ptr + offs_n, mask=offs_n < stop, other=-1)
    return token, (token >= first) & (token < end)


@triton.jit
def _add_bias(row_ptr, first, end, bias, BLOCK: tl.constexpr):
    """``bias``: (its list's start, ids, values)."""
    start_ptr, ids_ptr, values_ptr = bias
    stop = tl.load(start_ptr + 1)
    for place in range(tl.load(start_ptr), stop, BLOCK):
        offs_n = place + tl.arange(0, BLOCK)
        token, mask = _owned_ids(ids_ptr, offs_n, stop, first, end)
        value = tl.load(values_ptr + offs_n, mask=mask, other=0.0)
        logit = tl.load(row_ptr + token, mask=mask, other=0.0)
        tl.store(row_ptr + token, logit + value, mask=mask)


@triton.jit
def _ban(row_ptr, first, end, banned, BLOCK: tl.constexpr):
    """``banned``: (its list's start, ids)."""
    start_ptr, ids_ptr = banned
    stop = tl.load(start_ptr + 1)
    for place in range(tl.load(start_ptr), stop, BLOCK):
        offs_n = place + tl.arange(0, BLOCK)
        token, mask = _owned_ids(ids_ptr, offs_n, stop, first, end)
        tl.store(row_ptr + token, float("-inf"), mask=mask)


@triton.jit
def _penalize(row_ptr, token, mask, count, penalties):
    """Penalise logits of seen tokens; ``penalties``: (repetition, presence, frequency)."""
    repetition, presence, frequency = penalties
    logit = tl.load(row_ptr + token, mask=mask, other=0.0)
    divisor = tl.zeros_like(logit) + repetition
    logit = tl.where(logit > 0, tl.div_rn(logit, divisor), logit * repetition)
    logit = logit - frequency * count.to(tl.float32)
    logit = logit - presence * (count > 0).to(tl.float32)
    tl.store(row_ptr + token, logit, mask=mask)


@triton.jit
def _penalize_context(row_ptr, first, end, seen, prefix, penalties, BLOCK: tl.constexpr):
    """Tokens of the committed context; ``seen``: (ids, counts, start, stop), ``prefix``: (drafts,
    number)."""
    ids_ptr, counts_ptr, start, stop = seen
    drafts_ptr, num_drafts = prefix
    for place in range(start, stop, BLOCK):
        offs_n = place + tl.arange(0, BLOCK)
        token, mask = _owned_ids(ids_ptr, offs_n, stop, first, end)
        count = tl.load(counts_ptr + offs_n, mask=mask, other=0)
        if drafts_ptr is not None:
            for draft in range(num_drafts):
                count += (token == tl.load(drafts_ptr + draft)).to(tl.int32)
        _penalize(row_ptr, token, mask, count, penalties)


@triton.jit
def _is_in_list(ids_ptr, start, stop, token):
    """Whether each token is in the ascending list, by binary search."""
    low = tl.zeros_like(token) + start
    high = tl.zeros_like(token) + stop
    length = stop - start
    while length > 0:
        middle = (low + high) // 2
        is_open = low < high
        is_below = is_open & (tl.load(ids_ptr + middle, mask=is_open, other=0) < token)
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(is_open & (is_below == 0), middle, high)
        length = length // 2
    return (low < stop) & (tl.load(ids_ptr + low, mask=low < stop, other=0) == token)


@triton.jit
def _penalize_prefix(row_ptr, first, end, seen, prefix, penalties):
    """Drafts that the committed context does not hold, each once, with their number of times."""
    ids_ptr, counts_ptr, start, stop = seen
    drafts_ptr, num_drafts = prefix
    for place in range(0, num_drafts, _PREFIX_BLOCK):
        offs_p = place + tl.arange(0, _PREFIX_BLOCK)
        token, mask = _owned_ids(drafts_ptr, offs_p, num_drafts, first, end)
        token = token.to(tl.int32)
        count = tl.zeros_like(token)
        is_repeat = tl.zeros_like(token)
        for draft in range(num_drafts):
            is_same = (token == tl.load(drafts_ptr + draft)).to(tl.int32)
            count += is_same
            is_repeat |= is_same & (draft < offs_p).to(tl.int32)
        mask = mask & (is_repeat == 0) & (_is_in_list(ids_ptr, start, stop, token) == 0)
        _penalize(row_ptr, token, mask, count, penalties)


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
    if allowed_ptr is not None:
        words_ptr = allowed_ptr + row.to(tl.int64) * stride_allowed
        _apply_allowed(row_ptr, words_ptr, first, end, COLUMNS, BLOCK)
        tl.debug_barrier()
    if bias_ids_ptr is not None:
        bias = (bias_starts_ptr + request, bias_ids_ptr, bias_values_ptr)
        _add_bias(row_ptr, first, end, bias, BLOCK)
        tl.debug_barrier()
    if banned_ids_ptr is not None:
        _ban(row_ptr, first, end, (banned_starts_ptr + row, banned_ids_ptr), BLOCK)
        tl.debug_barrier()
    if seen_ids_ptr is not None:
        penalties = (
            tl.load(repetition_ptr + row),
            tl.load(presence_ptr + row),
            tl.load(frequency_ptr + row),
        )
        start, stop = tl.load(seen_starts_ptr + request), tl.load(seen_starts_ptr + request + 1)
        seen = (seen_ids_ptr, seen_counts_ptr, start, stop)
        if drafts_ptr is not None:
            row_drafts_ptr = drafts_ptr + tl.load(prefix_starts_ptr + row)
            prefix = (row_drafts_ptr, tl.load(prefix_lens_ptr + row))
            _penalize_context(row_ptr, first, end, seen, prefix, penalties, BLOCK)
            _penalize_prefix(row_ptr, first, end, seen, prefix, penalties)
        else:
            _penalize_context(row_ptr, first, end, seen, (None, 0), penalties, BLOCK)


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


def edit_logits_cost(
    num_rows: int, vocab_size: int, *, num_entries: int = 0, has_allowed: bool = False
) -> Cost:
    """Bytes and operations of one call whose rows have ``num_entries`` list entries together."""
    mask_bytes = num_rows * vocab_size // 8 if has_allowed else 0
    return Cost(bytes=16 * num_entries + mask_bytes, flops=5 * num_entries)
