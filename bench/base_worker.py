"""A tree's ops, timed in a process of its own: one JSON line a request, one an answer.

The process runs the ops of whichever pagedraft its PYTHONPATH names. It imports this file and
timing.py under another package name, hence the relative import: one clock times both sides, and the
other revision need not have it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .timing import measure, rotating_copies

# Where this tree's bench says what its cases are; each is asked alone, so that an op that another
# revision lacks does not take the others with it.
TABLES = ("layer_cases", "linear_cases", "token_cases")
Answer = dict[str, Any]


def makers(is_own: bool) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Return what makes the cases of each op, and why ops are missing.

    is_own: take the bench's own word for it, else gather what can be imported.
    """
    if is_own:
        return importlib.import_module("pagedraft.bench.kernels").MAKERS, {}
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name in TABLES:
        try:
            module = importlib.import_module(f"pagedraft.bench.{name}")
        except (ImportError, AttributeError) as error:
            missing[name] = f"{type(error).__name__}: {error}"
            continue
        if name == "linear_cases":
            found["linear"] = module.linear_cases
        else:
            found |= getattr(module, f"{name.removesuffix('_cases').upper()}_MAKERS")
    if not found:
        raise ValueError("; ".join(sorted(set(missing.values()))))
    return found, missing


def make_cases(setup: Answer, table: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the cases that ``setup`` names, by ``step/op part``."""
    from pagedraft.bench.layer_cases import Maker
    from pagedraft.bench.shapes import DTYPES, MODELS, STEPS

    known = {"model": MODELS, "dtype": DTYPES}
    if lacking := [setup[key] for key, names in known.items() if setup[key] not in names]:
        raise ValueError(f"its bench does not know {lacking}")
    if lacking := [step for step in setup["steps"] if step not in STEPS]:
        raise ValueError(f"its bench does not know the steps {lacking}")
    model, dtype = MODELS[setup["model"]], DTYPES[setup["dtype"]]
    return {
        f"{step}/{case.op} {case.part}": case
        for step in setup["steps"]
        for op in setup["ops"]
        if op in table
        for case in table[op](Maker(model, STEPS[step], dtype, device))
    }


class Clock:
    """Times cases by name; keeps the inputs of the last one."""

    def __init__(self, cases: Mapping[str, Any], device: torch.device) -> None:
        self._cases, self._device = cases, device
        self._name, self._inputs, self._about = "", {}, {}

    def time(self, name: str, budget: float) -> Answer:
        """Return the seconds of a call, the 20th percentile of ``budget`` s, or a ``problem``.

        Not the median: what else the machine does only adds time. Buffers are new each time: where
        memory happens to lie is part of the noise, not of the op.
        """
        case = self._cases[name]
        try:
            if name != self._name:
                self._take(name)
            if self._about["problem"] is not None:
                return self._about
            fresh = {key: tensor.clone() for key, tensor in self._inputs.items()}
            copies = rotating_copies(fresh, case.cost.bytes, self._device)
            runs = [case.prepare(copy) for copy in copies]
            timing = measure(runs, self._device, budget=budget)
        except Exception as error:  # an op's error is a fact about that op
            return {"problem": f"{type(error).__name__}: {error}"[:300]}
        return {**self._about, "seconds": timing.p20, "method": timing.method}

    def _take(self, name: str) -> None:
        from pagedraft.bench.gate import gate
        from pagedraft.kernels.dispatch import implementation

        case = self._cases[name]
        self._name, self._inputs = "", {}
        torch.manual_seed(0)
        inputs = case.inputs()
        self._about = {
            "problem": gate(case.prepare, inputs),
            "digest": digest(inputs),
            "implementation": implementation(case.op, self._device, has_cpu=True),
        }
        self._name, self._inputs = name, inputs


def digest(inputs: Mapping[str, torch.Tensor]) -> str:
    """Return what differs where names, shapes, dtypes or values of inputs do (values: a sample)."""
    state = hashlib.sha256()
    for name, tensor in sorted(inputs.items()):
        state.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        sample = tensor.flatten()[:: max(1, tensor.numel() // 4096)].contiguous().cpu()
        state.update(sample.view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:16]


def serve(requests: Iterator[str]) -> Iterator[Answer]:
    """Answer the first request (is_own, device, model, dtype, ops, steps), then one case each."""
    setup = json.loads(next(requests))
    device = torch.device(setup["device"])
    table, missing = makers(setup["is_own"])
    cases = make_cases(setup, table, device)
    loaded = [m for name, m in sys.modules.items() if name.startswith("pagedraft.")]
    files = [str(Path(path).resolve()) for m in loaded if (path := getattr(m, "__file__", None))]
    yield {"cases": list(cases), "missing": missing, "files": files}
    clock = Clock(cases, device)
    for line in requests:
        request = json.loads(line)
        yield clock.time(request["case"], request["budget"])


def main() -> int:
    """Serve until standard input ends; an error is the last answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    try:
        for answer in serve(iter(sys.stdin.readline, "")):
            print(json.dumps(answer), file=answers, flush=True)
    except Exception as error:  # whatever another revision's code raises belongs to the caller
        words = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        print(json.dumps({"error": words}), file=answers, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
