"""Compile every kernel for every target without a GPU and report what the machine code says.

    python -m pagedraft.bench.static [--targets sm_90,gfx942] [--op linear] [--quick] [--json file]
    python -m pagedraft.bench.static forward --help     a model's forward pass instead of the ops

Exit status 1 on a compile failure and on what ``static_checks.CHECKS`` find. The JSON is sorted, so
that two versions can be compared with ``diff``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
    os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / "build" / "static-cache"))

import torch  # noqa: E402
import triton  # noqa: E402

from pagedraft.bench import inspect_cli  # noqa: E402
from pagedraft.bench.record import Call  # noqa: E402
from pagedraft.bench.static_calls import calls  # noqa: E402
from pagedraft.bench.static_compile import TARGETS, check  # noqa: E402
from pagedraft.bench.static_report import Result, figures_of, print_results  # noqa: E402
from pagedraft.kernels.dispatch import OPS  # noqa: E402


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
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["forward"]:
        return inspect_cli.main(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m pagedraft.bench.static",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
            "bench": "static",
            "torch": torch.__version__,
            "triton": triton.__version__,
            "results": [result.to_json() for result in results],
            "figures": figures_of(results),
        }
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    num_failed = sum(bool(result.problem) for result in results)
    facts = {"bench": "static", "torch": torch.__version__, "triton": triton.__version__}
    print(json.dumps({**facts, "num_kernels": len(results), "num_failed": num_failed}))
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
