"""What changed between two runs of a bench, beyond noise.

    python -m pagedraft.bench.compare before.json after.json [--all] [--json changes.json]
    python -m pagedraft.bench.compare before/ after/     folders: documents are matched by path
    python -m pagedraft.bench.compare before.json after.json --match "linear qkv"

Figures (figures.py) are matched by name. A change counts

- of a timed figure (measured, predicted, synthetic): where the value changed by more than
  ``--margin``, 5 %, and the intervals from the 20th to the 80th percentile do not overlap. One with
  a single sample has no interval: then by more than ``--single``, 20 %;
- of a counted or modelled figure: always, but for the rounding of sums.

Shares are of the smaller value; from 0 every change exceeds the margin. What an op reaches of the
ceiling (".../ceiling", ".../of floor") is shown where it moved, not judged: every run measures its
own ceiling, whose noise no interval of times holds. The time beside it is judged.

A figure that only the first run has is gone, which fails like one that is worse: a bench leaves out
what it finds wrong. Neighbours on the machine can slow a whole run beyond its own intervals: before
a "worse" is believed, both sides are run again.

Runs of another git revision are the normal case, other versions are shown. Runs of other models,
dtypes or workloads, and timed figures of other devices or thread counts, are refused unless
``--across`` says that this is meant.

Exit status: 1 if a figure is worse or gone, 2 if the input cannot be compared, else 0.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from pagedraft.bench.changes import (
    TIMED,
    Change,
    Rule,
    compare_figures,
    count_marks,
    interval,
    is_failure,
    show,
)
from pagedraft.bench.figures import Figure, read_figures
from pagedraft.bench.report import write_json
from pagedraft.model.config import read_json

# What two documents must agree on; where one does not say it, nothing is known against it.
WORKLOAD = (
    *("bench", "dry", "quick", "select", "where", "settings"),
    *("model", "draft", "speculate", "alpha", "dtype", "kv_dtype", "block_size"),
    *("prompt", "prompts", "num_prompt", "tokens", "new_tokens", "num_new"),
)
MACHINE = ("device", "threads")
SHOWN = ("git", "date", "device", "threads", "omp", "python", "torch", "triton")
Document = Mapping[str, Any]


def compare_documents(
    old: Document, new: Document, rule: Rule, *, across: bool = False, prefix: str = ""
) -> list[Change]:
    """Compare two benches' documents; ValueError names what makes them no pair."""
    before, after = read_figures(old), read_figures(new)
    is_timed = any(figure.how in TIMED for figure in (*before, *after))
    for name in (*WORKLOAD, *(MACHINE if is_timed else ())):
        values = old.get(name), new.get(name)
        if None not in values and values[0] != values[1] and not across:
            raise ValueError(
                f"{name}: expected {values[0]!r} in both, got {values[1]!r} in the second; "
                "--across compares all the same"
            )
    if not {figure.name for figure in before} & {figure.name for figure in after}:
        raise ValueError("expected two runs of one bench, got no figure that both have")
    return compare_figures(before, after, rule, prefix)


def read_bench(path: Path) -> dict[str, Any]:
    """A bench's document whose figures can be compared; ValueError names file and figure."""
    document = read_json(path)
    try:
        figures = read_figures(document)
        if not figures:
            raise ValueError("expected at least one figure, got none")
        for figure in figures:
            _check(figure)
        counts = Counter(figure.name for figure in figures)
        if twice := sorted(name for name, count in counts.items() if count > 1):
            raise ValueError(f"expected each figure once, got {twice} more than once")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return document


def _check(figure: Figure) -> None:
    """Raise ValueError for what Figure lets through and no comparison can use."""
    if not isinstance(figure.name, str) or not figure.name:
        raise ValueError(f"name of a figure: expected text, got {figure.name!r}")
    numbers = [figure.value, figure.low, figure.high]
    if any(isinstance(n, bool) or not isinstance(n, (int, float, NoneType)) for n in numbers):
        raise ValueError(f"{figure.name}: expected numbers, got {numbers}")
    if (figure.low is None) != (figure.high is None):
        raise ValueError(f"{figure.name}: expected low and high or neither, got {numbers[1:]}")
    low, high = interval(figure)
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ValueError(f"{figure.name}: expected finite low <= high, got {[low, high]}")


