"""The engine on random weights of real sizes, on CUDA: steps, their floors, short answers.

    python -m pagedraft.bench.real_sizes [--models 8b,1b] [--quick] [--alpha 0.7] [--limit 100]
    python -m pagedraft.bench.real_sizes --models tiny --device cpu    a trial, no benchmark

With CUDA graphs and without, batches of 1, 8 and 64 rows with 0, 4 and 8 drafts a row. Acceptance
is SYNTHETIC: drafts are the recorded output, spoiled at random, so rows with drafts say what such
an acceptance would be worth here. A step is set against its floor: the bytes and flops that it
needs at the bandwidth and matmul rate measured in this run. Weights and prompts are random.

First the gate: outputs with and without drafts, graphs and neighbours must be the tokens of plain
decoding, else the model gets no time and the exit status is 1. So it is if a kernel was compiled
after the warm-up. JSON is written after every row; rows that ``--limit`` leaves no time for say so.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from pagedraft.bench.ceiling import Ceiling, measure_ceiling
from pagedraft.bench.figures import as_json
from pagedraft.bench.overhead_bed import set_up_is_no_garbage
from pagedraft.bench.real_sizes_bed import QUICK, SETTINGS, Bed, Setting, compile_in_parallel
from pagedraft.bench.real_sizes_jobs import SECTIONS, Document, first_line, jobs_of, run_job
from pagedraft.bench.real_sizes_report import derive, figures_of, print_tables, save_charts
from pagedraft.bench.real_sizes_rows import gate_problems
from pagedraft.bench.report import RESULTS, ROOT, header, print_header, results_folder, write_json
from pagedraft.bench.shapes import DTYPES
from pagedraft.kernels.dispatch import INTERPRETED
from pagedraft.scheduler.warm_up import num_compiled_kernels

TRIAL = Ceiling(copy_rate=1e10, matmul_rate=1e11)  # made up: floors of a dry run mean nothing


def measure_model(setting: Setting, document: Document, options: Any, path: Path) -> None:
    """Fill ``document`` and write it to ``path`` after every row."""
    device = torch.device(options.device)
    deadline = time.monotonic() + options.limit
    ceiling = TRIAL if setting.is_dry else measure_ceiling(device, DTYPES[setting.dtype])
    print(" ceiling ", "not measured in a dry run" if setting.is_dry else ceiling.text())
    document["ceiling"] = asdict(ceiling) | {"measured": not setting.is_dry}
    began = time.perf_counter()
    try:
        bed = Bed(setting, device, options.alpha)
    except torch.OutOfMemoryError as error:
        document["unavailable"] = f"no room for the model: {first_line(error)}"
        return
    document["set_up"] = {
        "seconds": time.perf_counter() - began,
        **{name: _report(bed, graphs) for name, graphs in (("graphs", True), ("eager", False))},
    }
    print(f"set up in {document['set_up']['seconds']:.1f} s; {bed.reports[True]}", flush=True)
    before = num_compiled_kernels()
    document["problems"] += gate_problems(bed)
    document["compiled_after_warm_up"] = num_compiled_kernels() - before
    document["gate"] = "different tokens" if document["problems"] else "equal tokens"
    print(f"gate: {document['gate']}", *document["problems"], sep="\n  ", flush=True)
    save(document, path)
    if document["problems"]:
        return
    with set_up_is_no_garbage():
        for job in jobs_of(bed, ceiling):
            if time.monotonic() > deadline:
                document[job.section].append(job.without_times(left_out="out of time"))
            else:
                run_job(job, document)
                print(f"{job.section}: {job.name}", file=sys.stderr, flush=True)
            save(document, path)


def _report(bed: Bed, graphs: bool) -> dict[str, Any]:
    report = asdict(bed.reports[graphs])
    return report | {"failed_graphs": [str(shape) for shape in bed.reports[graphs].failed_graphs]}


def save(document: Document, path: Path) -> None:
    """Write what there is, with all that follows from it."""
    derive(document)
    document["figures"] = as_json(figures_of(document))
    write_json(path, document)


def run_model(setting: Setting, facts: dict[str, Any], options: Any, folder: Path) -> Document:
    """Measure one model, print and save it; return its document."""
    document: Document = {"bench": "real_sizes", **facts, "model": setting.name}
    document |= {"dtype": setting.dtype, "dry": setting.is_dry, "weights": "random"}
    document |= {"alpha": options.alpha, "acceptance": "SYNTHETIC", "file": setting.file}
    document |= {"answer": [setting.answer_prompt, setting.answer_new], "gate": "not run"}
    document |= {"num_prompt": setting.num_prompt, "num_new": setting.num_new}
    document |= {"problems": [], "compiled_after_warm_up": 0, **{name: [] for name in SECTIONS}}
    path = folder / setting.file
    try:
        measure_model(setting, document, options, path)
    except Exception as error:  # what the device could not set up is told, and the next model runs
        traceback.print_exc()
        document["problems"].append(f"{type(error).__name__}: {first_line(error)}")
    if compiled := document["compiled_after_warm_up"]:
        document["problems"].append(f"{compiled} kernels were compiled after the warm-up")
    save(document, path)
    if any(document[name] for name in SECTIONS):
        print_tables(document)
        print("charts:", *_charts(document, folder))
    if "unavailable" in document:
        print(f"{setting.name}: not measured, {document['unavailable']}")
    print(*document["problems"], sep="\n", end="\n" if document["problems"] else "")
    return document


def _charts(document: Document, folder: Path) -> list[str]:
    try:
        return [str(path) for path in save_charts(document, folder)]
    except ImportError:
        return ["none, matplotlib is not installed"]


def out_folder(options: Any, settings: list[Setting]) -> Path:
    """Where JSON and charts go. Raises ValueError for a trial among results."""
    folder = Path(options.out) if options.out else None
    if not any(setting.is_dry for setting in settings):
        return folder or results_folder(torch.device(options.device))
    folder = folder or ROOT / "build" / "real-sizes-dry"
    if folder.resolve().is_relative_to(RESULTS.resolve()):
        raise ValueError(f"out: a dry run is no result, expected a folder outside {RESULTS}")
    return folder


def chosen_settings(options: Any) -> list[Setting]:
    """The settings of ``--models``. Raises ValueError for what cannot run on the device."""
    names = options.models.split(",")
    unknown = sorted(set(names) - set(SETTINGS))
    if unknown:
        raise ValueError(f"models: unknown {unknown}, expected some of {list(SETTINGS)}")
    settings = [SETTINGS[name] for name in names]
    if options.device == "cpu" and not all(setting.is_dry for setting in settings):
        raise ValueError(
            f"models: real sizes are measured on CUDA, a CPU takes tiny only, got {names}"
        )
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, and there is no CUDA device")
    return [replace(s, **QUICK) if options.quick and not s.is_dry else s for s in settings]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status, 1 if tokens or compile counts are wrong."""
    parser = argparse.ArgumentParser(prog="python -m pagedraft.bench.real_sizes")
    parser.add_argument("--models", default="8b,1b", help=f"comma-separated, of {list(SETTINGS)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="fewer rows, drafts and answers")
    parser.add_argument("--alpha", type=float, default=0.7, help="share of drafts that are right")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds a model; then rows go")
    parser.add_argument("--workers", type=int, default=None, help="that compile first; 0: none")
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache, no more")
    parser.add_argument("--out", default=None, help="folder for JSON and charts")
    options = parser.parse_args(arguments)
    try:
        settings = chosen_settings(options)
        folder = out_folder(options, settings)
    except ValueError as error:
        parser.error(str(error))
    device = torch.device(options.device)
    if INTERPRETED:  # the stock interpreter's products depend on the number of rows
        from pagedraft.tests import interpreter

        interpreter.install()
    facts = header(device)
    print_header(facts)
    if device.type == "cuda" and options.workers != 0:
        began = time.perf_counter()
        num_workers = compile_in_parallel(settings, device, options.workers)
        print(f"compiled by {num_workers} processes in {time.perf_counter() - began:.1f} s")
    if options.compile_only:
        print(json.dumps({"bench": "real_sizes", **facts, "compiled_only": options.models}))
        return 0
    documents = {}
    for setting in settings:
        documents[setting.name] = run_model(setting, facts, options, folder)
        gc.collect()
    print(json.dumps({"bench": "real_sizes", **facts, "models": documents}))
    return 1 if any(document["problems"] for document in documents.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
