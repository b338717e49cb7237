"""Transformers with random weights at real sizes, made on their device: no file, no checkpoint.

Scales are such that a pass is alive: states keep their size through the layers, attention looks at
few of its keys, and the next token depends on what the context says. So a wrong row, key or
position ends in other tokens, and greedy output is not one token repeated. It means nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pagedraft.bench.shapes import cut
from pagedraft.model.config import ModelConfig
from pagedraft.model.transformer import Transformer
from pagedraft.model.weights import Part, expected_parts

# Scores of attention have a standard deviation of its square: few keys hold most of the mass.
SHARPNESS = 1.75
QKV_GAINS = (SHARPNESS, SHARPNESS, 1.0)
TIED_GAIN = 0.5  # of an embedding that is the head, too: else a token tends to be said again
NOISE = 0.1  # of norm weights around 1, and of biases around 0
SHARED = ("embed", "head")  # what a draft has of its target


def empty_weights(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str
) -> dict[str, torch.Tensor]:
    """Return uninitialised tensors under the loader's names, q/k/v and gate/up fused.

    Raises ValueError for a config whose checkpoint is quantised.
    """
    return {
        name: torch.empty(_shape(parts), dtype=dtype, device=device)
        for name, parts in _plain_parts(config).items()
    }


def random_weights(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    without: Iterable[str] = (),
) -> dict[str, Any]:
    """Return weights drawn on ``device``, as ``load_weights`` would return those of a folder.

    The same seed gives the same weights on the same device. without: names to leave out.
    """
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    left_out = set(without)
    weights: dict[str, Any] = {}
    for name, parts in _plain_parts(config).items():
        if name not in left_out:
            weights[name] = torch.empty(_shape(parts), dtype=dtype, device=device)
            _fill(weights[name], parts, _gains(name, parts, config), generator)
    return weights


def random_model(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    exact: bool = True,
) -> Transformer:
    """Return a model of these sizes with random weights; it has no folder and no tokenizer."""
    return Transformer(
        config, random_weights(config, seed=seed, dtype=dtype, device=device), exact=exact
    )


def random_draft(target: Transformer, num_layers: int, *, seed: int = 1) -> Transformer:
    """Return a draft of ``num_layers`` random layers under the target's embedding and head.

    Right as often as chance has it: for trying features and costs, not acceptance.
    """
    config = cut(target.config, num_layers)
    options: dict[str, Any] = {"dtype": target.dtype, "device": target.device}
    weights = random_weights(config, seed=seed, without=SHARED, **options)
    weights |= {"embed": target.embed_VE, "head": target.head}
    return Transformer(config, weights, exact=target.exact)


def _plain_parts(config: ModelConfig) -> Mapping[str, list[Part]]:
    if config.quantization is not None:
        raise ValueError(f"quantization: expected None, got {config.quantization}")
    return expected_parts(config)


def _shape(parts: list[Part]) -> tuple[int, ...]:
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def _gains(name: str, parts: list[Part], config: ModelConfig) -> tuple[float, ...]:
    """What each part's standard deviation is multiplied by; the mean of what has one dimension."""
    kind = name.rpartition(".")[2]
    if len(parts[0].shape) == 1:
        return (1.0 if kind.endswith("norm") else 0.0,) * len(parts)
    if kind == "qkv":
        return QKV_GAINS
    return (TIED_GAIN if kind == "embed" and config.tied_head else 1.0,) * len(parts)


def _fill(
    weight: torch.Tensor, parts: list[Part], gains: tuple[float, ...], generator: torch.Generator
) -> None:
    """Draw a tensor part by part: [out, in] with a standard deviation of gain / sqrt(in)."""
    first = 0
    for part, gain in zip(parts, gains, strict=True):
        rows = weight[first : first + part.shape[0]]
        first += part.shape[0]
        if rows.ndim == 1:
            rows.normal_(gain, NOISE, generator=generator)
        else:
            rows.normal_(0.0, gain * part.shape[1] ** -0.5, generator=generator)
