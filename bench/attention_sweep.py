"""Paged attention over contexts, groups, head dims, block sizes and cache dtypes.

    python -m pagedraft.bench.kernels --sweep attention [--select short] [--baselines sdpa,flex]

On a CUDA device each point is gated, timed and set against its floor at the measured ceiling, its
baselines and the targets. Without one nothing is measured: bytes, flops and
floors on a named GPU, as JSON under bench/results/modelled/.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pagedraft.bench.attention_baselines import BASELINES, TITLES
from pagedraft.bench.attention_cases import (
    CACHE_DTYPES,
    SELECTIONS,
    TREE_UNITS,
    AttentionPoint,
    launched_split,
    num_units,
    point_cost,
    point_inputs,
    prepare_attention,
    scratch_bytes,
)
from pagedraft.bench.attention_figures import figures_of
from pagedraft.bench.attention_targets import Verdict, verdicts
from pagedraft.bench.ceiling import Ceiling, measure_ceiling
from pagedraft.bench.figure_verify import save_beside
from pagedraft.bench.gate import Tensors, gate
from pagedraft.bench.report import RESULTS, header, print_header, results_folder, write_json
from pagedraft.bench.shapes import DTYPES
from pagedraft.bench.table import print_table
from pagedraft.bench.timing import measure, rotating_copies
from pagedraft.kernels.paged_attention_launch import wide_tiles

Row = dict[str, Any]
MODEL_HEADERS = ("point", "KV MB", "all MB", "GFLOP", "flop/byte", "floor us", "bound by")
TIME_HEADERS = ("point", "us [p20 p80]", "floor us", "GB/s", "TFLOP/s", "ceiling")
# How far a baseline may be from our output, as a share of its largest value, before its time is
# withheld: 16-bit sums in another order stay well below, a wrong mask or a wrong page does not.
BASELINE_TOLERANCE = 0.05


@dataclass(frozen=True)
class NamedGpu:
    """A GPU that floors are stated for where none is at hand.

    is_wide: what wide_tiles is expected to find there; not seen yet.
    """

    name: str
    ceiling: Ceiling
    source: str
    is_wide: bool


# Rates that the design counts with, not from a run of this project.
H200 = NamedGpu(
    name="NVIDIA H200",
    ceiling=Ceiling(copy_rate=4.3e12, matmul_rate=790e12),
    source="copy and bf16 matmul rates measured on an H200 elsewhere",
    is_wide=True,
)


def price(point: AttentionPoint, ceiling: Ceiling, is_wide: bool) -> Row:
    """Return what a point must move and compute, and its floor in seconds at ``ceiling``.

    is_wide: whether the launcher may use tiles of 64 rows (wide_tiles).
    launched_unit: keys of a partial result as launched, 0 if there are none; scratch: bytes of
    partials as launched, and if they are stored at a level of the tree.
    """
    cost = point_cost(point)
    itemsize = DTYPES[point.dtype].itemsize
    q_bytes = point.num_tokens * point.num_heads * point.head_dim * itemsize
    split = launched_split(point, is_wide)
    counts = {name: num_units(point, unit) for name, unit in TREE_UNITS.items()}
    counts["launched"] = split.num_units
    is_memory = cost.bytes / ceiling.byte_rate >= cost.flops / ceiling.matmul_rate
    return {
        "point": point.name,
        **{"step": point.step, "rows": point.num_rows, "context": point.context},
        "axes": point.axes,
        **cost._asdict(),
        "launched_unit": split.unit,
        "kv_bytes": cost.bytes - 2 * q_bytes,
        "scratch": {name: scratch_bytes(point, count) for name, count in counts.items()},
        "flops_per_byte": cost.flops / cost.bytes,
        "floor": ceiling.floor(cost),
        "bound": "bytes" if is_memory else "flops",
    }


def modelled(select: str) -> dict[str, Any]:
    """Return the document of a machine without a GPU: no time in it."""
    document = {
        **{"bench": "attention", "select": select, "measured": False, "device": H200.name},
        "ceiling": {**asdict(H200.ceiling), "source": H200.source},
        "rows": [price(point, H200.ceiling, H200.is_wide) for point in SELECTIONS[select]],
    }
    return document | {"figures": figures_of(document)}


def measure_point(
    point: AttentionPoint,
    device: torch.device,
    ceiling: Ceiling,
    baselines: Sequence[str],
    budget: float,
) -> Row:
    """Price, gate and time one point; ``problem`` says why there are no times."""
    row = _priced_on(point, ceiling, device)
    try:
        inputs, prepare = point_inputs(point, device), prepare_attention(point)
        row["problem"] = gate(prepare, inputs)
        if row["problem"] is None:
            copies = rotating_copies(inputs, row["bytes"], device)
            timing = measure([prepare(copy) for copy in copies], device, budget=budget)
            row |= {"time": asdict(timing), "text": timing.text()}
            row["gb_s"] = row["bytes"] / timing.median / 1e9
            row["tflop_s"] = row["flops"] / timing.median / 1e12
            row["share_of_ceiling"] = row["floor"] / timing.median
            out = prepare(inputs)()
            row["baselines"] = {
                name: measure_baseline(name, point, copies, out, device, budget)
                for name in baselines
            }
    except Exception as error:
        row["problem"] = _reason(error)
    return row


def _priced_on(point: AttentionPoint, ceiling: Ceiling, device: torch.device) -> Row:
    is_wide = wide_tiles(device, DTYPES[point.dtype], point.head_dim)
    return price(point, ceiling, is_wide) | {"problem": None}


def _why_not(point: AttentionPoint, device: torch.device, seconds_left: float) -> str | None:
    """Return why a point is left out, None if it is not."""
    if seconds_left <= 0:
        return "out of time"
    is_fp8 = CACHE_DTYPES[point.cache] == torch.float8_e4m3fn
    if is_fp8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return "fp8 needs sm_89 or later"
    return None


def measure_baseline(
    name: str,
    point: AttentionPoint,
    copies: Sequence[Tensors],
    out_THD: torch.Tensor,
    device: torch.device,
    budget: float,
) -> Row:
    """Return a baseline's time, or why it has none: that never touches the point's own row."""
    try:
        runs = [BASELINES[name](point, copy) for copy in copies]
        theirs_THD = torch.cat([part.reshape(-1, *out_THD.shape[1:]) for part in runs[0]()])
        error = (theirs_THD.float() - out_THD.float()).abs().max() / out_THD.float().abs().max()
        if not float(error) <= BASELINE_TOLERANCE:
            return {"problem": f"WRONG: differs from our output by {float(error):.1%}"}
        return {"time": asdict(measure(runs, device, budget=budget))}
    except ImportError:
        return {"problem": "not installed"}
    except Exception as error:
        return {"problem": _reason(error)}


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def _model_cells(row: Row) -> list[str]:
    return [
        row["point"],
        f"{row['kv_bytes'] / 1e6:.1f}",
        f"{row['bytes'] / 1e6:.1f}",
        f"{row['flops'] / 1e9:.2f}",
        f"{row['flops_per_byte']:.1f}",
        f"{row['floor'] * 1e6:.1f}",
        row["bound"],
    ]


def _time_cells(row: Row, baselines: Sequence[str]) -> list[str]:
    if "time" not in row:
        why = f"not run: {row['left_out']}" if "left_out" in row else f"WRONG: {row['problem']}"
        return [row["point"], why, *["-"] * (len(TIME_HEADERS) - 2 + len(baselines))]
    return [
        row["point"],
        row["text"],
        f"{row['floor'] * 1e6:.1f}",
        f"{row['gb_s']:.0f}",
        f"{row['tflop_s']:.1f}",
        f"{100 * row['share_of_ceiling']:.0f} %",
        *(_baseline_cell(row, name) for name in baselines),
    ]


def _baseline_cell(row: Row, name: str) -> str:
    found = row["baselines"][name]
    if "time" not in found:
        return "-"
    seconds = found["time"]["median"]
    return f"{seconds * 1e6:.1f} ({seconds / row['time']['median']:.2f}x)"


def _print_reasons(rows: Sequence[Row], baselines: Sequence[str]) -> None:
    for name in baselines:
        points: dict[str, list[str]] = {}
        for row in rows:
            if problem := row.get("baselines", {}).get(name, {}).get("problem"):
                points.setdefault(problem, []).append(row["point"])
        for problem, where in points.items():
            shown = "every point" if len(where) == len(rows) else ", ".join(where)
            print(f"no time for {TITLES[name]} at {shown}: {problem}")


def run_modelled(options: argparse.Namespace) -> int:
    """Print and save what can be said without a GPU."""
    document = modelled(options.select)
    print(f"no CUDA device: nothing measured; floors on an {H200.name}: {H200.ceiling.text()},")
    print(H200.source)
    cells = [_model_cells(row) for row in document["rows"]]
    print_table(f"paged attention, modelled for an {H200.name}", MODEL_HEADERS, cells)
    path = Path(options.out or RESULTS / "modelled") / f"attention-{options.select}.json"
    write_json(path, document)
    print(save_beside(document, path))
    summary = {name: document[name] for name in ("bench", "select", "measured", "device")}
    print(json.dumps({**summary, "note": "nothing measured", "num_rows": len(cells)}))
    return 0


def run_measured(options: argparse.Namespace, device: torch.device) -> int:
    """Measure on ``device``, print and save after every point, judge; 1 if numbers are wrong."""
    start = time.monotonic()
    torch.manual_seed(0)
    facts = {"bench": "attention", "select": options.select, "measured": True, **header(device)}
    print_header(facts)
    dtype = torch.float32 if device.type == "cpu" else DTYPES["bf16"]
    ceiling = measure_ceiling(device, dtype)
    print(f" ceiling  {ceiling.text()}")
    baselines = [name for name in options.baselines.split(",") if name]
    document = {**facts, "ceiling": {**asdict(ceiling), "source": "measured in this run"}}
    path = Path(options.out or results_folder(device)) / f"attention-{options.select}.json"
    rows: list[Row] = []
    for point in SELECTIONS[options.select]:
        why = _why_not(point, device, start + options.limit - time.monotonic())
        if why:
            rows.append(_priced_on(point, ceiling, device) | {"left_out": why})
        else:
            rows.append(measure_point(point, device, ceiling, baselines, options.budget))
        document["figures"] = figures_of(document | {"rows": rows})
        write_json(path, document | {"rows": rows})
    print(save_beside(document | {"rows": rows}, path))
    headers = (*TIME_HEADERS, *(TITLES[name] for name in baselines))
    title = f"paged attention, {options.select}, measured on {facts['device']}"
    print_table(title, headers, [_time_cells(row, baselines) for row in rows])
    _print_reasons(rows, baselines)
    if options.select == "trial":
        print("a trial of the script, not a benchmark")
    judged = verdicts({**document, "rows": rows})
    print("\n".join(verdict.text() for verdict in judged))
    print(json.dumps({**_counts(rows, judged), **facts}))
    return 1 if any(row["problem"] for row in rows) else 0


def _counts(rows: Sequence[Row], judged: Sequence[Verdict]) -> Row:
    texts = {word: [v.text() for v in judged if v.word == word] for word in ("MISSED", "OPEN")}
    return {
        "targets_met": sum(verdict.is_met for verdict in judged),
        **{"targets_missed": texts["MISSED"], "targets_open": texts["OPEN"]},
        "num_rows": len(rows),
        "num_wrong": sum(bool(row["problem"]) for row in rows),
        "num_left_out": sum("left_out" in row for row in rows),
    }


def sweep(options: argparse.Namespace) -> int:
    """Run what ``options`` name; a CPU is measured only by the trial, which is no benchmark."""
    device = torch.device(options.device)
    unknown = sorted(set(filter(None, options.baselines.split(","))) - set(BASELINES))
    if unknown:
        raise ValueError(f"baselines: unknown {unknown}, expected some of {list(BASELINES)}")
    if device.type == "cuda" or options.select == "trial":
        return run_measured(options, device)
    return run_modelled(options)
