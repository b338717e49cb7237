"""Kernels that a layer and a step launch, as figures of the forward inspector's documents.

What CI holds them to is the inspector's own baseline (inspect_diff.py): its document and a fresh
one become figures by the same function, so that a number has one home. Which kernels a launcher
chooses does not depend on Triton's version, so a baseline of another one serves too.
"""

from __future__ import annotations

from collections import Counter

from pagedraft.bench.figures import Figure
from pagedraft.bench.inspect_cli import DEFAULT_STEPS, inspect
from pagedraft.bench.inspect_cost import GPUS
from pagedraft.bench.inspect_diff import BASELINES, baseline_path
from pagedraft.bench.inspect_document import PARTS, Document, read_document
from pagedraft.bench.inspect_inputs import Setup
from pagedraft.bench.shapes import CONFIGS, cut, parse_step

MODEL, NUM_LAYERS = "llama-8b", 2
TARGETS = ("sm_90", "gfx942")  # one of each vendor: launchers ask for no more
UNIT = "launches"


def record() -> Document:
    """Record the forward pass without compiling it; needs TRITON_INTERPRET=0."""
    whole = CONFIGS[MODEL]
    setup = Setup(MODEL, cut(whole, NUM_LAYERS), whole.num_layers)
    steps = [parse_step(name) for name in DEFAULT_STEPS]
    return inspect(setup, steps, TARGETS, GPUS["H200"], is_compiled=False).document


def baseline() -> Document:
    """The committed document, this Triton's if there is one; ValueError where there is none."""
    paths = [*sorted(BASELINES.glob("forward-*.json"), reverse=True)]
    if baseline_path().exists():
        paths.insert(0, baseline_path())
    if not paths:
        raise ValueError(f"{BASELINES}: expected a forward-*.json, `make static-baseline` makes it")
    return read_document(paths[0])


def figures_of(document: Document) -> list[Figure]:
    """Launches of each part of each step, of each kernel in it, and the model's least bytes.

    Names: "launches/<model> <step> <vendor>/<part>", then "/<stage>/<kernel>".
    """
    figures = []
    model = document["setup"]["model"]
    for step, vendors in document["steps"].items():
        for vendor, found in vendors.items():
            name = f"launches/{model} {step} {vendor}"
            for part in PARTS:
                figures.append(_counted(f"{name}/{part}", found[part]["launches"]))
            for part, kernels in found["kernels"].items():
                for kernel, count in sorted(Counter(kernels).items()):
                    figures.append(_counted(f"{name}/{part}/{kernel}", count))
            num_bytes = found["model"]["bytes"]
            figures.append(Figure(f"{name}/least bytes", num_bytes, "B", "lower", "modelled"))
    return figures


def launch_figures() -> list[Figure]:
    """The figures of the forward pass as it is now."""
    return figures_of(record())


def _counted(name: str, count: int) -> Figure:
    return Figure(name, count, UNIT, "lower", "counted")
