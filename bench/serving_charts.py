"""Charts of the serving bench: latency against throughput, and how latencies are distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedraft.bench.plot import new_chart
from pagedraft.bench.serving_rows import Row

STYLES = {"TTFT": "-", "ITL": "--"}
LATENCIES = {"TTFT": ("ttft", "requests"), "ITL": ("itl", "tokens")}  # of a Summary; its samples


def draw_curve(
    rows: Sequence[Row], goodput: Mapping[str, float | None], target_ms: float, title: str
) -> Any:
    """p99 of TTFT and ITL against the request rate, a color for each speculation.

    At the points: tokens/s served. Vertical lines: goodput. rows: of one kind of arrivals and mix.
    """
    figure, axes = new_chart(title, "requests/s that arrive (at the points: tokens/s)", "p99, ms")
    for index, speculation in enumerate(dict.fromkeys(row.speculation for row in rows)):
        color, mine = f"C{index}", [row for row in rows if row.speculation == speculation]
        for name, style in STYLES.items():
            latencies = [row.value(f"{name} p99") for row in mine]
            label = f"{name}, speculation {speculation}"
            rates = [row.rate for row in mine]
            axes.plot(rates, latencies, style, marker="o", color=color, label=label)
        for row in mine:
            spot = (row.rate, row.value("TTFT p99"))
            text, shift = f"{row.value('tokens/s'):.0f}", (4, 4 - 12 * index)
            axes.annotate(text, spot, shift, color=color, fontsize=7, textcoords="offset points")
        if (rate := goodput.get(speculation)) is not None:
            axes.axvline(rate, color=color, linestyle=":", linewidth=1)
    axes.axhline(target_ms, color="0.3", linewidth=1.2, label=f"target {target_ms:g} ms")
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)
    axes.set_xlim(left=0)
    axes.legend(fontsize=7, handlelength=3)
    return figure


def draw_distribution(rows: Sequence[Row], name: str, target_ms: float, title: str) -> Any:
    """Share of latencies up to a value: ``name`` is TTFT or ITL; all rounds of a row together."""
    attribute, unit = LATENCIES[name]
    figure, axes = new_chart(title, f"{name}, ms", f"share of {unit}")
    speculations = list(dict.fromkeys(row.speculation for row in rows))
    rates = sorted({row.rate for row in rows})
    for row in rows:
        values = row.pooled(attribute)
        if not values:
            continue
        color = f"C{rates.index(row.rate)}"
        style = ("-", "--", ":", "-.")[speculations.index(row.speculation) % 4]
        label = f"{row.rate:g}/s, speculation {row.speculation}"
        axes.ecdf(values, color=color, linestyle=style, label=label)
    axes.axvline(target_ms, color="0.3", linewidth=1.2, label=f"target {target_ms:g} ms")
    axes.set_xscale("log")
    plain_numbers(axes.xaxis)
    axes.legend(fontsize=7, handlelength=3)
    return figure


def plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis with numbers as they are, no powers of ten."""
    from matplotlib.ticker import LogFormatter

    axis.set_major_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
