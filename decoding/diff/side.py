"""One side of a comparison: runs a step and keeps what every stage of it made.

A step may be run *isolated*: after each stage ``inputs``, the other side's result, takes the
result's place, so that the next stage starts from what the other side's started from and its error
is its own. What no stage shows stays the side's own: the residual, and keys and values in the pool.

wire.py runs this file on another revision's kernels, so it imports only what that has too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pagedraft.decoding.draw import draw
from pagedraft.decoding.load import load_model, resolve_kv_dtype
from pagedraft.decoding.sequence import Sequence as TokenSequence
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.batch import Span, StepBatch, build_step_batch
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer

BLOCK_SIZE = 64
QUANTISED = ("int8", "int4", "fp8")
LAST_ROWS_ONLY = ("o_norm", "gate_up", "down_norm")  # in the last layer: rows that need logits


@dataclass(frozen=True)
class Side:
    """What one side runs.

    model: a local folder, a hub id, ``demo``, or a loaded Transformer.
    options: of ``load_model``, by name.
    swaps: op -> implementation, for what differs from the dispatch of the device.
    kv_dtype: of the KV pool, as ``LLM`` takes it.
    rev: git revision whose code runs, in a process of its own; None is this process.
    """

    model: str | Path | Transformer = "demo"
    options: Mapping[str, Any] = field(default_factory=dict)
    swaps: Mapping[str, str] = field(default_factory=dict)
    exact: bool = True
    kv_dtype: str = "auto"
    rev: str | None = None


class Stage(NamedTuple):
    """What one stage of a layer made, for the step's real rows.

    name: of STAGES in model/transformer.py, or "write_kv": the keys and values of the step's tokens
        as the pool gives them back.
    parts: "rows" of a plain result; "rows" and "squares" of a Normed one; "keys" and "values".
    eps: of a Normed result, else 0.
    """

    layer: int
    name: str
    parts: dict[str, torch.Tensor]
    eps: float = 0.0


@dataclass(frozen=True)
class Feed:
    """One step to run.

    tokens, start: the tokens and the position of the first; num_logits: 0 or 1.
    isolated: use the pool of isolated steps, which only they write.
    inputs: the other side's stages of this step, which take the place of this side's own.
    references: ops that run by their references in this step, whatever the side swaps.
    only_logits: keep the last stage alone.
    """

    tokens: list[int]
    start: int
    num_logits: int
    isolated: bool = False
    inputs: list[Stage] | None = None
    references: tuple[str, ...] = ()
    only_logits: bool = False


class Result(NamedTuple):
    """Stages in the order they ran, and the token drawn from the logits (-1: none is finite)."""

    stages: list[Stage]
    token: int | None


def load_side(side: Side) -> Transformer:
    """Load a side's model; weights are packed for the implementation that its linear layers run."""
    accepted = inspect.signature(load_model).parameters
    unknown = [name for name in side.options if name not in accepted]
    if unknown:
        raise ValueError(f"options: no option {unknown[0]!r}, expected some of {[*accepted][1:]}")
    if "observe" not in inspect.signature(Transformer.forward).parameters:
        raise ValueError("Transformer.forward has no `observe`: it cannot show its stages")
    choice = side.swaps.get("linear")
    packs_anew = {"linear": choice} if choice in ("cpu", "triton") else {}
    with swapped(packs_anew):
        return load_model(side.model, **side.options)


@contextmanager
def swapped(swaps: Mapping[str, str]) -> Iterator[None]:
    """Run ops with the implementations that ``swaps`` names inside the ``with`` block."""
    with ExitStack() as stack:
        for op, choice in swaps.items():
            stack.enter_context(use_implementation(choice, op))  # type: ignore[arg-type]
        yield


