"""Compile recorded launches for GPU targets without a GPU, and read their machine code."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import triton_key

from pagedraft.bench.fork_map import fork_map
from pagedraft.bench.inspect_code import ExecutedCount, address_products
from pagedraft.bench.record import Call, Launch, record_calls
from pagedraft.bench.sass import asm_instructions, machine_code
from pagedraft.bench.static_checks import Compiled, problem_of
from pagedraft.bench.static_report import Result

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def compile_launch(launch: Launch) -> Result:
    """Compile one launch for its target and judge the machine code."""
    about = _about(launch)
    if launch.error:
        return Result(**about, problem=f"does not compile: {launch.error}")
    target = TARGETS[launch.target]
    try:
        compiled = triton.compile(launch.source, target=target, options=launch.options)
    except Exception as error:
        return Result(**about, problem=f"does not compile: {_first_lines(error)}")
    instructions = asm_instructions(compiled.asm)
    code = machine_code(compiled.asm, instructions)
    metadata = compiled.metadata
    kernel = Compiled(
        launch, compiled.asm["ttir"], instructions, code, metadata.shared, metadata.num_warps
    )
    problem = problem_of(kernel)
    try:
        kv_bytes = kernel.kv_bytes
    except ValueError:  # part of the problem
        kv_bytes = {}
    count = ExecutedCount(kernel)
    executed = {use.call.case: count.executed(use) for use in launch.uses}
    return Result(
        **about,
        num_warps=metadata.num_warps,
        num_stages=metadata.num_stages,
        shared_bytes=metadata.shared,
        code=code,
        kv_bytes_per_instruction=kv_bytes,
        executed={case: number for case, number in executed.items() if number is not None},
        address_products=address_products(kernel.ttir),
        problem=problem,
    )


def _about(launch: Launch) -> dict[str, Any]:
    return {
        "op": launch.op,
        "kernel": launch.kernel,
        "target": launch.target,
        "cases": launch.cases,
        "constexprs": {name: _plain(value) for name, value in launch.constants.items()},
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _first_lines(error: Exception, limit: int = 600) -> str:
    return f"{type(error).__name__}: {error}"[:limit]


def compile_all(launches: list[Launch], num_processes: int | None = None) -> list[Result]:
    """Compile ``launches``, one process each, as many at a time as there are cores."""
    # Hashes of the compiler, part of every cache key: computed once here, inherited by the forks.
    triton_key()
    compiled = fork_map(compile_launch, launches, num_processes or os.cpu_count() or 1)
    died = "does not compile: the compiler's process died"
    return [
        result or Result(**_about(launch), problem=died)
        for launch, result in zip(launches, compiled, strict=True)
    ]


def check(
    wanted: Iterable[Call], target_names: Iterable[str], *, num_processes: int | None = None
) -> list[Result]:
    """Compile all launches of ``wanted`` for the named targets; calls that raise are failures."""
    targets = {name: TARGETS[name] for name in target_names}
    launches, failed = record_calls(list(wanted), targets)
    results = [
        Result(call.op, "-", "all", (call.case,), {}, problem=f"call failed: {message}")
        for call, message in failed
    ]
    results += compile_all(launches, num_processes)
    return sorted(results, key=lambda r: (r.op, r.kernel, r.target, r.cases))
