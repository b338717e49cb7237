"""Tables of the forward inspector: what a step launches and costs, what the machine code says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pagedraft.bench.inspect_cost import (
    LAUNCH_SECONDS,
    Gpu,
    Priced,
    StepSum,
    Totals,
    shares,
    sum_step,
)
from pagedraft.bench.inspect_forward import Trace
from pagedraft.bench.inspect_inputs import Setup
from pagedraft.bench.static_checks import SHARED_LIMITS
from pagedraft.bench.static_report import Result, print_failures, summary_cell, widths
from pagedraft.bench.table import print_table

STEP_HEADERS = (
    *("part", "stage", "op", "kernel", "grid", "MB", "GFLOP", "floor us", "share", "B/instr"),
)
CODE_HEADERS = (
    *("kernel", "case", "warps", "stages", "regs", "spill", "shared KB", "loads", "stores"),
    *("mma", "instr", "executed", "KV B/instr", "32-bit addr", "verdict"),
)


Steps = list[tuple[Trace, list[Priced]]]


def print_steps(setup: Setup, steps: Steps, gpu: Gpu, code: Sequence[Result]) -> None:
    """Print each step, once for all backends that launch the same.

    code: one target's; bytes over the warp instructions of a launch are worked out from it.
    """
    by_case = {(result.kernel, case): result for result in code for case in result.cases}
    grouped: dict[tuple, Steps] = {}
    for trace, priced in steps:
        launched = tuple((event.case, event.kernel, event.grid) for event in trace.events)
        grouped.setdefault((trace.step, launched), []).append((trace, priced))
    for (step, _), found in grouped.items():
        title = f"{step.name} on {' and '.join(trace.backend for trace, _ in found)}"
        _print_step(title, setup, *found[0], gpu, by_case)


Code = Mapping[tuple[str, str], Result]


def _print_step(
    title: str, setup: Setup, trace: Trace, priced: list[Priced], gpu: Gpu, code: Code
) -> None:
    """Print a step's kernels, the sums of a layer and of the whole model, and each op's share."""
    sums = sum_step(setup, priced, gpu)
    rows = []
    for layer in _shown_layers(setup, trace):
        count = setup.num_layers - 1 if layer == 0 else 1
        items = [item for item in priced if item.event.layer == layer]
        rows += [
            [
                _part(layer, setup),
                *_step_row(item, gpu, sums.model.seconds / count),
                _bytes_per_instruction(item, code),
            ]
            for item in items
        ]
    print_table(title, STEP_HEADERS, rows)
    for line in _sums(setup, sums, gpu):
        print(line)
    print("share of the floor by op: " + _shares(setup, priced, gpu, sums))


def _shown_layers(setup: Setup, trace: Trace) -> Sequence[int]:
    """The first layer stands for the last one too where all its launches are the same."""
    last = setup.config.num_layers - 1
    differs = any("/last." in event.case for event in trace.of_layer(last))
    return (-1, 0, last, last + 1) if differs else (-1, 0, last + 1)


def _part(layer: int, setup: Setup) -> str:
    last = setup.config.num_layers - 1
    return {-1: "before", 0: "layer", last: "last layer", last + 1: "after"}[layer]


def _step_row(item: Priced, gpu: Gpu, step_seconds: float) -> list[str]:
    """Return a row; its share is that of all layers like it in a step of ``step_seconds`` each."""
    event, cost = item.event, item.cost
    cells = [event.stage, event.op, event.kernel, "x".join(map(str, event.grid))]
    if cost is None:
        return [*cells, "?", "?", "?", ""]
    seconds = gpu.floor(cost)
    share = f"{seconds / step_seconds:.1%}"
    return [*cells, f"{cost.bytes / 1e6:.3f}", f"{cost.flops / 1e9:.3f}", _us(seconds), share]


def _bytes_per_instruction(item: Priced, code: Code) -> str:
    """Return the least bytes of a launch over its warp instructions; attention's: KV bytes only."""
    event = item.event
    result = code.get((event.kernel, event.case))
    if result is None or not item.cost or not item.cost.bytes:
        return ""
    if event.case in result.kv_bytes_per_instruction:
        return f"{result.kv_bytes_per_instruction[event.case]:.1f}"
    executed = result.executed.get(event.case)
    return f"{item.cost.bytes / executed / math.prod(event.grid):.1f}" if executed else ""


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}"


def _sums(setup: Setup, sums: StepSum, gpu: Gpu) -> list[str]:
    model, launches = sums.model, sums.model.launches
    share = model.seconds / (model.seconds + launches * LAUNCH_SECONDS)
    return [
        f"a layer: {_totals(sums.layer)}",
        f"around the layers: {_totals(sums.outside)}",
        f"model of all {setup.num_layers} layers: {_totals(model)}; with "
        f"{LAUNCH_SECONDS * 1e6:.1f} us a launch at most {share:.0%} of that floor is reached",
    ]


def _totals(totals: Totals) -> str:
    return (
        f"{totals.launches} launches, {totals.bytes / 1e6:,.1f} MB, "
        f"{totals.flops / 1e9:,.2f} GFLOP, floor {totals.seconds * 1e6:,.1f} us"
    )


def _shares(setup: Setup, priced: list[Priced], gpu: Gpu, sums: StepSum) -> str:
    return ", ".join(
        f"{op} {part.seconds / sums.model.seconds:.1%} ({part.launches} launches)"
        for op, part in shares(setup, priced, gpu).items()
    )


def print_code(results: list[Result], targets: Sequence[str], detailed: str) -> None:
    """Print the machine code of one target in full, of the others in a cell each, then failures."""
    rows = [_code_row(result) for result in results if result.target == detailed]
    print_table(f"machine code on {detailed}", CODE_HEADERS, rows)
    if len(targets) > 1:
        grouped: dict[tuple[str, str], dict[str, Result]] = {}
        for result in results:
            grouped.setdefault((result.kernel, result.cases[0]), {})[result.target] = result
        cells = [
            [kernel, case, *(summary_cell(found.get(target)) for target in targets)]
            for (kernel, case), found in grouped.items()
        ]
        title = "all targets: registers, shared KB, spilled bytes; ! fails a check"
        print_table(title, ("kernel", "case", *targets), cells)
    print_failures(results)


def _code_row(result: Result) -> list[str]:
    cells = [result.kernel, result.first_case]
    code = result.code
    if code is None:
        return [*cells, *["-"] * (len(CODE_HEADERS) - 3), "fails"]
    executed = sorted({round(n) for n in result.executed.values()})
    return [
        *cells,
        str(result.num_warps),
        str(result.num_stages),
        str(code.registers),
        str(code.spill_bytes),
        f"{result.shared_bytes / 1024:.1f}/{SHARED_LIMITS[result.target] // 1024}",
        widths(code.loads),
        widths(code.stores),
        " ".join(f"{name}:{n}" for name, n in code.mma.items()),
        str(code.instructions),
        "-".join(str(n) for n in dict.fromkeys((executed[0], executed[-1]))) if executed else "",
        result.kv_bytes,
        str(result.address_products),
        "fails" if result.problem else "ok",
    ]
