"""Figures for tests of comparisons."""

from __future__ import annotations

from pagedraft.bench.figures import Figure


def timed(value: float, low: float | None = None, high: float | None = None, **others) -> Figure:
    """A time in us, less of which is better."""
    fields = {"unit": "us", "better": "lower", "how": "measured", **others}
    return Figure("a", value, low=low, high=high, **fields)


def rate(value: float, low: float, high: float) -> Figure:
    """What more of is better."""
    return timed(value, low, high, unit="GB/s", better="higher")


def counted(value: float, **others) -> Figure:
    return timed(value, how="counted", **others)
