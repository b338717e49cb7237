"""A report's figure, from its JSON: acceptance by place, tokens a pass and speed-up over k."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Document = Mapping[str, Any]
SUBJECT, LOOKUP = "tab:blue", "tab:orange"
OTHERS = ("tab:grey", "tab:green", "tab:purple", "tab:brown")
MEASURED = "tab:red"


def draw(report: Document, path: Path) -> bool:
    """Write the figure to ``path``; False where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    figure_of(report).savefig(path, dpi=120, metadata={"Software": None})
    return True


def figure_of(report: Document) -> Any:
    """Return the matplotlib Figure of all texts."""
    from matplotlib.figure import Figure

    judged, measured = report["judgement"], report["measured"]
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    places, tokens, speed = figure.subplots(1, 3)
    colours = _colours(judged)
    for name, found in judged["drafters"].items():
        total, colour = found["total"], colours[name]
        _line(places, _numbered(total["places"], "conditional"), color=colour, label=name)
        _line(places, _numbered(total["places"], "cumulative"), color=colour, linestyle=":")
        for axes, value in ((tokens, "tokens_per_pass"), (speed, "speedup")):
            points = [(row["k"], row[value]) for row in total["rows"]]
            _line(axes, points, color=colour, label=f"{name}, expected")
    if measured is not None:
        label = f"{judged['subject']}, measured"
        style = {"color": MEASURED, "linestyle": "--", "label": label}
        rows = sorted(measured["total"]["rows"], key=lambda row: row["k"])
        _line(tokens, [(row["k"], row["tokens_per_pass"]) for row in rows], **style)
        _line(speed, [(row["k"], row["speedup"]) for row in rows], **style)
    _finish(places, "draft", "accepted, given all before; dotted: with all before")
    places.set_ylim(-0.03, 1.03)
    _finish(tokens, "k (drafts a pass)", "tokens a pass")
    _finish(speed, "k (drafts a pass)", "speed-up over plain decoding")
    speed.axhline(1.0, color="grey", linewidth=0.8)
    figure.suptitle(report["verdict"], fontsize="medium", wrap=True, parse_math=False)
    return figure


def _colours(judged: Document) -> dict[str, str]:
    subject, names = judged["subject"], list(judged["drafters"])
    others = [name for name in names[:-1] if name != subject]
    colours = {name: OTHERS[i % len(OTHERS)] for i, name in enumerate(others)}
    return {**colours, names[-1]: LOOKUP, subject: SUBJECT}  # the lookup is the last


def _numbered(entries: Sequence[Any], name: str) -> list[tuple[int, float]]:
    """(number from 1 on, value) of the entries that have one."""
    return [(i, entry[name]) for i, entry in enumerate(entries, 1) if entry[name] is not None]


def _line(axes: Any, points: Sequence[tuple[int, float]], **style: Any) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, **style)


def _finish(axes: Any, x: str, y: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize="small")
