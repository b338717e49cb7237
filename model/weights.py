"""Reads the safetensors weights of a folder into tensors under our names, q/k/v and gate/up fused.

Headers are checked as a whole before any data is read: names, shapes and dtypes, all problems of a
kind in one message. Then each tensor is read once, into its place in the fused tensor on the
target device. Nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pagedraft.model.config import ModelConfig, check_folder, read_json
from pagedraft.model.families import FAMILIES

FILE_DTYPES = ("F32", "F16", "BF16")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NUM_LISTED = 5  # names in one error message


@dataclass(frozen=True)
class Part:
    """One tensor of the file: its name there and the shape that the config asks for."""

    source: str
    shape: tuple[int, ...]


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """Return the tensors of ``expected_parts(config)``, cast to ``dtype``, on ``device``.

    Linear weights are [out, in]. "head" is absent when ``config.tied_head``: use "embed".
    Raises FileNotFoundError or ValueError naming the file and the tensors.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {DTYPES}, got {dtype}")
    folder = check_folder(folder)
    parts = expected_parts(config)
    with ExitStack() as stack:
        files = _open_files(folder, stack)
        _check_headers(folder, files, parts, config)
        weights = {}
        for name, sources in parts.items():
            weights[name] = _read(files, sources, dtype, torch.device(device))
        head = FAMILIES[config.family].tensors["head"][0]
        if config.tied_head and head in files:
            _check_tied(files, head, weights["embed"])
    return weights


def expected_parts(config: ModelConfig) -> dict[str, list[Part]]:
    """Return our tensor names in the order of the forward pass, with what each is made of."""
    names = FAMILIES[config.family].tensors
    shapes = _shapes(config)

    def parts(name: str, layer: int | None = None) -> list[Part]:
        sources = (source.format(i=layer) for source in names[name])
        return [Part(*pair) for pair in zip(sources, shapes[name], strict=True)]

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


@dataclass(frozen=True)
class _OpenFile:
    """A safetensors file that is open for reading."""

    path: Path
    handle: Any


def _open_files(folder: Path, stack: ExitStack) -> dict[str, _OpenFile]:
    """Open every weight file and return which one holds each tensor name."""
    files: dict[str, _OpenFile] = {}
    for path in _weight_files(folder):
        try:
            handle = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path}: expected a whole safetensors file, got a broken or truncated one of "
                f"{path.stat().st_size} bytes ({error})"
            ) from None
        for name in handle.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
            if name in files:
                raise ValueError(f"{path}: tensor {name} is also in {files[name].path.name}")
            files[name] = _OpenFile(path, handle)
    return files


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the folder: the single one, or the shards of the index."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        others = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
        found = sorted(path.name for path in folder.iterdir() if path.suffix in others)
        raise FileNotFoundError(
            f"{folder}: expected {SINGLE} or {INDEX}, found {_listed(found) or 'no weights'}"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ValueError(f"{index}: expected a non-empty object weight_map, got {weight_map!r}")
    names = set(weight_map.values())
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError(
            f"{index}: weight_map: expected file names, got {_listed(map(str, names))}"
        )
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise FileNotFoundError(
            f"{folder}: missing shard files named in {INDEX}: {_listed(missing)}"
        )
    return [folder / name for name in sorted(names)]


def _check_headers(
    folder: Path,
    files: Mapping[str, _OpenFile],
    parts: Mapping[str, list[Part]],
    config: ModelConfig,
) -> None:
    """Raise unless the files hold exactly the expected tensors, in shape and dtype."""
    family = FAMILIES[config.family]
    wanted = {part.source: part for sources in parts.values() for part in sources}
    missing = sorted(wanted.keys() - files.keys())
    left_over = sorted(
        name
        for name in files.keys() - wanted.keys() - set(family.tensors["head"])
        if not name.endswith(family.buffers)
    )
    problems = []
    if missing:
        problems.append(f"missing {len(missing)} tensors: {_listed(missing)}")
    if left_over:
        problems.append(f"left over {len(left_over)} tensors: {_listed(left_over)}")
    if problems:
        raise ValueError(f"{folder}: expected a {config.family} model, {'; '.join(problems)}")
    wrong = list(_wrong_headers(files, wanted))
    if wrong:
        raise ValueError(f"{folder}: {_listed(wrong, separator='; ')}")


def _wrong_headers(files: Mapping[str, _OpenFile], wanted: Mapping[str, Part]) -> Iterator[str]:
    for name, part in wanted.items():
        header = files[name].handle.get_slice(name)
        shape, dtype = tuple(header.get_shape()), header.get_dtype()
        if shape != part.shape:
            yield f"{name}: expected shape {part.shape} (from config.json), got {shape}"
        elif dtype not in FILE_DTYPES:
            yield f"{name}: expected dtype {' or '.join(FILE_DTYPES)}, got {dtype}"


def _read(
    files: Mapping[str, _OpenFile], parts: list[Part], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Read the parts straight into one tensor, one below the other."""
    num_rows = sum(part.shape[0] for part in parts)
    fused = torch.empty(num_rows, *parts[0].shape[1:], dtype=dtype, device=device)
    first = 0
    for part in parts:
        file = files[part.source]
        rows = fused[first : first + part.shape[0]]
        first += part.shape[0]
        try:
            source = file.handle.get_tensor(part.source)
        except SafetensorError as error:
            raise ValueError(f"{file.path}: cannot read {part.source} ({error})") from None
        rows.copy_(source)
        narrows = dtype == torch.float16 and source.dtype != torch.float16
        if narrows and bool(rows.isinf().any()):
            raise ValueError(
                f"{file.path}: {part.source}: values beyond the range of float16 (largest "
                f"{source.abs().max().item():.4g}); load as bfloat16 or float32"
            )
    return fused


def _check_tied(files: Mapping[str, _OpenFile], name: str, embed_VE: torch.Tensor) -> None:
    """Raise unless a head that the file stores besides a tied embedding is that embedding."""
    head = files[name].handle.get_tensor(name)
    same = tuple(head.shape) == tuple(embed_VE.shape) and torch.equal(
        head.to(embed_VE.device, embed_VE.dtype), embed_VE
    )
    if not same:
        raise ValueError(
            f"{files[name].path}: {name}: expected the embedding itself (config.json says "
            f"tie_word_embeddings), got a tensor {tuple(head.shape)} that differs"
        )


def _listed(names: Any, separator: str = ", ") -> str:
    """Join at most NUM_LISTED names, saying how many more there are."""
    names = list(names)
    shown = separator.join(names[:NUM_LISTED])
    hidden = len(names) - NUM_LISTED
    return f"{shown}{separator}and {hidden} more" if hidden > 0 else shown
