"""Compile every kernel for every target without a GPU and report what the machine code says.

    python -m pagedraft.bench.static [--targets sm_90,gfx942] [--op linear] [--quick] [--json file]

Exit status 1 on a compile failure and on what ``static_checks.CHECKS`` find. The JSON is sorted, so
that two versions can be compared with ``diff``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
    os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / "build" / "static-cache"))

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.cache import triton_key  # noqa: E402

from pagedraft.bench.fork_map import fork_map  # noqa: E402
from pagedraft.bench.record import Call, Launch, record_calls  # noqa: E402
from pagedraft.bench.sass import asm_instructions, machine_code  # noqa: E402
from pagedraft.bench.static_calls import calls  # noqa: E402
from pagedraft.bench.static_checks import Compiled, problem_of  # noqa: E402
from pagedraft.bench.static_report import Result, print_results  # noqa: E402
from pagedraft.kernels.dispatch import OPS  # noqa: E402

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
    return Result(
        **about,
        num_warps=metadata.num_warps,
        num_stages=metadata.num_stages,
        shared_bytes=metadata.shared,
        code=code,
        kv_bytes_per_instruction=kv_bytes,
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
    # Hashes of the compiler, part of every cache key: computed once here, inherited by the forks.
    triton_key()
    compiled = fork_map(compile_launch, launches, num_processes or os.cpu_count() or 1)
    for launch, result in zip(launches, compiled, strict=True):
        died = "does not compile: the compiler's process died"
        results.append(result or Result(**_about(launch), problem=died))
    return sorted(results, key=lambda r: (r.op, r.kernel, r.target, r.cases))


def _calls_of_file(path: str) -> list[Call]:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--calls: expected a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return list(module.calls())


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pagedraft.bench.static", description=__doc__)
    parser.add_argument("--targets", default=",".join(TARGETS), help="comma-separated names")
    parser.add_argument("--op", default=",".join(OPS), help="comma-separated ops")
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--calls", help="Python file with a calls() of its own instead of the ops")
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None, help="also write the results here")
    options = parser.parse_args(arguments)
    names = options.targets.split(",")
    if unknown := sorted(set(names) - set(TARGETS)):
        parser.error(f"--targets: unknown {unknown}, expected some of {list(TARGETS)}")
    if unknown := sorted(set(options.op.split(",")) - set(OPS)):
        parser.error(f"--op: unknown {unknown}, expected some of {list(OPS)}")
    if options.calls:
        wanted = _calls_of_file(options.calls)
    else:
        wanted = list(calls(quick=options.quick, ops=tuple(options.op.split(","))))
    results = check(wanted, names, num_processes=options.processes)
    return _report(results, options.json)


def _report(results: list[Result], json_path: Path | None) -> int:
    print_results(f"torch {torch.__version__}, triton {triton.__version__}", results)
    if json_path:
        document = {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "results": [result.to_json() for result in results],
        }
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return int(any(result.problem for result in results))


if __name__ == "__main__":
    sys.exit(main())
