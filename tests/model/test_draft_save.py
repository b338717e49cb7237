"""Writing a draft's folder: what is stored, what is replaced, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pagedraft.model import draft_save
from pagedraft.model.config import ModelConfig
from pagedraft.model.draft_format import FIELD, VOCAB_IDS, read_entry
from pagedraft.model.draft_save import own_tensors, save_draft
from pagedraft.model.fingerprint import fingerprint
from pagedraft.tests.model.drafts import layers_of, save_layers
from pagedraft.tests.model.tiny import save_tiny

IDS = [1, 5, 96]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saving") / "target"
    save_tiny(folder, "qwen3-tied")
    return folder


def test_what_is_stored(target, tmp_path):
    folder = save_layers(tmp_path / "made" / "draft", target, num_layers=1, ids=IDS)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["draft"], "nothing is left beside"
    stored = load_file(folder / "model.safetensors")
    ids_U = stored.pop(VOCAB_IDS)
    assert (ids_U.dtype, ids_U.tolist()) == (torch.int32, IDS)
    given = layers_of(target, 1)
    assert stored.keys() == given.keys()
    assert all(torch.equal(stored[name], given[name].bfloat16()) for name in given)
    assert not any("embed" in name or "head" in name for name in stored)


def test_the_config(target, tmp_path):
    folder = save_layers(tmp_path / "draft", target, num_layers=1, ids=IDS)
    entry = json.loads((folder / "config.json").read_text())[FIELD]
    assert entry == {
        "kind": "layers",
        "target": "the target",
        "target_sha256": fingerprint(target),
        "vocab": 3,
        "has_out": False,
    }
    own, lent = ModelConfig.from_folder(folder), ModelConfig.from_folder(target)
    assert (own.num_layers, own.dtype) == (1, torch.bfloat16)
    for name in ("family", "embed_dim", "num_heads", "head_dim", "rope_theta", "max_positions"):
        assert getattr(own, name) == getattr(lent, name)


def test_fields_of_a_quantised_or_windowed_target_are_left_out(target, tmp_path):
    values = json.loads((target / "config.json").read_text())
    count = values["num_hidden_layers"]
    values |= {"layer_types": ["full_attention"] * count, "torch_dtype": "float16"}
    values |= {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    other = tmp_path / "target"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(values))
    (other / "model.safetensors").write_bytes((target / "model.safetensors").read_bytes())
    folder = save_layers(tmp_path / "draft", other, num_layers=1)
    assert ModelConfig.from_folder(folder).dtype == torch.bfloat16


def test_one_draft_replaces_another(target, tmp_path):
    folder = save_layers(tmp_path / "draft", target, num_layers=2)
    (folder / "report.json").write_text("{}")
    (folder / "runs").mkdir()
    save_layers(folder, target, num_layers=1, ids=IDS)
    entry = read_entry(folder)
    assert entry is not None
    assert entry.vocab == 3
    assert VOCAB_IDS in load_file(folder / "model.safetensors")
    assert ModelConfig.from_folder(folder).num_layers == 1
    assert (folder / "report.json").read_text() == "{}"
    assert (folder / "runs").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_an_empty_folder_is_used(target, tmp_path):
    (tmp_path / "draft").mkdir()
    assert read_entry(save_layers(tmp_path / "draft", target)) is not None


def test_a_write_that_fails_leaves_the_old_draft(target, tmp_path, monkeypatch):
    folder = save_layers(tmp_path / "draft", target, num_layers=2)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_args, **_options):
        raise OSError("no space left on device")

    monkeypatch.setattr(draft_save, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        save_layers(folder, target, num_layers=1)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_a_move_that_fails_brings_the_old_draft_back(target, tmp_path, monkeypatch):
    folder = save_layers(tmp_path / "draft", target, num_layers=2)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    move = Path.rename

    def fail_for_the_new(path, to):
        if path.name == "new":
            raise OSError("no such device")
        return move(path, to)

    monkeypatch.setattr(Path, "rename", fail_for_the_new)
    with pytest.raises(OSError, match="no such device"):
        save_layers(folder, target, num_layers=1)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_a_model_is_not_replaced(target, tmp_path):
    save_tiny(tmp_path / "model", "llama")
    with pytest.raises(ValueError, match="holds a model of its own and will not be replaced"):
        save_layers(tmp_path / "model", target)
    assert "lm_head.weight" in load_file(tmp_path / "model" / "model.safetensors")


@pytest.mark.parametrize("name", ["notes.txt", "config.json"])
def test_other_folders_are_not_replaced(target, tmp_path, name):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / name).write_text("mine")
    with pytest.raises(ValueError, match="is no draft and will not be replaced"):
        save_layers(tmp_path / "notes", target)
    assert (tmp_path / "notes" / name).read_text() == "mine"


def test_a_file_is_not_replaced(target, tmp_path):
    (tmp_path / "draft").write_text("mine")
    with pytest.raises(ValueError, match="is no draft and will not be replaced"):
        save_layers(tmp_path / "draft", target)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NORM: None}, rf"missing 1: {NORM}; left over 0"),
        ({"lm_head.weight": torch.zeros(97, 64)}, r"missing 0: ; left over 1: lm_head\.weight"),
        ({NORM: torch.ones(63)}, rf"{NORM}: expected shape \(64,\), got \(63,\)"),
        ({NORM: torch.full((64,), torch.nan)}, rf"{NORM}: expected finite numbers"),
        ({NORM: torch.full((64,), 3.4e38)}, rf"{NORM}: expected finite numbers"),
    ],
    ids=["missing", "left over", "shape", "nan", "beyond bf16"],
)
def test_wrong_tensors(target, tmp_path, changes, message):
    tensors = layers_of(target, 1) | changes
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        save_draft(tmp_path / "draft", target, given, num_layers=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "expected a list of ids"),
        ([[1, 2]], "expected a list of ids"),
        ([5, 4], r"ascending ids, got \[5, 4\] at 0"),
        ([1, 97], "ids from 0 to 96, got 97"),
    ],
    ids=["none", "table", "order", "beyond"],
)
def test_wrong_ids(target, tmp_path, ids, message):
    with pytest.raises(ValueError, match=message):
        save_draft(
            tmp_path / "draft",
            target,
            layers_of(target, 1),
            num_layers=1,
            vocab_ids=torch.tensor(ids, dtype=torch.int64),
        )


def test_a_number_of_layers_that_is_none(target):
    with pytest.raises(ValueError, match="num_layers: expected a positive integer, got 0"):
        own_tensors(target, 0)


def test_views_of_one_fused_tensor(target, tmp_path):
    """What training holds fused is stored apart."""
    tensors = layers_of(target, 1)
    names = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    fused = torch.cat([tensors[name] for name in names]).bfloat16()
    views = dict(zip(names, fused.chunk(2), strict=True))
    folder = save_draft(tmp_path / "draft", target, tensors | views, num_layers=1)
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(stored[name], views[name]) for name in names)
