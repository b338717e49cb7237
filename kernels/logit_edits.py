"""Logit edits: which tokens a row may draw, and what its request and its context say of them.

In this order, for each row: its request's bias is added; tokens that its grammar does not allow and
banned tokens become -inf; penalties. A penalised logit l of a token that occurs c times in the
output, drafts before the row's position included, becomes

    l / repetition if l > 0 else l * repetition       where the token is in prompt or output
    l - frequency * c, then l - presence if c > 0

in fp32, each operation rounded, none fused: the same bits everywhere.

**Shapes.** logits_QV fp32, edited in place; the rest: sample_batch.py.

**Cost.** For each row, 4 bytes a word of its allowed mask, 16 a bias entry, 12 a ban, 16 a token of
its context, each read by all programs of the row, of which one writes the logit.

**Grid.** logit_edits_triton.py.

**Source.** Repetition: Keskar et al., arXiv 1909.05858; the others as in the OpenAI API.
"""

from __future__ import annotations

import torch

from pagedraft.kernels.cost import Cost
from pagedraft.kernels.sample_batch import DraftPrefix, Penalties, SampleBatch


def edit_logits_ref(logits_QV: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """Return edited logits, through dense [Q, V] counts: the oracle."""
    num_rows, num_columns = logits_QV.shape
    logits_QV = logits_QV.clone()
    request_Q = torch.arange(num_rows, device=logits_QV.device)
    if batch.request_Q is not None:
        request_Q = batch.request_Q.long()
    if batch.bias is not None:
        bias = batch.bias
        logits_QV += _dense(bias.starts_R1, bias.ids_n, bias.values_n, num_columns)[request_Q]
    if batch.allowed_QW is not None:
        logits_QV.masked_fill_(~_allowed_ref(batch.allowed_QW, num_columns), float("-inf"))
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


def _drafts_ref(prefix: DraftPrefix, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's drafts, padded to the longest prefix, and which of these count."""
    longest = max(prefix.lens_Q.tolist(), default=0)
    offs_p = torch.arange(longest, device=prefix.lens_Q.device)
    is_mine_Qp = offs_p < prefix.lens_Q[:, None]
    place_Qp = (prefix.starts_Q[:, None] + offs_p).masked_fill(~is_mine_Qp, 0)
    token_Qp = prefix.drafts_n[place_Qp] if longest else place_Qp.long()
    is_mine_Qp = is_mine_Qp & (token_Qp >= 0) & (token_Qp < num_columns)
    return token_Qp.clamp(0, num_columns - 1), is_mine_Qp


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
        token_Qp, is_mine_Qp = _drafts_ref(penalties.prefix, num_columns)
        count_QV = count_QV.scatter_add(1, token_Qp, is_mine_Qp.to(count_QV.dtype))
        is_seen_QV = is_seen_QV | (count_QV > 0)
    repetition_Q1 = penalties.repetition_Q[:, None]
    repeated_QV = torch.where(logits_QV > 0, logits_QV / repetition_Q1, logits_QV * repetition_Q1)
    logits_QV = torch.where(is_seen_QV, repeated_QV, logits_QV)
    logits_QV = logits_QV - penalties.frequency_Q[:, None] * count_QV.float()
    return logits_QV - penalties.presence_Q[:, None] * (count_QV > 0).float()


def edit_logits_cost(
    num_rows: int, vocab_size: int, *, num_entries: int = 0, has_allowed: bool = False
) -> Cost:
    """Bytes and operations of one call whose rows have ``num_entries`` list entries together."""
    mask_bytes = num_rows * vocab_size // 8 if has_allowed else 0
    return Cost(bytes=16 * num_entries + mask_bytes, flops=5 * num_entries)
