"""What a trace says of the engine it watched, and whether another engine is such a one."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.engine import Engine
from pagedraft.scheduler.trace_format import FORMAT

NUM_PROBES = 64  # rows of the embedding, and pieces of each file, that tell models apart
PROBE_BYTES = 256
DTYPES = {torch.float8_e4m3fn: "fp8"}  # names that LLM takes where torch has others


def settings_args(engine: Engine, options: Mapping[str, Any]) -> dict[str, Any]:
    """All that has to be the same for a replay, and what it ran on."""
    model = engine.target
    return {
        "format": FORMAT,
        "pagedraft": version("pagedraft"),
        "torch": torch.__version__,
        "device": device_name(model.device),
        "options": _options(model, options),
        "engine": engine_args(engine),
        "swap": swap_args(engine),
        "model": model_args(model),
        "is_fresh": is_fresh(engine),
    }


def is_fresh(engine: Engine) -> bool:
    """Whether nothing has run on an engine, so that a replay can begin as it does."""
    pool = engine.pool
    is_empty = pool.num_free == pool.num_usable and pool.num_evictable == 0
    return is_empty and engine.stats.num_steps == 0 and not engine.has_work


def engine_args(engine: Engine) -> dict[str, Any]:
    """Sizes that decide schedules."""
    return {
        "block_size": engine.pool.block_size,
        "num_blocks": engine.pool.num_blocks,
        "token_budget": engine.token_budget,
        "max_rows": engine.max_rows,
        "chunk_tokens": engine.chunk_tokens,
        "overlap": engine.overlap,
    }


def swap_args(engine: Engine) -> dict[str, int] | None:
    """Sizes that decide what is swapped; None where nothing is."""
    swap = engine.prefixes.swap
    return None if swap is None else {"bytes": swap.max_bytes, "block_bytes": swap.block_bytes}


def model_args(model: Transformer) -> dict[str, Any]:
    """What tells a model from others: its config, some of its weights, some of its files.

    weights: as they are in memory, so of one dtype only. files: None where there is no folder.
    """
    fields = dataclasses.fields(model.config)
    config = {field.name: str(getattr(model.config, field.name)) for field in fields}
    dtype = str(model.dtype).removeprefix("torch.")
    return {"config": config, "dtype": dtype, "weights": _weights(model), "files": _files(model)}


def difference(recorded: Mapping[str, Any], own: Mapping[str, Any], where: str) -> str | None:
    """The first setting that differs, in words; those that one side lacks do not count."""
    for name, value in recorded.items():
        other = own.get(name)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            found = difference(value, other, f"{where}.{name}")
            if found is not None:
                return found
        elif name in own and None not in (value, other) and value != other:
            return f"{where}.{name}: expected {value!r} as recorded, got {other!r}"
    return None


def _weights(model: Transformer) -> str:
    """A hash of embedding rows and norms."""
    digest = hashlib.sha256()
    num_rows = model.embed_VE.shape[0]
    probes = torch.arange(NUM_PROBES, device=model.device) * num_rows // NUM_PROBES
    norms = (norm for layer in model.layers for norm in (layer.input_norm_E, layer.post_norm_E))
    for tensor in (model.embed_VE[probes], model.final_norm_E, *norms):
        digest.update(tensor.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _files(model: Transformer) -> str | None:
    """A hash of pieces of the weight files, which hold all weights as they were stored."""
    paths = [] if model.folder is None else sorted(model.folder.glob("*.safetensors"))
    if not paths:
        return None
    digest = hashlib.sha256()
    for piece in _pieces(paths):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(paths: list[Path]) -> Iterator[bytes]:
    for path in paths:
        size = path.stat().st_size
        yield f"{path.name} {size}".encode()
        with open(path, "rb") as file:
            for probe in range(NUM_PROBES):
                file.seek(size * probe // NUM_PROBES)
                yield file.read(PROBE_BYTES)


def _options(model: Transformer, options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of LLM; those that say how a model is loaded are of the one that was."""
    own = {"dtype": model.dtype, "device": model.device.type, "exact": model.exact}
    is_loaded = isinstance(options.get("model"), Transformer)
    return {k: _plain(v) for k, v in ({**options, **own} if is_loaded else options).items()}


def _plain(value: Any) -> Any:
    """An argument of LLM as JSON; models and drafters in memory by their folder or name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return DTYPES.get(value, str(value).removeprefix("torch."))
    if isinstance(value, Transformer):
        return None if value.folder is None else str(value.folder)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (Path, torch.device)):
        return str(value)
    return str(getattr(value, "name", type(value).__name__))


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device}: {torch.cuda.get_device_name(device)}"
    return str(device)
