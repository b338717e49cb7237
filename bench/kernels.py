"""Measure every op: correctness gate, header, ceiling, table, step floor, one JSON line.

    python -m pagedraft.bench.kernels [--model 8b] [--dtype bf16] [--op linear] [--steps decode1]
    python -m pagedraft.bench.kernels --base HEAD [--op linear]   against another git revision
    python -m pagedraft.bench.kernels --sweep attention [--select short] [--baselines sdpa,flex]

On a CUDA device the Triton kernels at 8B shapes, on the CPU the CPU path at the demo model's. An
op whose numbers are wrong gets no time, and the exit status is 1. JSON and a roofline chart go to
bench/results/<device>/, those of some ops or steps and ratios to a base to build/bench/<device>/.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pagedraft.bench.attention_baselines import BASELINES
from pagedraft.bench.attention_cases import SELECTIONS
from pagedraft.bench.attention_sweep import sweep
from pagedraft.bench.base_ratio import compare
from pagedraft.bench.base_revision import RevisionError
from pagedraft.bench.ceiling import Ceiling, measure_ceiling
from pagedraft.bench.figures import Figure, as_json
from pagedraft.bench.gate import gate
from pagedraft.bench.layer_cases import LAYER_MAKERS, KernelCase, Maker, Tensors
from pagedraft.bench.linear_cases import linear_cases
from pagedraft.bench.report import ROOT, header, print_header, results_folder, write_json
from pagedraft.bench.roofline import save_roofline
from pagedraft.bench.shapes import DTYPES, MODELS, STEPS, ModelShape
from pagedraft.bench.table import print_table
from pagedraft.bench.timing import Timing, measure, rotating_copies
from pagedraft.bench.token_cases import TOKEN_MAKERS
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.dispatch import OPS, implementation

MAKERS = {**LAYER_MAKERS, "linear": linear_cases, **TOKEN_MAKERS}
# How often each part runs in a decode step of one layer, and once a step.
LAYER_PARTS = ("qkv", "write_kv", "attention", "o_norm", "gate_up_act", "down_norm")
STEP_PARTS = ("norm", "head", "sample")
DEFAULT_STEPS = {"cuda": "decode1,decode8,verify1,verify8,prefill", "cpu": "decode1,verify1"}
HEADERS = ("part", "step", "us [p20 p80]", "GB/s", "TFLOP/s", "ceiling", "baseline", "us", "x")
Row = dict[str, Any]


def measure_case(case: KernelCase, device: torch.device, ceiling: Ceiling, budget: float) -> Row:
    """Gate one case, then time it and its baseline; ``problem`` says why there are no times."""
    torch.manual_seed(0)  # a case's inputs do not depend on what was measured before
    row: Row = {"op": case.op, "part": case.part, "step": case.step.name, **case.cost._asdict()}
    try:
        inputs = case.inputs()
        row["problem"] = gate(case.prepare, inputs)
        if row["problem"] is None:
            row |= _times(case, inputs, device, ceiling, budget)
    except Exception as error:
        row["problem"] = f"{type(error).__name__}: {error}"[:300]
    return row


def _times(
    case: KernelCase, inputs: Tensors, device: torch.device, ceiling: Ceiling, budget: float
) -> Row:
    """Time one case and its baseline over rotating buffers."""
    copies = rotating_copies(inputs, case.cost.bytes, device)
    timing = measure([case.prepare(copy) for copy in copies], device, budget=budget)
    floor = ceiling.floor(case.cost)
    return {
        "implementation": implementation(case.op, device, has_cpu=True),
        "time": asdict(timing),
        "text": timing.text(),
        "gb_s": case.cost.bytes / timing.median / 1e9,
        "tflop_s": case.cost.flops / timing.median / 1e12,
        "floor": floor,
        "share_of_ceiling": floor / timing.median,
        "baseline": case.baseline_name,
        **_baseline_times(case, copies, timing, device, budget),
    }


def _baseline_times(
    case: KernelCase,
    copies: Sequence[Tensors],
    timing: Timing,
    device: torch.device,
    budget: float,
) -> Row:
    """Time the baseline; one that fails leaves the op's own times alone."""
    try:
        baseline = measure([case.baseline(copy) for copy in copies], device, budget=budget)
    except Exception as error:
        return {"baseline_problem": f"{type(error).__name__}: {error}"[:300]}
    return {"baseline_time": asdict(baseline), "speedup": baseline.median / timing.median}


