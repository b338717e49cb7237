"""Folders of feature heads: what is stored, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedraft.model.draft_folder import load_draft
from pagedraft.model.draft_format import FUSE_WEIGHT, read_entry
from pagedraft.model.draft_save import save_draft
from pagedraft.model.feature_head import FeatureHead
from pagedraft.model.transformer import Transformer
from pagedraft.tests.model.drafts import layers_of
from pagedraft.tests.model.feature_heads import head_tensors, save_head
from pagedraft.tests.model.tiny import save_tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A target."""
    root = tmp_path_factory.mktemp("folders")
    save_tiny(root / "llama", "llama", dtype=torch.bfloat16)
    return root


@pytest.mark.usefixtures("cpu_path")
def test_a_head_of_few_tokens(folders, tmp_path):
    folder = save_head(tmp_path / "head", folders / "llama", ids=[3, 5, 96])
    entry = read_entry(folder)
    assert entry is not None
    assert (entry.kind, entry.vocab) == ("head", 3)
    stored = load_file(folder / "model.safetensors")
    assert (stored[FUSE_WEIGHT].dtype, stored[FUSE_WEIGHT].shape) == (torch.bfloat16, (80, 160))
    head = load_draft(folder, Transformer.from_folder(folders / "llama"))
    assert isinstance(head, FeatureHead)
    assert head.head.ids_U is not None
    assert head.head.ids_U.tolist() == [3, 5, 96]


def damaged(folder: Path, tensors: dict[str, torch.Tensor | None], **fields: object) -> None:
    stored = load_file(folder / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(values))


FAULTS = {
    "no fc": ({FUSE_WEIGHT: None}, {}, rf"missing 1 tensors: {FUSE_WEIGHT}"),
    "a square fc": (
        {FUSE_WEIGHT: torch.zeros(80, 80)},
        {},
        rf"{FUSE_WEIGHT}: expected shape \(80, 160\)",
    ),
    "two layers": ({}, {"num_hidden_layers": 2}, 'num_layers: expected 1 for kind "head", got 2'),
}


@pytest.mark.usefixtures("cpu_path")
class TestRefusals:
    @pytest.mark.parametrize("name", FAULTS)
    def test_damage_is_named(self, folders, tmp_path, name):
        tensors, fields, message = FAULTS[name]
        folder = save_head(tmp_path / "head", folders / "llama")
        damaged(folder, tensors, **fields)
        with pytest.raises(ValueError, match=message):
            load_draft(folder, Transformer.from_folder(folders / "llama"))

    def test_layers_hold_no_fc(self, folders, tmp_path):
        tensors = head_tensors(folders / "llama", 0, 0.5, 1.0)
        with pytest.raises(ValueError, match=rf"left over 1: {FUSE_WEIGHT}"):
            save_draft(tmp_path / "head", folders / "llama", tensors, num_layers=1)

    def test_a_head_is_saved_with_its_fc(self, folders, tmp_path):
        with pytest.raises(ValueError, match=rf"missing 1: {FUSE_WEIGHT}"):
            save_draft(
                *(tmp_path / "head", folders / "llama", layers_of(folders / "llama", 1)),
                num_layers=1,
                kind="head",
            )

    def test_an_unknown_kind(self, folders, tmp_path):
        with pytest.raises(ValueError, match=r"kind: expected one of \['head', 'layers'\]"):
            save_draft(tmp_path / "head", folders / "llama", {}, num_layers=1, kind="tree")
