"""Charts of the benches: one look, and under each where, when and how its figures were got."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SIZE = (7.2, 4.4)  # inches
DPI = 150


def new_chart(title: str, x_label: str, y_label: str) -> tuple[Any, Any]:
    """A figure and its axes; drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def save_chart(figure: Any, path: Path, facts: Mapping[str, Any], how: str) -> None:
    """Write a PNG; ``facts`` is the header of its bench, ``how`` says what the figures are."""
    caption = f"{facts['device']}, {facts['threads']} threads, git {facts['git']}, {facts['date']}"
    figure.supxlabel(f"{caption}\n{how}", fontsize=7, color="0.35", x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
