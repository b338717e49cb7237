"""ModelConfig: both generations of config.json, defaults, and one row for each thing refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedraft.model.config import ModelConfig
from pagedraft.model.families import FAMILIES

LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 80,
    "intermediate_size": 112,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
ABSENT = object()


def _read(folder: Path, generation: Mapping[str, Any] | None = None, **changes: Any) -> ModelConfig:
    """Write LLAMA with ``changes`` (ABSENT removes a field) to ``folder`` and read it."""
    values = {k: v for k, v in {**LLAMA, **changes}.items() if v is not ABSENT}
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


def test_every_field(tmp_path: Path) -> None:
    assert _read(tmp_path) == ModelConfig(
        family="llama",
        num_layers=2,
        embed_dim=80,
        num_heads=5,
        num_kv_heads=1,
        head_dim=24,
        mlp_dim=112,
        vocab_size=97,
        max_positions=128,
        rms_eps=1e-5,
        rope_theta=5000.0,
        rope_scaling=None,
        tied_head=True,
        attention_bias=False,
        o_bias=False,
        qk_norm=False,
        activation="silu",
        eos_token_ids=(2,),
        bos_token_id=1,
        dtype=torch.bfloat16,
    )


def test_hashable(tmp_path: Path) -> None:
    config = _read(tmp_path, rope_parameters={**YARN, "rope_theta": 10000.0})
    assert len({config, config}) == 1


# name -> (changes of config.json, field of ModelConfig, its value)
VALUES: Mapping[str, tuple[Mapping[str, Any], str, Any]] = {
    "no head_dim": ({"head_dim": ABSENT}, "head_dim", 16),
    "null head_dim": ({"head_dim": None}, "head_dim", 16),
    "qwen3's own head_dim": ({"model_type": "qwen3", "head_dim": ABSENT}, "head_dim", 128),
    "no num_key_value_heads": ({"num_key_value_heads": ABSENT}, "num_kv_heads", 5),
    "old rope_theta": (
        {"rope_parameters": ABSENT, "rope_theta": 7000},
        "rope_theta",
        7000.0,
    ),
    "no rope_theta": ({"rope_parameters": ABSENT}, "rope_theta", 10000.0),
    "rope_theta beside rope_parameters": (
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 7000},
        "rope_theta",
        7000.0,
    ),
    "old scaling with type": (
        {"rope_parameters": ABSENT, "rope_scaling": {"type": "linear", "factor": 2}},
        "rope_scaling",
        {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 128},
    ),
    "null scaling": ({"rope_parameters": ABSENT, "rope_scaling": None}, "rope_scaling", None),
    "original context defaults to the context": (
        {"rope_parameters": LLAMA3},
        "rope_scaling",
        {**LLAMA3, "original_max_position_embeddings": 128.0},
    ),
    "original context outside": (
        {"rope_parameters": LLAMA3, "original_max_position_embeddings": 32},
        "rope_scaling",
        {**LLAMA3, "original_max_position_embeddings": 32.0},
    ),
    "yarn extends the context": ({"rope_parameters": YARN}, "max_positions", 256),
    "yarn already counted": (
        {"rope_parameters": YARN, "max_position_embeddings": 512},
        "max_positions",
        512,
    ),
    "linear does not extend": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2}},
        "max_positions",
        128,
    ),
    "old torch_dtype": ({"dtype": ABSENT, "torch_dtype": "float16"}, "dtype", torch.float16),
    "no dtype": ({"dtype": ABSENT}, "dtype", torch.float32),
    "untied by default": ({"tie_word_embeddings": ABSENT}, "tied_head", False),
    "no eos": ({"eos_token_id": None}, "eos_token_ids", ()),
    "eos list": ({"eos_token_id": [7, 2, 7]}, "eos_token_ids", (7, 2)),
    "eos 0 is an id": ({"eos_token_id": 0}, "eos_token_ids", (0,)),
    "no bos": ({"bos_token_id": None}, "bos_token_id", None),
    "llama bias on q k v": ({"attention_bias": True}, "attention_bias", True),
    "llama bias on o": ({"attention_bias": True}, "o_bias", True),
    "qwen2 bias on q k v": ({"model_type": "qwen2"}, "attention_bias", True),
    "qwen2 no bias on o": ({"model_type": "qwen2", "attention_bias": True}, "o_bias", False),
    "qwen3 norms q and k": ({"model_type": "qwen3"}, "qk_norm", True),
    "gelu": ({"hidden_act": "gelu_pytorch_tanh"}, "activation", "gelu_tanh"),
    "window named but not used": (
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64},
        "family",
        "qwen2",
    ),
    "window from a layer past the last": (
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
        "family",
        "llama",
    ),
    "layer_types all full": ({"layer_types": ["full_attention"] * 2}, "num_layers", 2),
}


@pytest.mark.parametrize("name", VALUES)
def test_value(name: str, tmp_path: Path) -> None:
    changes, field, expected = VALUES[name]
    assert getattr(_read(tmp_path, **changes), field) == expected


# name -> (generation_config.json, field, value); config.json says bos 1, eos 2
GENERATION: Mapping[str, tuple[Mapping[str, Any], str, Any]] = {
    "its eos come first": ({"eos_token_id": [9, 8]}, "eos_token_ids", (9, 8, 2)),
    "the same eos once": ({"eos_token_id": 2}, "eos_token_ids", (2,)),
    "without eos": ({"temperature": 0.5}, "eos_token_ids", (2,)),
    "config.json's bos wins": ({"bos_token_id": 5}, "bos_token_id", 1),
}


@pytest.mark.parametrize("name", GENERATION)
def test_generation_config(name: str, tmp_path: Path) -> None:
    generation, field, expected = GENERATION[name]
    assert getattr(_read(tmp_path, generation), field) == expected


def _rope(**values: Any) -> Mapping[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **values}}


# name -> (changes of config.json, what the message must say)
REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "unknown family": ({"model_type": "mamba"}, "model_type: unknown family 'mamba'"),
    "no family": ({"model_type": ABSENT}, "model_type: unknown family None"),
    "no hidden_size": ({"hidden_size": ABSENT}, "hidden_size: expected a positive integer, got N"),
    "zero layers": ({"num_hidden_layers": 0}, "num_hidden_layers: expected a positive integer"),
    "text for a size": ({"vocab_size": "97"}, "vocab_size: expected a positive integer, got '97'"),
    "bool for a size": ({"vocab_size": True}, "vocab_size: expected a positive integer, got True"),
    "fraction for a size": ({"head_dim": 24.5}, "head_dim: expected a positive integer, got 24.5"),
    "odd head_dim": ({"head_dim": 25}, "head_dim: expected an even number .*, got 25"),
    "uneven head_dim": ({"hidden_size": 81, "head_dim": ABSENT}, "hidden_size: expected a multipl"),
    "uneven groups": ({"num_key_value_heads": 2}, "num_attention_heads: expected a multiple"),
    "no eps": ({"rms_norm_eps": ABSENT}, "rms_norm_eps: expected a positive number, got None"),
    "mlp_bias": ({"mlp_bias": True}, "mlp_bias: expected false"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: .*gptq"),
    "activation": ({"hidden_act": "relu"}, "hidden_act: expected one of .*, got 'relu'"),
    "dtype": ({"dtype": "int8"}, "dtype: expected one of .*, got 'int8'"),
    "sliding window": (
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        "use_sliding_window: expected full attention",
    ),
    "sliding layer": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types: expected full attention",
    ),
    "dynamic rope": (_rope(rope_type="dynamic", factor=2), "rope_parameters.rope_type: .*dynamic"),
    "longrope": (_rope(rope_type="longrope"), "rope_parameters.rope_type: .*'longrope'"),
    "old dynamic rope": (
        {"rope_parameters": ABSENT, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_scaling.rope_type: .*'dynamic'",
    ),
    "linear without factor": (_rope(rope_type="linear"), "rope_parameters.factor: expected"),
    "negative factor": (_rope(rope_type="linear", factor=-1), "rope_parameters.factor: .*-1"),
    "llama3 half filled": (
        _rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0),
        "rope_parameters.high_freq_factor: expected a positive number, got None",
    ),
    "theta": (_rope(rope_theta="big"), "rope_theta: expected a positive number, got 'big'"),
    "rope is no object": ({"rope_parameters": [1]}, "rope_parameters: expected an object"),
    "rope a layer type": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters: expected one rope for all layers",
    ),
    "partial rotary": (
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor: expected 1, got 0.5",
    ),
    "partial rotary inside": (
        _rope(partial_rotary_factor=0.5),
        "partial_rotary_factor: expected 1",
    ),
    "eos text": ({"eos_token_id": "</s>"}, "eos_token_id: expected a token id"),
    "eos negative": ({"eos_token_id": [-1]}, "eos_token_id: expected a token id"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        _read(tmp_path, **changes)


def test_unknown_family_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        _read(tmp_path, model_type="mamba")
    assert str(sorted(FAMILIES)) in str(caught.value)


BROKEN: Mapping[str, tuple[bytes, str]] = {
    "cut": (b'{"model_type": "lla', "broken JSON"),
    "empty": (b"", "broken JSON"),
    "not text": (b"\xff\xfe\x00", "broken JSON"),
    "a list": (b"[1]", "expected a JSON object, got a list"),
}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_json(name: str, file: str, tmp_path: Path) -> None:
    _read(tmp_path)
    content, message = BROKEN[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=rf"/{file}: {message}"):
        ModelConfig.from_folder(tmp_path)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="/nothing: no such folder"):
        ModelConfig.from_folder(tmp_path / "nothing")


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    with pytest.raises(ValueError, match="/model: expected a model folder, got a file"):
        ModelConfig.from_folder(tmp_path / "model")


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"it has no config\.json"):
        ModelConfig.from_folder(tmp_path)
