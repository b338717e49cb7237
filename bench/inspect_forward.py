"""Run the real forward pass without a GPU and without arithmetic, and keep what it would launch.

Weights, KV pools and inputs are tensors of true shapes without memory (PyTorch's device "meta"), so
an 8B model costs nothing and nothing can be read. Triton launches are recorded as record.py does;
what PyTorch itself would launch (embedding, indexing, a copy that a launcher makes) is seen by a
dispatch mode. The forward's ``observe`` tells the stages apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pagedraft.bench.inspect_inputs import (
    META,
    Setup,
    meta_batch,
    meta_cache,
    meta_weights,
    prompt_sequence,
)
from pagedraft.bench.record import (
    Call,
    Launch,
    add_distinct,
    by_backend,
    launches_recorded,
    vendor_of,
)
from pagedraft.bench.shapes import StepShape
from pagedraft.decoding.draw import draw
from pagedraft.kernels.dispatch import OPS
from pagedraft.kernels.verify import verify
from pagedraft.model.transformer import Transformer

PARTS_OF_OPS = {"logit_edits": "sample", "truncate": "sample"}  # files not named after their op
NO_KERNELS = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
    + ("detach", "detach_", "lift_fresh", "lift_fresh_copy")
)


@dataclass(frozen=True)
class Event:
    """One kernel that a step launches.

    layer: -1 before the first layer, the number of layers after the last.
    case: step/stage, with ``#2`` for a kernel's second launch in a stage; ``last.`` stands before
        the stage where the last layer's launch is not the first layer's.
    launches: by target; empty for PyTorch's own kernels, whose ``num_bytes`` are those of their
    results, read and written.
    """

    layer: int
    stage: str
    op: str
    kernel: str
    case: str
    grid: tuple[int, ...] = ()
    launches: dict[str, Launch] = field(default_factory=dict)
    num_bytes: int = 0

    @property
    def sizes(self) -> Any:
        """Equal for launches of one kernel with the same grid and run-time numbers."""
        launches = self.launches.values()
        keys = [(launch.key, launch.uses[0].numbers) for launch in launches]
        return keys, self.grid, self.num_bytes


@dataclass(frozen=True)
class Trace:
    """The kernels of one step, in order, as launchers choose them for one backend."""

    step: StepShape
    backend: str
    events: list[Event]

    def of_layer(self, layer: int) -> list[Event]:
        """Return the events of one layer."""
        return [event for event in self.events if event.layer == layer]


def op_of(fn: JITFunction) -> str:
    """Return the op whose file a kernel stands in, or the file's name."""
    stem = fn.fn.__module__.rpartition(".")[2]
    owners = [op for op in OPS if stem == op or stem.startswith(op + "_")]
    return max(owners, key=len, default=PARTS_OF_OPS.get(stem, stem))


class _TorchKernels(TorchDispatchMode):
    """Append (name, bytes of the results) of what PyTorch would launch on a GPU to ``found``."""

    def __init__(self, found: list[Any]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        outputs = [t for t in _tensors(result) if t.device == META]
        if name in NO_KERNELS or not outputs:
            return result
        inputs = list(_tensors((args, kwargs)))
        if any(t.device != META for t in inputs):  # a copy from the host
            return result
        memory = {t.untyped_storage()._cdata for t in inputs}
        is_view = all(t.untyped_storage()._cdata in memory for t in outputs)
        if func._schema.is_mutable or not is_view:
            self.found.append((name, sum(t.nbytes for t in outputs)))
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


class _Stages:
    """Turns what was found since the last stage into its events."""

    def __init__(self, step: StepShape, num_layers: int, found: list[Any]) -> None:
        self.step, self.found, self.num_seen = step, found, 0
        self.last = num_layers - 1
        self.events: list[Event] = []

    def observe(self, layer: int, stage: str, result: object) -> None:
        """Give what the forward launched for ``stage`` its name."""
        for item in self.found[self.num_seen :]:
            self.events.append(self._event(layer, stage, item))
        self.num_seen = len(self.found)

    def _event(self, layer: int, stage: str, item: Any) -> Event:
        if isinstance(item, tuple):
            name, num_bytes = item
            event = Event(layer, stage, "torch", name, "", num_bytes=2 * num_bytes)
            return replace(event, case=self._case(event))
        first = next(iter(item.values()))
        event = Event(layer, stage, first.op, first.kernel, "", first.uses[0].grid, item)
        case = self._case(event)
        for launch in item.values():
            launch.uses[:] = [
                replace(use, call=replace(use.call, case=case)) for use in launch.uses
            ]
        return replace(event, case=case)

    def _case(self, event: Event) -> str:
        def alike(layer: int) -> list[Event]:
            place = layer, event.stage, event.kernel
            return [e for e in self.events if (e.layer, e.stage, e.kernel) == place]

        number = len(alike(event.layer))
        where = ""
        if 0 < event.layer <= self.last:
            first = alike(0)
            if number >= len(first) or first[number].sizes != event.sizes:
                where = "last." if event.layer == self.last else f"layer{event.layer}."
        suffix = f"#{number + 1}" if number else ""
        return f"{self.step.name}/{where}{event.stage}{suffix}"


def record_step(setup: Setup, step: StepShape, targets: Mapping[str, GPUTarget]) -> list[Trace]:
    """Return what one step launches, a trace for each backend of ``targets``.

    Raises what the forward raises, and ValueError for a context beyond the model's.
    """
    if step.context > setup.config.max_positions:
        raise ValueError(
            f"step {step.name}: expected a context of at most {setup.config.max_positions} tokens"
        )
    return [_trace(setup, step, name, group) for name, group in by_backend(targets).items()]


def _trace(setup: Setup, step: StepShape, backend: str, targets: Mapping[str, GPUTarget]) -> Trace:
    found: list[Any] = []
    stages = _Stages(step, setup.config.num_layers, found)

    def call_of(fn: JITFunction) -> Call:
        return Call(op_of(fn), "", _not_run, span=step.span, context=step.context)

    with vendor_of(backend), launches_recorded(call_of, targets, found):
        model = Transformer(setup.config, meta_weights(setup))
        batch = meta_batch(setup, step)
        with torch.inference_mode(), _TorchKernels(found):
            logits_QV = model.forward(batch, meta_cache(setup, step), stages.observe)
            _sample(setup, step, logits_QV, stages)
    return Trace(step, backend, stages.events)


def _not_run() -> None:
    """Stand for a call whose launches were found in the forward pass."""


def _sample(setup: Setup, step: StepShape, logits_QV: torch.Tensor, stages: _Stages) -> None:
    """Draw a token for each row of logits, then compare the drafts with them."""
    num_logits, layer = logits_QV.shape[0], setup.config.num_layers
    sequence = prompt_sequence(setup, step)
    tokens_Q = draw(logits_QV, [sequence] * num_logits, [step.context] * num_logits)
    stages.observe(layer, "sample", tokens_Q)
    num_drafts = num_logits - step.num_rows
    if num_drafts > 0:
        drafts_K = torch.empty(num_drafts, dtype=torch.int64, device=META)
        starts_R1 = torch.empty(step.num_rows + 1, dtype=torch.int32, device=META)
        verify(drafts_K, starts_R1, tokens_Q)
        stages.observe(layer, "verify", tokens_Q)


def distinct_launches(traces: list[Trace]) -> list[Launch]:
    """Return the launches to compile, each kernel once with all its uses."""
    distinct: dict[str, Launch] = {}
    for trace in traces:
        for event in trace.events:
            for launch in event.launches.values():
                add_distinct(launch, distinct)
    return list(distinct.values())
