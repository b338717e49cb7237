"""The report of a distillation run: report.md, report.json, and report.png where matplotlib is.

Everything is in the JSON; text and figure are made from it alone, so they can be made again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedraft.decoding.distill.figures import Judgement, Measured
from pagedraft.decoding.distill.report_figure import draw
from pagedraft.decoding.distill.report_text import markdown

NAME = "report"
FILES = tuple(f"{NAME}.{ending}" for ending in ("json", "md", "png"))
Document = dict[str, Any]


def write_report(
    folder: str | Path,
    facts: Mapping[str, Any],
    judgement: Judgement,
    measured: Measured | None = None,
) -> list[Path]:
    """Write the report into ``folder``, which is made if need be; return the files.

    facts: what the run was, in any nesting: rendered as a table. "target" names the model in the
        title, "device" the machine, in place of the judgement's. A value None was not measured.
    measured: of the judgement's subject; None where speed was not measured.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return render(folder, document(facts, judgement, measured))


def document(
    facts: Mapping[str, Any], judgement: Judgement, measured: Measured | None = None
) -> Document:
    """All of a report as JSON has it, with the verdict."""
    device = str(facts.get("device") or judgement.device)
    return {
        "verdict": verdict(judgement, measured, device),
        "device": device,
        "facts": _plain(facts),
        "judgement": _plain(judgement.to_json()),
        "measured": None if measured is None else _plain(measured.to_json()),
    }


def render(folder: Path, report: Document) -> list[Path]:
    """Write the files of a document, the figure only where matplotlib is installed."""
    files = [folder / f"{NAME}.json", folder / f"{NAME}.md"]
    files[0].write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    png = folder / f"{NAME}.png"
    is_drawn = draw(report, png)
    files[1].write_text(markdown(report, png.name if is_drawn else None), encoding="utf-8")
    return [*files, png] if is_drawn else files


def verdict(judgement: Judgement, measured: Measured | None, device: str) -> str:
    """One line: the best k and its speed-up, or "no gain" where none beats noise.

    It goes by what was measured, if anything was. Outputs that drafts changed are a fault, of which
    no speed is told.
    """
    where = f"single stream on {device}"
    found = judgement.drafters[judgement.subject]
    expected = {row.k: row.speedup for row in found.total.rows}
    if measured is None:
        k = max(expected, key=lambda k: expected[k])
        noise = found.costs.noise
        if expected[k] > 1.0 + noise:
            return f"k={k}: {expected[k]:.2f}x expected, speed not measured, {where}"
        said = f"at best {expected[k]:.2f}x expected at k={k}, noise {noise:.1%}"
        return f"no gain: {said}, speed not measured, {where}"
    group = measured.total
    wrong = [str(row.k) for row in group.rows if row.num_same < group.num_texts]
    if wrong:
        return f"fault: drafts changed the output at k={', '.join(wrong)}, {where}"
    best = max(group.rows, key=lambda row: row.speedup)
    as_expected = f"{expected[best.k]:.2f}x expected" if best.k in expected else "not estimated"
    if best.speedup > 1.0 + group.noise:
        return f"k={best.k}: {as_expected}, {best.speedup:.2f}x measured, {where}"
    said = f"at best {best.speedup:.2f}x measured at k={best.k} ({as_expected})"
    return f"no gain: {said}, noise {group.noise:.1%}, {where}"


def _plain(value: Any) -> Any:
    """``value`` as JSON has it; numbers that JSON lacks and other objects become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(entry) for entry in value), key=str)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
