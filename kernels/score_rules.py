"""What a layer does to attention scores before the softmax, beyond the causal mask."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from pagedraft.kernels.check import check_contiguous, check_dtype, check_shape


class ScoreRules(NamedTuple):
    """Rules of one layer, alike for all its rows.

    scale: factor of q k.
    window: a query sees its own key and the window - 1 keys before it (Mistral, Gemma); None: all.
    soft_cap: scaled scores become soft_cap * tanh(score / soft_cap) (Gemma 2); None: as they are.
    sinks_H: [H] fp32, one more logit a head in the softmax's denominator (gpt-oss); None: none.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks_H: torch.Tensor | None = None


def check_rules(rules: ScoreRules, num_heads: int) -> None:
    """Raise ValueError or TypeError that names the rule."""
    if not 0.0 < rules.scale < math.inf:
        raise ValueError(f"scale: expected a positive number, got {rules.scale}")
    is_number = isinstance(rules.window, int) and not isinstance(rules.window, bool)
    if rules.window is not None and not (is_number and 1 <= rules.window < 2**30):
        raise ValueError(f"window: expected 1 to 2^30 tokens or None, got {rules.window!r}")
    if rules.soft_cap is not None and not 0.0 < rules.soft_cap < math.inf:
        raise ValueError(f"soft_cap: expected a positive number or None, got {rules.soft_cap}")
    if rules.sinks_H is not None:
        check_shape("sinks_H", rules.sinks_H, (num_heads,))
        check_dtype("sinks_H", rules.sinks_H, torch.float32)
        check_contiguous("sinks_H", rules.sinks_H)
