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
from pagedraft.model.sections import step_sections
from pagedraft.model.shared_prefix import Run, find_runs, shared_prefixes

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
    query_starts_R1: int32 prefix sums of the span lengths; padding lies after the last. A row's
        span may be empty.
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
    width = int((-(-(starts + lengths) // block_size)).max())
    table = np.full((len(spans), width), NULL_BLOCK, dtype=np.int32)
    for row, span in enumerate(spans):
        used = -(-(span.start + len(span.token_ids)) // block_size)
        table[row, :used] = span.block_ids[:used]
    is_shared = bool((table[1:, 0] == table[:-1, 0]).any())
    runs = find_runs([span.block_ids for span in spans], starts.tolist(), block_size)
    return lay_out(
        [token for span in spans for token in span.token_ids],
        lengths,
        starts,
        np.array([span.num_logits for span in spans]),
        table,
        block_size=block_size,
        device=device,
        row_multiple=row_multiple,
        runs=runs if is_shared else (),
    )


def lay_out(
    tokens: Sequence[int],
    lengths_R: np.ndarray,
    starts_R: np.ndarray,
    num_logits_R: np.ndarray,
    table_RM: np.ndarray,
    *,
    block_size: int,
    device: torch.device,
    row_multiple: int = 1,
    runs: Sequence[Run] = (),
    device_table_RM: torch.Tensor | None = None,
) -> StepBatch:
    """The step of rows whose spans are given by their lengths, starts and numbers of logits.

    tokens: of all spans, one after another; a row may have none. table_RM: int32, the blocks of
    each row, at least as many as it uses; device_table_RM: the same on the device, if it is there.
    Unchecked: what does not fit together gives a wrong step.
    """
    num_rows, num_tokens, num_logits = len(lengths_R), len(tokens), int(num_logits_R.sum())
    padded = _round_up(num_tokens, row_multiple)
    padded_logits = padded if num_logits == num_tokens else _round_up(num_logits, row_multiple)
    sections = step_sections(padded, num_rows, padded_logits)
    memory_x = np.zeros(sections.num_bytes, np.uint8)
    arrays = sections.arrays(memory_x)
    tokens_T, positions_T, slots_T, logit_rows_Q, query_starts_R1, kv_lens_R, _ = arrays

    max_query_len = int(lengths_R.max())
    query_starts_R1[1:] = lengths_R.cumsum()
    np.add(starts_R, lengths_R, out=kv_lens_R)
    tokens_T[:num_tokens] = tokens
    row_T = np.arange(num_rows)
    positions = positions_T[:num_tokens]
    if num_tokens == num_rows and max_query_len == 1:  # a token each
        positions[:] = starts_R
    else:
        row_T = row_T.repeat(lengths_R)
        first_R = kv_lens_R - query_starts_R1[1:]  # token t of row r has position first_R[r] + t
        np.add(first_R[row_T], np.arange(num_tokens), out=positions)
    _fill_slots(slots_T[:num_tokens], table_RM, row_T, positions, block_size)
    if num_logits == num_tokens:
        logit_rows_Q[:] = np.arange(padded)
    elif num_logits:
        last_R = query_starts_R1[1:] - num_logits_R.cumsum()
        logit_rows_Q[:num_logits] = last_R.repeat(num_logits_R) + np.arange(num_logits)

    on_device = sections.moved(memory_x, arrays, device)
    if device_table_RM is None:
        device_table_RM = torch.from_numpy(table_RM).to(device, non_blocking=True)
    return step_of(
        on_device,
        device_table_RM,
        num_tokens=num_tokens,
        num_logits=num_logits,
        max_query_len=max_query_len,
        max_kv_len=int(kv_lens_R.max()),
        shared=shared_prefixes(table_RM, query_starts_R1, runs, device) if runs else None,
    )


def step_of(
    sections: Sequence[torch.Tensor],
    table_RM: torch.Tensor,
    *,
    num_tokens: int,
    num_logits: int,
    max_query_len: int,
    max_kv_len: int,
    shared: SharedPrefixes | None = None,
) -> StepBatch:
    """A step of tensors in the order of ``step_sections``, and a block table."""
    return StepBatch(
        tokens_T=sections[0],
        positions_T=sections[1],
        slots_T=sections[2],
        logit_rows_Q=sections[3],
        query_starts_R1=sections[4],
        kv_lens_R=sections[5],
        block_table_RM=table_RM,
        num_tokens=num_tokens,
        num_logits=num_logits,
        max_query_len=max_query_len,
        max_kv_len=max_kv_len,
        shared=shared,
    )


def _fill_slots(
    slots_T: np.ndarray,
    table_RM: np.ndarray,
    row_T: np.ndarray,
    position_T: np.ndarray,
    block_size: int,
) -> None:
    """Write where each token's KV goes."""
    column_T, offset_T = np.divmod(position_T, block_size)
    np.multiply(table_RM[row_T, column_T], block_size, out=slots_T, dtype=np.int64)
    slots_T += offset_T


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


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