def _cells(row: Row) -> list[str]:
    name = row["part"] if row["part"].startswith(row["op"]) else f"{row['op']} {row['part']}"
    if row["problem"]:
        return [name, row["step"], f"WRONG: {row['problem']}", *["-"] * 6]
    return [
        name,
        row["step"],
        row["text"],
        f"{row['gb_s']:.1f}",
        f"{row['tflop_s']:.3f}",
        f"{100 * row['share_of_ceiling']:.0f} %",
        row["baseline"],
        *_baseline_cells(row),
    ]


def _baseline_cells(row: Row) -> list[str]:
    if "baseline_problem" in row:
        return [row["baseline_problem"], "-"]
    return [f"{row['baseline_time']['median'] * 1e6:.1f}", f"{row['speedup']:.2f}"]


def step_estimate(
    rows: Sequence[Row], step: str, model: ModelShape, ceiling: Ceiling
) -> Row | None:
    """Add up a whole step from its parts; None unless every part was measured.

    floor counts the same bytes and flops at the measured ceiling.
    """
    parts = {row["part"]: row for row in rows if row["step"] == step and not row["problem"]}
    wanted = [*LAYER_PARTS * model.num_layers, *STEP_PARTS]
    if not set(wanted) <= set(parts):
        return None
    cost = Cost(
        sum(parts[part]["bytes"] for part in wanted), sum(parts[part]["flops"] for part in wanted)
    )
    floor = ceiling.floor(cost)
    seconds = sum(parts[part]["time"]["median"] for part in wanted)
    return {"step": step, "seconds": seconds, "floor": floor, "share": floor / seconds}


def _step_text(step: Row) -> str:
    return (
        f"step {step['step']}: {step['seconds'] * 1e3:.2f} ms as a sum of parts, "
        f"floor {step['floor'] * 1e3:.2f} ms, {100 * step['share']:.0f} % of the ceiling"
    )


def figures_of(prefix: str, rows: Sequence[Row], steps: Sequence[Row]) -> list[Figure]:
    """Time and share of the ceiling of every row that has a time, and of every summed step."""
    figures = []
    for row in rows:
        if row["problem"]:
            continue
        name = f"{prefix}/{row['step']}/{row['op']} {row['part']}"
        median, low, high = (row["time"][key] * 1e6 for key in ("median", "p20", "p80"))
        floor = 100 * row["floor"] * 1e6  # so that floor / us is a percentage
        shares = floor / median, "%", "higher", "measured", floor / high, floor / low
        figures.append(Figure(f"{name}/us", median, "us", "lower", "measured", low, high))
        figures.append(Figure(f"{name}/ceiling", *shares))
    for step in steps:
        name, us = f"{prefix}/{step['step']}/sum of parts", step["seconds"] * 1e6
        figures.append(Figure(f"{name}/us", us, "us", "lower", "predicted"))
        figures.append(Figure(f"{name}/ceiling", 100 * step["share"], "%", "higher", "predicted"))
    return figures


def result_file(options: argparse.Namespace, device: torch.device) -> Path:
    """Where the JSON goes: results hold whole tables only, unless ``--out`` says otherwise."""
    folder = results_folder(device)
    whole = (set(OPS), set(DEFAULT_STEPS[device.type].split(",")))
    if not (set(options.op.split(",")) >= whole[0] and set(options.steps.split(",")) >= whole[1]):
        folder = ROOT / "build" / "bench" / folder.name
    return Path(options.out or folder) / f"kernels-{options.model}-{options.dtype}.json"


