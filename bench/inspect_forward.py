"""Run the real forward pass without a GPU and without arithmetic, and keep what it would launch.

Weights, KV pools and inputs are tensors of true shapes without memory (PyTorch's device "meta"), so
an 8B model costs nothing and nothing can be read. Triton launches are recorded as record.py does;
what PyTorch itself would launch (embedding, indexing, a copy that a launcher makes) is seen by a
dispatch mode. The forward's ``observe`` tells the stages apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pagedraft.bench.record import (
    Call,
    Launch,
    add_distinct,
    by_backend,
    launches_recorded,
    vendor_of,
)
from pagedraft.bench.shapes import DTYPES, StepShape
from pagedraft.bench.static_attention_calls import CACHE_DTYPES
from pagedraft.decoding.draw import draw
from pagedraft.decoding.sequence import Sequence
from pagedraft.kernels.dispatch import OPS
from pagedraft.kernels.verify import verify
from pagedraft.kernels.weight_quant import CODE_DTYPES, INT4_GROUPS, QuantWeight, WeightFormat
from pagedraft.model.batch import Span, StepBatch, build_step_batch
from pagedraft.model.config import ModelConfig
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer
from pagedraft.model.weights import expected_parts

META = torch.device("meta")
LINEAR = ("qkv", "o", "gate_up", "down", "head")
NO_KERNELS = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
    + ("detach", "detach_", "lift_fresh", "lift_fresh_copy")
)


@dataclass(frozen=True)
class Setup:
    """What is run: a model's first layers, how its weights and keys are stored.

    config: of the layers that run. num_layers: of the whole model.
    dtype: a name of shapes.DTYPES. weights, kv_dtype: "auto" (``dtype``) or a quantised format.
    """

    model: str
    config: ModelConfig
    num_layers: int
    dtype: str = "bf16"
    weights: str = "auto"
    kv_dtype: str = "auto"
    block_size: int = 64

    @property
    def needs_fp8(self) -> bool:
        return "fp8" in (self.weights, self.kv_dtype)


@dataclass(frozen=True)
class Event:
    """One kernel that a step launches.

    layer: -1 before the first layer, the number of layers after the last.
    case: step/stage, with ``#2`` for a kernel's second launch in a stage; ``last.`` stands before a
        stage of the last layer where that has fewer rows.
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
    return max(owners, key=len, default=stem)


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
            case = self._case(layer, stage, name)
            return Event(layer, stage, "torch", name, case, num_bytes=2 * num_bytes)
        first = next(iter(item.values()))
        case = self._case(layer, stage, first.kernel)
        for launch in item.values():
            launch.uses[:] = [
                replace(use, call=replace(use.call, case=case)) for use in launch.uses
            ]
        return Event(layer, stage, first.op, first.kernel, case, first.uses[0].grid, item)

    def _case(self, layer: int, stage: str, kernel: str) -> str:
        earlier = [e for e in self.events if (e.layer, e.stage, e.kernel) == (layer, stage, kernel)]
        number = f"#{len(earlier) + 1}" if earlier else ""
        has_fewer = layer == self.last and self.step.num_logits < self.step.num_tokens
        return f"{self.step.name}/{'last.' if has_fewer else ''}{stage}{number}"


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
        batch = _batch(setup, step)
        with torch.inference_mode(), _TorchKernels(found):
            logits_QV = model.forward(batch, _cache(setup, step), stages.observe)
            _sample(logits_QV, step, setup.config.num_layers, stages)
    return Trace(step, backend, stages.events)


def _not_run() -> None:
    """Stand for a call whose launches were found in the forward pass."""


def meta_weights(setup: Setup) -> dict[str, Any]:
    """Return weights under the loader's names, without memory."""
    parts = expected_parts(setup.config)
    weights: dict[str, Any] = {}
    for name, sources in parts.items():
        shape = (sum(part.shape[0] for part in sources), *sources[0].shape[1:])
        weights[name] = torch.empty(shape, dtype=DTYPES[setup.dtype], device=META)
    if setup.weights == "auto":
        return weights
    weights.setdefault("head", weights["embed"])  # a quantised head is a copy
    return {
        name: _quantised(weight, setup.weights) if name.split(".")[-1] in LINEAR else weight
        for name, weight in weights.items()
    }


def _quantised(weight_OI: torch.Tensor, format: WeightFormat) -> QuantWeight:
    """Return what ``quantize_weight`` makes of that shape."""
    num_out, num_in = weight_OI.shape
    group = INT4_GROUPS[0] if format == "int4" else num_in
    code_columns = num_in // 2 if format == "int4" else num_in
    factors = (num_in // group, num_out)
    return QuantWeight(
        format,
        torch.empty(num_out, code_columns, dtype=CODE_DTYPES[format], device=META),
        torch.empty(factors, device=META),
        torch.empty(factors, dtype=torch.uint8, device=META) if format == "int4" else None,
        group,
    )


def _batch(setup: Setup, step: StepShape) -> StepBatch:
    """Rows with blocks of their own."""
    blocks_a_row = math.ceil(step.context / setup.block_size)
    num_logits = step.num_logits // step.num_rows
    spans = [
        Span(
            [0] * step.span,
            step.context - step.span,
            range(1 + row * blocks_a_row, 1 + (row + 1) * blocks_a_row),
            num_logits,
        )
        for row in range(step.num_rows)
    ]
    return build_step_batch(spans, block_size=setup.block_size, device=META)


def _cache(setup: Setup, step: StepShape) -> KVCache:
    """A pool of just enough blocks, made on the CPU: no device is asked whether it knows fp8."""
    num_blocks = 1 + step.num_rows * math.ceil(step.context / setup.block_size)
    dtype = CACHE_DTYPES.get(setup.kv_dtype, DTYPES[setup.dtype])
    cache = KVCache(setup.config, num_blocks, setup.block_size, dtype, torch.device("cpu"))
    for name in ("k", "v", "k_scale", "v_scale"):
        pools = getattr(cache, name)
        setattr(cache, name, [None if pool is None else pool.to(META) for pool in pools])
    return cache


def _sample(logits_QV: torch.Tensor, step: StepShape, layer: int, stages: _Stages) -> None:
    """Draw a token for each row of logits, then compare the drafts with them."""
    num_logits = logits_QV.shape[0]
    sequence = Sequence([0] * step.context, step.context, temperature=1.0, seed=0)
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
