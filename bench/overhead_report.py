"""What the overhead bench found: results by case, the table, figures and aims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np

from pagedraft.bench.figures import Figure, from_samples
from pagedraft.bench.overhead_bed import Case
from pagedraft.bench.overhead_parts import BEHIND, COMMIT, DRAW, HOST_PARTS, PLAN
from pagedraft.bench.table import print_table

# What the project aims at, in microseconds a step: all host work, and plan and commit together.
HOST_LIMITS = {64: 500.0, 256: 2000.0}
PLAN_COMMIT_LIMITS = {64: 100.0, 256: 400.0}
CONTEXT_LIMIT = 1.15
SHOWN = (*HOST_PARTS, BEHIND, DRAW)


@dataclass
class Result:
    """One case. Lists are microseconds, one entry a step.

    host, wall: all of a step but the device's work and what runs behind it, in CPU and wall time,
        of the steps without probes of the host's parts. total: host and what runs behind the
        device, in CPU time, of the same steps.
    loop: CPU time of LOOP beside these. parts: CPU time by part, of the steps with probes.
    """

    case: Case
    host: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    loop: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    accepted: float | None = None
    num_ended: int = 0

    def part(self, *names: str) -> float:
        """Median of the steps' sums over these parts."""
        return median(map(sum, zip(*[self.parts[name] for name in names], strict=True)))

    def quiet(self, fastest: float) -> float:
        """Median of the host times, each scaled by its own loop to the ``fastest`` one's speed."""
        pairs = zip(self.host, self.loop, strict=True)
        return median(host * fastest / loop for host, loop in pairs)

    @property
    def verdict(self) -> str:
        """Whether the limits for so many rows are kept; "-" where there are none."""
        rows = self.case.rows
        if rows not in HOST_LIMITS:
            return "-"
        misses = []
        if median(self.host) > HOST_LIMITS[rows]:
            misses.append(f"host > {HOST_LIMITS[rows]:.0f}")
        if self.part(PLAN, COMMIT) > PLAN_COMMIT_LIMITS[rows]:
            misses.append(f"plan+commit > {PLAN_COMMIT_LIMITS[rows]:.0f}")
        return "fail: " + ", ".join(misses) if misses else "pass"

    def document(self) -> dict[str, Any]:
        """What goes to the JSON: medians and percentiles."""
        return {
            **asdict(self.case),
            "host_us": _percentiles(self.host),
            "wall_us": _percentiles(self.wall),
            "total_us": _percentiles(self.total),
            "loop_us": _percentiles(self.loop),
            "parts_us": {name: _percentiles(values) for name, values in self.parts.items()},
            "plan_commit_us": round(self.part(PLAN, COMMIT), 2),
            "accepted": self.accepted,
            "ended": self.num_ended,
            "verdict": self.verdict,
        }


def cells(result: Result, fastest: float) -> list[str]:
    """One line of the table. fastest: the shortest loop of the run, in microseconds."""
    case = result.case
    low, middle, high = _percentiles(result.host)
    return [
        str(case.rows),
        f"{case.context}{'' if case.answer is None else ' turnover'}",
        str(case.k),
        f"{middle:.0f} [{low:.0f} {high:.0f}]",
        f"{median(result.wall):.0f}",
        f"{median(result.loop):.0f}",
        f"{median(result.total):.0f}",
        *[f"{result.part(name):.0f}" for name in SHOWN],
        f"{result.part(PLAN, COMMIT):.0f}",
        f"{result.quiet(fastest):.0f}",
        "-" if result.accepted is None else f"{result.accepted:.2f}",
        result.verdict,
    ]


def context_ratios(results: Sequence[Result]) -> dict[str, float]:
    """Host time at the longest context over that at the shortest, by rows and k."""
    steady = [result for result in results if result.case.answer is None]
    ratios = {}
    for shape in dict.fromkeys((result.case.rows, result.case.k) for result in steady):
        same = [result for result in steady if (result.case.rows, result.case.k) == shape]
        same.sort(key=lambda result: result.case.context)
        if len(same) > 1:
            ratio = median(same[-1].host) / median(same[0].host)
            ratios[f"{shape[0]} rows, k={shape[1]}"] = ratio
    return ratios


def show(results: Sequence[Result]) -> None:
    """Print the table, the ratios of contexts, and what was aimed at."""
    headers = ["rows", "context", "k", "host", "wall", "loop", "total", *SHOWN, "plan+commit"]
    headers += ["quiet", "accepted", "verdict"]
    fastest = min(min(result.loop) for result in results)
    title = "Host time of a step, us, median [p20 p80]"
    print_table(title, headers, [cells(result, fastest) for result in results])
    ratios = context_ratios(results)
    rows = [
        [name, f"{ratio:.2f}", "pass" if ratio <= CONTEXT_LIMIT else "fail"]
        for name, ratio in ratios.items()
    ]
    if rows:
        print_table("Longest context over shortest", ["case", "ratio", "verdict"], rows)
    print(
        f"\naims: host <= {HOST_LIMITS[64]:.0f} us at 64 rows, {HOST_LIMITS[256]:.0f} at 256; plan "
        f"and commit together <= {PLAN_COMMIT_LIMITS[64]:.0f} and {PLAN_COMMIT_LIMITS[256]:.0f}; "
        f"contexts within {CONTEXT_LIMIT - 1:.0%}\n"
        "host: what the device waits for; behind: what runs while it works, not counted in host\n"
        "(drafters that learn, callbacks, observers); total: both\n"
        "rest: statistics, learning from drafts, publishing, ends"
    )


def _percentiles(values: Sequence[float]) -> list[float]:
    """The 20th, 50th and 80th."""
    return [round(float(value), 2) for value in np.percentile(values, (20, 50, 80))]


def figures(results: Sequence[Result]) -> list[Figure]:
    """Host time, plan and commit, and what runs behind the device, by case; ratios of contexts."""
    found = []
    for result in results:
        case = result.case
        turnover = "" if case.answer is None else ", turnover"
        name = f"overhead/rows={case.rows}, context={case.context}, k={case.k}{turnover}"
        is_aim = case.answer is None
        limit = HOST_LIMITS.get(case.rows) if is_aim else None
        found.append(from_samples(f"{name}/host", result.host, "us", "lower", target=limit))
        pairs = zip(result.parts[PLAN], result.parts[COMMIT], strict=True)
        plan_commit = [sum(pair) for pair in pairs]
        limit = PLAN_COMMIT_LIMITS.get(case.rows) if is_aim else None
        found.append(
            from_samples(f"{name}/plan and commit", plan_commit, "us", "lower", target=limit)
        )
        found.append(from_samples(f"{name}/behind", result.parts[BEHIND], "us", "lower"))
    for name, ratio in context_ratios(results).items():
        place = f"overhead/{name}/longest context over shortest"
        found.append(Figure(place, ratio, "x", "lower", "measured", target=CONTEXT_LIMIT))
    return found
