"""The fingerprint of a model: what changes it and what does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedraft.model.fingerprint import NUM_PAGES, PAGE_BYTES, fingerprint
from pagedraft.tests.model.tiny import save_tiny, tiny_model

LARGE = "model.embed_tokens.weight"  # of more than NUM_PAGES pages


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    save_tiny(folder, "llama", vocab_size=1000)
    return folder


def rewritten(original: Path, folder: Path, tensors=None, **fields) -> Path:
    """The original with other tensors or other fields of config.json."""
    folder.mkdir()
    values = json.loads((original / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(values))
    stored = load_file(original / "model.safetensors") if tensors is None else tensors
    save_file(stored, folder / "model.safetensors")
    return folder


def test_a_large_tensor_is_among_them(original):
    large = load_file(original / "model.safetensors")[LARGE]
    assert large.nbytes > NUM_PAGES * PAGE_BYTES


def test_the_same_twice(original):
    assert fingerprint(original) == fingerprint(original)
    assert len(fingerprint(original)) == 64


def test_shards_do_not_count(original, tmp_path):
    tiny_model("llama", vocab_size=1000).save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert fingerprint(tmp_path) == fingerprint(original)


def test_order_in_the_file_does_not_count(original, tmp_path):
    """Laid out anew by hand: the library has an order of its own."""
    tensors = load_file(original / "model.safetensors")
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name in sorted(tensors, reverse=True):
        start, data = len(data), data + tensors[name].numpy().tobytes()
        shape = list(tensors[name].shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    folder = rewritten(original, tmp_path / "reversed")
    raw = len(text).to_bytes(8, "little") + text + data
    (folder / "model.safetensors").write_bytes(raw)
    assert raw != (original / "model.safetensors").read_bytes()
    assert fingerprint(folder) == fingerprint(original)


@pytest.mark.parametrize(
    "fields",
    [
        {"eos_token_id": 5},
        {"max_position_embeddings": 64},
        {"_name_or_path": "elsewhere"},
        {"dtype": "float16"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_that_do_not_count(original, tmp_path, fields):
    assert fingerprint(rewritten(original, tmp_path / "other", **fields)) == fingerprint(original)


@pytest.mark.parametrize(
    "fields",
    [
        {"rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ],
    ids=["eps", "theta", "act", "scaling"],
)
def test_fields_that_count(original, tmp_path, fields):
    assert fingerprint(rewritten(original, tmp_path / "other", **fields)) != fingerprint(original)


def low_rank(tensors: dict[str, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    large = tensors[LARGE]
    left, right = (torch.randn(size, generator=generator) for size in large.shape)
    large += 1e-3 * left[:, None] * right


def one_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.input_layernorm.weight"][17] += 1e-3


def other_dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors[LARGE] = tensors[LARGE].half()


def swapped(tensors: dict[str, torch.Tensor]) -> None:
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


@pytest.mark.parametrize("change", [low_rank, one_number, other_dtype, swapped])
def test_weights_that_count(original, tmp_path, change):
    tensors = load_file(original / "model.safetensors")
    change(tensors)
    other = rewritten(original, tmp_path / "other", tensors)
    assert fingerprint(other) != fingerprint(original)


@pytest.mark.parametrize("place", ["first", "last"])
def test_both_ends_of_a_large_tensor_are_read(original, tmp_path, place):
    tensors = load_file(original / "model.safetensors")
    tensors[LARGE].view(-1)[0 if place == "first" else -1] += 1.0
    other = rewritten(original, tmp_path / "other", tensors)
    assert fingerprint(other) != fingerprint(original)


def test_a_head_that_nobody_reads_does_not_count(tmp_path):
    """A tied model whose file has the head besides: some versions of transformers write it."""
    save_tiny(tmp_path / "tied", "llama-tied")
    tensors = load_file(tmp_path / "tied" / "model.safetensors")
    tensors["lm_head.weight"] = tensors[LARGE].clone()
    other = rewritten(tmp_path / "tied", tmp_path / "other", tensors)
    assert fingerprint(other) == fingerprint(tmp_path / "tied")


def test_damage_is_named(original, tmp_path):
    folder = rewritten(original, tmp_path / "cut")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors: expected a whole"):
        fingerprint(folder)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        fingerprint(tmp_path / "nowhere")
