"""What ``bench/kernels.py`` measures in a layer: inputs, op, cost and a named PyTorch baseline.

``inputs`` are tensors only, so that the bench can copy them (rotating buffers) and widen them (the
correctness gate). ``prepare`` turns them into a call that does nothing but the op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from pagedraft.bench.attention_baselines import sdpa
from pagedraft.bench.attention_cases import (
    AttentionPoint,
    dtype_name,
    point_cost,
    point_inputs,
    prepare_attention,
)
from pagedraft.bench.shapes import ModelShape, StepShape
from pagedraft.bench.static_calls import BLOCK_SIZE
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.dispatch import implementation
from pagedraft.kernels.gated_mlp import gated_mlp, gated_mlp_cost
from pagedraft.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_cost
from pagedraft.kernels.write_kv import plan_write_kv, write_kv, write_kv_cost

Tensors = dict[str, torch.Tensor]
Prepare = Callable[[Tensors], Callable[[], object]]
EPS = 1e-5


@dataclass(frozen=True)
class KernelCase:
    """One row of the table; ``part`` is unique within a step."""

    op: str
    part: str
    step: StepShape
    inputs: Callable[[], Tensors]
    prepare: Prepare
    cost: Cost
    baseline_name: str
    baseline: Prepare


@dataclass(frozen=True)
class Maker:
    """Makes the cases of one model and step.

    dtype: of the weights, and of everything else on a GPU; activations on the CPU are fp32.
    """

    model: ModelShape
    step: StepShape
    dtype: torch.dtype
    device: torch.device

    @property
    def act_dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else self.dtype

    @property
    def itemsize(self) -> int:
        return self.act_dtype.itemsize

    def randn(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0):
        """Return normal values on the device."""
        values = torch.randn(*shape, device=self.device) * scale
        return values.to(dtype or self.act_dtype)

    def case(self, op: str, part: str, inputs, prepare, cost, baseline_name, baseline):
        """Return a case of this step."""
        return KernelCase(op, part, self.step, inputs, prepare, cost, baseline_name, baseline)


def _rms_norm(make: Maker) -> Iterator[KernelCase]:
    tokens, width = make.step.num_tokens, make.model.embed_dim

    def inputs() -> Tensors:
        return {
            "x": make.randn(tokens, width),
            "residual": make.randn(tokens, width),
            "weight": make.randn(width),
        }

    yield make.case(
        "rms_norm",
        "norm",
        inputs,
        lambda t: lambda: rms_norm(t["x"], t["weight"], EPS),
        rms_norm_cost(tokens, width, make.itemsize),
        "F.rms_norm",
        lambda t: lambda: F.rms_norm(t["x"], (width,), t["weight"], EPS),
    )
    yield make.case(
        "rms_norm",
        "add_norm",
        inputs,
        lambda t: lambda: add_rms_norm(t["x"], t["residual"], t["weight"], EPS),
        rms_norm_cost(tokens, width, make.itemsize, residual=True),
        "add, F.rms_norm",
        lambda t: lambda: F.rms_norm(t["x"] + t["residual"], (width,), t["weight"], EPS),
    )


def _gated_mlp(make: Maker) -> Iterator[KernelCase]:
    tokens, width = make.step.num_tokens, make.model.mlp_dim

    def baseline(t: Tensors) -> Callable[[], object]:
        gate, up = t["x"].chunk(2, dim=-1)
        return lambda: F.silu(gate) * up

    yield make.case(
        "gated_mlp",
        "act",
        lambda: {"x": make.randn(tokens, 2 * width)},
        lambda t: lambda: gated_mlp(t["x"]),
        gated_mlp_cost(tokens, width, make.itemsize),
        "F.silu * up",
        baseline,
    )


def _paged_attention(make: Maker) -> Iterator[KernelCase]:
    step, model = make.step, make.model
    dtype = dtype_name(make.act_dtype)
    point = AttentionPoint(
        step.name,
        (step.span,) * step.num_rows,
        (step.context,) * step.num_rows,
        group=model.num_heads // model.num_kv_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=BLOCK_SIZE,
        dtype=dtype,
        cache=dtype,
    )
    yield make.case(
        "paged_attention",
        "attention",
        lambda: point_inputs(point, make.device),
        prepare_attention(point),
        point_cost(point),
        "SDPA, no paging",
        partial(sdpa, point),
    )


def _write_inputs(make: Maker) -> Tensors:
    """Return qkv, rotation tables, a filled pool, and shuffled slots of each row's last tokens."""
    step, model, device = make.step, make.model, make.device
    blocks_a_row = -(-step.context // BLOCK_SIZE)
    num_blocks = 1 + step.num_rows * blocks_a_row
    angles_PR = torch.rand(step.context, model.head_dim // 2, device=device) * 6.28
    pool = (num_blocks, model.num_kv_heads, BLOCK_SIZE, model.head_dim)
    table_RM = 1 + torch.randperm(num_blocks - 1, device=device).view(step.num_rows, blocks_a_row)
    positions_L = torch.arange(step.context - step.span, step.context, device=device)
    blocks_RL = table_RM[:, positions_L // BLOCK_SIZE]
    return {
        "qkv": make.randn(step.num_tokens, model.qkv_dim),
        "cos": angles_PR.cos(),
        "sin": angles_PR.sin(),
        "k": make.randn(*pool),
        "v": make.randn(*pool),
        "positions": positions_L.repeat(step.num_rows).int(),
        "slots": (blocks_RL * BLOCK_SIZE + positions_L % BLOCK_SIZE).flatten(),
    }


def _write_kv(make: Maker) -> Iterator[KernelCase]:
    step, model = make.step, make.model

    def prepare(t: Tensors) -> Callable[[], object]:
        tables = (t["cos"], t["sin"], t["positions"], t["slots"])
        caches = (t["k"], t["v"])
        is_cpu = implementation("write_kv", t["qkv"].device, has_cpu=True) == "cpu"
        plan = plan_write_kv(*tables, model.num_kv_heads, BLOCK_SIZE) if is_cpu else None
        write = partial(write_kv, t["qkv"], *tables, *caches, model.num_heads, plan=plan)
        return lambda: (write(), *caches)

    def baseline(t: Tensors) -> Callable[[], object]:
        return lambda: _rope_and_scatter(t, model)

    yield make.case(
        "write_kv",
        "write_kv",
        lambda: _write_inputs(make),
        prepare,
        write_kv_cost(
            *(step.num_tokens, model.num_heads, model.num_kv_heads, model.head_dim),
            make.itemsize,
        ),
        "eager ops",
        baseline,
    )


def _rope_and_scatter(t: Tensors, model: ModelShape) -> torch.Tensor:
    heads = t["qkv"].view(len(t["qkv"]), -1, model.head_dim)
    sizes = (model.num_heads, model.num_kv_heads, model.num_kv_heads)
    q, k, v = heads.split(sizes, dim=1)
    cos, sin = t["cos"][t["positions"]][:, None], t["sin"][t["positions"]][:, None]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return rotated.to(x.dtype)

    block, offset = t["slots"] // BLOCK_SIZE, t["slots"] % BLOCK_SIZE
    t["k"][block, :, offset] = rotate(k)
    t["v"][block, :, offset] = v
    return rotate(q)


LAYER_MAKERS: dict[str, Callable[[Maker], Iterator[KernelCase]]] = {
    "rms_norm": _rms_norm,
    "write_kv": _write_kv,
    "paged_attention": _paged_attention,
    "gated_mlp": _gated_mlp,
}
