"""Writes a draft's folder (draft_format.py) so that nobody ever sees a half of it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from pagedraft.model.config import ModelConfig, read_json
from pagedraft.model.draft_folder import KINDS
from pagedraft.model.draft_format import (
    FIELD,
    OUT_WEIGHT,
    VOCAB_IDS,
    DraftEntry,
    check_vocab_ids,
    own_parts,
    read_entry,
)
from pagedraft.model.fingerprint import fingerprint
from pagedraft.model.weight_files import SINGLE, listed

# Fields of a target's config.json that do not hold for its draft.
DROPPED = (
    "quantization_config",
    "compression_config",
    "torch_dtype",
    "layer_types",  # all are full attention, or the target would not load
    "use_sliding_window",
)


def save_draft(
    folder: str | Path,
    target_folder: str | Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    num_layers: int,
    kind: str = "layers",
    target: str | None = None,
    vocab_ids: torch.Tensor | None = None,
) -> Path:
    """Write a draft for the model in ``target_folder``; return its folder.

    tensors: those of ``own_tensors``, by the family's names; stored as bf16. With OUT_WEIGHT among
        them a draft of kind "layers" has one.
    kind: a name of ``draft_folder.KINDS``; a "head" has one layer.
    target: what the user calls the target, for messages; None: its folder.
    vocab_ids: ascending token ids [U] that the draft may propose; None for all.

    A draft that was there is replaced when the new one is whole; other files beside it stay. Raises
    ValueError for wrong tensors and for a folder that holds anything but a draft.
    """
    folder, target_folder = Path(folder), Path(target_folder)
    check_replaceable(folder)
    has_out = OUT_WEIGHT in tensors
    stored = _checked(own_tensors(target_folder, num_layers, kind, has_out), tensors)
    if vocab_ids is not None:
        check_vocab_ids(vocab_ids, ModelConfig.from_folder(target_folder).vocab_size)
        stored[VOCAB_IDS] = vocab_ids.to("cpu", torch.int32, copy=True)
    entry = DraftEntry(
        kind,
        str(target_folder) if target is None else target,
        fingerprint(target_folder),
        None if vocab_ids is None else vocab_ids.numel(),
        has_out,
    )
    values = _draft_config(target_folder, num_layers, entry)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        made = scratch / "new"
        made.mkdir()
        (made / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        try:
            save_file(stored, made / SINGLE, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{folder / SINGLE}: cannot be written: {error}") from None
        os.chmod(made / SINGLE, (made / "config.json").stat().st_mode)  # save_file keeps it private
        _put(made, folder, scratch / "old")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def own_tensors(
    target_folder: str | Path, num_layers: int, kind: str = "layers", has_out: bool = False
) -> dict[str, tuple[int, ...]]:
    """Shapes of a draft's own tensors, by the family's names, in the order of the forward pass."""
    if type(num_layers) is not int or num_layers < 1:
        raise ValueError(f"num_layers: expected a positive integer, got {num_layers!r}")
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {sorted(KINDS)}, got {kind!r}")
    config = ModelConfig.from_folder(target_folder)
    parts = own_parts(replace(config, num_layers=num_layers, quantization=None), kind, has_out)
    return {part.source: part.shape for group in parts.values() for part in group}


def check_replaceable(folder: str | Path) -> None:
    """Raise ValueError where ``folder`` holds anything but a draft."""
    folder = Path(folder)
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        entry = read_entry(folder)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{folder}: is no draft and will not be replaced ({error})") from None
    if entry is None:
        raise ValueError(f"{folder}: holds a model of its own and will not be replaced")


def _draft_config(target_folder: Path, num_layers: int, entry: DraftEntry) -> dict[str, Any]:
    values = read_json(target_folder / "config.json")
    kept = {name: value for name, value in values.items() if name not in DROPPED}
    own = {"num_hidden_layers": num_layers, "dtype": "bfloat16", FIELD: entry.to_json()}
    return kept | own


def _checked(
    shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors as they are stored, in memory of their own."""
    missing = [name for name in shapes if name not in tensors]
    left_over = [name for name in tensors if name not in shapes]
    if missing or left_over:
        raise ValueError(
            f"tensors: expected those of own_tensors; missing {len(missing)}: {listed(missing)}; "
            f"left over {len(left_over)}: {listed(left_over)}"
        )
    result = {}
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
        stored = torch.empty(shape, dtype=torch.bfloat16).copy_(tensor.detach())
        if not bool(stored.isfinite().all()):
            raise ValueError(f"{name}: expected finite numbers, got NaN or infinity")
        result[name] = stored
    return result


def _put(made: Path, folder: Path, aside: Path) -> None:
    """Let ``made`` take the place of ``folder``, whose other files move with it."""
    if folder.exists():
        folder.rename(aside)
    try:
        made.rename(folder)
    except OSError:
        if aside.exists():
            aside.rename(folder)
        raise
    if aside.exists():
        for path in aside.iterdir():
            if not (folder / path.name).exists():
                path.rename(folder / path.name)
