"""What the forward inspector runs: weights, a step and a KV cache without memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from pagedraft.bench.shapes import DTYPES, StepShape
from pagedraft.bench.static_attention_calls import CACHE_DTYPES
from pagedraft.decoding.logit_rules import NEUTRAL, LogitRules
from pagedraft.decoding.sequence import Sequence
from pagedraft.kernels.weight_quant import CODE_DTYPES, INT4_GROUPS, QuantWeight, WeightFormat
from pagedraft.model.batch import Span, StepBatch, build_step_batch
from pagedraft.model.config import ModelConfig
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.weights import LINEAR, expected_parts

META = torch.device("meta")
_CUT = LogitRules(top_k=50, top_p=0.9, min_p=0.01)
SAMPLING = {
    "plain": NEUTRAL,
    "cut": _CUT,
    "all": replace(
        _CUT, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, bias=((1, 1.0),)
    ),
}


@dataclass(frozen=True)
class Setup:
    """What is run: a model's first layers, how its weights and keys are stored.

    config: of the layers that run. num_layers: of the whole model.
    dtype: a name of shapes.DTYPES. weights: "auto" (as the config says) or a quantised format.
    kv_dtype: "auto" (``dtype``) or a quantised format. sampling: a name of SAMPLING.
    """

    model: str
    config: ModelConfig
    num_layers: int
    dtype: str = "bf16"
    weights: str = "auto"
    kv_dtype: str = "auto"
    block_size: int = 64
    sampling: str = "plain"

    @property
    def needs_fp8(self) -> bool:
        return "fp8" in (self.weight_format, self.kv_dtype)

    @property
    def weight_format(self) -> WeightFormat | None:
        """Format of the linear weights, None for plain tensors of ``dtype``."""
        if self.weights != "auto":
            return self.weights
        return self.config.quantization.format if self.config.quantization else None

    @property
    def head_format(self) -> WeightFormat | None:
        """Format of the head, which a quantised checkpoint may store plain."""
        parts = expected_parts(self.config).get("head")
        if self.weights == "auto" and (parts is None or parts[0].scheme is None):
            return None
        return self.weight_format

    @property
    def weight_group(self) -> int | None:
        """Inputs that share a factor, None for all inputs of an output."""
        if self.weights == "auto" and self.config.quantization:
            return self.config.quantization.group
        return INT4_GROUPS[0] if self.weights == "int4" else None


def meta_weights(setup: Setup) -> dict[str, Any]:
    """Return weights under the loader's names, without memory."""
    weights: dict[str, Any] = {}
    for name, parts in expected_parts(setup.config).items():
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        weights[name] = torch.empty(shape, dtype=DTYPES[setup.dtype], device=META)
        if parts[0].scheme is not None:
            weights[name] = _quantised(setup, shape)
    if setup.weights == "auto":
        return weights
    weights.setdefault("head", weights["embed"])  # a quantised head is a copy
    return {
        name: _quantised(setup, weight.shape) if name.split(".")[-1] in LINEAR else weight
        for name, weight in weights.items()
    }


def _quantised(setup: Setup, shape: tuple[int, ...]) -> QuantWeight:
    """Return a weight [O, I] of that shape as the setup stores it."""
    format, scheme = setup.weight_format, setup.config.quantization
    assert format is not None
    num_out, num_in = shape
    group = min(setup.weight_group or num_in, num_in)
    if num_in % group:
        raise ValueError(f"{format} weights: {num_in} inputs do not divide into groups of {group}")
    code_columns = num_in // 2 if format == "int4" else num_in
    factors = (num_in // group, num_out)
    has_order = setup.weights == "auto" and scheme is not None and scheme.has_order
    return QuantWeight(
        format,
        torch.empty(num_out, code_columns, dtype=CODE_DTYPES[format], device=META),
        torch.empty(factors, device=META),
        torch.empty(factors, dtype=torch.uint8, device=META) if format == "int4" else None,
        group,
        torch.empty(num_in, dtype=torch.int64, device=META) if has_order else None,
    )


def meta_batch(setup: Setup, step: StepShape) -> StepBatch:
    """Return a step's rows, each with blocks of its own."""
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


def meta_cache(setup: Setup, step: StepShape) -> KVCache:
    """Return a pool of just enough blocks; made as if for the CPU, which knows fp8."""
    num_blocks = 1 + step.num_rows * math.ceil(step.context / setup.block_size)
    dtype = CACHE_DTYPES.get(setup.kv_dtype, DTYPES[setup.dtype])
    cache = KVCache(setup.config, num_blocks, setup.block_size, dtype, torch.device("cpu"))
    for name in ("k", "v", "k_scale", "v_scale"):
        pools = getattr(cache, name)
        setattr(cache, name, [None if pool is None else pool.to(META) for pool in pools])
    return cache


def prompt_sequence(setup: Setup, step: StepShape) -> Sequence:
    """Return a request whose context is what a row of the step has."""
    rules = SAMPLING[setup.sampling]
    return Sequence([0] * step.context, step.context, temperature=1.0, seed=0, rules=rules)
