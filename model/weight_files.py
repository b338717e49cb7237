"""The safetensors files of a model folder: opened together, headers checked, tensors read once.

Headers are checked as a whole before any data is read: names, shapes and dtypes, all problems of a
kind in one message. Nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pagedraft.model.config import read_json

FLOATS = ("F32", "F16", "BF16")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NUM_LISTED = 5  # names in one error message


@dataclass(frozen=True)
class Header:
    """One tensor that the files should hold: its name, the shapes and dtypes that will do."""

    source: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = FLOATS
    is_optional: bool = False


@dataclass(frozen=True)
class OpenFile:
    """A safetensors file that is open for reading."""

    path: Path
    handle: Any

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor ``name`` on the CPU."""
        try:
            return self.handle.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{self.path}: cannot read {name} ({error})") from None


def open_files(folder: Path, stack: ExitStack) -> dict[str, OpenFile]:
    """Open every weight file and return which one holds each tensor name."""
    files: dict[str, OpenFile] = {}
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
            files[name] = OpenFile(path, handle)
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
            f"{folder}: expected {SINGLE} or {INDEX}, found {listed(found) or 'no weights'}"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ValueError(f"{index}: expected a non-empty object weight_map, got {weight_map!r}")
    names = set(weight_map.values())
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError(f"{index}: weight_map: expected file names, got {listed(map(str, names))}")
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise FileNotFoundError(
            f"{folder}: missing shard files named in {INDEX}: {listed(missing)}"
        )
    return [folder / name for name in sorted(names)]


def check_headers(
    folder: Path,
    files: Mapping[str, OpenFile],
    headers: Iterable[Header],
    *,
    kind: str,
    ignored: Collection[str],
    endings: tuple[str, ...],
) -> None:
    """Raise unless the files hold exactly the expected tensors, in shape and dtype.

    kind: of model, for the message. ignored: names that may be there. endings: of such names.
    """
    wanted = {header.source: header for header in headers}
    missing = sorted(name for name in wanted.keys() - files.keys() if not wanted[name].is_optional)
    left_over = sorted(
        name for name in files.keys() - wanted.keys() - set(ignored) if not name.endswith(endings)
    )
    problems = []
    if missing:
        problems.append(f"missing {len(missing)} tensors: {listed(missing)}")
    if left_over:
        problems.append(f"left over {len(left_over)} tensors: {listed(left_over)}")
    if problems:
        raise ValueError(f"{folder}: expected a {kind} model, {'; '.join(problems)}")
    found = (header for name, header in wanted.items() if name in files)
    wrong = list(_wrong_headers(files, found))
    if wrong:
        raise ValueError(f"{folder}: {listed(wrong, separator='; ')}")


def _wrong_headers(files: Mapping[str, OpenFile], wanted: Iterable[Header]) -> Iterator[str]:
    for header in wanted:
        name = header.source
        stored = files[name].handle.get_slice(name)
        shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
        if shape not in header.shapes:
            shapes = " or ".join(map(str, header.shapes))
            yield f"{name}: expected shape {shapes} (from config.json), got {shape}"
        elif dtype not in header.dtypes:
            yield f"{name}: expected dtype {' or '.join(header.dtypes)}, got {dtype}"


def listed(names: Any, separator: str = ", ") -> str:
    """Join at most NUM_LISTED names, saying how many more there are."""
    names = list(names)
    shown = separator.join(names[:NUM_LISTED])
    hidden = len(names) - NUM_LISTED
    return f"{shown}{separator}and {hidden} more" if hidden > 0 else shown
