"""SampleBatch: what each row of logits draws with, as tensors; never a [Q, V] state.

A parameter that is None is neutral for all rows, and so costs nothing. Row means a row of logits:
Q of them, several a request when drafts are verified. What belongs to a request, its bias and its
token counts, is stored once and found through ``request_Q``. Lists are CSR: list i of ``ids_n`` is
``ids_n[starts[i]:starts[i + 1]]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedraft.kernels.check import check_dtype, check_same_device, check_shape, check_vector

INVALID_TOKEN = -1


@dataclass(frozen=True)
class LogitBias:
    """What each request adds to some logits; -inf bans a token.

    starts_R1: int32 [R + 1]. values_n: fp32.
    ids_n: int32, ascending and each once within a request.
    """

    starts_R1: torch.Tensor
    ids_n: torch.Tensor
    values_n: torch.Tensor


@dataclass(frozen=True)
class BannedIds:
    """Tokens that a row must not draw: stop tokens before min_tokens is reached.

    starts_Q1: int32 [Q + 1]. ids_n: int32.
    """

    starts_Q1: torch.Tensor
    ids_n: torch.Tensor


@dataclass(frozen=True)
class DraftPrefix:
    """The drafts that a row counts as output: those before the position that it verifies.

    Row q sees ``drafts_n[starts_Q[q] : starts_Q[q] + lens_Q[q]]``; the rows of a request overlap.
    drafts_n: int64. starts_Q, lens_Q: int32.
    """

    drafts_n: torch.Tensor
    starts_Q: torch.Tensor
    lens_Q: torch.Tensor


@dataclass(frozen=True)
class Penalties:
    """Penalties on tokens that a row's context holds, and what each context holds.

    repetition_Q: fp32 > 0, neutral 1: divides the positive logits of tokens in prompt or output
        and multiplies the others.
    presence_Q, frequency_Q: fp32, neutral 0: taken off the logits of tokens in the output, once
        and times their count there.
    starts_R1, ids_n: int32; every token of a request's committed context once, ascending.
    counts_n: int32, how often it occurs in the output; 0 for a token of the prompt alone.
    prefix: drafts that count as output; None: no row has any.
    """

    repetition_Q: torch.Tensor
    presence_Q: torch.Tensor
    frequency_Q: torch.Tensor
    starts_R1: torch.Tensor
    ids_n: torch.Tensor
    counts_n: torch.Tensor
    prefix: DraftPrefix | None = None


@dataclass(frozen=True)
class SampleBatch:
    """How each row draws; all tensors on the device of the logits.

    temperature_Q: fp32; 0 is greedy.
    seed_Q: int64, the request's.
    position_Q: int64, index of the drawn token in its context.
    sample_index_Q: int64, which of a request's n samples; None is 0 everywhere.
    top_k_Q: int32; below 1: all tokens.
    top_p_Q: fp32; from 1 on: all tokens; 0 and below: the most probable alone.
    min_p_Q: fp32; up to 2^-126: all tokens; from 1 on: the most probable alone.
    request_Q: int32, the request of each row in ``bias`` and ``penalties``; None: row q is
        request q.
    allowed_QW: int32 [Q, ceil(V / 32)], unit stride in W; token v is allowed where bit v % 32 of
        word v // 32 is 1. Rows without a grammar allow all (words of -1).
    vocab_size: how many tokens there are; columns from there on are padding, never looked at.
        None: all columns.

    Ids outside the vocabulary are ignored in every list.
    """

    temperature_Q: torch.Tensor
    seed_Q: torch.Tensor
    position_Q: torch.Tensor
    sample_index_Q: torch.Tensor | None = None
    top_k_Q: torch.Tensor | None = None
    top_p_Q: torch.Tensor | None = None
    min_p_Q: torch.Tensor | None = None
    request_Q: torch.Tensor | None = None
    bias: LogitBias | None = None
    banned: BannedIds | None = None
    penalties: Penalties | None = None
    allowed_QW: torch.Tensor | None = None
    vocab_size: int | None = None

    @property
    def has_edits(self) -> bool:
        """Whether any logits change before the temperature applies."""
        edits = (self.bias, self.banned, self.penalties, self.allowed_QW)
        return any(edit is not None for edit in edits)

    @property
    def has_cut(self) -> bool:
        """Whether some rows may keep only their most probable tokens."""
        return any(cut is not None for cut in (self.top_k_Q, self.top_p_Q, self.min_p_Q))

    def num_tokens(self, num_columns: int) -> int:
        """How many of ``num_columns`` columns are tokens."""
        return num_columns if self.vocab_size is None else self.vocab_size


def check_batch(logits_QV: torch.Tensor, batch: SampleBatch) -> None:
    """Raise ValueError or TypeError, naming the argument, where the two do not fit."""
    check_dtype("logits_QV", logits_QV, torch.float32, torch.float16, torch.bfloat16)
    check_shape("logits_QV", logits_QV, (None, None))
    num_rows, num_columns = logits_QV.shape
    if num_columns == 0 or logits_QV.stride(1) != 1:
        raise ValueError(
            "logits_QV: expected at least one column and unit stride in V, got shape "
            f"{tuple(logits_QV.shape)}, strides {logits_QV.stride()}"
        )
    if batch.has_edits and logits_QV.dtype != torch.float32:
        raise TypeError(
            f"logits_QV: bias, bans and penalties edit logits in place and so expect dtype "
            f"float32, got {str(logits_QV.dtype).removeprefix('torch.')}"
        )
    if batch.vocab_size is not None and not 1 <= batch.vocab_size <= num_columns:
        raise ValueError(f"vocab_size: expected 1..{num_columns}, got {batch.vocab_size}")
    tensors = {}
    for name, vector, dtype in _row_vectors(batch):
        if vector is not None:
            check_vector(name, vector, dtype, num_rows)
            tensors[name] = vector
    if batch.has_edits:
        tensors |= _checked_lists(batch, num_rows)
    if batch.allowed_QW is not None:
        check_dtype("allowed_QW", batch.allowed_QW, torch.int32)
        num_words = -(-batch.num_tokens(num_columns) // 32)
        if batch.allowed_QW.ndim != 2 or batch.allowed_QW.shape[1] < num_words:
            shape = tuple(batch.allowed_QW.shape)
            raise ValueError(f"allowed_QW: expected at least {num_words} words a row, got {shape}")
        check_shape("allowed_QW", batch.allowed_QW, (num_rows, None))
        if batch.allowed_QW.stride(1) != 1:
            raise ValueError(
                f"allowed_QW: expected unit stride in W, got strides {batch.allowed_QW.stride()}"
            )
        tensors["allowed_QW"] = batch.allowed_QW
    check_same_device(logits_QV=logits_QV, **tensors)


def _row_vectors(batch: SampleBatch) -> list[tuple[str, torch.Tensor | None, torch.dtype]]:
    """The vectors with an entry a row: name, tensor and dtype."""
    wanted = [
        ("temperature_Q", batch.temperature_Q, torch.float32),
        ("seed_Q", batch.seed_Q, torch.int64),
        ("position_Q", batch.position_Q, torch.int64),
        ("sample_index_Q", batch.sample_index_Q, torch.int64),
        ("top_k_Q", batch.top_k_Q, torch.int32),
        ("top_p_Q", batch.top_p_Q, torch.float32),
        ("min_p_Q", batch.min_p_Q, torch.float32),
        ("request_Q", batch.request_Q, torch.int32),
    ]
    if batch.penalties is not None:
        for name in ("repetition_Q", "presence_Q", "frequency_Q"):
            wanted.append((f"penalties.{name}", getattr(batch.penalties, name), torch.float32))
        if batch.penalties.prefix is not None:
            for name in ("starts_Q", "lens_Q"):
                vector = getattr(batch.penalties.prefix, name)
                wanted.append((f"penalties.prefix.{name}", vector, torch.int32))
    return wanted


def _checked_lists(batch: SampleBatch, num_rows: int) -> dict[str, torch.Tensor]:
    """Check the lists of bias, bans and penalties; return their tensors by name."""
    tensors: dict[str, torch.Tensor] = {}

    def check_list(name: str, *, num_lists: int | None, starts: str, **values: torch.dtype) -> None:
        holder = getattr(batch, name)
        starts_1 = getattr(holder, starts)
        check_vector(f"{name}.{starts}", starts_1, torch.int32)
        is_short = starts_1.shape[0] <= num_lists if num_lists is not None else False
        if starts_1.shape[0] == 0 or is_short:
            raise ValueError(
                f"{name}.{starts}: expected at least {1 + (num_lists or 0)} entries, got "
                f"{starts_1.shape[0]}"
            )
        tensors[f"{name}.{starts}"] = starts_1
        for field, dtype in values.items():
            vector = getattr(holder, field)
            check_vector(f"{name}.{field}", vector, dtype, holder.ids_n.shape[0])
            tensors[f"{name}.{field}"] = vector

    num_requests = num_rows if batch.request_Q is None else None
    ids = {"ids_n": torch.int32}
    if batch.bias is not None:
        values = {**ids, "values_n": torch.float32}
        check_list("bias", num_lists=num_requests, starts="starts_R1", **values)
    if batch.banned is not None:
        check_list("banned", num_lists=num_rows, starts="starts_Q1", **ids)
    if batch.penalties is not None:
        values = {**ids, "counts_n": torch.int32}
        check_list("penalties", num_lists=num_requests, starts="starts_R1", **values)
        if batch.penalties.prefix is not None:
            name, drafts_n = "penalties.prefix.drafts_n", batch.penalties.prefix.drafts_n
            check_vector(name, drafts_n, torch.int64)
            tensors[name] = drafts_n
    return tensors
