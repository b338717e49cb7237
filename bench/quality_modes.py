"""The modes that the quality bench compares: how weights and KV are stored, how products run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagedraft.decoding.load import resolve_dtype, resolve_kv_dtype
from pagedraft.kernels.weight_quant import (
    INT4_GROUPS,
    QuantWeight,
    WeightFormat,
    check_weight_format,
    quantize_weight,
)
from pagedraft.model.config import ModelConfig
from pagedraft.model.kv_cache import FP8, check_fp8_arch, gpu_arch, kv_bytes_per_token
from pagedraft.model.transformer import Transformer
from pagedraft.model.weights import LINEAR, load_weights

CONTROL = "exact"


@dataclass(frozen=True)
class Mode:
    """One way to run the model.

    format, group: what the layers' linear weights are rounded to, None to keep them; head: the
        same of the head.
    dtype: what unrounded weights are loaded as, None for the control's dtype.
    kv_dtype: what the pool stores: "auto" (the activations' dtype), "int8" or "fp8".
    exact: False for products whose bits may depend on the batch.
    target: largest ratio of perplexities that the project aims at, 0 for none.
    """

    name: str
    format: WeightFormat | None = None
    group: int | None = None
    head: WeightFormat | None = None
    dtype: str | None = None
    kv_dtype: str = "auto"
    exact: bool = True
    target: float = 0.0


MODES = (
    Mode(CONTROL),
    Mode("fast", exact=False),
    Mode("fp32", dtype="fp32"),
    Mode("int8", "int8", head="int8", target=1.01),
    Mode("int8-plain-head", "int8"),
    Mode("int4", "int4", head="int8", target=1.08),
    Mode("int4-int4-head", "int4", head="int4"),
    Mode("int4-groups-64", "int4", 64, "int8"),
    Mode("int4-groups-128", "int4", 128, "int8"),
    Mode("fp8", "fp8", head="fp8"),
    Mode("kv-int8", kv_dtype="int8"),
    Mode("kv-fp8", kv_dtype="fp8"),
    Mode("int4-kv-int8", "int4", head="int8", kv_dtype="int8"),
)


def choose(names: Sequence[str]) -> list[Mode]:
    """The control, then the modes of these names in the order of MODES.

    Raises ValueError for a name that no mode has.
    """
    known = [mode.name for mode in MODES]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"modes: expected some of {known}, got {unknown}")
    return [mode for mode in MODES if mode.name == CONTROL or mode.name in names]


@dataclass(frozen=True)
class Source:
    """A checkpoint, from which the model of every mode is made.

    weights: of the control (names as in model/weights.py); never changed.
    """

    folder: Path
    config: ModelConfig
    weights: dict[str, Any]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def read(cls, folder: Path, dtype: torch.dtype, device: torch.device) -> Source:
        """Load the weights in ``folder`` as ``dtype``."""
        config = ModelConfig.from_folder(folder)
        weights = load_weights(folder, config, dtype=dtype, device=device)
        return cls(folder, config, weights, dtype, device)

    def model(self, mode: Mode) -> tuple[Transformer, str]:
        """The model of ``mode``, and what has to be said beside its figures."""
        weights, notes = dict(self.weights), []
        if mode.dtype is not None:
            dtype = resolve_dtype(mode.dtype)
            weights = load_weights(self.folder, self.config, dtype=dtype, device=self.device)
            if _same_values(weights, self.weights):
                notes.append("weights of exact's values")
        for name, weight in weights.items():
            if mode.format and _is_layer(name):
                weights[name] = quantize_weight(weight, mode.format, mode.group)
        if mode.head:
            head = self.weights.get("head", self.weights["embed"])
            weights["head"] = quantize_weight(head, mode.head)
        model = Transformer(self.config, weights, exact=mode.exact)
        if self.device.type == "cpu":
            notes.append(f"layers by {model.layers[0].qkv.format}")
        return model, ", ".join(notes)

    def stored_kv(self, mode: Mode, model: Transformer) -> torch.dtype:
        """What the pool of ``mode`` stores."""
        return resolve_kv_dtype(mode.kv_dtype) or model.activation_dtype

    def kv_bytes(self, mode: Mode, model: Transformer) -> int:
        """Bytes of KV a token."""
        return kv_bytes_per_token(self.config, self.stored_kv(mode, model))

    def why_not(self, mode: Mode) -> str:
        """Why ``mode`` cannot be told from the control, or cannot run here; empty if it can."""
        if not mode.exact:
            return self._why_not_fast()
        if mode.dtype is not None and resolve_dtype(mode.dtype) == self.dtype:
            return "this is the control's dtype"
        stored = self.config.quantization
        if stored is not None and (mode.format or mode.head or mode.dtype):
            return f"the checkpoint stores {stored.format} weights"
        group = mode.group or (INT4_GROUPS[0] if mode.format == "int4" else 1)
        if not self._divides(group):
            return f"groups of {group} do not divide the inputs of every layer"
        try:
            for format in {mode.format, mode.head} - {None}:
                check_weight_format(format, self.device)
            if resolve_kv_dtype(mode.kv_dtype) == FP8:
                check_fp8_arch(gpu_arch(self.device))
        except ValueError as error:
            return str(error)
        return ""

    def _why_not_fast(self) -> str:
        if self.device.type == "cpu":
            return "exact=False is the code path of exact on a CPU: nothing to compare"
        if all(isinstance(self.weights[name], QuantWeight) for name in self._layers()):
            return "exact=False is the code path of exact for quantised weights"
        return ""

    def _divides(self, group: int) -> bool:
        if group == 1:
            return True
        return all(self.weights[name].shape[1] % group == 0 for name in self._layers())

    def _layers(self) -> list[str]:
        return [name for name in self.weights if _is_layer(name)]


def _is_layer(name: str) -> bool:
    return name.rpartition(".")[2] in LINEAR and name != "head"


def _same_values(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether unquantised weights are equal number by number, whatever their dtypes."""
    return all(torch.equal(a[name].float(), b[name].float()) for name in b)
