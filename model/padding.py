"""A step padded to fixed sizes: what a captured graph needs, and any launch that must not change.

Padding is invisible: rows without queries, tokens at slots of the null block behind the last row,
rows of logits that nobody asked for. What a kernel computes for the others does not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from pagedraft.kernels.paged_attention_launch import SharedPrefixes
from pagedraft.model.batch import NULL_BLOCK, StepBatch, step_of
from pagedraft.model.sections import Sections, step_sections


@dataclass(frozen=True, order=True)
class StepShape:
    """Sizes of a padded step: T tokens, R rows, and what bounds the grids.

    max_query_len: no row has more queries; max_kv_len: no row has more context.
    """

    num_tokens: int
    num_rows: int
    max_query_len: int
    max_kv_len: int

    def __str__(self) -> str:
        return (
            f"{self.num_rows} rows, {self.num_tokens} tokens, spans up to {self.max_query_len}, "
            f"contexts up to {self.max_kv_len}"
        )

    def holds(self, other: StepShape) -> bool:
        """Whether a step of that shape can be padded to this one."""
        return (
            other.num_tokens <= self.num_tokens
            and other.num_rows <= self.num_rows
            and other.max_query_len <= self.max_query_len
            and other.max_kv_len <= self.max_kv_len
        )


def shape_of_batch(batch: StepBatch) -> StepShape:
    """The sizes of a step as it is, without padding."""
    num_rows = batch.kv_lens_R.shape[0]
    return StepShape(batch.num_tokens, num_rows, batch.max_query_len, batch.max_kv_len)


def pad_batch(
    batch: StepBatch,
    num_rows: int,
    num_tokens: int,
    num_logits: int | None = None,
    *,
    num_columns: int | None = None,
    max_query_len: int | None = None,
    max_kv_len: int | None = None,
) -> StepBatch:
    """Return the step with axes of R = num_rows, T = num_tokens and Q = num_logits entries.

    num_logits: None pads as the step is padded: all tokens if each needs logits, else not at all.
    num_columns: M of the block table. max_query_len, max_kv_len: bounds of the grids. The counts
    of what is real, ``num_tokens`` and ``num_logits`` of the step, stay.
    Raises ValueError for sizes that do not hold the step.
    """
    all_logits = batch.num_logits == batch.num_tokens
    if num_logits is None:
        num_logits = num_tokens if all_logits else batch.num_logits
    if num_columns is None:
        num_columns = batch.block_table_RM.shape[1]
    real = shape_of_batch(batch)
    shape = StepShape(
        num_tokens,
        num_rows,
        real.max_query_len if max_query_len is None else max_query_len,
        real.max_kv_len if max_kv_len is None else max_kv_len,
    )
    _check_holds(shape, real)
    if num_logits < batch.num_logits or (all_logits and num_logits != num_tokens):
        wanted = f"{num_tokens}, for every token" if all_logits else f"at least {batch.num_logits}"
        raise ValueError(f"num_logits: expected {wanted}, got {num_logits}")
    if num_columns < batch.block_table_RM.shape[1]:
        raise ValueError(
            f"num_columns: expected at least {batch.block_table_RM.shape[1]}, got {num_columns}"
        )
    device = batch.tokens_T.device
    sizes = PackedSizes(shape, num_logits, num_columns)
    padded = packed_batch(torch.empty(sizes.num_bytes, dtype=torch.uint8, device=device), sizes)
    fill_padded(padded, batch)
    shared = batch.shared if num_rows == real.num_rows else _pad_shared(batch, padded)
    return replace(padded, shared=shared, num_tokens=batch.num_tokens, num_logits=batch.num_logits)


def _check_holds(shape: StepShape, real: StepShape) -> None:
    for name in ("num_rows", "num_tokens", "max_query_len", "max_kv_len"):
        least, got = getattr(real, name), getattr(shape, name)
        if got < least:
            raise ValueError(f"{name}: expected at least {least}, got {got}")


def _pad_shared(batch: StepBatch, padded: StepBatch) -> SharedPrefixes | None:
    """The padding rows are one more run, which shares nothing and has no queries."""
    shared = batch.shared
    if shared is None:
        return None
    num_more = padded.kv_lens_R.shape[0] - batch.kv_lens_R.shape[0]
    pad = torch.nn.functional.pad
    starts_P1 = shared.query_starts_P1
    return shared._replace(
        query_starts_P1=torch.cat((starts_P1, starts_P1[-1:])),
        num_keys_P=pad(shared.num_keys_P, (0, 1)),
        num_keys_R=pad(shared.num_keys_R, (0, num_more)),
        kv_lens_P=pad(shared.kv_lens_P, (0, 1)),
        block_table_PM=pad(shared.block_table_PM, (0, 0, 0, 1), value=NULL_BLOCK),
    )


class PackedSizes(NamedTuple):
    """Sizes of a step's inputs in one piece of memory; num_columns 0: without the block table."""

    shape: StepShape
    num_logits: int
    num_columns: int

    @property
    def sections(self) -> Sections:
        """Where they lie."""
        shape = self.shape
        return step_sections(shape.num_tokens, shape.num_rows, self.num_logits, self.num_columns)

    @property
    def num_bytes(self) -> int:
        """Of all sections."""
        return self.sections.num_bytes


