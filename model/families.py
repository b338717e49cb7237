"""The families of models that load, one table row each: what differs between them.

Everything that a row does not say is the same transformer for all. A new family that needs no new
computation is one more row here and one more tiny model in ``tests/model/tiny.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Bias = Literal["always", "never", "attention_bias"]

# Our name of a tensor -> its names in the file; several are fused along the rows, in this order.
_TENSORS: Mapping[str, tuple[str, ...]] = {
    "embed": ("model.embed_tokens.weight",),
    "final_norm": ("model.norm.weight",),
    "head": ("lm_head.weight",),
    "layers.{i}.input_norm": ("model.layers.{i}.input_layernorm.weight",),
    "layers.{i}.qkv": tuple(f"model.layers.{{i}}.self_attn.{x}_proj.weight" for x in "qkv"),
    "layers.{i}.qkv_bias": tuple(f"model.layers.{{i}}.self_attn.{x}_proj.bias" for x in "qkv"),
    "layers.{i}.q_norm": ("model.layers.{i}.self_attn.q_norm.weight",),
    "layers.{i}.k_norm": ("model.layers.{i}.self_attn.k_norm.weight",),
    "layers.{i}.o": ("model.layers.{i}.self_attn.o_proj.weight",),
    "layers.{i}.o_bias": ("model.layers.{i}.self_attn.o_proj.bias",),
    "layers.{i}.post_norm": ("model.layers.{i}.post_attention_layernorm.weight",),
    "layers.{i}.gate_up": (
        "model.layers.{i}.mlp.gate_proj.weight",
        "model.layers.{i}.mlp.up_proj.weight",
    ),
    "layers.{i}.down": ("model.layers.{i}.mlp.down_proj.weight",),
}


@dataclass(frozen=True)
class Family:
    """What one family does differently.

    ``qkv_bias`` and ``o_bias`` say whether the projections carry a bias: always, never, or when
    config.json sets ``attention_bias``. ``head_dim`` is the family's value when config.json names
    none (None: hidden_size / num_attention_heads). ``must_be_false`` lists fields of config.json
    that select a computation we do not have. ``buffers`` are name endings that old files carry and
    nobody reads.
    """

    qkv_bias: Bias
    o_bias: Bias
    qk_norm: bool = False
    head_dim: int | None = None
    must_be_false: tuple[str, ...] = ()
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _TENSORS)
    buffers: tuple[str, ...] = (".rotary_emb.inv_freq",)


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        qkv_bias="attention_bias", o_bias="attention_bias", must_be_false=("mlp_bias",)
    ),
    "qwen2": Family(qkv_bias="always", o_bias="never"),
    "qwen3": Family(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True, head_dim=128),
}


def family_of(model_type: object) -> Family:
    """Return the row of ``model_type`` (config.json); ValueError lists the known families."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"model_type: unknown family {model_type!r}, expected one of {sorted(FAMILIES)}"
        )
    return FAMILIES[model_type]


def has_bias(bias: Bias, attention_bias: bool) -> bool:
    """Say whether a projection carries a bias, given ``attention_bias`` of config.json."""
    return bias == "always" or (bias == "attention_bias" and attention_bias)
