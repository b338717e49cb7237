"""The charts of the engine bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pagedraft.bench.engine_cell import AUTO, PLAIN, Cell
from pagedraft.bench.engine_ttft import MOST_MS, FirstTokens
from pagedraft.bench.plot import new_chart, save_chart

SET = "SYNTHETIC: the acceptance was set"
COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")


def save_charts(
    stem: Path, cells: Sequence[Cell], first: Sequence[FirstTokens], facts: Mapping[str, Any]
) -> list[Path]:
    """Draw what there are figures for, to files that begin with ``stem``; return them."""
    charts = {}
    for drafter in dict.fromkeys(cell.drafter for cell in cells):
        rows = [cell for cell in cells if cell.drafter == drafter]
        charts[f"speedup-{_slug(drafter)}"] = speedup_chart(rows)
    if any(cell.acceptance for cell in cells if cell.k != AUTO):
        charts["acceptance"] = acceptance_chart(cells)
    for batch in dict.fromkeys(cell.batch for cell in cells):
        rows = [cell for cell in cells if cell.batch == batch]
        charts[f"itl-batch-{batch}"] = itl_chart(rows)
    for result in first:
        charts[f"ttft-{result.length}"] = ttft_chart(result)
    paths = []
    for name, (figure, how) in charts.items():
        path = stem.with_name(f"{stem.name}-{name}.png")
        save_chart(figure, path, facts, how)
        paths.append(path)
    return paths


def speedup_chart(cells: Sequence[Cell]) -> tuple[Any, str]:
    """Speed-up against drafts a row, a colour a batch: measured, and as predicted."""
    is_synthetic = cells[0].alpha is not None
    figure, axes = new_chart(
        f"Speed-up, drafter: {cells[0].drafter}", "drafts a row (k)", "over k=0"
    )
    lengths = list(dict.fromkeys(cell.k for cell in cells))
    places = {k: place for place, k in enumerate(lengths)}
    for color, batch in zip(_colors(), dict.fromkeys(cell.batch for cell in cells), strict=False):
        rows = [cell for cell in cells if cell.batch == batch]
        measured = {cell.k: median(cell.speedups) for cell in rows if cell.speedups}
        predicted = {cell.k: cell.predicted for cell in rows if cell.predicted is not None}
        for points, mark, line, alpha in ((measured, "o", "-", 1.0), (predicted, "x", "--", 0.6)):
            look = {"color": color, "alpha": alpha, "marker": mark}
            fixed = {places[k]: value for k, value in points.items() if k != AUTO}
            chosen = {places[k]: value for k, value in points.items() if k == AUTO}
            axes.plot(list(fixed), list(fixed.values()), linestyle=line, **look)
            axes.plot(list(chosen), list(chosen.values()), linestyle="", **look)
        axes.plot([], [], "o-", color=color, label=f"batch {batch}")
    axes.axhline(1.0, color="0.4", linewidth=0.8)
    axes.set_xticks(list(places.values()), [str(k) for k in lengths])
    axes.plot([], [], "x--", color="0.4", label="predicted")
    axes.legend(fontsize=8)
    how = "solid: measured, steps in which all rows decode; dashed: predicted from step times"
    return figure, f"{how}; {SET}" if is_synthetic else how


def acceptance_chart(cells: Sequence[Cell]) -> tuple[Any, str]:
    """Share of drafts kept by position, a line for each drafter and batch at its longest k."""
    figure, axes = new_chart("Acceptance by position", "position of the draft", "kept, share")
    drafters = dict.fromkeys(cell.drafter for cell in cells)
    for color, drafter in zip(_colors(), drafters, strict=False):
        for style, cell in zip(("o-", "s--", "^:", "d-."), longest(cells, drafter), strict=False):
            kept = cell.acceptance
            label = f"{drafter}, batch {cell.batch}"
            axes.plot(range(1, len(kept) + 1), kept, style, color=color, label=label)
    most = max(len(cell.acceptance) for cell in cells if cell.k != AUTO)
    axes.set(ylim=(0.0, 1.02), xticks=range(1, most + 1))
    axes.legend(fontsize=8)
    how = "measured: of drafts at a position, those kept, and so all before them"
    has_synthetic = any(cell.alpha is not None for cell in cells)
    return figure, f"{how}; {SET}" if has_synthetic else how


def longest(cells: Sequence[Cell], drafter: str) -> list[Cell]:
    """Of each batch, the drafter's cell with most fixed drafts that drafted at all."""
    best: dict[int, Cell] = {}
    for cell in cells:
        if cell.drafter != drafter or cell.k == AUTO or not cell.acceptance:
            continue
        if cell.batch not in best or cell.k > best[cell.batch].k:  # type: ignore[operator]
            best[cell.batch] = cell
    return list(best.values())


def itl_chart(cells: Sequence[Cell]) -> tuple[Any, str]:
    """Distribution of inter-token latency: per token, and the gap between steps."""
    from matplotlib.ticker import LogLocator

    batch = cells[0].batch
    figure, axes = new_chart(f"Between tokens, batch {batch}", "ms", "share of tokens or gaps")
    control = next(cell for cell in cells if cell.k == PLAIN)
    real = [cell for cell in cells if cell.alpha is None]
    shown = [control, *longest(cells, (real or cells)[0].drafter)]
    shown += [cell for cell in real if cell.k == AUTO][:1]
    for color, cell in zip(_colors(), shown, strict=False):
        label = "k=0" if cell.k == PLAIN else f"{cell.drafter}, k={cell.k}"
        axes.step(*_shares(cell.itl), where="post", color=color, label=f"{label}: per token")
        gaps = {"color": color, "linestyle": ":", "label": f"{label}: step gap"}
        axes.step(*_shares(cell.gaps), where="post", **gaps)
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.legend(fontsize=8)
    return figure, "measured; per token: the gap over the tokens that a step brought"


def ttft_chart(result: FirstTokens) -> tuple[Any, str]:
    """Distribution of the time to the first token, with the line that is aimed at."""
    title = f"First token, prompt of {result.length} tokens"
    figure, axes = new_chart(title, "ms", "share of requests")
    for color, name in zip(_colors(), [result.ours, *result.theirs], strict=False):
        label = "pagedraft" if name == result.ours else name
        axes.step(*_shares(result.seconds[name]), where="post", color=color, label=label)
    axes.axvline(MOST_MS, color="0.4", linewidth=0.8, linestyle="--", label=f"{MOST_MS:.0f} ms")
    axes.legend(fontsize=8)
    return figure, "measured; one request on an idle engine"


def _shares(seconds: Sequence[float]) -> tuple[list[float], list[float]]:
    """Milliseconds in order, and the share of values that are no larger, from 0 on."""
    ordered = sorted(1e3 * value for value in seconds)
    return ordered[:1] + ordered, [index / len(ordered) for index in range(len(ordered) + 1)]


def _colors() -> list[str]:
    return list(COLORS) * 4


def _slug(name: str) -> str:
    return name.lower().replace(" ", "-").replace(".", "")
