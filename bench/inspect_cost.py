"""What a step must move and compute at the least, kernel by kernel, and how long that takes.

Bytes and flops are those of the ops' cost formulas for the sizes of the model and the step. An op's
cost counts once a stage, at its first kernel there; kernels that only merge what it left count 0.
Times are a model: bytes over bandwidth or flops over the rate of products, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pagedraft.bench.inspect_forward import Event, Trace
from pagedraft.bench.inspect_inputs import SAMPLING, Setup
from pagedraft.bench.shapes import DTYPES, StepShape
from pagedraft.bench.static_attention_calls import CACHE_DTYPES
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.gated_mlp import gated_mlp_cost
from pagedraft.kernels.linear import linear_cost
from pagedraft.kernels.paged_attention import paged_attention_cost
from pagedraft.kernels.rms_norm import rms_norm_cost
from pagedraft.kernels.sample import sample_cost
from pagedraft.kernels.verify import verify_cost
from pagedraft.kernels.write_kv import write_kv_cost

FREE = Cost(0, 0)


@dataclass(frozen=True)
class Gpu:
    """bandwidth: bytes/s; flops: flop/s of dense bf16 products; target: what to compile for."""

    name: str
    target: str
    bandwidth: float
    flops: float
    source: str

    def floor(self, cost: Cost) -> float:
        """Return the seconds below which no kernel of that cost can end."""
        return max(cost.bytes / self.bandwidth, cost.flops / self.flops)


LAUNCH_SECONDS = 1.3e-6  # of a kernel in a CUDA graph, seen on an H200
_SHEET = "data sheet"
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H200", "sm_90", 4.3e12, 790e12, "copy and bf16 matmul rates measured elsewhere"),
        Gpu("H100", "sm_90", 3.35e12, 989e12, _SHEET),
        Gpu("A100-80GB", "sm_80", 2.04e12, 312e12, _SHEET),
        Gpu("RTX-3090", "sm_86", 0.936e12, 71e12, _SHEET),
        Gpu("RTX-4090", "sm_89", 1.008e12, 165e12, _SHEET),
        Gpu("L40S", "sm_89", 0.864e12, 362e12, _SHEET),
        Gpu("B200", "sm_100", 8.0e12, 2250e12, _SHEET),
        Gpu("MI300X", "gfx942", 5.3e12, 1307e12, _SHEET),
    )
}


@dataclass(frozen=True)
class StepSizes:
    """Sizes that the stages' costs are made of, for one step of one model."""

    setup: Setup
    step: StepShape

    @property
    def itemsize(self) -> int:
        return DTYPES[self.setup.dtype].itemsize

    def num_rows(self, layer: int) -> int:
        """Rows of a layer's MLP: the last layer has those that need logits."""
        is_last = layer >= self.setup.config.num_layers - 1
        return self.step.num_logits if is_last else self.step.num_tokens

    def linear(self, rows: int, num_in: int, num_out: int, *, has_residual: bool = False) -> Cost:
        """Return the cost of a layer's projection with its weights as they are stored."""
        cost = linear_cost(rows, num_in, num_out, self.itemsize, has_residual=has_residual)
        return cost + self.saved(num_in * num_out, self.setup.weight_format)

    def saved(self, num_weights: int, format: str | None) -> Cost:
        """Return what ``format`` changes of the weights' bytes; factors count where groups share
        them, with int4's zero points."""
        if format is None:
            return FREE
        group, bits = self.setup.weight_group, 4 if format == "int4" else 8
        factor_bits = (32 + (8 if format == "int4" else 0)) / group if group else 0
        return Cost(int(num_weights * ((bits + factor_bits) / 8 - self.itemsize)), 0)


Costs = dict[str, Cost]  # by op


def _input_norm(sizes: StepSizes, layer: int, ops: set[str]) -> Costs:
    config = sizes.setup.config
    return {"rms_norm": rms_norm_cost(sizes.step.num_tokens, config.embed_dim, sizes.itemsize)}


def _qkv(sizes: StepSizes, layer: int, ops: set[str]) -> Costs:
    config = sizes.setup.config
    num_out = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return {"linear": sizes.linear(sizes.step.num_tokens, config.embed_dim, num_out)}


def _attention(sizes: StepSizes, layer: int, ops: set[str]) -> Costs:
    config, step = sizes.setup.config, sizes.step
    heads = config.num_heads, config.num_kv_heads, config.head_dim, sizes.itemsize
    cache = CACHE_DTYPES.get(sizes.setup.kv_dtype)
    spans, contexts = [step.span] * step.num_rows, [step.context] * step.num_rows
    quantised = {"kv_itemsize": cache.itemsize, "scale_itemsize": 4} if cache else {}
    return {
        "write_kv": write_kv_cost(step.num_tokens, *heads, cache_dtype=cache),
        "paged_attention": paged_attention_cost(spans, contexts, *heads, **quantised),
    }


def _add_norm(sizes: StepSizes, layer: int, ops: set[str], num_in: int) -> Costs:
    """A projection back to the residual; without a norm's launch its epilogue adds and norms."""
    rows, embed_dim = sizes.num_rows(layer), sizes.setup.config.embed_dim
    is_fused = "rms_norm" not in ops
    norm = rms_norm_cost(rows, embed_dim, sizes.itemsize, residual=True)
    linear = sizes.linear(rows, num_in, embed_dim, has_residual=is_fused)
    if is_fused:  # normed rows are stored beside the sum
        linear += Cost((rows + 1) * embed_dim * sizes.itemsize, norm.flops)
    return {"linear": linear, "rms_norm": norm}


