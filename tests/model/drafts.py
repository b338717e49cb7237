"""Drafts made of the tiny models' own layers."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from pagedraft.model.draft_format import OUT_WEIGHT
from pagedraft.model.draft_save import own_tensors, save_draft


def layers_of(folder: Path, num_layers: int) -> dict[str, torch.Tensor]:
    """The first layers and the last norm of the model in ``folder``, as a draft's own tensors."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in own_tensors(folder, num_layers)}


def save_layers(
    folder: Path,
    target: Path,
    num_layers: int = 2,
    ids: list[int] | None = None,
    out_EE: torch.Tensor | None = None,
) -> Path:
    """Save a draft of the target's first layers that proposes ``ids``, None for all tokens."""
    return save_draft(
        folder,
        target,
        layers_of(target, num_layers) | ({} if out_EE is None else {OUT_WEIGHT: out_EE}),
        num_layers=num_layers,
        target="the target",
        vocab_ids=None if ids is None else torch.tensor(ids),
    )