def packed_batch(
    memory_x: torch.Tensor, sizes: PackedSizes, table_RM: torch.Tensor | None = None
) -> StepBatch:
    """A step whose tensors are views of ``memory_x`` (uint8), whatever that holds.

    All its tokens count as real and all its rows of logits too. table_RM: the block table of a
    step that is packed without one.
    """
    *sections, packed_table = sizes.sections.tensors(memory_x)
    if table_RM is None:
        table_RM = packed_table.view(sizes.shape.num_rows, sizes.num_columns)
    return step_of(
        sections,
        table_RM,
        num_tokens=sizes.shape.num_tokens,
        num_logits=sizes.num_logits,
        max_query_len=sizes.shape.max_query_len,
        max_kv_len=sizes.shape.max_kv_len,
    )


def fill_padded(padded: StepBatch, batch: StepBatch, *, with_table: bool = True) -> None:
    """Write a step and its padding into the tensors of a larger one; no value is read on the host.

    with_table: also its block table, the columns of which may be fewer.
    """
    num_tokens, num_logits = batch.num_tokens, batch.num_logits
    for name in ("tokens_T", "positions_T", "slots_T"):
        _fill(getattr(padded, name), getattr(batch, name)[:num_tokens])
    _fill(padded.logit_rows_Q, batch.logit_rows_Q[:num_logits])
    num_rows = batch.kv_lens_R.shape[0]
    _fill(padded.kv_lens_R, batch.kv_lens_R)
    padded.query_starts_R1[: num_rows + 1] = batch.query_starts_R1
    padded.query_starts_R1[num_rows + 1 :] = batch.query_starts_R1[-1:]
    if with_table:
        num_columns = min(batch.block_table_RM.shape[1], padded.block_table_RM.shape[1])
        padded.block_table_RM.fill_(NULL_BLOCK)
        padded.block_table_RM[:num_rows, :num_columns] = batch.block_table_RM[:, :num_columns]


def _fill(padded_x: torch.Tensor, values_x: torch.Tensor) -> None:
    count = values_x.shape[0]
    padded_x[:count] = values_x
    padded_x[count:] = 0


def empty_batch(
    shape: StepShape,
    num_logits: int,
    num_columns: int,
    device: torch.device,
    spans: Sequence[int] = (),
) -> StepBatch:
    """A step that stores nothing: its tokens are padding, its block table the null block.

    spans: queries of the first rows, which read the null block, whatever that holds; the other
    rows, all of them by default, have none.
    """
    sizes = PackedSizes(shape, num_logits, num_columns)
    batch = packed_batch(torch.zeros(sizes.num_bytes, dtype=torch.uint8, device=device), sizes)
    if spans:
        num_rows = len(spans)
        lengths_R = torch.tensor(spans, dtype=torch.int32)
        batch.kv_lens_R[:num_rows] = lengths_R.to(device)
        batch.query_starts_R1[1 : num_rows + 1] = lengths_R.cumsum(0).int().to(device)
        batch.query_starts_R1[num_rows + 1 :] = sum(spans)
    return batch
