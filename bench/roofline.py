"""Draw every case of a kernel table under the measured ceilings: what bounds it, and how far off.

    python -m pagedraft.bench.roofline bench/results/amd-epyc/kernels-135m-bf16.json

x: flops a byte that the op must move at the least; y: flop/s achieved. Colours are ops, markers are
steps, a thin line joins a part's steps. The PNG goes beside the JSON as ``<name>-roofline.png``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pagedraft.bench.plot import new_chart, save_chart

SIZE = (10.5, 7.0)  # inches: a label a part needs the room
LABEL_SIZE = 7  # points
MARKERS = ("o", "^", "s", "D", "v", "P", "X")
HOW = (
    "measured: median time of a call over rotating buffers; bytes and flops are what the op needs "
    "at the least, counted"
)
# Where a label may stand, in points from its marker: near places first, beside before above.
PLACES = sorted(
    product((6, -6), range(-90, 91, 6)), key=lambda place: (abs(place[1]), place[0] < 0)
)


@dataclass(frozen=True)
class Point:
    """A timed case; intensity in flop/byte, rate in TFLOP/s."""

    op: str
    part: str
    step: str
    intensity: float
    rate: float

    @property
    def name(self) -> str:
        return self.part if self.part.startswith(self.op) else f"{self.op} {self.part}"


def points_of(document: dict[str, Any]) -> tuple[list[Point], dict[str, list[str]]]:
    """The points of a document, and the names of what is not among them by reason."""
    points: list[Point] = []
    left_out: dict[str, list[str]] = {}
    for row in document["rows"]:
        point = Point(row["op"], row["part"], row["step"], row["flops"] / row["bytes"], 0.0)
        reason = "no time" if row["problem"] else None if row["flops"] else "no flops"
        if reason is None:
            rate = row["flops"] / row["time"]["median"] / 1e12
            points.append(Point(row["op"], row["part"], row["step"], point.intensity, rate))
        elif point.name not in left_out.setdefault(reason, []):
            left_out[reason].append(point.name)
    return points, left_out


def chart_of(document: dict[str, Any]) -> Any:
    """The matplotlib Figure; ValueError if no case has a time and flops."""
    points, left_out = points_of(document)
    if not points:
        raise ValueError(f"rows: expected a case with a time and flops, got none ({left_out})")
    title = f"Kernels under the measured ceilings, {document['model']} {document['dtype']}"
    note = "".join(
        f"; not shown, {reason}: {', '.join(names)}" for reason, names in left_out.items()
    )
    figure, axes = new_chart(title, f"flop/byte{note}", "TFLOP/s")
    figure.set_size_inches(*SIZE)
    axes.set(xscale="log", yscale="log")
    _draw_ceilings(axes, document["ceiling"], points)
    parts = _draw_points(axes, points)
    axes.legend(loc="lower right", fontsize=LABEL_SIZE, ncols=2)
    _label(figure, axes, [max(part, key=lambda p: p.intensity) for part in parts], points)
    return figure


def _draw_ceilings(axes: Any, ceiling: dict[str, Any], points: Sequence[Point]) -> None:
    """Bandwidth as a slope, the product's rate as a level, other rates that were tried dotted."""
    copy, level = ceiling["copy_rate"], ceiling["matmul_rate"] / 1e12
    byte_rate = max(copy, ceiling.get("read_rate") or 0.0)
    slope, ridge = byte_rate / 1e12, level / (byte_rate / 1e12)
    low = min(point.intensity for point in points) / 2
    high = 2 * max(ridge, *(point.intensity for point in points))
    kind = "read" if byte_rate > copy else "copy"
    text = f"{kind} {byte_rate / 1e9:.0f} GB/s, matmul {level:.3g} TFLOP/s"
    axes.plot([low, ridge, high], [low * slope, level, level], color="black", label=text)
    if byte_rate > copy:
        ends = [low, level / (copy / 1e12)]
        heights = [low * copy / 1e12, level]
        axes.plot(ends, heights, ":", color="0.3", label=f"copy {copy / 1e9:.0f} GB/s")
    for name, rate in ceiling.get("products", {}).items():
        if rate != ceiling["matmul_rate"]:
            label = f"{name} {rate / 1e12:.3g} TFLOP/s"
            axes.plot([ridge, high], [rate / 1e12] * 2, ":", color="0.6", label=label)


def _draw_points(axes: Any, points: Sequence[Point]) -> list[list[Point]]:
    """Draw all; return the points of each part."""
    ops = list(dict.fromkeys(point.op for point in points))
    steps = list(dict.fromkeys(point.step for point in points))
    colours = {op: f"C{index % 10}" for index, op in enumerate(ops)}
    markers = {step: MARKERS[index % len(MARKERS)] for index, step in enumerate(steps)}
    parts: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        parts.setdefault((point.op, point.part), []).append(point)
        style = {"color": colours[point.op], "marker": markers[point.step], "markersize": 5}
        axes.plot(point.intensity, point.rate, linestyle="", **style)
    for (op, _), part in parts.items():
        axes.plot(
            [point.intensity for point in part],
            [point.rate for point in part],
            color=colours[op],
            linewidth=0.6,
            alpha=0.5,
        )
    for step in steps:
        axes.plot([], [], markers[step], color="0.3", label=step)
    for op in ops:
        axes.plot([], [], color=colours[op], linewidth=3, label=op)
    return list(parts.values())


def _label(figure: Any, axes: Any, labelled: Sequence[Point], points: Sequence[Point]) -> None:
    """Name each of ``labelled`` at the nearest place where its text covers nothing."""
    figure.draw_without_rendering()  # limits and the legend's place are known afterwards
    renderer = figure.canvas.get_renderer()
    taken = [_box(axes.transData.transform((p.intensity, p.rate)), 4) for p in points]
    taken.append(axes.get_legend().get_window_extent(renderer))
    for point in sorted(labelled, key=lambda p: -p.rate):
        text = axes.annotate(
            point.name,
            (point.intensity, point.rate),
            PLACES[0],
            textcoords="offset points",
            fontsize=LABEL_SIZE,
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
            arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.5},
        )
        for place in PLACES:
            text.set_position(place)
            text.set_horizontalalignment("left" if place[0] > 0 else "right")
            box = _text_box(text, renderer)
            if not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)


def _text_box(annotation: Any, renderer: Any) -> Any:
    """Extent of the words alone: an annotation's own includes its line."""
    from matplotlib.text import Text

    annotation.update_positions(renderer)
    return Text.get_window_extent(annotation, renderer)


def _box(centre: Any, radius: float) -> Any:
    from matplotlib.transforms import Bbox

    x, y = centre
    return Bbox([[x - radius, y - radius], [x + radius, y + radius]])


def save_roofline(document: dict[str, Any], json_path: Path) -> str:
    """Draw ``document`` beside its JSON; return a line that says where, or why there is none."""
    target = json_path.with_name(f"{json_path.stem}-roofline.png")
    try:
        figure = chart_of(document)
    except ImportError:
        return "no roofline chart: matplotlib is not installed"
    except ValueError as error:
        return f"no roofline chart: {error}"
    save_chart(figure, target, document, HOW)
    return f"chart    {target}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the chart of each JSON named; 1 if one has none."""
    parser = argparse.ArgumentParser(
        prog="python -m pagedraft.bench.roofline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("json", nargs="+", type=Path, help="kernels-*.json of a run")
    lines = [save_roofline(json.loads(p.read_text()), p) for p in parser.parse_args(arguments).json]
    print("\n".join(lines))
    return int(any(line.startswith("no ") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
