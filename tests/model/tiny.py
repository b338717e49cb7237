"""Builders of tiny random models: made by transformers, saved to a folder as anybody's would be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

SIZES: Mapping[str, Any] = {
    "vocab_size": 97,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _llama(**changes: Any) -> PreTrainedConfig:
    """5 query heads on 1 KV head, head_dim 24, which is not hidden_size / heads."""
    heads = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 24}
    return LlamaConfig(**{**SIZES, "hidden_size": 80, **heads, **changes})


def _qwen2(**changes: Any) -> PreTrainedConfig:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2Config(**{**SIZES, "hidden_size": 64, **heads, **changes})


def _qwen3(**changes: Any) -> PreTrainedConfig:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return Qwen3Config(**{**SIZES, "hidden_size": 64, **heads, **changes})


# name -> how to make its config; the names are what tests are parametrized with.
TINY: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "llama": _llama,
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-bias": lambda: _llama(attention_bias=True),
    "qwen2": _qwen2,
    "qwen2-tied": lambda: _qwen2(tie_word_embeddings=True),
    "qwen3": _qwen3,
    "qwen3-tied": lambda: _qwen3(tie_word_embeddings=True),
}


def tiny_model(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """Return a random model of ``TINY[name]``; ``changes`` replace fields of its config.

    Every parameter is random, also norms and biases, which transformers starts at 1 and 0: a test
    must see when one of them is left out.
    """
    config = TINY[name]()
    for field, value in changes.items():
        setattr(config, field, value)
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter_name.endswith("norm.weight")
        is_matrix = parameter.dim() == 2
        scale = parameter.shape[-1] ** -0.5 if is_matrix else 0.2
        parameter.data.copy_(noise * scale + (1.0 if is_norm else 0.0))
    return model


def save_tiny(
    folder: Path,
    name: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "50GB",
    **changes: Any,
) -> PreTrainedModel:
    """Save ``tiny_model(name, ...)`` to ``folder`` and return it."""
    model = tiny_model(name, seed=seed, dtype=dtype, **changes)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