def run(options: argparse.Namespace) -> int:
    """Measure what ``options`` name, print and save it; return the exit status."""
    device, model = torch.device(options.device), MODELS[options.model]
    facts = header(device) | {"model": model.name, "dtype": options.dtype}
    print_header(facts)
    ceiling = measure_ceiling(device, torch.float32 if device.type == "cpu" else DTYPES["bf16"])
    print(f" ceiling  {ceiling.text()}")
    path = result_file(options, device)
    rows: list[Row] = []
    steps: list[Row] = []
    document: Row = {"bench": "kernels", **facts, "ceiling": asdict(ceiling)}
    for name in options.steps.split(","):
        make = Maker(model, STEPS[name], DTYPES[options.dtype], device)
        found = [
            measure_case(case, device, ceiling, options.budget)
            for op in options.op.split(",")
            for case in MAKERS[op](make)
        ]
        rows += found
        print_table(f"{model.name} {options.dtype} {name}", HEADERS, [_cells(row) for row in found])
        _print_doubts(found, device)
        if step := step_estimate(found, name, model, ceiling):
            steps.append(step)
            print(_step_text(step))
        figures = as_json(figures_of(f"kernels/{model.name}-{options.dtype}", rows, steps))
        # After every step: what a time limit cuts off later is not lost.
        document |= {"rows": rows, "steps": steps, "figures": figures}
        write_json(path, document)
    print(save_roofline(document, path))
    num_wrong = sum(bool(row["problem"]) for row in rows)
    summary = {"bench": "kernels", **facts, "num_rows": len(rows), "num_wrong": num_wrong}
    print(json.dumps({**summary, "steps": steps, "figures": document["figures"]}))
    return 1 if num_wrong else 0


def _print_doubts(rows: Sequence[Row], device: torch.device) -> None:
    """Say which times are not what the table's other times are."""
    timed = [row for row in rows if not row["problem"]]
    above = [row["part"] for row in timed if row["share_of_ceiling"] > 1]
    eager = [row["part"] for row in timed if row["time"]["method"] == "events"]
    if above:
        why = "partly cached, or others had the memory while the ceiling was measured"
        print(f"above the measured ceiling ({why}): {', '.join(above)}")
    if eager and device.type == "cuda":
        print(f"launched one by one, as no CUDA graph takes it: {', '.join(eager)}")


def _parser() -> argparse.ArgumentParser:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        prog="python -m pagedraft.bench.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default=device, choices=("cuda", "cpu"))
    parser.add_argument("--model", default=None, choices=tuple(MODELS))
    parser.add_argument("--dtype", default="bf16", choices=tuple(DTYPES))
    parser.add_argument("--op", default=",".join(OPS), help="comma-separated ops")
    parser.add_argument("--steps", default=None, help=f"comma-separated, of {list(STEPS)}")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds a measurement")
    parser.add_argument("--out", default=None, help="folder for JSON and chart")
    group = parser.add_argument_group("base", "ratios to another git revision, instead of ceilings")
    group.add_argument("--base", default=None, metavar="REV", help="what to compare this tree with")
    group.add_argument("--pairs", type=int, default=3, help="pairs of processes")
    group.add_argument("--rounds", type=int, default=3, help="turns of both sides in each pair")
    group = parser.add_argument_group("sweep", "one op over many shapes, instead of the step table")
    group.add_argument("--sweep", default=None, choices=("attention",))
    group.add_argument("--select", default="full", choices=tuple(SELECTIONS))
    group.add_argument("--baselines", default=",".join(BASELINES), help="comma-separated")
    group.add_argument(
        "--limit", type=float, default=1e9, help="seconds; later points are left out"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.base and options.sweep:
        parser.error("--base: compares the step table, not --sweep")
    if min(options.pairs, options.rounds) < 1 or options.pairs * options.rounds < 3:
        turns = f"{options.pairs} pairs of {options.rounds} rounds"
        parser.error(f"--rounds: expected at least 3 in all pairs, got {turns}")
    if options.sweep:
        return sweep(options)
    options.model = options.model or ("8b" if options.device == "cuda" else "135m")
    options.steps = options.steps or DEFAULT_STEPS[options.device]
    for flag, known in (("op", OPS), ("steps", STEPS)):
        if unknown := sorted(set(getattr(options, flag).split(",")) - set(known)):
            parser.error(f"--{flag}: unknown {unknown}, expected some of {list(known)}")
    try:
        return compare(options) if options.base else run(options)
    except RevisionError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
