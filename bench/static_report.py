"""Tables of compiled kernels: one row a kernel and target, or for attention one row a kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedraft.bench.figures import Figure, as_json
from pagedraft.bench.sass import MachineCode
from pagedraft.bench.static_checks import FLOOR_TARGET, SHARED_LIMITS
from pagedraft.bench.table import print_table


@dataclass(frozen=True)
class Result:
    """One kernel on one target.

    kv_bytes_per_instruction: by case, where the kernel reads keys and values on tensor cores.
    executed: warp instructions of one program by case, where its loops are understood.
    address_products: 32-bit products that addresses are made of.
    problem: why it counts as failed.
    """

    op: str
    kernel: str
    target: str
    cases: tuple[str, ...]
    constexprs: dict[str, Any]
    num_warps: int = 0
    num_stages: int = 0
    shared_bytes: int = 0
    code: MachineCode | None = None
    kv_bytes_per_instruction: dict[str, float] = field(default_factory=dict)
    executed: dict[str, float] = field(default_factory=dict)
    address_products: int = 0
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain types."""
        fields = dict(self.__dict__, cases=list(self.cases))
        return {**fields, "code": self.code.to_json() if self.code else None}

    @property
    def first_case(self) -> str:
        more = f" +{len(self.cases) - 1}" if len(self.cases) > 1 else ""
        return self.cases[0] + more

    @property
    def kv_bytes(self) -> str:
        """KV bytes a warp instruction, the lowest of the cases."""
        found = self.kv_bytes_per_instruction.values()
        return f"{min(found):.1f}" if found else ""


HEADERS = (
    *("kernel", "target", "case", "warps", "stages", "regs", "spill"),
    *("shared", "loads", "mma", "instr", "verdict"),
)


def _row(result: Result) -> list[str]:
    cells = [result.kernel, result.target, result.first_case]
    code = result.code
    if code is None:
        return [*cells, *["-"] * (len(HEADERS) - 4), _verdict(result)]
    return [
        *cells,
        str(result.num_warps),
        str(result.num_stages),
        str(code.registers),
        str(code.spill_bytes),
        f"{result.shared_bytes / 1024:.1f}/{SHARED_LIMITS[result.target] // 1024}",
        widths(code.loads),
        " ".join(f"{name}:{n}" for name, n in code.mma.items()),
        str(code.instructions),
        _verdict(result),
    ]


def widths(counts: Mapping[int, int]) -> str:
    """Return accesses by width in bits, the widest first; bulk (TMA) copies last."""
    return " ".join(f"{bits or 'tma'}:{n}" for bits, n in sorted(counts.items(), reverse=True))


def _verdict(result: Result) -> str:
    return result.problem.splitlines()[0][:80] if result.problem else "ok"


def _attention_rows(results: Iterable[Result], targets: Sequence[str]) -> list[list[str]]:
    """One row a kernel and first case: what each target makes of it in one cell."""
    grouped: dict[tuple[str, str], dict[str, Result]] = {}
    for result in results:
        grouped.setdefault((result.kernel, result.cases[0]), {})[result.target] = result
    rows = []
    for (kernel, _), found in grouped.items():
        first = next(iter(found.values()))
        kv_bytes = found[FLOOR_TARGET].kv_bytes if FLOOR_TARGET in found else ""
        cells = [summary_cell(found.get(target)) for target in targets]
        rows.append([kernel, first.first_case, str(first.num_warps), kv_bytes, *cells])
    return rows


def summary_cell(result: Result | None) -> str:
    """Return registers, shared memory and spills of one kernel on one target."""
    if result is None:
        return ""
    if result.code is None:
        return "fails"
    spill = f" spill {result.code.spill_bytes}" if result.code.spill_bytes else ""
    mark = " !" if result.problem else ""
    return f"{result.code.registers} {result.shared_bytes / 1024:.0f}K{spill}{mark}"


def print_results(title: str, results: list[Result]) -> None:
    """Print tables, what failed and the sums."""
    attention = [result for result in results if result.op == "paged_attention"]
    others = [result for result in results if result.op != "paged_attention"]
    if others:
        print_table(title, HEADERS, [_row(result) for result in others])
    if attention:
        targets = [name for name in SHARED_LIMITS if any(r.target == name for r in attention)]
        headers = ("kernel", "case", "warps", f"KV B/instr {FLOOR_TARGET}", *targets)
        note = "cells: registers, shared memory; ! failed"
        print_table(f"{title}; {note}", headers, _attention_rows(attention, targets))
    print_failures(results)


def print_failures(results: list[Result]) -> None:
    """Print what failed, once for all targets and cases that share it, and the sums."""
    failures = [result for result in results if result.problem]
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for failure in failures:
        where = f"{failure.target} ({', '.join(failure.cases)})"
        grouped.setdefault((failure.op, failure.kernel, failure.problem or ""), []).append(where)
    for (op, kernel, problem), where in grouped.items():
        print(f"\nFAILED {op} {kernel} on {'; '.join(where)}\n{problem}")
    print(f"\n{len(results)} kernels x targets, {len(failures)} failed")


def figures_of(results: Iterable[Result]) -> list[dict[str, Any]]:
    """The list ``figures`` of a document: what the compiler made of each kernel, and failures.

    A kernel is named by its target and first case; of several with one name the later are numbered.
    """
    figures = []
    seen: Counter[str] = Counter()
    num_failed = 0
    for result in results:
        num_failed += bool(result.problem)
        if result.code is None:
            continue
        name = f"static/{result.target}/{result.op} {result.kernel} {result.cases[0]}"
        seen[name] += 1
        name += f" #{seen[name]}" if seen[name] > 1 else ""
        counts = {
            "registers": result.code.registers,
            "spills": result.code.spill_bytes,
            "shared": result.shared_bytes,
            "instructions": result.code.instructions,
        }
        for what, count in counts.items():
            unit = "B" if what in ("spills", "shared") else "1"
            figures.append(Figure(f"{name}/{what}", count, unit, "lower", "counted"))
    figures.append(Figure("static/failed", num_failed, "1", "lower", "counted", target=0))
    return as_json(figures)
