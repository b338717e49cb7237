"""Teeth of the comparators."""

from __future__ import annotations

import math

import pytest
import torch

from pagedraft.tests.compare import assert_no_worse, assert_same_bits
from pagedraft.tests.inputs import randn

EXACT = randn(8, 16).double()
ROUNDED = EXACT.to(torch.bfloat16)


def change(value: float) -> torch.Tensor:
    """The rounded result with one wrong entry."""
    out = ROUNDED.clone()
    out[3, 5] = value
    return out


REJECTED = {
    "one NaN": (change(math.nan), "1 of 128 values are not finite"),
    "one infinity": (change(math.inf), "not finite"),
    "one entry off by a few roundings": (
        change(EXACT[3, 5].item() + 8 * (ROUNDED - EXACT).abs().max().item()),
        r"error .* at \(3, 5\)",
    ),
    "all zeros": (torch.zeros_like(ROUNDED), "allowed"),
    "rows shifted by one": (ROUNDED.roll(1, 0), "allowed"),
    "other shape": (ROUNDED[:4], "shapes differ"),
    "other dtype": (ROUNDED.float(), "dtypes differ"),
}


@pytest.mark.parametrize(("out", "message"), REJECTED.values(), ids=REJECTED)
def test_no_worse_rejects(out, message):
    with pytest.raises(AssertionError, match=message):
        assert_no_worse(out, exact=EXACT, same_dtype=ROUNDED)


def test_no_worse_refuses_to_judge_by_a_broken_reference():
    with pytest.raises(AssertionError, match="cannot judge"):
        assert_no_worse(ROUNDED, exact=EXACT * math.nan, same_dtype=ROUNDED)


@pytest.mark.parametrize("out", [ROUNDED, (EXACT * (1 + 2**-10)).to(torch.bfloat16)])
def test_no_worse_accepts_rounding(out):
    assert_no_worse(out, exact=EXACT, same_dtype=ROUNDED)


def test_no_worse_accepts_nothing_to_compare():
    empty = torch.empty(0, 4)
    assert_no_worse(empty, exact=empty, same_dtype=empty)


DIFFERENT = {
    "sign of zero": (torch.tensor([0.0]), torch.tensor([-0.0]), "bits differ"),
    "last place": (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), "bits differ"),
    "dtype": (torch.zeros(1), torch.zeros(1, dtype=torch.int32), "dtypes differ"),
    "shape": (torch.zeros(1), torch.zeros(1, 1), "shapes differ"),
}


@pytest.mark.parametrize(("left", "right", "message"), DIFFERENT.values(), ids=DIFFERENT)
def test_same_bits_rejects(left, right, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_bits(left, right)


def test_same_bits_accepts_nan_and_strides():
    x = torch.tensor([[math.nan, 1.0], [2.0, 3.0]])
    assert_same_bits(x.t(), x.t().contiguous())
