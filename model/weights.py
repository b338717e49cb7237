"""Reads the weights of a folder into tensors under our names, q/k/v and gate/up fused.

Each tensor is read once, into its place in the fused tensor on the target device. Linear weights
may come as ``QuantWeight``: because the checkpoint stores them so, or rounded here, one tensor of
the file at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from pagedraft.kernels.weight_quant import (
    WEIGHT_FORMATS,
    QuantWeight,
    WeightFormat,
    check_weight,
    check_weight_format,
)
from pagedraft.model import quantized
from pagedraft.model.config import ModelConfig, check_folder
from pagedraft.model.families import FAMILIES
from pagedraft.model.quant_scheme import QuantScheme
from pagedraft.model.weight_files import Header, OpenFile, check_headers, open_files

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LINEAR = ("qkv", "o", "gate_up", "down", "head", "fuse", "out")
# What the head becomes where it differs from the layers. int4 in the head alone costs the demo
# model 6 % of perplexity; int8 there makes 98 MB of the 88 MB that a token reads.
HEAD_FORMATS: Mapping[str, WeightFormat] = {"int4": "int8"}

Files = Mapping[str, OpenFile]


@dataclass(frozen=True)
class Part:
    """One tensor of an unquantised file: its name there and the shape that the config asks for.

    scheme: how the file stores it in its place, where it does not store the tensor itself.
    """

    source: str
    shape: tuple[int, ...]
    scheme: QuantScheme | None = None

    @property
    def module(self) -> str:
        return self.source.rpartition(".")[0]

    @property
    def headers(self) -> list[Header]:
        """What the file has for it."""
        if self.scheme is None:
            return [Header(self.source, (self.shape,))]
        return quantized.headers(self.scheme, self.module, *self.shape)


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    weights: str = "auto",
) -> dict[str, Any]:
    """Return the tensors of ``expected_parts(config)``, cast to ``dtype``, on ``device``.

    Linear weights [out, in] are tensors or ``QuantWeight``. "head" is absent where it is the
    embedding itself.
    weights: "int8", "int4" or "fp8" rounds the linear ones to it, the head as HEAD_FORMATS says;
    "auto" keeps what is stored. int4 takes groups of 32 inputs and refuses other numbers of them.
    Raises FileNotFoundError or ValueError naming the file and the tensors.
    """
    device = torch.device(device)
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {DTYPES}, got {dtype}")
    check_weights(weights, config, device)
    if config.quantization is not None:
        weights = "auto"
    folder, parts = check_folder(folder), expected_parts(config)
    with ExitStack() as stack:
        files = open_files(folder, stack)
        _check_headers(folder, files, parts, config)
        result = read_parts(files, parts, dtype=dtype, device=device, weights=weights)
        head = FAMILIES[config.family].tensors["head"][0]
        if config.tied_head and head in files:
            _check_tied(files, head, result["embed"])
    if config.tied_head and weights != "auto":
        result["head"] = quantized.quantize(result["embed"], _format_of("head", weights))
    return result


def read_parts(
    files: Files,
    parts: Mapping[str, list[Part]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    weights: str,
) -> dict[str, Any]:
    """Read what ``parts`` name; their headers have been checked.

    weights: what linear ones are rounded to, but those that are stored quantised; or "auto".
    """
    result: dict[str, Any] = {}
    for name, sources in parts.items():
        if sources[0].scheme is not None:
            result[name] = _load_quantised(files, sources, device, f"{name}_bias" in parts)
        elif weights != "auto" and _is_linear(name):
            result[name] = _load_rounded(files, sources, device, _format_of(name, weights))
        else:
            result[name] = _load_plain(files, sources, dtype, device)
    return result


def check_weights(weights: str, config: ModelConfig, device: torch.device) -> None:
    """Raise ValueError unless linear weights of this model can be had as ``weights``."""
    choices = ["auto", *WEIGHT_FORMATS]
    if weights not in choices:
        raise ValueError(f"weights: expected one of {choices}, got {weights!r}")
    stored = config.quantization
    if stored is not None and weights not in ("auto", stored.format):
        raise ValueError(
            f'weights: expected "auto" or "{stored.format}", which the checkpoint stores '
            f"(quant_method {stored.method}), got {weights!r}"
        )
    for format in {weights, "auto" if stored is None else stored.format} - {"auto"}:
        check_weight_format(cast(WeightFormat, format), device)


def _is_linear(name: str) -> bool:
    return name.rpartition(".")[2] in LINEAR


def _format_of(name: str, weights: str) -> WeightFormat:
    """Return what the linear weight ``name`` is rounded to."""
    layers = cast(WeightFormat, weights)
    return HEAD_FORMATS.get(weights, layers) if name == "head" else layers


def expected_parts(config: ModelConfig) -> dict[str, list[Part]]:
    """Return our tensor names in the order of the forward pass, with what each is made of."""
    names = FAMILIES[config.family].tensors
    shapes, scheme = _shapes(config), config.quantization

    def parts(name: str, layer: int | None = None) -> list[Part]:
        sources = (source.format(i=layer) for source in names[name])
        plain = [Part(*pair) for pair in zip(sources, shapes[name], strict=True)]
        if scheme is None or not _is_linear(name):
            return plain
        quantised = [replace(part, scheme=scheme) for part in plain if scheme.covers(part.module)]
        if quantised and len(quantised) < len(plain):
            raise ValueError(
                f"quantization_config: expected all of {[part.source for part in plain]} to be "
                f"quantised or none, got {[part.source for part in quantised]}"
            )
        return quantised or plain

    result = {"embed": parts("embed")}
    in_layer = [name for name in names if name in shapes and name.startswith("layers.")]
    for layer in range(config.num_layers):
        result |= {name.format(i=layer): parts(name, layer) for name in in_layer}
    result["final_norm"] = parts("final_norm")
    if not config.tied_head:
        result["head"] = parts("head")
    return result


def _shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return, for each of our names that this config has, the shapes of its parts."""
    embed, mlp, vocab = config.embed_dim, config.mlp_dim, config.vocab_size
    query_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    qkv_rows = (query_rows, kv_rows, kv_rows)
    layer: dict[str, tuple[tuple[int, ...], ...]] = {
        "input_norm": ((embed,),),
        "qkv": tuple((rows, embed) for rows in qkv_rows),
        "o": ((embed, query_rows),),
        "post_norm": ((embed,),),
        "gate_up": ((mlp, embed), (mlp, embed)),
        "down": ((embed, mlp),),
    }
    if config.attention_bias:
        layer["qkv_bias"] = tuple((rows,) for rows in qkv_rows)
    if config.o_bias:
        layer["o_bias"] = ((embed,),)
    if config.qk_norm:
        layer["q_norm"] = layer["k_norm"] = ((config.head_dim,),)
    shapes = {f"layers.{{i}}.{name}": shape for name, shape in layer.items()}
    return shapes | {
        "embed": ((vocab, embed),),
        "final_norm": ((embed,),),
        "head": ((vocab, embed),),
    }


