"""A tiny model for comparisons, and one call to compare two of its sides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pagedraft.decoding.diff.report import USED_OPS, Report
from pagedraft.decoding.diff.run import Work, find_divergence
from pagedraft.decoding.diff.side import Side
from pagedraft.tests.model.tiny import save_tiny

PROMPT = [5, 9, 33, 7, 60, 61, 5, 9]
NUM_LAYERS = 3
CPU = {"device": "cpu", "dtype": "fp32"}
ALL_REFERENCES = Side(swaps=dict.fromkeys(USED_OPS, "ref"))


def save_model(folder: Path) -> Path:
    """Save a random model of NUM_LAYERS layers, whose weights are no bf16 numbers."""
    layers = {"num_hidden_layers": NUM_LAYERS, "layer_types": ["full_attention"] * NUM_LAYERS}
    save_tiny(folder, "qwen3", intermediate_size=96, **layers)
    return folder


def diff(folder: Path, b: Side | None = None, *, dtype: str = "fp32", **work) -> Report:
    """Compare ``b`` with the plain side A, both in ``dtype`` on the CPU unless ``b`` says more."""
    b, options = b or Side(), {**CPU, "dtype": dtype}
    sides = Side(folder, options), replace(b, model=folder, options={**options, **b.options})
    return find_divergence(*sides, Work(**{"token_ids": PROMPT, "max_tokens": 3, **work}))
