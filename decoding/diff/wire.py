"""A side in a process of its own: one JSON line a step, tensors in safetensors files.

The process runs the kernels of whichever pagedraft its PYTHONPATH names. It imports this file and
side.py under another package name, hence the relative import: that revision need not have them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from .side import Feed, Runner, Side, Stage, load_side


def save_stages(stages: Sequence[Stage], path: str) -> list[Any]:
    """Write the tensors to ``path``; return the rest, ready for JSON."""
    tensors = {
        f"{index}.{part}": tensor.contiguous()
        for index, stage in enumerate(stages)
        for part, tensor in stage.parts.items()
    }
    save_file(tensors, path)
    return [[stage.layer, stage.name, list(stage.parts), stage.eps] for stage in stages]


def load_stages(heads: Sequence[Any], path: str) -> list[Stage]:
    """What ``save_stages`` wrote and returned, as stages; the file is gone afterwards."""
    tensors = load_file(path)
    os.unlink(path)
    return [
        Stage(layer, name, {part: tensors[f"{index}.{part}"] for part in parts}, eps)
        for index, (layer, name, parts, eps) in enumerate(heads)
    ]


def serve(requests: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Answer the first request (a Side and Runner's arguments), then one Feed a request."""
    first = json.loads(next(requests))
    side = Side(**first["side"])
    runner = Runner(side, load_side(side), **first["run"])
    own = [module for name, module in sys.modules.items() if name.startswith("pagedraft.")]
    files = [str(Path(path).resolve()) for m in own if (path := getattr(m, "__file__", None))]
    yield {"formats": runner.formats, "shape": runner.shape, "files": files}
    for line in requests:
        request = json.loads(line)
        inputs, output = request.pop("inputs"), request.pop("output")
        request["inputs"] = load_stages(*inputs) if inputs else None
        result = runner.step(Feed(**request))
        yield {"stages": save_stages(result.stages, output), "token": result.token}


def main() -> int:
    """Serve until standard input ends; an error is the last answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    try:
        for answer in serve(iter(sys.stdin.readline, "")):
            print(json.dumps(answer), file=answers, flush=True)
    except Exception as error:  # whatever another revision's code raises belongs to the caller
        is_plain = isinstance(error, (ValueError, FileNotFoundError))
        words = str(error) if is_plain else f"{type(error).__name__}: {error}"
        print(json.dumps({"error": words}), file=answers, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