def _check_headers(
    folder: Path, files: Files, parts: Mapping[str, list[Part]], config: ModelConfig
) -> None:
    """Raise unless the files hold what ``parts`` ask for and nothing else."""
    family = FAMILIES[config.family]
    try:
        wanted = [header for group in parts.values() for part in group for header in part.headers]
    except ValueError as error:  # sizes that the scheme cannot store
        raise ValueError(f"{folder}: {error}") from None
    check_headers(
        folder,
        files,
        wanted,
        kind=config.family,
        ignored=family.tensors["head"],
        endings=family.buffers + (quantized.UNREAD if config.quantization else ()),
    )


def _load_plain(
    files: Files, parts: list[Part], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Read the parts straight into one tensor, one below the other."""
    num_rows = sum(part.shape[0] for part in parts)
    fused = torch.empty(num_rows, *parts[0].shape[1:], dtype=dtype, device=device)
    first = 0
    for part in parts:
        file = files[part.source]
        rows = fused[first : first + part.shape[0]]
        first += part.shape[0]
        source = file.read(part.source)
        rows.copy_(source)
        narrows = dtype == torch.float16 and source.dtype != torch.float16
        if narrows and bool(rows.isinf().any()):
            raise ValueError(
                f"{file.path}: {part.source}: values beyond the range of float16 (largest "
                f"{source.abs().max().item():.4g}); load as bfloat16 or float32"
            )
    return fused


def _load_rounded(
    files: Files, parts: list[Part], device: torch.device, format: WeightFormat
) -> QuantWeight:
    """Read the parts one at a time and round each to ``format``."""

    def rounded(part: Part) -> QuantWeight:
        file = files[part.source]
        try:
            return quantized.quantize(file.read(part.source).to(device), format)
        except ValueError as error:
            raise ValueError(f"{file.path}: {part.source}: {error}") from None

    return quantized.concatenate([rounded(part) for part in parts])


def _load_quantised(
    files: Files, parts: list[Part], device: torch.device, has_bias: bool
) -> QuantWeight:
    """Read the layers that are stored quantised and put one below the other."""
    weights = [_read_layer(files, part, device, has_bias) for part in parts]
    try:
        return quantized.concatenate(weights)
    except ValueError as error:
        raise ValueError(f"{', '.join(part.module for part in parts)}: {error}") from None


def _read_layer(files: Files, part: Part, device: torch.device, has_bias: bool) -> QuantWeight:
    assert part.scheme is not None
    sources = [header.source for header in part.headers if header.source in files]
    path = files[sources[0]].path
    tensors = {name.rpartition(".")[2]: files[name].read(name).to(device) for name in sources}
    bias_O = tensors.pop("bias", None)
    if bias_O is not None and not has_bias and bool(bias_O.any()):
        raise ValueError(f"{path}: {part.module}.bias: expected zeros, the model has no bias there")
    try:
        weight = quantized.read_layer(part.scheme, tensors)
        check_weight(weight)
        return weight
    except ValueError as error:
        raise ValueError(f"{path}: {part.module}: {error}") from None


def _check_tied(files: Files, name: str, embed_VE: torch.Tensor) -> None:
    """Raise unless a head that the file stores besides a tied embedding is that embedding."""
    head = files[name].read(name)
    same = tuple(head.shape) == tuple(embed_VE.shape) and torch.equal(
        head.to(embed_VE.device, embed_VE.dtype), embed_VE
    )
    if not same:
        raise ValueError(
            f"{files[name].path}: {name}: expected the embedding itself (config.json says "
            f"tie_word_embeddings), got a tensor {tuple(head.shape)} that differs"
        )