class Runner:
    """Runs the steps of one side over pools of its own: one prompt of at most ``max_length``."""

    def __init__(
        self, side: Side, model: Transformer, max_length: int, temperature: float, seed: int
    ) -> None:
        self.side, self.model = side, model
        self.temperature, self.seed = temperature, seed
        self.block_ids = list(range(1, 2 + max_length // BLOCK_SIZE))
        kv_dtype = resolve_kv_dtype(side.kv_dtype) or model.activation_dtype
        self.caches = {
            isolated: KVCache(
                model.config, len(self.block_ids) + 1, BLOCK_SIZE, kv_dtype, model.device
            )
            for isolated in (False, True)
        }

    @property
    def shape(self) -> list[int]:
        """The sizes that both sides of a comparison share."""
        c = self.model.config
        heads = c.num_heads, c.num_kv_heads, c.head_dim
        return [c.num_layers, c.embed_dim, *heads, c.mlp_dim, c.vocab_size]

    @property
    def formats(self) -> dict[str, str]:
        """How numbers are stored, by names of compare.py.

        dtype: of the weights; weights: of the linear ones, which may be quantised; activations; kv:
        of the pool.
        """
        asked, packed = self.side.options.get("weights"), self.model.layers[0].qkv.format
        found = next((form for form in QUANTISED if form in f"{asked} {packed}"), None)
        activations = _name(self.model.activation_dtype)
        return {
            "dtype": _name(self.model.dtype),
            "weights": found or _name(self.model.dtype),
            "activations": activations,
            "kv": activations if self.side.kv_dtype == "auto" else self.side.kv_dtype,
        }

    def step(self, feed: Feed) -> Result:
        """Run ``feed`` and return its stages; tensors are copies on the model's device."""
        cache = self.caches[feed.isolated]
        span = Span(feed.tokens, feed.start, self.block_ids, feed.num_logits)
        batch = build_step_batch(
            [span],
            block_size=BLOCK_SIZE,
            device=self.model.device,
            row_multiple=self.model.row_multiple,
        )
        recorder = _Recorder(cache, batch, self.model.config.num_layers, feed)
        self.model.exact = self.side.exact
        with swapped({**self.side.swaps, **dict.fromkeys(feed.references, "ref")}):
            logits_QV = self.model.forward(batch, cache, observe=recorder)
            token = self._draw(logits_QV, feed) if feed.num_logits else None
        return Result(recorder.stages, token)

    def _draw(self, logits_1V: torch.Tensor, feed: Feed) -> int:
        context = TokenSequence([], 0, self.temperature, self.seed)
        return int(draw(logits_1V, [context], [feed.start + len(feed.tokens)]))

    def close(self) -> None:
        """Nothing outlives the object."""


class _Recorder:
    """What ``forward`` calls with each stage's result."""

    def __init__(self, cache: KVCache, batch: StepBatch, num_layers: int, feed: Feed) -> None:
        self.cache, self.batch, self.feed = cache, batch, feed
        self.last = num_layers - 1
        inputs = None if feed.inputs is None else {stage[:2]: stage for stage in feed.inputs}
        self.inputs = inputs
        self.stages: list[Stage] = []

    @torch.inference_mode()
    def __call__(self, layer: int, name: str, result: Any) -> None:
        if self.feed.only_logits and layer <= self.last:
            return
        if name == "attention":
            self.stages.append(Stage(layer, "write_kv", self._written(layer)))
        is_cut = layer > self.last or (layer == self.last and name in LAST_ROWS_ONLY)
        num_rows = self.batch.num_logits if is_cut else self.batch.num_tokens
        if hasattr(result, "rows_TE"):
            whole = {"rows": result.rows_TE, "squares": result.squares_TP}
        else:
            whole = {"rows": result}
        parts = {part: tensor[:num_rows].clone() for part, tensor in whole.items()}
        stage = Stage(layer, name, parts, getattr(result, "eps", 0.0))
        self.stages.append(stage)
        if self.inputs is not None:
            if (layer, name) not in self.inputs:
                raise ValueError(f"stages: only one side has {name} of layer {layer}")
            _overwrite(whole, stage, self.inputs[layer, name])

    def _written(self, layer: int) -> dict[str, torch.Tensor]:
        """Keys and values [T, G, D] of the step's tokens, read from the pool."""
        slots_T = self.batch.slots_T[: self.batch.num_tokens]
        block_T, offset_T = slots_T // BLOCK_SIZE, slots_T % BLOCK_SIZE
        parts = {}
        for part, pool, scale in (
            ("keys", self.cache.k[layer], self.cache.k_scale[layer]),
            ("values", self.cache.v[layer], self.cache.v_scale[layer]),
        ):
            rows_TGD = pool[block_T, :, offset_T]
            if scale is not None:
                rows_TGD = rows_TGD.float() * scale[block_T, :, offset_T][..., None]
            parts[part] = rows_TGD
        return parts


def finished(stage: Stage) -> torch.Tensor:
    """The rows of a stage with their norm's factor, whichever way they came."""
    rows = stage.parts["rows"]
    if "squares" not in stage.parts:
        return rows
    mean_T1 = stage.parts["squares"].sum(-1, keepdim=True) / rows.shape[1]
    return (rows.float() * torch.rsqrt(mean_T1 + stage.eps)).to(rows.dtype)


def _overwrite(whole: dict[str, torch.Tensor], own: Stage, other: Stage) -> None:
    """Put ``other``'s values into the tensors ``whole`` that the next stage reads."""
    num_rows = len(own.parts["rows"])
    if own.parts.keys() == other.parts.keys():
        for part, tensor in whole.items():
            tensor[:num_rows].copy_(other.parts[part])
        return
    whole["rows"][:num_rows].copy_(finished(other))
    if "squares" in whole:  # such that the factor 1 / sqrt(mean + eps) is 1
        squares_TP = whole["squares"]
        mean = (1.0 - own.eps) * whole["rows"].shape[1]
        squares_TP[:num_rows] = mean / squares_TP.shape[1]


def _name(dtype: torch.dtype) -> str:
    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    return names.get(dtype, str(dtype))
