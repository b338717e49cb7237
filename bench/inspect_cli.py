"""Inspect the real forward pass of a model without a GPU: launches, bytes, machine code.

    python -m pagedraft.bench.static forward [--model llama-8b] [--steps decode1@1024,...]
    python -m pagedraft.bench.static forward --base old.json       what an edit changed
    python -m pagedraft.bench.static forward --check               what CI refuses
    python -m pagedraft.bench.static forward --no-compile          launches and bytes, in seconds

A cut of the model runs on tensors without memory; every Triton launch is recorded with its true
signature, constexprs and grid, and each distinct one is compiled. Sums of the whole model are
worked out from the cut. Exit status 1 where a kernel fails a check, or --check or --base finds
more spills, too much shared memory or more launches.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import triton

from pagedraft.bench.inspect_cost import GPUS, Gpu, Priced, price
from pagedraft.bench.inspect_diff import (
    ADVICE,
    BASELINES,
    baseline_path,
    compare,
    print_diff,
    regressions,
)
from pagedraft.bench.inspect_document import (
    Document,
    make_document,
    read_document,
    write_document,
)
from pagedraft.bench.inspect_forward import Trace, distinct_launches, record_step
from pagedraft.bench.inspect_inputs import SAMPLING, Setup
from pagedraft.bench.inspect_report import print_code, print_steps
from pagedraft.bench.shapes import CONFIGS, DTYPES, StepShape, cut, parse_step
from pagedraft.bench.static_attention_calls import CACHE_DTYPES, FP8_TARGETS
from pagedraft.bench.static_compile import TARGETS, compile_all
from pagedraft.bench.static_report import Result
from pagedraft.kernels.paged_attention import BLOCK_SIZES
from pagedraft.kernels.weight_quant import WEIGHT_FORMATS
from pagedraft.model.config import ModelConfig

DEFAULT_STEPS = ("decode1@1024", "decode8@8192", "verify8x4@8192", "prefill512@2048")
DETAILED = "sm_90"


@dataclass(frozen=True)
class Inspection:
    """What was recorded and compiled; ``results`` is empty where nothing was compiled."""

    setup: Setup
    targets: tuple[str, ...]
    steps: list[tuple[Trace, list[Priced]]]
    results: list[Result]
    gpu: Gpu

    @property
    def document(self) -> Document:
        return make_document(self.setup, self.targets, self.steps, self.results, self.gpu)


def inspect(
    setup: Setup,
    steps: Sequence[StepShape],
    target_names: Sequence[str],
    gpu: Gpu,
    *,
    is_compiled: bool = True,
    num_processes: int | None = None,
) -> Inspection:
    """Record the steps, price them, and compile what they launch for the named targets.

    Targets that do not know fp8 are left out where it is asked for; ValueError if none is left.
    """
    names = [name for name in target_names if not setup.needs_fp8 or name in FP8_TARGETS]
    if not names:
        raise ValueError(f"targets: fp8 compiles for {list(FP8_TARGETS)} only, int8 for all")
    targets = {name: TARGETS[name] for name in names}
    traces = [trace for step in steps for trace in record_step(setup, step, targets)]
    launches = distinct_launches(traces) if is_compiled else []
    results = sorted(
        compile_all(launches, num_processes), key=lambda r: (r.op, r.kernel, r.target, r.cases)
    )
    priced = [(trace, price(setup, trace)) for trace in traces]
    return Inspection(setup, tuple(names), priced, results, gpu)


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.no_compile and (options.check or options.save_baseline):
        parser.error("--no-compile: a baseline is about compiled kernels")
    try:
        base = find_base(options.base, is_check=options.check)
        if base is not None:  # what it ran is run again, unless the arguments say otherwise
            parser.set_defaults(**_defaults(base[1]))
            options = parser.parse_args(arguments)
        found = inspect(
            _setup(options),
            [parse_step(name) for name in options.steps.split(",")],
            _targets(options.targets),
            GPUS[options.gpu],
            is_compiled=not options.no_compile,
            num_processes=options.processes,
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    failed = any(result.problem for result in found.results)
    if base is None or failed:
        _print(found)
    for path in filter(None, (options.json, baseline_path() if options.save_baseline else None)):
        write_document(path, found.document)
        print(f"written: {path}")
    return int(failed | _judge(base, found.document, options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pagedraft.bench.static forward",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="llama-8b", help=f"of {list(CONFIGS)}, or a folder with a config.json")
    add("--layers", type=int, default=2, help="how many of its layers run (at least 2)")
    add(
        "--steps",
        default=",".join(DEFAULT_STEPS),
        help="comma-separated: decode<rows>@<context>, verify<rows>x<drafts>@<context>, "
        "prefill<tokens>@<context> (default: %(default)s)",
    )
    add("--targets", default="all", help=f'"all" or some of {",".join(TARGETS)}')
    add("--dtype", default="bf16", choices=tuple(DTYPES))
    add("--weights", default="auto", choices=("auto", *WEIGHT_FORMATS))
    add("--kv-dtype", default="auto", choices=("auto", *CACHE_DTYPES))
    add("--block-size", type=int, default=64, choices=BLOCK_SIZES)
    add("--sampling", default="plain", choices=tuple(SAMPLING), help="what requests ask for")
    add("--gpu", default="H200", choices=tuple(GPUS), help="whose bandwidth floors are of")
    add("--no-compile", action="store_true", help="launches and bytes only")
    add("--processes", type=int, default=None)
    add("--json", type=Path, help="also write the findings here")
    add("--base", type=Path, help="JSON of an earlier run: run the same again and compare")
    add("--check", action="store_true", help="the same with the committed baseline")
    add("--save-baseline", action="store_true", help="write the committed baseline anew")
    return parser


def _setup(options: argparse.Namespace) -> Setup:
    if options.layers < 2:
        raise ValueError(f"--layers: expected 2 or more, got {options.layers}")
    if options.model in CONFIGS:
        name, config = options.model, CONFIGS[options.model]
    else:
        path = Path(options.model)
        if not path.exists():
            raise ValueError(f"--model: expected one of {list(CONFIGS)} or a folder, got {path}")
        folder = path.parent if path.name == "config.json" else path
        name, config = folder.resolve().name, ModelConfig.from_folder(folder)
    return Setup(
        name,
        cut(config, options.layers),
        config.num_layers,
        options.dtype,
        options.weights,
        options.kv_dtype,
        options.block_size,
        options.sampling,
    )


def _targets(text: str) -> tuple[str, ...]:
    names = tuple(TARGETS) if text == "all" else tuple(text.split(","))
    if unknown := sorted(set(names) - set(TARGETS)):
        raise ValueError(f"--targets: unknown {unknown}, expected some of {list(TARGETS)}")
    return names


def find_base(path: Path | None, *, is_check: bool) -> tuple[str, Document] | None:
    """Return what to compare with and its name: the file ``path``, or the committed baseline.

    None where nothing is asked for, or where this version of Triton has no baseline, which is said.
    """
    if path is not None:
        return str(path), read_document(path)
    if not is_check:
        return None
    path = baseline_path()
    if path.exists():
        return path.name, read_document(path)
    known = sorted(file.stem.removeprefix("forward-") for file in BASELINES.glob("forward-*.json"))
    there_is = f"there is one for {', '.join(known)}" if known else "there is none"
    print(f"no baseline for triton {triton.__version__}: {there_is}")
    return None


def _defaults(document: Document) -> dict[str, object]:
    setup = {name: value for name, value in document["setup"].items() if name != "model_layers"}
    return {**setup, "steps": ",".join(document["steps"]), "targets": ",".join(document["targets"])}


def _print(found: Inspection) -> None:
    setup, gpu = found.setup, found.gpu
    print(
        f"{setup.model}, {setup.config.num_layers} of {setup.num_layers} layers run; "
        f"{setup.dtype}, weights {setup.weights}, KV {setup.kv_dtype}, blocks of "
        f"{setup.block_size}; triton {triton.__version__}\n"
        f"floors: {gpu.name}, {gpu.bandwidth / 1e12:g} TB/s, {gpu.flops / 1e12:g} TFLOP/s bf16 "
        f"({gpu.source}); all times are a model"
    )
    detailed = DETAILED if DETAILED in found.targets else found.targets[0]
    code = [result for result in found.results if result.target == detailed]
    print_steps(setup, found.steps, gpu, code)
    if found.results:
        print_code(found.results, found.targets, detailed)


def _judge(base: tuple[str, Document] | None, fresh: Document, options: argparse.Namespace) -> bool:
    """Print what differs from the base; return whether something is worse than CI allows."""
    if base is None:
        return False
    name, document = base
    if document["triton"] != fresh["triton"]:
        print(f"\nthe base is of triton {document['triton']}, this run of {fresh['triton']}")
    print_diff(compare(document, fresh), name)
    worse = regressions(document, fresh)
    print("".join(f"\nWORSE {line}" for line in worse))
    if worse and options.check:
        print(ADVICE)
    return bool(worse)
