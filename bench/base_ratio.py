"""Time every op of this tree and of another git revision in turn, and say what differs.

    python -m pagedraft.bench.kernels --base HEAD~1 [--op linear] [--rounds 9]

Both sides stay alive in processes of their own and take turns on each case (A B, B A, A B, ...),
with the same inputs, new buffers each turn and one clock; a turn's time is the 20th percentile of
its calls. A ratio is the median of the rounds' ratios, this / base; its noise is their 20th and
80th percentile.
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

from pagedraft.bench.base_revision import Base, Side, both_sides, describe_tree, worktree_of
from pagedraft.bench.figures import Figure, as_json
from pagedraft.bench.report import ROOT, header, print_header, results_folder, write_json
from pagedraft.bench.table import print_table

HEADERS = ("case", "this us", "base us", "this / base [p20 p80]", "")
Row = dict[str, Any]
# Two processes of the same code differ by a few per cent however long they run: where their code
# and buffers lie stays the same. A ratio nearer to 1 is never called a difference.
MIN_DIFFERENCE = 0.03


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


def race(this: Side, base: Side, name: str, rounds: int, budget: float) -> Row:
    """Time one case on both sides in turn; ``word`` says what came of it.

    budget: seconds of calls on each side, over all rounds.
    """
    row: Row = {"case": name}
    sides = {"this": this, "base": base}
    only = [key for key, side in sides.items() if name in side.cases]
    if len(only) == 1:
        other = base if only == ["this"] else this
        why = f": {'; '.join(other.missing.values())}" if other.missing else ""
        return row | {"word": f"only in {only[0]}{why}"}
    seconds: dict[str, list[float]] = {"this": [], "base": []}
    digests = {}
    for turn in range(rounds):
        for key in ("this", "base") if turn % 2 == 0 else ("base", "this"):
            answer = sides[key].ask({"case": name, "budget": budget / rounds})
            if answer["problem"] is not None:
                return row | {"word": f"WRONG in {key}: {answer['problem']}"}
            seconds[key].append(answer["seconds"])
            digests[key] = answer["digest"]
            row[f"{key}_path"] = f"{answer['implementation']} {answer['method']}"
        if digests["this"] != digests["base"]:
            return row | {"word": "not compared: the base's bench gives it other inputs"}
    ratio = paired_ratio(seconds["this"], seconds["base"])
    times = {key: median(values) for key, values in seconds.items()}
    return row | times | {"rounds": seconds, "ratio": vars(ratio), "word": ratio.word}


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
    with worktree_of(options.base, root) as base, both_sides(base, root, setup) as sides:
        facts = header(device) | {"model": options.model, "dtype": options.dtype}
        facts |= {"this": describe_tree(root, base.commit), "base": _base_text(base, sides[2])}
        print_header(facts)
        rows = _race_all(*sides[:2], options.rounds, options.budget)
    title = f"{options.model} {options.dtype}, this tree against {options.base}"
    print_table(title, HEADERS, [_cells(row) for row in rows])
    print(
        f"slower, faster: farther from 1 than p20 and p80 are from each other, and than "
        f"{100 * MIN_DIFFERENCE:.0f} %, over {options.rounds} rounds"
    )
    figures = as_json(figures_of(f"kernels-base/{options.model}-{options.dtype}", rows))
    folder = options.out or ROOT / "build" / "bench" / results_folder(device).name
    path = Path(folder) / f"kernels-{options.model}-{options.dtype}-base.json"
    write_json(path, {"bench": "kernels-base", **facts, "rows": rows, "figures": figures})
    num_wrong = sum(row["word"].startswith("WRONG in this") for row in rows)
    print(json.dumps({"bench": "kernels-base", **facts, **_counts(rows), "figures": figures}))
    return 1 if num_wrong else 0


def _base_text(base: Base, how: str) -> str:
    return f"{base.rev}, {base.commit[:9]}; {how}"


def _race_all(this: Side, base: Side, rounds: int, budget: float) -> list[Row]:
    names = [*this.cases, *(name for name in base.cases if name not in this.cases)]
    return [race(this, base, name, rounds, budget) for name in names]


def _counts(rows: Sequence[Row]) -> Row:
    """Names of cases by what came of them."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["word"].partition(":")[0], []).append(row["case"])
    counts: Row = {word: names for word, names in found.items() if word != "within noise"}
    return counts | {"within noise": len(found.get("within noise", []))}
