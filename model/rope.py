"""The cosine and sine table of rotary position embedding, with the scalings that stay fixed.

Shapes: ``cos_PR`` and ``sin_PR`` fp32, P positions from 0, R = head_dim / 2 frequencies. A pair of
columns (r, r + R) of a head is turned by the angle of (position, r): the half layout of Llama.

Sources: RoFormer (arXiv 2104.09864); linear: position interpolation (arXiv 2306.15595); yarn: arXiv
2309.00071; llama3: the model card and reference code of Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pagedraft.model.config import ModelConfig


def rope_table(
    config: ModelConfig, num_positions: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(cos_PR, sin_PR)`` fp32 for positions 0..num_positions-1.

    Computed on the CPU whatever the device, so every device holds the same bits; a position's row
    does not depend on ``num_positions``. Yarn's attention factor is multiplied in.
    """
    if num_positions < 1:
        raise ValueError(f"num_positions: expected at least 1, got {num_positions}")
    inv_freq_R, factor = inverse_frequencies(config)
    positions_P1 = torch.arange(num_positions, dtype=torch.float32)[:, None]
    angle_PR = positions_P1 * inv_freq_R
    cos_PR, sin_PR = angle_PR.cos() * factor, angle_PR.sin() * factor
    return cos_PR.to(device), sin_PR.to(device)


def inverse_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Return the angle per position of each frequency, fp32 [R], and the factor on cos and sin."""
    exponents_R = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv_freq_R = 1.0 / config.rope_theta**exponents_R
    if config.rope_scaling is None:
        return inv_freq_R, 1.0
    try:
        return _SCALINGS[config.rope_scaling["rope_type"]](inv_freq_R, config.rope_scaling, config)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"rope_scaling: {dict(config.rope_scaling)}: {error}") from error


def _linear(
    inv_freq_R: torch.Tensor, scaling: Mapping[str, Any], config: ModelConfig
) -> tuple[torch.Tensor, float]:
    """Squeeze all positions by one factor."""
    return inv_freq_R / scaling["factor"], 1.0


def _llama3(
    inv_freq_R: torch.Tensor, scaling: Mapping[str, Any], config: ModelConfig
) -> tuple[torch.Tensor, float]:
    """Slow long waves by ``factor``, keep short ones, blend between the two wavelengths."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns_R = scaling["original_max_position_embeddings"] * inv_freq_R / (2 * math.pi)
    keep_R = ((turns_R - low) / (high - low)).clamp(0, 1)
    return (1 - keep_R) * inv_freq_R / scaling["factor"] + keep_R * inv_freq_R, 1.0


def _yarn(
    inv_freq_R: torch.Tensor, scaling: Mapping[str, Any], config: ModelConfig
) -> tuple[torch.Tensor, float]:
    """Interpolate frequencies that turn seldom in the trained context, keep the quick ones."""
    dim, factor = config.head_dim, scaling["factor"]

    def column_that_turns(num_turns: float) -> float:
        length = scaling["original_max_position_embeddings"] / (num_turns * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(config.rope_theta))

    first = column_that_turns(scaling.get("beta_fast") or 32)
    last = column_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # the published code's guard against 0 / 0
    columns_R = torch.arange(dim // 2, dtype=torch.float32)
    interpolate_R = ((columns_R - first) / (last - first)).clamp(0, 1)
    scaled_R = inv_freq_R / factor * interpolate_R + inv_freq_R * (1 - interpolate_R)
    return scaled_R, _yarn_attention_factor(scaling)


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    """Return what yarn multiplies cos and sin by, so that attention logits keep their spread."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


_SCALINGS: Mapping[str, Callable[..., tuple[torch.Tensor, float]]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
