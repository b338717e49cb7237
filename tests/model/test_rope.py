"""RoPE tables against transformers' rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pagedraft.model.config import ModelConfig
from pagedraft.model.rope import rope_table

SIZES = {"num_attention_heads": 2, "hidden_size": 128, "max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}

CASES: Mapping[str, Mapping[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "default-odd-theta": {"rope_type": "default", "rope_theta": 1234567.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "llama3": LLAMA3,
    "llama3-only-blended": {**LLAMA3, "low_freq_factor": 0.01, "high_freq_factor": 1000.0},
    "yarn": YARN,
    "yarn-no-original-context": {k: v for k, v in YARN.items() if not k.startswith("original")},
    "yarn-betas": {**YARN, "beta_fast": 8, "beta_slow": 2},
    "yarn-no-truncate": {**YARN, "truncate": False},
    "yarn-attention-factor": {**YARN, "attention_factor": 0.75},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-factor-below-1": {**YARN, "factor": 0.5},
}


def _both(folder: Path, parameters: Mapping[str, Any]) -> tuple[ModelConfig, LlamaRotaryEmbedding]:
    """Our config and transformers' embedding of one model, both from the saved config.json."""
    LlamaConfig(**SIZES, rope_parameters=dict(parameters)).save_pretrained(folder)
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(folder))
    return ModelConfig.from_folder(folder), theirs


def _largest_difference(config: ModelConfig, theirs: LlamaRotaryEmbedding) -> float:
    cos_PR, sin_PR = rope_table(config, 512)
    cos_1PD, sin_1PD = theirs(torch.zeros(1), torch.arange(512)[None])
    half = config.head_dim // 2
    differences = (cos_PR - cos_1PD[0, :, :half], sin_PR - sin_1PD[0, :, :half])
    return max(d.abs().max().item() for d in differences)


@pytest.mark.parametrize("name", CASES)
def test_matches_transformers(name: str, tmp_path: Path) -> None:
    """fp32 angles up to 512 rad: one rounding of an angle moves cos by up to 3e-5."""
    config, theirs = _both(tmp_path, CASES[name])
    assert _largest_difference(config, theirs) < 6e-5


@pytest.mark.parametrize("name", ["default", "default-odd-theta"])
def test_plain_rope_has_the_same_bits(name: str, tmp_path: Path) -> None:
    config, theirs = _both(tmp_path, CASES[name])
    assert _largest_difference(config, theirs) == 0.0


@pytest.mark.parametrize("name", [name for name in CASES if "default" not in name])
def test_teeth_scaling_left_out(name: str, tmp_path: Path) -> None:
    """The comparison above sees when the scaling is ignored."""
    config, theirs = _both(tmp_path, CASES[name])
    assert _largest_difference(replace(config, rope_scaling=None), theirs) > 1e-2


def test_shape_and_dtype(tmp_path: Path) -> None:
    config, _ = _both(tmp_path, CASES["yarn"])
    cos_PR, sin_PR = rope_table(config, 7)
    assert cos_PR.shape == sin_PR.shape == (7, config.head_dim // 2)
    assert cos_PR.dtype == sin_PR.dtype == torch.float32


@pytest.mark.parametrize("num_positions", [1, 5, 127])
def test_rows_do_not_depend_on_the_length(num_positions: int, tmp_path: Path) -> None:
    config, _ = _both(tmp_path, CASES["llama3"])
    short, long = rope_table(config, num_positions), rope_table(config, 512)
    assert torch.equal(short[0], long[0][:num_positions])
    assert torch.equal(short[1], long[1][:num_positions])


def test_no_positions(tmp_path: Path) -> None:
    config, _ = _both(tmp_path, CASES["default"])
    with pytest.raises(ValueError, match="num_positions: expected at least 1, got 0"):
        rope_table(config, 0)
