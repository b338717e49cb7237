"""Drafts that hold tensors of their own only, and borrow the rest from the target they were made
for.

``load_draft`` makes a Transformer of the folder that draft_format.py describes and draft_save.py
writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from pagedraft.model import quantized
from pagedraft.model.config import ModelConfig
from pagedraft.model.draft_format import (
    VOCAB_IDS,
    DraftEntry,
    check_vocab_ids,
    own_parts,
    read_entry,
)
from pagedraft.model.families import FAMILIES
from pagedraft.model.feature_head import FeatureHead
from pagedraft.model.fingerprint import fingerprint
from pagedraft.model.head import Head
from pagedraft.model.transformer import Transformer
from pagedraft.model.weight_files import Header, check_headers, open_files
from pagedraft.model.weights import check_weights, expected_parts, read_parts

SHARED = ("family", "embed_dim", "vocab_size")  # what borrowing asks of the two configs
# What each kind is loaded as; ``draft_format.own_parts`` says what it stores.
KINDS: Mapping[str, type[Transformer]] = {"layers": Transformer, "head": FeatureHead}


def load_draft(folder: str | Path, target: Transformer, *, weights: str = "auto") -> Transformer:
    """Load the draft in ``folder`` beside the loaded model that it was distilled for.

    Dtype, device and exactness are the target's. Its embedding is shared, and its head, packed as
    it is; of a head of few tokens the rows are the target's, rounded as there. Logits are over the
    whole vocabulary all the same, -inf for tokens that the head has no row for.
    ``weight_bytes`` is what a pass reads: the draft's own weights and its head.
    weights: "int8", "int4" or "fp8" rounds the draft's own linear weights.

    Raises FileNotFoundError or ValueError for a folder that is no draft, a damaged one, and another
    target than its own.
    """
    folder = Path(folder)
    entry = read_entry(folder)
    if entry is None:
        raise ValueError(f"{folder}: expected a draft without embedding, got a model of its own")
    if entry.kind not in KINDS:
        raise ValueError(
            f"{folder}: expected a draft of a kind in {sorted(KINDS)}, got {entry.kind!r}"
        )
    _check_target(folder, entry, target)
    config = ModelConfig.from_folder(folder)
    for name in SHARED:
        own, lent = getattr(config, name), getattr(target.config, name)
        if own != lent:
            raise ValueError(f"{folder}: {name}: expected the target's {lent!r}, got {own!r}")
    if config.quantization is not None:
        raise ValueError(f"{folder}: expected plain tensors, got a quantization_config")
    check_weights(weights, config, target.device)
    own = read_own(folder, entry, config, dtype=target.dtype, device=target.device, weights=weights)
    ids_U = own.pop(VOCAB_IDS, None)
    own["embed"] = target.embed_VE
    own["head"] = target.head if ids_U is None else cut_head(target, ids_U)
    draft = KINDS[entry.kind](config, own, exact=target.exact)
    draft.weight_bytes -= target.embed_VE.nbytes  # a pass reads a row of it
    draft.folder = folder
    return draft


def _check_target(folder: Path, entry: DraftEntry, target: Transformer) -> None:
    if target.folder is None:
        raise ValueError(
            f"{folder}: was distilled for {entry.target}; whether the target is that model cannot "
            "be checked, because it was made in memory: load it from its folder"
        )
    found = fingerprint(target.folder)
    if found != entry.target_sha256:
        raise ValueError(
            f"{folder}: was distilled for {entry.target} ({entry.target_sha256[:12]}), and the "
            f"loaded target {target.folder} differs ({found[:12]}); its drafts would be of no use"
        )


def read_own(
    folder: Path,
    entry: DraftEntry,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    weights: str = "auto",
) -> dict[str, Any]:
    """A draft's own weights by our names, and its token ids, if it has such, as VOCAB_IDS."""
    try:
        parts = own_parts(config, entry.kind, entry.has_out)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    headers = [header for group in parts.values() for part in group for header in part.headers]
    if entry.vocab is not None:
        headers.append(Header(VOCAB_IDS, ((entry.vocab,),), ("I32",)))
    with ExitStack() as stack:
        files = open_files(folder, stack)
        check_headers(
            folder,
            files,
            headers,
            kind=f"draft of a {config.family}",
            ignored=(),
            endings=FAMILIES[config.family].buffers,
        )
        own = read_parts(files, parts, dtype=dtype, device=device, weights=weights)
        if entry.vocab is not None:
            own[VOCAB_IDS] = files[VOCAB_IDS].read(VOCAB_IDS).long()
    if entry.vocab is not None:
        try:
            check_vocab_ids(own[VOCAB_IDS], config.vocab_size)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
    return own


def cut_head(target: Transformer, ids_U: torch.Tensor) -> Head:
    """A head of the target's rows ``ids_U`` (int64 [U]), in the form that its own has.

    What is rounded is rounded output by output, so these rows are the target's to the bit.
    """
    ids_U = ids_U.to(target.device)
    format = target.head.format
    if target.config.tied_head:
        rows_UE = target.embed_VE[ids_U]
        rows = rows_UE if format == "plain" else quantized.quantize(rows_UE, format)
        return Head.pack(rows, target.dtype, ids_U)
    assert target.folder is not None
    with ExitStack() as stack:
        whole = read_parts(
            open_files(target.folder, stack),
            {"head": expected_parts(target.config)["head"]},
            dtype=target.dtype,
            device=target.device,
            weights="auto" if format == "plain" else format,
        )["head"]
    is_plain = isinstance(whole, torch.Tensor)
    rows = whole[ids_U] if is_plain else quantized.select_outputs(whole, ids_U)
    return Head.pack(rows, target.dtype, ids_U)
