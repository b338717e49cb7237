"""Inspect forward passes, as they are and with a toy kernel too many, for test_inspect_forward.py.

Prints one JSON document. Runs in a process of its own, with TRITON_INTERPRET=0.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import asdict
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from pagedraft.bench.inspect_cli import inspect
from pagedraft.bench.inspect_cost import GPUS, price, sum_step
from pagedraft.bench.inspect_diff import compare, regressions
from pagedraft.bench.inspect_forward import record_step
from pagedraft.bench.inspect_inputs import Setup
from pagedraft.bench.shapes import CONFIGS, cut, parse_step
from pagedraft.bench.static_compile import TARGETS
from pagedraft.model import transformer
from pagedraft.tests.bench.toy_kernels import product

ONE_TARGET = ("sm_90",)
DECODE = "decode1@1024"


def setup(model: str, num_layers: int = 2, **options: str) -> Setup:
    """Return a cut of a named model."""
    return Setup(model, cut(CONFIGS[model], num_layers), CONFIGS[model].num_layers, **options)


def peak_bytes() -> int:
    """Return the most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def recording() -> dict[str, Any]:
    """Record an 8B model without compiling: what it takes, and what it leaves behind."""
    before = JITFunction.run, torch.version.hip
    start, start_bytes = time.perf_counter(), peak_bytes()
    traces = {n: record_step(setup("llama-8b", n), parse_step(DECODE), TARGETS) for n in (2, 3)}
    seconds, grown = time.perf_counter() - start, peak_bytes() - start_bytes
    steps = {n: price(setup("llama-8b", n), found[0]) for n, found in traces.items()}
    sums = {n: sum_step(setup("llama-8b", n), steps[n], GPUS["H200"]) for n in steps}
    return {
        "seconds": seconds,
        "grown_bytes": grown,
        "is_restored": before == (JITFunction.run, torch.version.hip),
        "a_layer": sums[2].layer.launches,
        "a_layer_more": len(steps[3]) - len(steps[2]),
        "models": [asdict(sums[n].model) for n in sums],
        "unpriced": [item.event.kernel for item in steps[2] if item.cost is None],
    }


def other_setups() -> dict[str, list[str]]:
    """Return the kernels of a layer where weights or keys are stored in fewer bits."""
    found = {}
    for options in ({"weights": "int4"}, {"sampling": "all"}):
        trace = record_step(setup("llama-1b", **options), parse_step("verify2x3@1024"), TARGETS)[0]
        found[" ".join(options.values())] = [f"{e.stage}/{e.kernel}" for e in trace.events]
    return found


def with_a_toy_kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return ``gated_linear``, with one more kernel that spills and a copy by PyTorch."""
    product(128, torch.float16, num_warps=1, num_stages=1)
    return GATED_LINEAR(*args, **kwargs).clone()


GATED_LINEAR = transformer.gated_linear


def main() -> None:
    """Print all findings."""
    found: dict[str, Any] = {"recording": recording(), "other_setups": other_setups()}
    inspected = setup("smol-135m"), [parse_step(DECODE)], ONE_TARGET, GPUS["H200"]
    base, again = (inspect(*inspected).document for _ in range(2))
    transformer.gated_linear = with_a_toy_kernel
    toy = inspect(*inspected).document
    diff = compare(base, toy)
    found |= {
        "is_equal": compare(base, again).is_empty and not regressions(base, again),
        "new": [key[0] for key in diff.new],
        "steps": {
            name: [str(change) for change in changes] for name, changes in diff.steps.items()
        },
        "regressions": regressions(base, toy),
        "kernels": base["kernels"],
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
