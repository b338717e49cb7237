"""Comparators: how close is close enough."""

from __future__ import annotations

import torch


def assert_no_worse(
    out: torch.Tensor,
    *,
    exact: torch.Tensor,
    same_dtype: torch.Tensor,
    factor: float = 2.0,
) -> None:
    """Assert that ``out`` is finite and at most ``factor`` times as wrong as PyTorch.

    exact: the reference run in fp64 (or fp32 for a 16-bit ``out``).
    same_dtype: the reference run in the dtype of ``out`` with fp32 accumulation.

    Errors are the largest absolute difference from ``exact``. PyTorch's error counts as at least
    what rounding costs at the largest exact value: half a unit in the last place for 16-bit
    results, which are rounded once, and two units for wider ones, whose every step rounds.
    """
    assert out.shape == exact.shape == same_dtype.shape, (
        f"shapes differ: out {tuple(out.shape)}, exact {tuple(exact.shape)}, "
        f"same_dtype {tuple(same_dtype.shape)}"
    )
    assert out.dtype == same_dtype.dtype, f"dtypes differ: {out.dtype}, {same_dtype.dtype}"
    if out.numel() == 0:
        return
    assert bool(exact.isfinite().all()), "exact: not finite, cannot judge"
    num_bad = int((~out.isfinite()).sum())
    assert num_bad == 0, f"out: {num_bad} of {out.numel()} values are not finite"
    exact = exact.double()
    error = (out.double() - exact).abs()
    num_units = 0.5 if out.element_size() <= 2 else 2.0
    rounding = num_units * torch.finfo(out.dtype).eps * exact.abs().max().item()
    allowed = factor * max((same_dtype.double() - exact).abs().max().item(), rounding)
    worst = error.max().item()
    where = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    assert worst <= allowed, (
        f"out: error {worst:.3e} at {where} (got {out[where].item():.6g}, exact "
        f"{exact[where].item():.6g}), allowed {allowed:.3e}"
    )


def assert_same_bits(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equal shape, dtype and bits; NaN equals NaN of the same bits, -0.0 is not 0.0."""
    assert out.shape == expected.shape, f"shapes differ: {out.shape}, {expected.shape}"
    assert out.dtype == expected.dtype, f"dtypes differ: {out.dtype}, {expected.dtype}"
    bytes_out = out.contiguous().view(-1).view(torch.uint8)
    bytes_expected = expected.contiguous().view(-1).view(torch.uint8)
    differing = int((bytes_out != bytes_expected).sum())
    assert differing == 0, f"bits differ in {differing} of {bytes_out.numel()} bytes"
