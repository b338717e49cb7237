"""Draw verify(k+1) / decode(1) against context from the JSON of an attention sweep.

    python -m pagedraft.bench.figure_verify bench/results/modelled/attention-full.json

A measured sweep gives a ratio of times. A modelled one gives a ratio of bytes: keys, values,
queries, outputs, and the partials that a split launch writes and its merge reads, as launched and
for each level of the tree at which they may be stored. The PNG goes beside the JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagedraft.bench.attention_cases import BASE_ROWS, TREE_UNITS, VERIFY_SPANS
from pagedraft.bench.attention_targets import MAX_VERIFY_OVER_DECODE, VERIFY_CONTEXTS
from pagedraft.bench.plot import new_chart, save_chart

Row = dict[str, Any]
Points = list[tuple[int, float]]
COLOURS = dict(zip(VERIFY_SPANS, ("tab:green", "tab:blue", "tab:red"), strict=True))
MODELLED = ("launched", *TREE_UNITS)
SIZE = (8, 5.5)  # inches: eight lines and their legend
STYLES = {"time": "-", "launched": "-", "segments": "--", "sections": ":"}


def ratios(document: dict[str, Any]) -> dict[tuple[int, str], Points]:
    """Return (context, ratio) points of each (queries a row, quantity).

    quantity: "time" of a measured sweep, else one of MODELLED: where the partials are stored.
    Points that were not measured are missing.
    """
    rows = {(row["step"], row["context"]): row for row in document["rows"] if _is_base(row)}
    contexts = sorted({context for step, context in rows if step == "decode"})
    found: dict[tuple[int, str], Points] = {}
    for quantity in ("time",) if document["measured"] else MODELLED:
        for span in VERIFY_SPANS:
            pairs = [
                (context, rows.get((f"verify{span}", context)), rows["decode", context])
                for context in contexts
            ]
            points = [
                (context, _value(verify, quantity) / _value(decode, quantity))
                for context, verify, decode in pairs
                if verify and _is_known(verify, quantity) and _is_known(decode, quantity)
            ]
            if points:
                found[span, quantity] = points
    return found


def _is_base(row: Row) -> bool:
    return not row["axes"] and row["rows"] == BASE_ROWS


def _is_known(row: Row, quantity: str) -> bool:
    return quantity != "time" or "time" in row


def _value(row: Row, quantity: str) -> float:
    return row["time"]["median"] if quantity == "time" else row["bytes"] + row["scratch"][quantity]


def title(document: dict[str, Any]) -> str:
    """Return what the figure shows and where the numbers are from."""
    source = f"measured on {document['device']}" if document["measured"] else "modelled bytes"
    return f"verify(k+1) / decode(1), {source}"


def _label(span: int, quantity: str) -> str:
    if quantity == "time":
        return f"k+1 = {span}"
    if quantity == "launched":
        return f"k+1 = {span}, as launched"
    return f"k+1 = {span}, all partials of {TREE_UNITS[quantity]} keys"


def figure_of(document: dict[str, Any]) -> Any:
    """Return the matplotlib Figure; ValueError if the document has no ratio to show."""
    lines = ratios(document)
    if not lines:
        raise ValueError("rows: expected decode and verify at one context, got none with numbers")
    what = "ratio of times" if document["measured"] else "ratio of bytes, each key counted once"
    x_label = f"context (tokens); {BASE_ROWS} rows, 32 heads on 8, head dim 128, bf16"
    figure, axes = new_chart(title(document), x_label, what)
    figure.set_size_inches(*SIZE)
    for (span, quantity), points in lines.items():
        is_main = quantity in ("time", "launched")
        axes.plot(
            *zip(*points, strict=True),
            color=COLOURS[span],
            linestyle=STYLES[quantity],
            linewidth=2.0 if is_main else 1.0,
            marker="o" if is_main else None,
            label=_label(span, quantity),
        )
    target = (MAX_VERIFY_OVER_DECODE, *VERIFY_CONTEXTS)
    axes.hlines(*target, "black", "dashdot", label="target, k+1 = 9")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    contexts = [context for context, _ in max(lines.values(), key=len)]
    axes.set_xticks(contexts, [f"{n // 1024}k" if n >= 1024 else str(n) for n in contexts])
    axes.legend(ncols=1 if document["measured"] else 2, fontsize="small")
    return figure


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the figure to ``path``, with its device and date if it was measured."""
    figure = figure_of(document)
    if document["measured"]:
        save_chart(figure, path, document, "measured: ratio of median times of a call")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def save_beside(document: dict[str, Any], json_path: Path) -> str:
    """Draw beside the JSON of a sweep; return a line that says where, or why there is no figure."""
    select = json_path.stem.removeprefix("attention-")
    suffix = "" if select == "full" else f"-{select}"
    target = json_path.with_name(f"verify_over_decode{suffix}.png")
    try:
        draw(document, target)
    except ImportError:
        return "no chart of verify / decode: matplotlib is not installed"
    except ValueError as error:
        return f"no chart of verify / decode: {error}"
    return f"chart    {target}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the figure of each JSON named; 1 if one has none."""
    parser = argparse.ArgumentParser(
        prog="python -m pagedraft.bench.figure_verify", description=__doc__
    )
    parser.add_argument("json", nargs="+", type=Path, help="attention-*.json of a sweep")
    paths = parser.parse_args(arguments).json
    lines = [save_beside(json.loads(path.read_text()), path) for path in paths]
    print("\n".join(lines))
    return int(any(line.startswith("no ") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