Pair = tuple[str, dict[str, Any] | None, dict[str, Any] | None]  # path in its folder, documents


def read_pairs(old: Path, new: Path) -> tuple[list[Pair], list[str]]:
    """The documents of two files, or of two folders by path, and the files without figures.

    A document that only one folder has stands beside None. ValueError or OSError for anything that
    cannot be read.
    """
    if missing := [path for path in (old, new) if not path.exists()]:
        raise ValueError(f"{missing[0]}: expected a file or a folder, there is none")
    if old.is_dir() != new.is_dir():
        raise ValueError(f"expected two files or two folders, got {old} and {new}")
    if not old.is_dir():
        return [("", read_bench(old), read_bench(new))], []
    before, after = _read_folder(old), _read_folder(new)
    names = sorted({*before, *after})
    pairs = [(name, before.get(name), after.get(name)) for name in names]
    found = [pair for pair in pairs if any(pair[1:])]
    if not any(one and other for _, one, other in found):
        raise ValueError(f"{old} and {new}: expected a document with figures that both have")
    return found, [name for name, *documents in pairs if not any(documents)]


def _read_folder(folder: Path) -> dict[str, dict[str, Any] | None]:
    """Documents by path; None for JSON without a list of figures, which is no bench's."""
    found: dict[str, dict[str, Any] | None] = {}
    for path in sorted(folder.rglob("*.json")):
        is_bench = "figures" in read_json(path)
        found[str(path.relative_to(folder))] = read_bench(path) if is_bench else None
    return found


def compare_pairs(pairs: Sequence[Pair], rule: Rule, *, across: bool) -> list[Change]:
    """The changes of all documents; one that a folder lacks has all its figures gone or new."""
    changes: list[Change] = []
    for name, old, new in pairs:
        prefix = f"{name}: " if name else ""
        try:
            if old is not None and new is not None:
                found = compare_documents(old, new, rule, across=across, prefix=prefix)
            else:
                sides = (read_figures(side) if side else [] for side in (old, new))
                found = compare_figures(*sides, rule, prefix)
        except ValueError as error:
            raise ValueError(prefix + str(error)) from None
        changes += found
    return changes


def _print_facts(pairs: Sequence[Pair]) -> None:
    """Print what the documents say of themselves, once where both sides agree."""
    sides = [pair[1] for pair in pairs if pair[1]], [pair[2] for pair in pairs if pair[2]]
    for name in SHOWN:
        old, new = (sorted({str(d[name]) for d in side if name in d}) for side in sides)
        if old or new:
            arrow = f"  ->  {', '.join(new) or 'none'}" if new != old else ""
            print(f"{name:>8}  {', '.join(old) or 'none'}{arrow}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        rule = Rule(_share("--margin", options.margin), _share("--single", options.single))
        pairs, without = read_pairs(options.before, options.after)
        changes = compare_pairs(pairs, rule, across=options.across)
        changes = [change for change in changes if options.match in change.name]
        if not changes:
            raise ValueError(f"--match: expected part of a figure's name, got {options.match!r}")
    except (ValueError, OSError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    _print_facts(pairs)
    for name in without:
        print(f"no figures, left out: {name}")
    shown = show("changes beyond noise", changes, everything=options.all)
    facts = {"bench": "compare", "before": str(options.before), "after": str(options.after)}
    document = {**facts, "margin": rule.margin, "single": rule.single, "left_out": without}
    document |= {"counts": count_marks(changes), "changes": [c.as_json() for c in shown]}
    if options.json:
        write_json(options.json, document)
    print(json.dumps(document))
    return int(is_failure(changes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pagedraft.bench.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", type=Path, help="a bench's JSON document, or a folder of them")
    parser.add_argument("after", type=Path)
    parser.add_argument("--match", default="", help="only figures with this in their names")
    parser.add_argument("--all", action="store_true", help="also show what did not change")
    parser.add_argument("--across", action="store_true", help="other devices, threads, dtypes")
    parser.add_argument(
        "--margin", type=float, default=Rule.margin, help="share; default %(default)s"
    )
    parser.add_argument(
        "--single", type=float, default=Rule.single, help="share; default %(default)s"
    )
    parser.add_argument("--json", type=Path, default=None, help="also write the changes here")
    return parser


def _share(name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}: expected a share of 0 or more, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
