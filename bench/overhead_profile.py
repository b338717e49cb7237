"""Which functions a step's host time goes to: cProfile's numbers, by the function's own time."""

from __future__ import annotations

import cProfile
import pstats
from pathlib import Path

from pagedraft.bench.overhead_bed import Bed, Case, set_up_is_no_garbage
from pagedraft.bench.report import ROOT
from pagedraft.bench.table import print_table

NUM_FUNCTIONS = 25


def print_profile(case: Case, num_steps: int) -> None:
    """Print the functions of a case that take the longest.

    The profiler slows down every call: the order says more than the numbers.
    """
    bed = Bed(case, num_steps)
    profile = cProfile.Profile()
    with set_up_is_no_garbage():
        for _ in range(num_steps):
            bed.prepare()
            profile.enable()
            bed.step()
            profile.disable()
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    ordered = sorted(stats.items(), key=lambda item: -item[1][2])[:NUM_FUNCTIONS]
    rows = [
        [
            f"{own / num_steps * 1e6:.0f}",
            f"{whole / num_steps * 1e6:.0f}",
            f"{calls / num_steps:.1f}",
            _where(*place),
        ]
        for place, (_, calls, own, whole, _) in ordered
    ]
    headers = ["own us", "with callees", "calls", "function"]
    print_table(f"{case.name}: a step under the profiler", headers, rows)


def _where(path: str, line: int, name: str) -> str:
    """A function by its file within the project, or by its name alone."""
    if path == "~":
        return name
    parents = Path(path)
    if parents.is_relative_to(ROOT) and ".venv" not in parents.parts:
        return f"{parents.relative_to(ROOT)}:{line} {name}"
    return f"{parents.name}:{line} {name}"
