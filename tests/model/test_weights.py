"""Loading weights: values against transformers' state dict, and one row for each broken folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedraft.model.config import ModelConfig
from pagedraft.model.weight_files import INDEX, SINGLE
from pagedraft.model.weights import load_weights
from pagedraft.tests.model.tiny import TINY, save_tiny

LAYER = "model.layers.1."
SHARD = "model-00002-of-00004.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that saves a tiny model once and returns its folder; not to be changed."""
    folders: dict[tuple[str, ...], Path] = {}

    def get(name: str = "llama", max_shard_size: str = "50GB") -> Path:
        key = (name, max_shard_size)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("saved")
            save_tiny(folders[key], name, max_shard_size=max_shard_size)
        return folders[key]

    return get


def _load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return load_weights(folder, ModelConfig.from_folder(folder), dtype=dtype)


def _expected(state: Mapping[str, torch.Tensor], num_layers: int) -> dict[str, torch.Tensor]:
    """Our names, written out by hand a second time, from a transformers state dict."""

    def stack(*names: str) -> torch.Tensor | None:
        return torch.cat([state[name] for name in names]) if names[0] in state else None

    found = {
        "embed": stack("model.embed_tokens.weight"),
        "final_norm": stack("model.norm.weight"),
        "head": stack("lm_head.weight"),
    }
    for i in range(num_layers):
        attn, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        layer = {
            "input_norm": stack(f"model.layers.{i}.input_layernorm.weight"),
            "qkv": stack(*(f"{attn}{x}_proj.weight" for x in "qkv")),
            "qkv_bias": stack(*(f"{attn}{x}_proj.bias" for x in "qkv")),
            "q_norm": stack(f"{attn}q_norm.weight"),
            "k_norm": stack(f"{attn}k_norm.weight"),
            "o": stack(f"{attn}o_proj.weight"),
            "o_bias": stack(f"{attn}o_proj.bias"),
            "post_norm": stack(f"model.layers.{i}.post_attention_layernorm.weight"),
            "gate_up": stack(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
            "down": stack(f"{mlp}down_proj.weight"),
        }
        found |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _assert_equal(
    weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    assert weights.keys() == expected.keys()
    wrong = [name for name in expected if not torch.equal(weights[name], expected[name])]
    assert not wrong


@pytest.mark.parametrize("max_shard_size", ["50GB", "150KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("name", TINY)
def test_same_values_as_transformers(name: str, max_shard_size: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, name, max_shard_size=max_shard_size)
    assert (tmp_path / INDEX).exists() == (max_shard_size != "50GB")
    expected = _expected(model.state_dict(), model.config.num_hidden_layers)
    if name.endswith("-tied"):
        del expected["head"]
    _assert_equal(_load(tmp_path), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cast_at_load(dtype: torch.dtype, saved: Callable[..., Path]) -> None:
    wide = _load(saved("qwen3"))
    _assert_equal(_load(saved("qwen3"), dtype), {k: v.to(dtype) for k, v in wide.items()})


def test_16_bit_file_to_fp32(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "qwen2", dtype=torch.bfloat16)
    weights = _load(tmp_path)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert torch.equal(weights["embed"], model.state_dict()["model.embed_tokens.weight"].float())


def test_owns_its_memory(saved: Callable[..., Path], tmp_path: Path) -> None:
    """The file may go away or change after loading (tensors are no views of a mapped file)."""
    folder = shutil.copytree(saved(), tmp_path / "copy")
    weights = _load(folder)
    before = weights["final_norm"].clone()
    (folder / SINGLE).write_bytes(bytes((folder / SINGLE).stat().st_size))
    assert torch.equal(weights["final_norm"], before)


def _edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace (or with None remove) tensors of the single file; "__" in a name stands for "."."""
    tensors = load_file(folder / SINGLE)
    tensors |= {name.replace("__", "."): t for name, t in changes.items() if t is not None}
    gone = {name.replace("__", ".") for name, t in changes.items() if t is None}
    save_file({k: v.clone() for k, v in tensors.items() if k not in gone}, folder / SINGLE)


def _truncate(file: Path, num_bytes: int) -> None:
    file.write_bytes(file.read_bytes()[:num_bytes])


def _only_bin(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "model.Q4_1.gguf").write_bytes(b"GGUF")


def _index(folder: Path, text: str) -> None:
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(text)


# name -> (what is broken in a folder with one file, the message)
ONE_FILE: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (
        lambda d: (d / SINGLE).unlink(),
        r"expected model\.safetensors or model\.safetensors\.index\.json, found no weights",
    ),
    "only bin and gguf": (_only_bin, r"found model\.Q4_1\.gguf, pytorch_model\.bin"),
    "another name": (
        lambda d: (d / SINGLE).rename(d / "weights.safetensors"),
        r"found weights\.safetensors",
    ),
    "no config": (lambda d: (d / "config.json").unlink(), r"it has no config\.json"),
    "truncated data": (
        lambda d: _truncate(d / SINGLE, 20000),
        r"/model\.safetensors: expected a whole safetensors file, got .* of 20000 bytes",
    ),
    "truncated header": (lambda d: _truncate(d / SINGLE, 100), "expected a whole safetensors file"),
    "empty": (lambda d: _truncate(d / SINGLE, 0), "expected a whole safetensors file.* of 0 bytes"),
    "a pickle by that name": (
        lambda d: torch.save({"a": torch.zeros(3)}, d / SINGLE),
        "expected a whole safetensors file",
    ),
    "missing tensor": (
        lambda d: _edit(d, **{f"{LAYER}mlp.up_proj.weight": None}),
        r"missing 1 tensors: model\.layers\.1\.mlp\.up_proj\.weight",
    ),
    "missing head": (lambda d: _edit(d, lm_head__weight=None), r"missing .*lm_head\.weight"),
    "left over": (
        lambda d: _edit(d, **{f"{LAYER}self_attn.q_proj.bias": torch.zeros(120)}),
        r"left over 1 tensors: model\.layers\.1\.self_attn\.q_proj\.bias",
    ),
    "one layer too many": (
        lambda d: _edit(d, **{"model.layers.2.mlp.up_proj.weight": torch.zeros(112, 80)}),
        r"left over 1 tensors: model\.layers\.2\.mlp\.up_proj\.weight",
    ),
    "missing and left over": (
        lambda d: _edit(d, model__norm__weight=None, norm__weight=torch.zeros(80)),
        r"missing 1 tensors: model\.norm\.weight; left over 1 tensors: norm\.weight",
    ),
    "wrong shape": (
        lambda d: _edit(d, **{f"{LAYER}self_attn.k_proj.weight": torch.zeros(80, 24)}),
        r"k_proj\.weight: expected shape \(24, 80\) \(from config\.json\), got \(80, 24\)",
    ),
    "wrong rank": (
        lambda d: _edit(d, model__norm__weight=torch.zeros(80, 1)),
        r"model\.norm\.weight: expected shape \(80,\) .* got \(80, 1\)",
    ),
    "padded vocabulary": (
        lambda d: _edit(d, model__embed_tokens__weight=torch.zeros(104, 80)),
        r"embed_tokens\.weight: expected shape \(97, 80\) .* got \(104, 80\)",
    ),
    "integers": (
        lambda d: _edit(d, model__norm__weight=torch.zeros(80, dtype=torch.int8)),
        r"model\.norm\.weight: expected dtype F32 or F16 or BF16, got I8",
    ),
    "fp8": (
        lambda d: _edit(d, model__norm__weight=torch.zeros(80).to(torch.float8_e4m3fn)),
        r"model\.norm\.weight: expected dtype .*, got F8_E4M3",
    ),
    "index is no JSON": (lambda d: _index(d, "{"), r"index\.json: broken JSON"),
    "index without a map": (lambda d: _index(d, "{}"), r"index\.json: expected a non-empty object"),
    "index leads outside": (
        lambda d: _index(d, '{"weight_map": {"a": "../other/model.safetensors"}}'),
        r"index\.json: weight_map: expected file names, got \.\./other",
    ),
    "index names a number": (
        lambda d: _index(d, '{"weight_map": {"a": 3}}'),
        r"index\.json: weight_map: expected file names, got 3",
    ),
}


@pytest.mark.parametrize("name", ONE_FILE)
def test_broken_folder(name: str, saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(saved(), tmp_path / "model")
    config = ModelConfig.from_folder(folder)
    damage, message = ONE_FILE[name]
    damage(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_weights(folder, config)


def _repeat_in_other_shard(folder: Path) -> None:
    first = load_file(folder / SHARD.replace("00002", "00001"))
    save_file(load_file(folder / SHARD) | first, folder / SHARD)


def _drop_from_shard(folder: Path) -> None:
    tensors = load_file(folder / SHARD)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, folder / SHARD)


SHARDED: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (
        lambda d: (d / SHARD).unlink(),
        rf"missing shard files named in model\.safetensors\.index\.json: {SHARD}",
    ),
    "truncated shard": (
        lambda d: _truncate(d / SHARD, 30000),
        rf"/{SHARD}: expected a whole safetensors file",
    ),
    "tensor in two shards": (_repeat_in_other_shard, rf"{SHARD}: tensor .* is also in model-00001"),
    "tensor not in its shard": (_drop_from_shard, "missing 1 tensors: "),
}


@pytest.mark.parametrize("name", SHARDED)
def test_broken_shards(name: str, saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(saved("llama", "150KB"), tmp_path / "model")
    damage, message = SHARDED[name]
    damage(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        _load(folder)


def test_many_problems_are_counted(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(saved(), tmp_path / "model")
    save_file({"a": torch.zeros(1)}, folder / SINGLE)
    with pytest.raises(ValueError, match=r"missing 21 tensors: (\S+, ){5}and 16 more; left over"):
        _load(folder)


def test_config_of_another_model(saved: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="expected a qwen3 model, missing .* left over"):
        load_weights(saved("llama-bias"), ModelConfig.from_folder(saved("qwen3")))


def test_no_such_folder(saved: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_weights(tmp_path / "nothing", ModelConfig.from_folder(saved()))


def test_dtype_that_nobody_computes_in(saved: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"dtype: expected one of .* got torch\.int8"):
        _load(saved(), torch.int8)


def test_too_large_for_fp16(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(saved(), tmp_path / "model")
    _edit(folder, model__norm__weight=torch.full((80,), 1e5))
    assert _load(folder, torch.bfloat16)["final_norm"].isfinite().all()
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight: values beyond the range of float16"
    ):
        _load(folder, torch.float16)


def test_buffers_of_old_files_are_skipped(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(saved(), tmp_path / "model")
    _edit(folder, **{f"{LAYER}self_attn.rotary_emb.inv_freq": torch.zeros(12)})
    _assert_equal(_load(folder), _load(saved()))


def test_tied_head_that_is_stored_too(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(saved("llama-tied"), tmp_path / "model")
    _edit(folder, lm_head__weight=load_file(folder / SINGLE)["model.embed_tokens.weight"])
    _assert_equal(_load(folder, torch.bfloat16), _load(saved("llama-tied"), torch.bfloat16))


def test_tied_head_that_differs(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(saved("llama-tied"), tmp_path / "model")
    head_VE = load_file(folder / SINGLE)["model.embed_tokens.weight"].clone()
    head_VE[3, 5] += 0.5
    _edit(folder, lm_head__weight=head_VE)
    with pytest.raises(ValueError, match=r"lm_head\.weight: expected the embedding itself"):
        _load(folder)


def test_single_file_wins_over_an_index(saved: Callable[..., Path], tmp_path: Path) -> None:
    """As in transformers: a stale index beside the single file is not read."""
    folder = shutil.copytree(saved(), tmp_path / "model")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    _assert_equal(_load(folder), _load(saved()))
