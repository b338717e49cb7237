"""CPU path of the logit edits: row by row in NumPy, touching only listed logits.

Equal to ``edit_logits_ref`` in every bit; in place.
"""

from __future__ import annotations

import numpy as np
import torch

from pagedraft.kernels.sample_batch import BannedIds, LogitBias, Penalties, SampleBatch

_MINUS_INF = np.float32(-np.inf)


def edit_logits_cpu(logits_QV: torch.Tensor, batch: SampleBatch) -> None:
    """Edit fp32 logits (no padding columns) in place."""
    rows_QV = logits_QV.numpy()
    request_Q = np.arange(rows_QV.shape[0])
    if batch.request_Q is not None:
        request_Q = batch.request_Q.numpy()
    if batch.bias is not None:
        _add_bias(rows_QV, batch.bias, request_Q)
    if batch.allowed_QW is not None:
        _apply_allowed(rows_QV, batch.allowed_QW.numpy())
    if batch.banned is not None:
        _ban(rows_QV, batch.banned)
    if batch.penalties is not None:
        _Penalizer(batch.penalties, rows_QV.shape[1]).apply(rows_QV, request_Q)


def _apply_allowed(rows_QV: np.ndarray, allowed_QW: np.ndarray) -> None:
    for row_V, words_W in zip(rows_QV, allowed_QW, strict=True):
        if (words_W == -1).all():
            continue
        banned_bytes = np.ascontiguousarray(~words_W, dtype="<i4").view(np.uint8)
        banned_V = np.unpackbits(banned_bytes, count=len(row_V), bitorder="little")
        np.putmask(row_V, banned_V.view(bool), _MINUS_INF)  # a third of copyto's time


def _is_known(ids_n: np.ndarray, vocab_size: int) -> np.ndarray:
    return (ids_n >= 0) & (ids_n < vocab_size)


def _add_bias(rows_QV: np.ndarray, bias: LogitBias, request_Q: np.ndarray) -> None:
    starts_R1, ids_n, values_n = (x.numpy() for x in (bias.starts_R1, bias.ids_n, bias.values_n))
    for row_V, request in zip(rows_QV, request_Q, strict=True):
        entries = slice(starts_R1[request], starts_R1[request + 1])
        is_known_n = _is_known(ids_n[entries], len(row_V))
        row_V[ids_n[entries][is_known_n]] += values_n[entries][is_known_n]


def _ban(rows_QV: np.ndarray, banned: BannedIds) -> None:
    starts_Q1, ids_n = banned.starts_Q1.numpy(), banned.ids_n.numpy()
    for row, row_V in enumerate(rows_QV):
        banned_n = ids_n[starts_Q1[row] : starts_Q1[row + 1]]
        row_V[banned_n[_is_known(banned_n, len(row_V))]] = _MINUS_INF


class _Penalizer:
    """The penalties of one call as NumPy arrays."""

    def __init__(self, penalties: Penalties, vocab_size: int) -> None:
        self.repetition_Q = penalties.repetition_Q.numpy()
        self.presence_Q = penalties.presence_Q.numpy()
        self.frequency_Q = penalties.frequency_Q.numpy()
        self.starts_R1 = penalties.starts_R1.numpy()
        self.ids_n = penalties.ids_n.numpy()
        self.counts_n = penalties.counts_n.numpy()
        self.prefix = penalties.prefix
        self.vocab_size = vocab_size

    def apply(self, rows_QV: np.ndarray, request_Q: np.ndarray) -> None:
        """Penalise every row that a penalty concerns."""
        is_neutral_Q = (self.repetition_Q == 1) & (self.presence_Q == 0) & (self.frequency_Q == 0)
        for row in (~is_neutral_Q).nonzero()[0]:
            token_n, count_n = self._seen(row, request_Q[row])
            logit_n = rows_QV[row, token_n]
            repetition = self.repetition_Q[row]
            logit_n = np.where(logit_n > 0, logit_n / repetition, logit_n * repetition)
            logit_n -= self.frequency_Q[row] * count_n.astype(np.float32)
            logit_n -= self.presence_Q[row] * (count_n > 0).astype(np.float32)
            rows_QV[row, token_n] = logit_n

    def _seen(self, row: int, request: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the row's context, each once, and how often the output holds them."""
        entries = slice(self.starts_R1[request], self.starts_R1[request + 1])
        token_n, count_n = self.ids_n[entries], self.counts_n[entries]
        is_known_n = _is_known(token_n, self.vocab_size)
        token_n, count_n = token_n[is_known_n], count_n[is_known_n]
        drafts_p = self._drafts(row)
        if len(drafts_p) == 0:
            return token_n, count_n
        token_u, times_u = np.unique(drafts_p, return_counts=True)
        place_u = np.searchsorted(token_n, token_u)
        is_held_u = place_u < len(token_n)
        is_held_u[is_held_u] = token_n[place_u[is_held_u]] == token_u[is_held_u]
        count_n[place_u[is_held_u]] += times_u[is_held_u].astype(np.int32)
        return (
            np.concatenate([token_n, token_u[~is_held_u]]),
            np.concatenate([count_n, times_u[~is_held_u]]),
        )

    def _drafts(self, row: int) -> np.ndarray:
        if self.prefix is None:
            return np.empty(0, dtype=np.int64)
        start = self.prefix.starts_Q.numpy()[row]
        drafts_p = self.prefix.drafts_n.numpy()[start : start + self.prefix.lens_Q.numpy()[row]]
        return drafts_p[_is_known(drafts_p, self.vocab_size)]
