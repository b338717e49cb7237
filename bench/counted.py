"""The figures that are the same in every run, and so can be held: what CI does not let get worse.

    python -m pagedraft.bench.counted [--parts tokens,host]    count, print, save JSON
    python -m pagedraft.bench.counted --check                  fail where one is worse or gone
    python -m pagedraft.bench.counted --save                   write the baseline anew

Parts: launches of a forward pass by kernel, tokens a pass with synthetic drafts, KV slots without a
token, and what a step asks of the host: calls and operators. The baseline is
``baseline/counted.json``; launches are held by the forward inspector's (``make static-baseline``).
Parts that depend on versions of Python, torch or numpy are compared where these are the baseline's.

Calls may change by 1 % or by two a step: a helper that was taken out of a function, 50 ns, needs no
new baseline; one more call for each of 64 rows, or for each token of a context, does. Everything
else may not get worse at all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # interpreted launches cannot be recorded

import numpy as np  # noqa: E402
import torch  # noqa: E402

from pagedraft.bench import counted_launches  # noqa: E402
from pagedraft.bench.changes import Change, Rule, compare_figures, is_failure, show  # noqa: E402
from pagedraft.bench.compare import read_bench  # noqa: E402
from pagedraft.bench.counted_host import host_figures  # noqa: E402
from pagedraft.bench.counted_tokens import token_figures  # noqa: E402
from pagedraft.bench.figures import Figure, as_json, read_figures  # noqa: E402
from pagedraft.bench.kv_waste import SIGMAS, simulate  # noqa: E402
from pagedraft.bench.report import (  # noqa: E402
    ROOT,
    header,
    print_header,
    results_folder,
    write_json,
)
from pagedraft.bench.table import print_table  # noqa: E402

BASELINE = ROOT / "bench" / "baseline" / "counted.json"
CALLS = Rule(counted=0.01, slack=2.0)
CPU = torch.device("cpu")
ADVICE = (
    "If this is meant, run `python -m pagedraft.bench.counted --save` (launches: `make "
    "static-baseline`) and commit the file with a line in CHANGELOG.md under Performance."
)


def waste_figures() -> list[Figure]:
    """Share of owned KV slots that hold no token, for 16 rows over 100 steps."""
    with torch.inference_mode():
        found = [simulate(size, sigma, 16, 100) for sigma in SIGMAS for size in (16, 64)]
    return [
        Figure(
            f"kv_waste/blocks of {waste.block_size}, lengths of sigma {waste.sigma:g}/share",
            waste.kv_waste,
            "of owned slots",
            "lower",
            "counted",
        )
        for waste in found
    ]


PARTS: dict[str, Callable[[], list[Figure]]] = {
    "launches": counted_launches.launch_figures,
    "tokens": token_figures,
    "kv_waste": waste_figures,
    "host": host_figures,
}
# Whose versions, but for the last number, have a say in a part.
DEPENDS = {"launches": (), "tokens": (), "kv_waste": ("numpy",)}
DEPENDS["host"] = ("python", "torch", "numpy")


def versions() -> dict[str, str]:
    """The first two numbers of the versions that counts may depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found["numpy"] = np.__version__
    return {name: ".".join(text.split(".")[:2]) for name, text in found.items()}


def read_baseline() -> tuple[list[Figure], dict[str, str]]:
    """The figures to hold, and the versions they were counted with; ValueError names the file."""
    document = read_bench(BASELINE)
    figures = [*counted_launches.figures_of(counted_launches.baseline()), *read_figures(document)]
    return figures, document["versions"]


def changes_since(base: Sequence[Figure], fresh: Sequence[Figure]) -> list[Change]:
    """Compare counts with those of the baseline."""
    changes = []
    for is_call, rule in ((False, Rule()), (True, CALLS)):
        sides = ([f for f in side if (f.unit == "calls") is is_call] for side in (base, fresh))
        changes += compare_figures(*sides, rule)
    return changes


def check(figures: Sequence[Figure], parts: Sequence[str]) -> tuple[list[Change], list[str]]:
    """Compare with the baseline; return the changes and why parts are left out.

    ValueError where nothing is left to compare, or the baseline cannot be read.
    """
    base, known = read_baseline()
    here, left_out, held = versions(), [], []
    for part in parts:
        differ = [name for name in DEPENDS[part] if known.get(name) != here[name]]
        if differ:
            was, now = (", ".join(f"{n} {side.get(n)}" for n in differ) for side in (known, here))
            left_out.append(f"{part}: the baseline is of {was}, this is {now}")
        else:
            held.append(part)
    if not held:
        raise ValueError(f"nothing to compare: {'; '.join(left_out)}")
    sides = ([f for f in side if f.name.split("/")[0] in held] for side in (base, figures))
    return changes_since(*sides), left_out


def _show_figures(figures: Sequence[Figure]) -> None:
    """Print all figures but those of single kernels, which would fill pages."""
    rows = [
        [figure.name, f"{figure.value:.6g}", figure.unit, figure.how]
        for figure in figures
        if figure.unit != counted_launches.UNIT or figure.name.count("/") == 2
    ]
    print_table("Counted", ["figure", "value", "unit", "how"], rows)


def _judge(figures: Sequence[Figure], parts: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """Print what differs from the baseline; return the exit status and what goes to the JSON."""
    changes, left_out = check(figures, parts)
    shown = show("against the baseline", changes)
    for line in left_out:
        print(f"not compared: {line}")
    is_worse = is_failure(changes)
    if is_worse:
        print(ADVICE)
    found = {"left_out": left_out, "changes": [change.as_json() for change in shown]}
    return int(is_worse), found


def save(figures: Sequence[Figure]) -> None:
    """Write the baseline: all but the launches, which have one of their own."""
    held = [figure for figure in figures if not figure.name.startswith("launches/")]
    write_json(BASELINE, {"bench": "counted", "versions": versions(), "figures": as_json(held)})
    print(f"written: {BASELINE}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 if worse or gone, 2 without a baseline."""
    options = _parse(arguments)
    facts = {"bench": "counted", **header(CPU), "versions": versions()}
    print_header(facts)
    figures = [figure for part in options.parts for figure in PARTS[part]()]
    _show_figures(figures)
    document, status = {**facts, "figures": as_json(figures)}, 0
    if options.check:
        try:
            status, judged = _judge(figures, options.parts)
        except (ValueError, OSError) as error:
            print(f"counted: {error}", file=sys.stderr)
            return 2
        document |= judged
    if options.save:
        save(figures)
    if options.out or not (options.check or options.save):
        write_json((options.out or results_folder(CPU)) / "counted.json", document)
    print(json.dumps(document))
    return status


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pagedraft.bench.counted",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, %(default)s")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--check", action="store_true", help="compare with the baseline")
    group.add_argument("--save", action="store_true", help="write the baseline anew")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON")
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"--parts: unknown {unknown}, expected some of {list(PARTS)}")
    if options.save and set(options.parts) != set(PARTS):
        parser.error("--save: a baseline has all parts")
    return options


if __name__ == "__main__":
    sys.exit(main())