def _o_norm(sizes: StepSizes, layer: int, ops: set[str]) -> Costs:
    config = sizes.setup.config
    return _add_norm(sizes, layer, ops, config.num_heads * config.head_dim)


def _gate_up(sizes: StepSizes, layer: int, ops: set[str]) -> Costs:
    config, rows = sizes.setup.config, sizes.num_rows(layer)
    linear = sizes.linear(rows, config.embed_dim, 2 * config.mlp_dim)
    act = gated_mlp_cost(rows, config.mlp_dim, sizes.itemsize)
    if "gated_mlp" not in ops:  # one column is stored where two were
        linear += Cost(-rows * config.mlp_dim * sizes.itemsize, act.flops)
    return {"linear": linear, "gated_mlp": act}


def _down_norm(sizes: StepSizes, layer: int, ops: set[str]) -> Costs:
    return _add_norm(sizes, layer, ops, sizes.setup.config.mlp_dim)


def _head(sizes: StepSizes, layer: int, ops: set[str]) -> Costs:
    config, rows = sizes.setup.config, sizes.step.num_logits
    cost = linear_cost(rows, config.embed_dim, config.vocab_size, sizes.itemsize)
    cost += sizes.saved(config.embed_dim * config.vocab_size, sizes.setup.head_format)
    wide = Cost(rows * config.vocab_size * (4 - sizes.itemsize), 0)  # logits are fp32
    return {"linear": cost + wide}


def _sample(sizes: StepSizes, layer: int, ops: set[str]) -> Costs:
    rows, rules = sizes.step.num_logits, SAMPLING[sizes.setup.sampling]
    num_cut = rows if rules.has_cut else 0
    return {
        "sample": sample_cost(
            rows, sizes.setup.config.vocab_size, 4, num_sampled=rows, num_cut=num_cut
        )
    }


def _verify(sizes: StepSizes, layer: int, ops: set[str]) -> Costs:
    num_rows = sizes.step.num_rows
    return {"verify": verify_cost(num_rows, num_rows * (sizes.step.span - 1))}


STAGE_COSTS: dict[str, Callable[[StepSizes, int, set[str]], Costs]] = {
    "input_norm": _input_norm,
    "qkv": _qkv,
    "attention": _attention,
    "o_norm": _o_norm,
    "gate_up": _gate_up,
    "down_norm": _down_norm,
    "head": _head,
    "sample": _sample,
    "verify": _verify,
}


@dataclass(frozen=True)
class Priced:
    """An event with its least cost; None where no formula speaks of its op."""

    event: Event
    cost: Cost | None


def price(setup: Setup, trace: Trace) -> list[Priced]:
    """Return the events of a step with their costs."""
    sizes = StepSizes(setup, trace.step)
    stages = dict.fromkeys((event.layer, event.stage) for event in trace.events)
    return [
        priced
        for layer, stage in stages
        for priced in _price_stage(
            sizes, [e for e in trace.events if (e.layer, e.stage) == (layer, stage)]
        )
    ]


def _price_stage(sizes: StepSizes, events: list[Event]) -> Iterable[Priced]:
    ops = {event.op for event in events}
    formulas = STAGE_COSTS.get(events[0].stage)
    costs = formulas(sizes, events[0].layer, ops) if formulas else {}
    counted: set[str] = set()
    for event in events:
        if event.op == "torch":
            yield Priced(event, Cost(event.num_bytes, 0))
        elif event.op in counted:
            yield Priced(event, FREE)
        else:
            counted.add(event.op)
            yield Priced(event, costs.get(event.op))


@dataclass(frozen=True)
class Totals:
    """Launches, least bytes and flops, and seconds on a GPU, of some kernels."""

    launches: int = 0
    bytes: int = 0
    flops: int = 0
    seconds: float = 0.0

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.launches + other.launches,
            self.bytes + other.bytes,
            self.flops + other.flops,
            self.seconds + other.seconds,
        )

    def times(self, count: int) -> Totals:
        """Return the totals of ``count`` such groups."""
        return Totals(
            self.launches * count, self.bytes * count, self.flops * count, self.seconds * count
        )


def total(priced: Iterable[Priced], gpu: Gpu) -> Totals:
    """Return the sums; kernels without a formula count as launches only."""
    result = Totals()
    for item in priced:
        cost = item.cost or FREE
        result += Totals(1, cost.bytes, cost.flops, gpu.floor(cost))
    return result


@dataclass(frozen=True)
class StepSum:
    """A step in parts: around the layers, a layer inside, the last layer, and all of the model.

    ``model`` is worked out, not run: every layer but the last as the first one.
    """

    outside: Totals
    layer: Totals
    last_layer: Totals
    model: Totals


def sum_step(setup: Setup, priced: list[Priced], gpu: Gpu) -> StepSum:
    """Add up a step that ran with ``setup.config.num_layers`` layers."""
    last = setup.config.num_layers - 1

    def of(*layers: int) -> Totals:
        return total((item for item in priced if item.event.layer in layers), gpu)

    outside, layer, last_layer = of(-1, last + 1), of(0), of(last)
    model = outside + layer.times(setup.num_layers - 1) + last_layer
    return StepSum(outside, layer, last_layer, model)


def shares(setup: Setup, priced: list[Priced], gpu: Gpu) -> dict[str, Totals]:
    """Return each op's part of the whole model's step, the longest first."""
    found = {
        op: sum_step(setup, [item for item in priced if item.event.op == op], gpu).model
        for op in dict.fromkeys(item.event.op for item in priced)
    }
    return dict(sorted(found.items(), key=lambda pair: -pair[1].seconds))
