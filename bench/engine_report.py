"""What the engine bench prints and writes of what it found."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pagedraft.bench import engine_cases, engine_ttft, engine_weights
from pagedraft.bench import figures as bench_figures
from pagedraft.bench.engine_cell import HEADERS, Cell
from pagedraft.bench.engine_charts import longest
from pagedraft.bench.engine_steps import StepTimes
from pagedraft.bench.figures import Figure
from pagedraft.bench.synthetic import SYNTHETIC
from pagedraft.bench.table import print_table

OPENMP_NAMES = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_")
THREAD_LINES = ("ATen/Parallel", "at::get_num", "OpenMP", "omp_get", "Intel(R) MKL-DNN", "mkl_get")


@dataclass
class Found:
    """What was measured, and what was not, a line each.

    times: of steps, by batch. peers: facts of those that ran, by name.
    """

    cases: list[engine_cases.CaseResult] = field(default_factory=list)
    first: list[engine_ttft.FirstTokens] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    times: dict[int, StepTimes] = field(default_factory=dict)
    weights: list[engine_weights.WeightsRow] = field(default_factory=list)
    peers: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)

    def figures(self) -> list[Figure]:
        """Of all parts."""
        found = engine_cases.figures(self.cases) + engine_ttft.figures(self.first)
        found += [figure for cell in self.cells for figure in cell.figures()]
        for batch, times in self.times.items():
            plain = times.at(batch)
            for size, seconds in times.seconds_by_tokens.items():
                where = f"engine/step, batch={batch}, {size // batch} tokens a row"
                found.append(Figure(f"{where}/ms", 1e3 * seconds, "ms", "lower", "measured"))
                if size > batch:
                    ratio = Figure(f"{where}/over one", seconds / plain, "x", "lower", "measured")
                    found.append(ratio)
        return found + engine_weights.figures(self.weights)


def thread_facts() -> dict[str, Any]:
    """What decides how fast a CPU run is: threads, cores, OpenMP's settings and build."""
    lines = [line.strip() for line in torch.__config__.parallel_info().splitlines()]
    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cores": len(os.sched_getaffinity(0)),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(OPENMP_NAMES)
        },
        "openmp": [line for line in lines if line.startswith(THREAD_LINES)],
    }


def document(
    found: Found, options: argparse.Namespace, facts: dict[str, Any], eos_ids: Sequence[int]
) -> dict[str, Any]:
    """Everything as JSON."""
    settings = {
        name: str(value) if hasattr(value, "__fspath__") else value
        for name, value in vars(options).items()
        if name != "out"
    }
    return {
        "bench": "engine",
        **facts,
        "model": options.model,
        "settings": settings,
        "threading": thread_facts(),
        "peers": found.peers,
        "cases": engine_cases.as_rows(found.cases, eos_ids),
        "ttft": engine_ttft.as_rows(found.first),
        "sweep": [cell.as_json() for cell in found.cells],
        "step_seconds": {
            str(batch): {str(size): value for size, value in times.seconds_by_tokens.items()}
            for batch, times in found.times.items()
        },
        "weights": engine_weights.as_rows(found.weights),
        "left_out": found.left_out,
        "not_judged": found.unjudged,
        "figures": bench_figures.as_json(found.figures()),
    }


def show(found: Found, eos_ids: Sequence[int]) -> None:
    """Print the tables, the aims, and what was left out."""
    if found.cases:
        engine_cases.show(found.cases, eos_ids)
    if found.first:
        engine_ttft.show(found.first)
    _show_sweep(found)
    if found.weights:
        engine_weights.show(found.weights)
    _show_aims(found)
    for line in found.left_out:
        print(f"left out  {line}")


def _show_sweep(found: Found) -> None:
    if found.times:
        rows = []
        for batch, times in found.times.items():
            for size, seconds in times.seconds_by_tokens.items():
                ratio = seconds / times.at(batch)
                cells = [str(batch), str(size // batch), f"{1e3 * seconds:.2f}"]
                rows.append([*cells, f"{ratio:.2f}x"])
        headers = ["batch", "tokens a row", "step ms", "over the smallest"]
        print_table("A decode step, by tokens a row (drafts all wrong)", headers, rows)
    if not found.cells:
        return
    title = "Batch, drafter and drafts a row; speed-up in steps with all rows over k=0"
    print_table(title, HEADERS, [cell.table_row() for cell in found.cells])
    if any(cell.alpha is not None for cell in found.cells):
        print(f"SYNTHETIC: {SYNTHETIC}")
    rows = []
    for drafter in dict.fromkeys(cell.drafter for cell in found.cells):
        for cell in longest(found.cells, drafter):
            shares = " ".join(f"{100 * share:.0f}" for share in cell.acceptance)
            rows.append([drafter, str(cell.batch), str(cell.k), shares])
    if rows:
        headers = ["drafter", "batch", "k", "kept of the drafts at each position, %"]
        print_table("Acceptance by position", headers, rows)


def _show_aims(found: Found) -> None:
    judged = [figure for figure in found.figures() if figure.target is not None]
    print()
    for figure in judged:
        sign = ">=" if figure.better == "higher" else "<="
        verdict = "pass" if figure.is_met else "FAIL"
        text = f"{figure.value:.2f} {figure.unit} ({sign} {figure.target:g})"
        print(f"{verdict}  {figure.name}: {text}")
    for line in found.unjudged:
        print(f"not judged  {line}")
