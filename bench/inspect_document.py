"""The inspector's findings as one JSON document, small and equal for equal sources.

Keys: ``triton`` (version), ``setup``, ``targets``, ``steps`` (by step, then by backend: launches,
bytes and flops of a layer, of the last one, of what is around them, of the whole model, and the
kernels in order), ``kernels`` (where a kernel is launched, with which constexprs, and what the
machine code of each target says).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import triton

from pagedraft.bench.inspect_cost import Gpu, Priced, Totals, sum_step
from pagedraft.bench.inspect_forward import Trace
from pagedraft.bench.inspect_inputs import Setup
from pagedraft.bench.static_report import Result

Document = dict[str, Any]
PARTS = ("layer", "last_layer", "outside", "model")


def make_document(
    setup: Setup,
    targets: Iterable[str],
    steps: list[tuple[Trace, list[Priced]]],
    results: Iterable[Result],
    gpu: Gpu,
) -> Document:
    """Return the document of what was recorded, priced and compiled."""
    documents: dict[str, dict[str, Any]] = {}
    for trace, priced in steps:
        documents.setdefault(trace.step.name, {})[trace.backend] = _step(setup, priced, gpu)
    return {
        "triton": triton.__version__,
        "setup": {
            "model": setup.model,
            "layers": setup.config.num_layers,
            "model_layers": setup.num_layers,
            "dtype": setup.dtype,
            "weights": setup.weights,
            "kv_dtype": setup.kv_dtype,
            "block_size": setup.block_size,
            "sampling": setup.sampling,
        },
        "targets": list(targets),
        "steps": documents,
        "kernels": _kernels(results),
    }


def _step(setup: Setup, priced: list[Priced], gpu: Gpu) -> dict[str, Any]:
    sums = sum_step(setup, priced, gpu)
    last = setup.config.num_layers - 1
    layers = {"layer": (0,), "last_layer": (last,), "outside": (-1, last + 1)}
    return {
        **{part: _totals(getattr(sums, part)) for part in PARTS},
        "kernels": {
            part: [_place(item) for item in priced if item.event.layer in numbers]
            for part, numbers in layers.items()
        },
    }


def _place(item: Priced) -> str:
    return f"{item.event.stage}/{item.event.kernel}"


def _totals(totals: Totals) -> dict[str, int]:
    return {"launches": totals.launches, "bytes": totals.bytes, "flops": totals.flops}


def _kernels(results: Iterable[Result]) -> list[dict[str, Any]]:
    """Return an entry for each kernel, the figures of its targets in it."""
    grouped: dict[str, dict[str, Any]] = {}
    for result in results:
        about = {name: getattr(result, name) for name in ("op", "kernel", "constexprs")}
        about["cases"] = sorted(result.cases)
        kernel = grouped.setdefault(_dumps(about), {**about, "targets": {}})
        kernel["targets"][result.target] = _figures(result)
    return list(grouped.values())


def _figures(result: Result) -> dict[str, Any]:
    """Return plain types; without machine code where the kernel does not compile."""
    code = result.code.to_json() if result.code else {}
    code.pop("tf32", None)
    return {
        "warps": result.num_warps,
        "stages": result.num_stages,
        "shared": result.shared_bytes,
        **code,
        "address_products": result.address_products,
        "executed": {case: round(n) for case, n in sorted(result.executed.items())},
        "kv_bytes": {case: round(n, 2) for case, n in result.kv_bytes_per_instruction.items()},
        "problem": result.problem,
    }


def write_document(path: Path, document: Document) -> None:
    """Write ``document`` with a line for each step, kernel and target: versions can be compared."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f'"{key}": {_dumps(document[key])}' for key in ("triton", "setup", "targets")]
    steps = [f' "{name}": {_dumps(step)}' for name, step in document["steps"].items()]
    lines.append('"steps": {\n' + ",\n".join(steps) + "\n}")
    lines.append('"kernels": [\n' + ",\n".join(map(_kernel_lines, document["kernels"])) + "\n]")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _kernel_lines(kernel: dict[str, Any]) -> str:
    about = _dumps({name: value for name, value in kernel.items() if name != "targets"})
    targets = [f'  "{name}": {_dumps(figures)}' for name, figures in kernel["targets"].items()]
    return f' {about[:-1]}, "targets": {{\n' + ",\n".join(targets) + "}}"


def _dumps(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def read_document(path: Path) -> Document:
    """Read what ``write_document`` wrote; raise ValueError for anything else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: broken JSON ({error})") from None
    wanted = {"triton", "setup", "targets", "steps", "kernels"}
    if not isinstance(document, dict) or not wanted <= document.keys():
        raise ValueError(f"{path}: expected a JSON file of the forward inspector")
    if not _has_steps(document["steps"]):
        raise ValueError(f"{path}: expected steps with the launches of their parts")
    return document


def _has_steps(steps: object) -> bool:
    """Whether every step has at least one vendor with its kernels."""
    return isinstance(steps, dict) and all(
        isinstance(vendors, dict)
        and vendors
        and all(isinstance(found, dict) and "kernels" in found for found in vendors.values())
        for vendors in steps.values()
    )
