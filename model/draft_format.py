"""What makes a folder a draft: the object "pagedraft_draft" in its config.json.

The rest of config.json is a plain config of the target's family, with the draft's own number of
layers. ``model.safetensors`` holds what the draft has of its own, under the family's names; the
target lends embedding and head. With a head of few tokens ``VOCAB_IDS`` says which they are: int32,
ascending. A draft of kind "head" (feature_head.py) has one layer, and ``FUSE_WEIGHT`` besides; one
of kind "layers" may have ``OUT_WEIGHT``, which its states go through before the last norm.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pagedraft.model.config import ModelConfig, check_folder, read_json
from pagedraft.model.weights import Part, expected_parts

FIELD = "pagedraft_draft"
VOCAB_IDS = "draft.vocab_ids"
FUSE_WEIGHT = "draft.fc.weight"  # [E, 2 E]: columns of the state before, then of the token
OUT_WEIGHT = "draft.out.weight"  # [E, E]
LENT = ("embed", "head")  # of our names of tensors


@dataclass(frozen=True)
class DraftEntry:
    """The object "pagedraft_draft".

    kind: how the draft works, a name of ``draft_folder.KINDS``: "layers" or "head".
    target: the model that it was distilled for, as the user named it.
    target_sha256: ``fingerprint`` of that model's folder.
    vocab: tokens that its head can propose; None for all.
    has_out: it stores OUT_WEIGHT.
    """

    kind: str
    target: str
    target_sha256: str
    vocab: int | None = None
    has_out: bool = False

    def to_json(self) -> dict[str, Any]:
        """The object as config.json has it."""
        return asdict(self)


def read_entry(folder: str | Path) -> DraftEntry | None:
    """The entry in ``folder``/config.json; None where the folder is a model of its own.

    Raises FileNotFoundError for a missing folder or config.json, ValueError for a damaged entry.
    """
    file = check_folder(folder) / "config.json"
    values = read_json(file)
    if FIELD not in values:
        return None
    try:
        return _parse(values[FIELD])
    except ValueError as error:
        raise ValueError(f"{file}: {FIELD}{error}") from None


def refuse_draft(folder: str | Path) -> None:
    """Raise ValueError where ``folder`` is a draft, which cannot run without its target."""
    entry = read_entry(folder)
    if entry is not None:
        raise ValueError(
            f"{folder}: expected a whole model, got a draft without embedding and head; give it as "
            f"the draft of its target, {entry.target}"
        )


def own_parts(
    config: ModelConfig, kind: str = "layers", has_out: bool = False
) -> dict[str, list[Part]]:
    """What a draft stores, by our names: layers and the last norm; of a "head" also "fuse".

    has_out: also "out", which a head cannot have.
    """
    parts = {name: parts for name, parts in expected_parts(config).items() if name not in LENT}
    if kind != "head":
        out = Part(OUT_WEIGHT, (config.embed_dim, config.embed_dim))
        return parts | ({"out": [out]} if has_out else {})
    if has_out:
        raise ValueError(f'{OUT_WEIGHT}: expected none for kind "head"')
    if config.num_layers != 1:
        raise ValueError(f'num_layers: expected 1 for kind "head", got {config.num_layers}')
    return {"fuse": [Part(FUSE_WEIGHT, (config.embed_dim, 2 * config.embed_dim))], **parts}


def check_vocab_ids(ids_U: torch.Tensor, vocab_size: int) -> None:
    """Raise ValueError unless these are token ids of the vocabulary, ascending."""
    if ids_U.ndim != 1 or ids_U.numel() == 0:
        raise ValueError(f"{VOCAB_IDS}: expected a list of ids, got shape {tuple(ids_U.shape)}")
    if bool((ids_U[1:] <= ids_U[:-1]).any()):
        index = int((ids_U[1:] <= ids_U[:-1]).int().argmax())
        pair = ids_U[index : index + 2].tolist()
        raise ValueError(f"{VOCAB_IDS}: expected ascending ids, got {pair} at {index}")
    first, last = int(ids_U[0]), int(ids_U[-1])
    if first < 0 or last >= vocab_size:
        wrong = first if first < 0 else last
        raise ValueError(f"{VOCAB_IDS}: expected ids from 0 to {vocab_size - 1}, got {wrong}")


def _parse(values: object) -> DraftEntry:
    """Raises ValueError that begins with the field, as what follows the name of the object."""
    if not isinstance(values, dict):
        raise ValueError(f": expected an object, got {values!r}")
    for name in ("kind", "target", "target_sha256"):
        if not isinstance(values.get(name), str) or not values[name]:
            raise ValueError(f".{name}: expected text, got {values.get(name)!r}")
    digest = values["target_sha256"]
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise ValueError(f".target_sha256: expected 64 hexadecimal digits, got {digest!r}")
    vocab = values.get("vocab")
    if vocab is not None and (type(vocab) is not int or vocab < 1):
        raise ValueError(f".vocab: expected null or a positive integer, got {vocab!r}")
    has_out = values.get("has_out", False)
    if type(has_out) is not bool:
        raise ValueError(f".has_out: expected true or false, got {has_out!r}")
    return DraftEntry(values["kind"], values["target"], digest, vocab, has_out)
