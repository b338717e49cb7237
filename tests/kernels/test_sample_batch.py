"""sample_batch: errors name the argument; what is absent is neutral."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pagedraft.kernels.sample import process_logits, sample
from pagedraft.kernels.sample_batch import SampleBatch, check_batch
from pagedraft.tests.kernels.sample_inputs import Row, sample_batch

FULL = Row(
    **{"top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition": 1.5, "bias": {1: 2.0}, "banned": (0,)},
    **{"allowed": (1, 2), "prompt": (1,), "output": (2,), "drafts": (3,), "sample_index": 1},
)
LONG, INT, FLOAT = torch.int64, torch.int32, torch.float32


def _vector(length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(length, dtype=dtype)


def _part(name: str, **changes: torch.Tensor) -> Callable[[SampleBatch], SampleBatch]:
    return lambda batch: replace(batch, **{name: replace(getattr(batch, name), **changes)})


def _prefix(**changes: torch.Tensor) -> Callable[[SampleBatch], SampleBatch]:
    def change(batch: SampleBatch) -> SampleBatch:
        prefix = replace(batch.penalties.prefix, **changes)
        return replace(batch, penalties=replace(batch.penalties, prefix=prefix))

    return change


# name: (logits or None, change of a full batch of two rows and four columns, error, message)
ERRORS = {
    "logits_dtype": (torch.zeros(2, 4).double(), {}, TypeError, "logits_QV: expected dtype"),
    "logits_shape": (torch.zeros(4), {}, ValueError, "logits_QV: expected shape"),
    "no_columns": (torch.zeros(2, 0), {}, ValueError, "logits_QV: expected at least one column"),
    "column_stride": (torch.zeros(4, 2).T, {}, ValueError, "logits_QV: expected at least one col"),
    "edits_of_halves": (torch.zeros(2, 4).half(), {}, TypeError, "logits_QV: bias, bans and pena"),
    "temperature": (None, {"temperature_Q": _vector(2, LONG)}, TypeError, "temperature_Q: expec"),
    "seed_rows": (None, {"seed_Q": _vector(3, LONG)}, ValueError, "seed_Q: expected shape"),
    "position": (None, {"position_Q": _vector(2, INT)}, TypeError, "position_Q: expected dtype"),
    "index": (None, {"sample_index_Q": _vector(2, INT)}, TypeError, "sample_index_Q: expected"),
    "top_k": (None, {"top_k_Q": _vector(2, LONG)}, TypeError, "top_k_Q: expected dtype int32"),
    "top_p": (None, {"top_p_Q": _vector(1, FLOAT)}, ValueError, "top_p_Q: expected shape"),
    "min_p": (None, {"min_p_Q": _vector(4, FLOAT)[::2]}, ValueError, "min_p_Q: expected a conti"),
    "request": (None, {"request_Q": _vector(2, LONG)}, TypeError, "request_Q: expected dtype"),
    "no_tokens": (None, {"vocab_size": 0}, ValueError, r"vocab_size: expected 1..4, got 0"),
    "too_many_tokens": (None, {"vocab_size": 5}, ValueError, r"vocab_size: expected 1..4, got 5"),
    "words": (None, {"allowed_QW": torch.zeros(2, 1).long()}, TypeError, "allowed_QW: expected d"),
    "few_words": (
        torch.zeros(2, 40),
        {},
        ValueError,
        r"allowed_QW: expected at least 2 words a row, got \(2, 1\)",
    ),
    "word_rows": (
        None,
        {"allowed_QW": torch.zeros(3, 1).int()},
        ValueError,
        "allowed_QW: expected shape",
    ),
    "bias_values": (
        None,
        _part("bias", values_n=_vector(2, FLOAT)),
        ValueError,
        r"bias.values_n: expected shape \(1\), got \(2,\)",
    ),
    "bias_ids": (None, _part("bias", ids_n=_vector(1, LONG)), TypeError, "bias.ids_n: expected"),
    "bias_of_fewer_requests": (
        None,
        lambda batch: replace(batch, request_Q=None),
        ValueError,
        "bias.starts_R1: expected at least 3 entries, got 2",
    ),
    "bans_of_fewer_rows": (
        None,
        _part("banned", starts_Q1=_vector(2, INT)),
        ValueError,
        "banned.starts_Q1: expected at least 3 entries, got 2",
    ),
    "repetition": (
        None,
        _part("penalties", repetition_Q=_vector(1, FLOAT)),
        ValueError,
        "penalties.repetition_Q: expected shape",
    ),
    "no_requests": (
        None,
        _part("penalties", starts_R1=_vector(0, INT)),
        ValueError,
        "penalties.starts_R1: expected at least 1 entries, got 0",
    ),
    "counts": (
        None,
        _part("penalties", counts_n=_vector(2, LONG)),
        TypeError,
        "penalties.counts_n: expected dtype int32",
    ),
    "drafts": (
        None,
        _prefix(drafts_n=_vector(2, INT)),
        TypeError,
        "penalties.prefix.drafts_n: expected dtype int64",
    ),
    "prefix_lengths": (
        None,
        _prefix(lens_Q=_vector(3, INT)),
        ValueError,
        "penalties.prefix.lens_Q: expected shape",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str) -> None:
    logits_QV, change, error, message = ERRORS[name]
    batch = sample_batch([FULL, FULL], 4)
    batch = replace(batch, **change) if isinstance(change, dict) else change(batch)
    with pytest.raises(error, match=message):
        sample(torch.zeros(2, 4) if logits_QV is None else logits_QV, batch)


def test_half_precision_logits_cannot_be_processed() -> None:
    with pytest.raises(TypeError, match="logits_QV: expected dtype float32, got float16"):
        process_logits(torch.zeros(1, 4).half(), sample_batch([Row()], 4))


def test_a_full_and_an_empty_batch_pass() -> None:
    full = sample_batch([FULL, FULL], 4)
    check_batch(torch.zeros(2, 4), full)
    plain = SampleBatch(torch.ones(1), _vector(1, LONG), _vector(1, LONG))
    check_batch(torch.zeros(1, 4, dtype=torch.bfloat16), plain)
    assert (full.has_edits, full.has_cut) == (True, True)
    assert (plain.has_edits, plain.has_cut) == (False, False)
