"""Which model a folder holds, whatever its files are called and however they are cut.

A draft that borrows a target's embedding and head is of use with that target alone, so it records
the target's fingerprint. It covers what the forward pass depends on: numbers of config.json, and
of each tensor that is read its name, dtype, shape and bytes. Of a tensor beyond NUM_PAGES pages
only so many are read, spread evenly: all that a fine-tuning writes differs nearly everywhere. A
change of few rows of one large tensor (a token's embedding) may go unseen.

**Cost**: at most 64 KB a tensor: 19 MB for the 291 tensors of an 8B model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from pagedraft.model.config import ModelConfig
from pagedraft.model.weight_files import open_files
from pagedraft.model.weights import expected_parts

PAGE_BYTES = 4096
NUM_PAGES = 16  # of a tensor that is larger than so many
# Fields of ModelConfig that change the numbers of the forward pass. A new one belongs here only
# where its default is left out, or recorded fingerprints would no longer hold.
FIELDS = (
    "family",
    "num_layers",
    "embed_dim",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "mlp_dim",
    "vocab_size",
    "rms_eps",
    "rope_theta",
    "rope_scaling",
    "tied_head",
    "attention_bias",
    "o_bias",
    "qk_norm",
    "activation",
)
QUANT_FIELDS = ("method", "format", "zero_offset")  # of QuantScheme; names and shapes say the rest


class _Stored(NamedTuple):
    """Where a tensor lies: path, its dtype and shape in the header, first byte and size."""

    path: Path
    dtype: str
    shape: list[int]
    start: int
    num_bytes: int


def fingerprint(folder: str | Path) -> str:
    """Return the sha256 of the model in ``folder``, 64 hexadecimal digits.

    The same for any sharding and order of tensors in the files. Tensors that loading skips do not
    count. Raises FileNotFoundError or ValueError for a folder that does not load.
    """
    folder = Path(folder)
    config = ModelConfig.from_folder(folder)
    digest = hashlib.sha256(_line(_fields(config)))
    with ExitStack() as stack:
        files = {name: file.path for name, file in open_files(folder, stack).items()}
    stored = {n: place for path in set(files.values()) for n, place in _stored(path).items()}
    for name in sorted(_names(config) & stored.keys()):
        place = stored[name]
        digest.update(_line([name, place.dtype, place.shape]))
        for page in _pages(place):
            digest.update(page)
    return digest.hexdigest()


def _fields(config: ModelConfig) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in FIELDS}
    if config.quantization is not None:
        values |= {name: getattr(config.quantization, name) for name in QUANT_FIELDS}
    return values


def _names(config: ModelConfig) -> set[str]:
    """Names, in the files, of the tensors that loading reads."""
    groups = expected_parts(config).values()
    return {header.source for parts in groups for part in parts for header in part.headers}


def _line(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode() + b"\n"


def _stored(path: Path) -> dict[str, _Stored]:
    """The tensors of a safetensors file, by the header that ``open_files`` found to be whole."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: Mapping[str, Any] = json.loads(file.read(size))
    result = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            place = 8 + size + start
            result[name] = _Stored(path, entry["dtype"], entry["shape"], place, end - start)
    return result


def _pages(stored: _Stored) -> Iterator[bytes]:
    """All bytes of a small tensor, else the first page, the last, and some between."""
    descriptor = os.open(stored.path, os.O_RDONLY)
    try:
        if stored.num_bytes <= NUM_PAGES * PAGE_BYTES:
            yield os.pread(descriptor, stored.num_bytes, stored.start)
            return
        last = stored.num_bytes - PAGE_BYTES
        for index in range(NUM_PAGES):
            place = last * index // (NUM_PAGES - 1)
            yield os.pread(descriptor, PAGE_BYTES, stored.start + place)
    finally:
        os.close(descriptor)
