"""Time every op of this tree and of another git revision in turn, and say what differs.

    python -m pagedraft.bench.kernels --base HEAD~1 [--op linear] [--pairs 3] [--rounds 3]

Both sides stay alive in processes of their own and take turns on each case (A B, B A, A B, ...);
then new processes do, as two of one code differ, too. They have the same inputs, new buffers each
turn and one clock; a turn's time is the 20th percentile of its calls. A ratio is the median of the
rounds' ratios, this / base; its noise is their 20th and 80th percentile.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from pagedraft.bench.base_revision import Side, both_sides, describe_tree, worktree_of
from pagedraft.bench.figures import Figure, as_json
from pagedraft.bench.report import ROOT, header, print_header, results_folder, write_json
from pagedraft.bench.table import print_table

HEADERS = ("case", "this us", "base us", "this / base [p20 p80]", "")
Row = dict[str, Any]
# Two processes of one code differ however long they run, as where code and buffers lie stays the
# same: on a busy machine by up to 6 %. So several pairs run, and less is never called a difference.
MIN_DIFFERENCE = 0.05


@dataclass(frozen=True)
class Ratio:
    """this / base: above 1, this tree is slower. low, high: 20th and 80th percentile of rounds."""

    value: float
    low: float
    high: float

    @property
    def word(self) -> str:
        """slower, faster, or "within noise": the median is no farther from 1 than rounds spread."""
        if abs(self.value - 1) <= max(MIN_DIFFERENCE, self.high - self.low):
            return "within noise"
        return "slower" if self.value > 1 else "faster"

    def text(self) -> str:
        """Return ``median [p20 p80]``."""
        return f"{self.value:.3f} [{self.low:.3f} {self.high:.3f}]"


def paired_ratio(this: Sequence[float], base: Sequence[float]) -> Ratio:
    """The ratio of rounds timed in pairs; ValueError for fewer than three rounds."""
    if len(this) != len(base) or len(this) < 3:
        raise ValueError(f"rounds: expected three or more pairs, got {len(this)} and {len(base)}")
    ratios = [ours / theirs for ours, theirs in zip(this, base, strict=True)]
    cuts = quantiles(ratios, n=5, method="inclusive")
    return Ratio(median(ratios), cuts[0], cuts[-1])


def race(this: Side, base: Side, row: Row, turns: Sequence[bool], budget: float) -> None:
    """Time ``row["case"]`` on both sides in turn and add to ``row["rounds"]``.

    turns: for each round, whether this side goes first. budget: seconds of calls a side and round.
    ``row["word"]`` is set where there is nothing to compare.
    """
    sides = {"this": this, "base": base}
    only = [key for key, side in sides.items() if row["case"] in side.cases]
    if len(only) == 1:
        other = base if only == ["this"] else this
        why = f": {'; '.join(other.missing.values())}" if other.missing else ""
        row["word"] = f"only in {only[0]}{why}"
        return
    digests = {}
    for is_first in turns:
        for key in ("this", "base") if is_first else ("base", "this"):
            answer = sides[key].ask({"case": row["case"], "budget": budget})
            if answer["problem"] is not None:
                row["word"] = f"WRONG in {key}: {answer['problem']}"
                return
            row.setdefault("rounds", {"this": [], "base": []})[key].append(answer["seconds"])
            digests[key] = answer["digest"]
            row[f"{key}_path"] = f"{answer['implementation']} {answer['method']}"
        if digests["this"] != digests["base"]:
            row["word"] = "not compared: the base's bench gives it other inputs"
            return


def judge(row: Row) -> None:
    """Add the ratio of all rounds and its word, unless the row has a word already."""
    if "word" not in row:
        ratio = paired_ratio(row["rounds"]["this"], row["rounds"]["base"])
        row |= {key: median(values) for key, values in row["rounds"].items()}
        row |= {"ratio": vars(ratio), "word": ratio.word}


def _cells(row: Row) -> list[str]:
    if "ratio" not in row:
        return [row["case"], "-", "-", "-", row["word"]]
    times = [f"{row[key] * 1e6:.1f}" for key in ("this", "base")]
    word = row["word"]
    if row["this_path"] != row["base_path"]:
        word += f" ({row['this_path']}, base {row['base_path']})"
    return [row["case"], *times, Ratio(**row["ratio"]).text(), word]


def figures_of(prefix: str, rows: Sequence[Row]) -> list[Figure]:
    """Ratios to the base, by case."""
    return [
        Figure(f"{prefix}/{row['case']}/of base", *_value(row["ratio"]))
        for row in rows
        if "ratio" in row
    ]


def _value(ratio: Row) -> tuple[float, str, str, str, float, float]:
    return ratio["value"], "x", "lower", "measured", ratio["low"], ratio["high"]


def compare(options: argparse.Namespace, root: Path = ROOT) -> int:
    """Run what ``options`` name, print and save it; 1 if this side's numbers are wrong.

    root: the repository; its working tree, with all that is not committed, is this side. Raises
    RevisionError where the base cannot be had or driven.
    """
    device = torch.device(options.device)
    setup = {
        **{"device": options.device, "model": options.model, "dtype": options.dtype},
        **{"ops": options.op.split(","), "steps": options.steps.split(",")},
    }
    rows: dict[str, Row] = {}
    facts = header(device) | {"model": options.model, "dtype": options.dtype}
    with worktree_of(options.base, root) as base:
        for pair in range(options.pairs):
            with both_sides(base, root, setup) as (this, other, how):
                if pair == 0:
                    facts |= {"this": describe_tree(root, base.commit)}
                    facts |= {"base": f"{base.rev}, {base.commit[:9]}; {how}"}
                    print_header(facts)
                turns = [(pair + turn) % 2 == 0 for turn in range(options.rounds)]
                _race_all(this, other, rows, turns, options.budget / options.rounds)
    for row in rows.values():
        judge(row)
    return _report(options, facts, list(rows.values()))


def _race_all(
    this: Side, base: Side, rows: dict[str, Row], turns: Sequence[bool], budget: float
) -> None:
    for name in [*this.cases, *(name for name in base.cases if name not in this.cases)]:
        row = rows.setdefault(name, {"case": name})
        if "word" not in row:
            race(this, base, row, turns, budget)


def _report(options: argparse.Namespace, facts: Row, rows: Sequence[Row]) -> int:
    """Print and save; return the exit status."""
    title = f"{options.model} {options.dtype}, this tree against {options.base}"
    print_table(title, HEADERS, [_cells(row) for row in rows])
    print(
        f"slower, faster: farther from 1 than p20 and p80 are from each other, and than "
        f"{100 * MIN_DIFFERENCE:.0f} %, over {options.rounds} rounds of {options.pairs} pairs of "
        "processes"
    )
    figures = as_json(figures_of(f"kernels-base/{options.model}-{options.dtype}", rows))
    device = torch.device(options.device)
    folder = options.out or ROOT / "build" / "bench" / results_folder(device).name
    path = Path(folder) / f"kernels-{options.model}-{options.dtype}-base.json"
    write_json(path, {"bench": "kernels-base", **facts, "rows": rows, "figures": figures})
    print(json.dumps({"bench": "kernels-base", **facts, **_counts(rows), "figures": figures}))
    return int(any(row["word"].startswith("WRONG in this") for row in rows))


def _counts(rows: Sequence[Row]) -> Row:
    """Names of cases by what came of them."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["word"].partition(":")[0], []).append(row["case"])
    counts: Row = {word: names for word, names in found.items() if word != "within noise"}
    return counts | {"within noise": len(found.get("within noise", []))}
