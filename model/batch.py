"""StepBatch: what one forward pass takes, whatever mix of chunks, decodes and drafts it holds.

A row is a span of tokens at the end of its own context. A prompt chunk, one decoded token and a row
of drafts to verify differ in the span's length and in how many of its tokens need logits: there is
no phase flag anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagedraft.kernels.paged_attention_launch import SharedPrefixes
from pagedraft.model.shared_prefix import find_runs, shared_prefixes

NULL_BLOCK = 0


@dataclass(frozen=True)
class Span:
    """What one request contributes to a step.

    token_ids: the tokens to feed; token i is written at position ``start + i``.
    start: number of context tokens whose KV is already in the pool.
    block_ids: the request's blocks, enough for ``start + len(token_ids)`` tokens.
    num_logits: how many of the last tokens need logits (0 inside a prompt).
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    num_logits: int


@dataclass(frozen=True)
class StepBatch:
    """One step's inputs on the device, and the host integers that bound the grids.

    tokens_T: int64 token ids, rows one after another, then padding (token 0).
    positions_T: int64 position of each token in its own context; 0 for padding.
    slots_T: int64 physical slot, block * block_size + offset; padding has those of the
        null block, where nothing is stored.
    query_starts_R1: int32 prefix sums of the span lengths; padding lies after the last.
    kv_lens_R: int32 context length of each row after this step's tokens are written.
    block_table_RM: int32 blocks of each row, filled up with the null block.
    logit_rows_Q: int64 indices into the T axis of the tokens that need logits, padded with 0.
    num_tokens, num_logits: how many entries of the T and Q axes are real.
    max_query_len, max_kv_len: the largest span and the largest context.
    shared: neighbouring rows that begin with the same blocks, if there are any.
    """

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    query_starts_R1: torch.Tensor
    kv_lens_R: torch.Tensor
    block_table_RM: torch.Tensor
    logit_rows_Q: torch.Tensor
    num_tokens: int
    num_logits: int
    max_query_len: int
    max_kv_len: int
    shared: SharedPrefixes | None = None


def build_step_batch(
    spans: Sequence[Span],
    *,
    block_size: int,
    device: torch.device,
    row_multiple: int = 1,
) -> StepBatch:
    """Lay the spans out flat and move them to ``device``.

    row_multiple: T and Q are padded up to a multiple of it, so that no op of the pass has to.
    Raises ValueError for an empty step, an empty span, or a span longer than its blocks.
    """
    if not spans:
        raise ValueError("spans: expected at least one, got none")
    _check_spans(spans, block_size)
    lengths = np.array([len(span.token_ids) for span in spans])
    starts = np.array([span.start for span in spans])
    num_tokens = int(lengths.sum())
    padded = _round_up(num_tokens, row_multiple)
    query_starts = np.concatenate(([0], np.cumsum(lengths)))

    width = max(-(-(span.start + len(span.token_ids)) // block_size) for span in spans)
    table = np.full((len(spans), width), NULL_BLOCK, dtype=np.int32)
    for row, span in enumerate(spans):
        used = -(-(span.start + len(span.token_ids)) // block_size)
        table[row, :used] = span.block_ids[:used]

    rows = np.repeat(np.arange(len(spans)), lengths)
    tokens = np.zeros(padded, dtype=np.int64)
    tokens[:num_tokens] = [token for span in spans for token in span.token_ids]
    positions = np.zeros(padded, dtype=np.int64)
    positions[:num_tokens] = np.arange(num_tokens) - query_starts[rows] + starts[rows]
    slots = np.zeros(padded, dtype=np.int64)
    blocks = table[rows, positions[:num_tokens] // block_size].astype(np.int64)
    slots[:num_tokens] = blocks * block_size + positions[:num_tokens] % block_size
    runs = find_runs([span.block_ids for span in spans], [span.start for span in spans], block_size)
    logit_rows, num_logits = _logit_rows(spans, query_starts, num_tokens, padded, row_multiple)

    def to_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return StepBatch(
        tokens_T=to_device(tokens),
        positions_T=to_device(positions),
        slots_T=to_device(slots),
        query_starts_R1=to_device(query_starts.astype(np.int32)),
        kv_lens_R=to_device((starts + lengths).astype(np.int32)),
        block_table_RM=to_device(table),
        logit_rows_Q=to_device(logit_rows),
        num_tokens=num_tokens,
        num_logits=num_logits,
        max_query_len=int(lengths.max()),
        max_kv_len=int((starts + lengths).max()),
        shared=shared_prefixes(table, query_starts, runs, device),
    )


def _check_spans(spans: Sequence[Span], block_size: int) -> None:
    for row, span in enumerate(spans):
        length = len(span.token_ids)
        if length == 0:
            raise ValueError(f"spans[{row}]: expected at least one token, got none")
        if not 0 <= span.num_logits <= length:
            raise ValueError(
                f"spans[{row}].num_logits: expected 0 to {length}, got {span.num_logits}"
            )
        room = len(span.block_ids) * block_size
        if span.start < 0 or span.start + length > room:
            raise ValueError(
                f"spans[{row}]: tokens {span.start} to {span.start + length} do not fit the "
                f"{len(span.block_ids)} blocks of {block_size} tokens it owns"
            )


def _logit_rows(
    spans: Sequence[Span],
    query_starts: np.ndarray,
    num_tokens: int,
    padded: int,
    row_multiple: int,
) -> tuple[np.ndarray, int]:
    """Rows of the T axis that need logits, padded; all T rows in order if every token does."""
    num_logits = sum(span.num_logits for span in spans)
    if num_logits == num_tokens:
        return np.arange(padded), num_logits
    rows = np.zeros(_round_up(num_logits, row_multiple), dtype=np.int64)
    if num_logits:
        ends = query_starts[1:]
        rows[:num_logits] = np.concatenate(
            [np.arange(end - span.num_logits, end) for span, end in zip(spans, ends, strict=True)]
        )
    return rows, num_logits


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
