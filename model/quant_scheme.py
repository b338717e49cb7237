"""Reads ``quantization_config`` of config.json: how a checkpoint stores its quantised layers.

Only what changes the numbers of the weights is read. Activations are never quantised here, whatever
the file asks for; a scheme that we cannot load is an error that names the field and the way out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pagedraft.kernels.weight_quant import FP8_BLOCK, INT4_GROUPS, WeightFormat

Layout = Literal["gptq", "awq", "packed", "blocks", "scaled"]
SUPPORTED = (
    "gptq and awq (gemm) of 4 bits, fp8, fbgemm_fp8, compressed-tensors of the formats "
    "float-quantized, int-quantized and pack-quantized (4 bits)"
)


@dataclass(frozen=True)
class QuantScheme:
    """How the quantised linear layers of a checkpoint are stored.

    method: quant_method of the file.
    layout: which tensors a layer has (model/quantized.py).
    format: what a layer becomes.
    group: inputs that share a factor; None for one factor an output or a tensor.
    zero_offset: added to a stored zero point.
    has_zero: zero points are stored (packed layout).
    has_order: a layer must store which group each of its inputs belongs to.
    scale_name: last part of the name of the factors.
    skipped: modules that are stored plain: names, dotted parts of names, or "re:" and a pattern.
    """

    method: str
    layout: Layout
    format: WeightFormat
    group: int | None = None
    zero_offset: int = 0
    has_zero: bool = True
    has_order: bool = False
    scale_name: str = "weight_scale"
    skipped: tuple[str, ...] = ()

    def covers(self, module: str) -> bool:
        """Say whether the layer ``module`` (its name in the file) is stored quantised."""
        return not any(_names(entry, module) for entry in self.skipped)


def _names(entry: str, module: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    return f".{entry}." in f".{module}."


def parse_scheme(values: object) -> QuantScheme:
    """Return the scheme of a ``quantization_config``; ValueError for one that is not supported."""
    if not isinstance(values, Mapping):
        raise ValueError(f"quantization_config: expected an object, got {values!r}")
    method = values.get("quant_method")
    try:
        if not isinstance(method, str) or method not in PARSERS:
            raise ValueError("unknown quant_method")
        return PARSERS[method](values)
    except (ValueError, re.error) as error:
        raise ValueError(
            f"quantization_config: quant_method {method!r}: {error}; supported: {SUPPORTED}; or "
            f'load the unquantised model with weights="int4", "int8" or "fp8" (--weights)'
        ) from None


def _gptq(values: Mapping[str, Any]) -> QuantScheme:
    _expect(values, "bits", [4])
    _expect(values, "pack_dtype", ["int32"], default="int32")
    _expect(values, "dynamic", [{}], default={})
    version = _expect(values, "checkpoint_format", ["gptq", "gptq_v2"], default="gptq")
    return QuantScheme(
        "gptq",
        "gptq",
        "int4",
        _group(values),
        zero_offset=1 if version == "gptq" else 0,
        has_order=bool(values.get("desc_act")),
        skipped=_skipped(values, "modules_to_not_convert", has_head=bool(values.get("lm_head"))),
    )


def _awq(values: Mapping[str, Any]) -> QuantScheme:
    _expect(values, "bits", [4])
    _expect(values, "version", ["gemm", "GEMM"], default="gemm")
    _expect(values, "zero_point", [True], default=True)
    return QuantScheme(
        "awq", "awq", "int4", _group(values), skipped=_skipped(values, "modules_to_not_convert")
    )


def _fp8(values: Mapping[str, Any]) -> QuantScheme:
    _expect(values, "fmt", ["e4m3", "float8_e4m3fn"], default="e4m3")
    skipped = _skipped(values, "modules_to_not_convert", "ignored_layers")
    if values.get("weight_block_size") is None:
        return QuantScheme("fp8", "scaled", "fp8", skipped=skipped)
    _expect(values, "weight_block_size", [[FP8_BLOCK, FP8_BLOCK]])
    return QuantScheme(
        "fp8", "blocks", "fp8", FP8_BLOCK, scale_name="weight_scale_inv", skipped=skipped
    )


def _fbgemm_fp8(values: Mapping[str, Any]) -> QuantScheme:
    skipped = _skipped(values, "modules_to_not_convert")
    return QuantScheme("fbgemm_fp8", "scaled", "fp8", skipped=skipped)


def _compressed_tensors(values: Mapping[str, Any]) -> QuantScheme:
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise ValueError(f"config_groups: expected one group, got {_short(groups)}")
    [group] = groups.values()
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise ValueError(f"config_groups: expected an object with weights, got {_short(group)}")
    _expect(group, "targets", [["Linear"]])
    sparsity = values.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping):
        raise ValueError(f"sparsity_config: expected an object, got {_short(sparsity)}")
    _expect(sparsity, "format", ["dense"], default="dense")
    weights = group["weights"]
    file_format = _expect(values, "format", list(COMPRESSED_FORMATS))
    skipped = _skipped(values, "ignore", has_head=True)
    return COMPRESSED_FORMATS[file_format](weights, skipped)


def _float_quantized(weights: Mapping[str, Any], skipped: tuple[str, ...]) -> QuantScheme:
    _expect(weights, "num_bits", [8])
    _expect(weights, "type", ["float"])
    strategy = _expect(weights, "strategy", ["channel", "tensor", "block"])
    if strategy != "block":
        return QuantScheme("compressed-tensors", "scaled", "fp8", skipped=skipped)
    _expect(weights, "block_structure", [[FP8_BLOCK, FP8_BLOCK]])
    return QuantScheme("compressed-tensors", "blocks", "fp8", FP8_BLOCK, skipped=skipped)


def _int_quantized(weights: Mapping[str, Any], skipped: tuple[str, ...]) -> QuantScheme:
    _expect(weights, "num_bits", [8])
    _expect(weights, "type", ["int"], default="int")
    _expect(weights, "symmetric", [True], default=True)
    _expect(weights, "strategy", ["channel", "tensor"])
    return QuantScheme("compressed-tensors", "scaled", "int8", skipped=skipped)


def _pack_quantized(weights: Mapping[str, Any], skipped: tuple[str, ...]) -> QuantScheme:
    _expect(weights, "num_bits", [4])
    _expect(weights, "type", ["int"], default="int")
    strategy = _expect(weights, "strategy", ["group", "channel"])
    return QuantScheme(
        "compressed-tensors",
        "packed",
        "int4",
        group=_group(weights) if strategy == "group" else None,
        has_zero=not weights.get("symmetric", True),
        has_order=weights.get("actorder") in ("group", True),
        skipped=skipped,
    )


PARSERS: Mapping[str, Callable[[Mapping[str, Any]], QuantScheme]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "compressed-tensors": _compressed_tensors,
}
COMPRESSED_FORMATS: Mapping[str, Callable[..., QuantScheme]] = {
    "float-quantized": _float_quantized,
    "int-quantized": _int_quantized,
    "pack-quantized": _pack_quantized,
}


def _group(values: Mapping[str, Any]) -> int | None:
    """Return group_size; None where it says that all inputs of an output share one factor."""
    group = values.get("group_size")
    if group == -1:
        return None
    if isinstance(group, bool) or not isinstance(group, int) or group < 1 or group % INT4_GROUPS[0]:
        raise ValueError(f"group_size: expected -1 or a multiple of {INT4_GROUPS[0]}, got {group}")
    return group


def _skipped(values: Mapping[str, Any], *names: str, has_head: bool = False) -> tuple[str, ...]:
    """Return the modules that are stored plain, the head among them unless ``has_head``."""
    entries = [] if has_head else ["lm_head"]
    for name in names:
        value = values.get(name) or []
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise ValueError(f"{name}: expected a list of names, got {_short(value)}")
        entries += value
    for entry in entries:
        re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
    return tuple(entries)


def _expect(values: Mapping[str, Any], name: str, allowed: list[Any], default: Any = None) -> Any:
    """Return the field ``name``, or raise unless it is one of ``allowed``."""
    value = values.get(name)
    value = default if value is None else value
    if not any(type(value) is type(other) and value == other for other in allowed):
        raise ValueError(f"{name}: expected {_either(allowed)}, got {_short(value)}")
    return value


def _either(allowed: list[Any]) -> str:
    return " or ".join(str(value) for value in allowed)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
