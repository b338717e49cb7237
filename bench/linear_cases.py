"""What ``bench/kernels.py`` measures of linear layers: plain, with their neighbours, quantised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from pagedraft.bench.layer_cases import EPS, KernelCase, Maker, Tensors
from pagedraft.bench.static_calls import linear_sizes
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.linear import linear, linear_cost, pack_linear
from pagedraft.kernels.linear_fused import gated_linear, linear_add_norm
from pagedraft.kernels.weight_quant import WEIGHT_FORMATS, WeightFormat, quantize_weight

FP8_CAPABILITY = (8, 9)


def _inputs(make: Maker, num_out: int, num_in: int) -> Tensors:
    weight = make.randn(num_out, num_in, dtype=make.dtype, scale=num_in**-0.5)
    return {"x": make.randn(make.step.num_tokens, num_in), "weight": weight}


def _cost(make: Maker, num_out: int, num_in: int, weight_size: float | None = None) -> Cost:
    size = weight_size or make.dtype.itemsize
    cost = linear_cost(make.step.num_tokens, num_in, num_out, make.itemsize, weight_size=size)
    return Cost(int(cost.bytes), cost.flops)


def plain_cases(make: Maker) -> Iterator[KernelCase]:
    """The projections that stand alone, and the others without their neighbours."""
    sizes = linear_sizes(make.model)
    sizes["head"] = (make.model.vocab_size, make.model.embed_dim)

    def prepare(t: Tensors) -> Callable[[], object]:
        packed = pack_linear(t["weight"])
        return lambda: linear(t["x"], packed)

    def baseline(t: Tensors) -> Callable[[], object]:
        x = t["x"].to(t["weight"].dtype)
        return lambda: F.linear(x, t["weight"])

    for part, shape in sizes.items():
        inputs = partial(_inputs, make, *shape)
        yield make.case("linear", part, inputs, prepare, _cost(make, *shape), "F.linear", baseline)


def fused_cases(make: Maker) -> Iterator[KernelCase]:
    """A layer's projections with what follows them, as the forward pass calls them."""
    sizes = linear_sizes(make.model)
    yield _gated_case(make, *sizes["gate_up"])
    for part in ("o", "down"):
        yield _add_norm_case(make, f"{part}_norm", *sizes[part])


def _gated_case(make: Maker, num_out: int, num_in: int) -> KernelCase:
    def prepare(t: Tensors) -> Callable[[], object]:
        packed = pack_linear(t["weight"])
        return lambda: gated_linear(t["x"], packed)

    def baseline(t: Tensors) -> Callable[[], object]:
        x = t["x"].to(t["weight"].dtype)

        def run() -> torch.Tensor:
            gate, up = F.linear(x, t["weight"]).chunk(2, dim=-1)
            return F.silu(gate) * up

        return run

    cost = _cost(make, num_out, num_in)
    saved = make.step.num_tokens * num_out // 2 * make.itemsize
    return make.case(
        "linear",
        "gate_up_act",
        partial(_inputs, make, num_out, num_in),
        prepare,
        Cost(cost.bytes - saved, cost.flops),
        "F.linear, F.silu * up",
        baseline,
    )


def _add_norm_case(make: Maker, part: str, num_out: int, num_in: int) -> KernelCase:
    def inputs() -> Tensors:
        residual, norm = make.randn(make.step.num_tokens, num_out), make.randn(num_out)
        return _inputs(make, num_out, num_in) | {"residual": residual, "norm": norm}

    def prepare(t: Tensors) -> Callable[[], object]:
        packed = pack_linear(t["weight"])
        return lambda: linear_add_norm(t["x"], packed, t["residual"], t["norm"], EPS)

    def baseline(t: Tensors) -> Callable[[], object]:
        x = t["x"].to(t["weight"].dtype)

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            total = F.linear(x, t["weight"]).to(t["residual"].dtype) + t["residual"]
            return F.rms_norm(total, (num_out,), t["norm"], EPS), total

        return run

    cost = _cost(make, num_out, num_in)
    added = (2 * make.step.num_tokens + 1) * num_out * make.itemsize
    return make.case(
        "linear",
        part,
        inputs,
        prepare,
        Cost(cost.bytes + added, cost.flops),
        "F.linear, add, F.rms_norm",
        baseline,
    )


def quantised_cases(make: Maker) -> Iterator[KernelCase]:
    """The widest projection with weights of fewer bits, against the plain weight's."""
    if make.device.type != "cuda":
        return
    has_fp8 = torch.cuda.get_device_capability(make.device) >= FP8_CAPABILITY
    shape = linear_sizes(make.model)["gate_up"]
    for name in WEIGHT_FORMATS:
        if name != "fp8" or has_fp8:
            yield _quantised_case(make, name, *shape)


def _quantised_case(make: Maker, name: WeightFormat, num_out: int, num_in: int) -> KernelCase:
    def prepare(t: Tensors) -> Callable[[], object]:
        weight = quantize_weight(t["weight"], name)
        packed = pack_linear(weight, dtype=t["x"].dtype)
        return lambda: linear(t["x"], packed)

    def baseline(t: Tensors) -> Callable[[], object]:
        packed = pack_linear(t["weight"])
        return lambda: linear(t["x"], packed)

    weight_size = quantize_weight(torch.zeros(1, num_in), name).bytes_per_weight
    return make.case(
        "linear",
        f"gate_up_{name}",
        partial(_inputs, make, num_out, num_in),
        prepare,
        _cost(make, num_out, num_in, weight_size),
        "plain weight, ours",
        baseline,
    )


def linear_cases(make: Maker) -> Iterator[KernelCase]:
    """All of the above."""
    yield from plain_cases(make)
    yield from fused_cases(make)
    yield from quantised_cases(make)
