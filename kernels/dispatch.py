"""Which implementation of an op runs: Triton, the CPU path, or the reference.

CUDA tensors run Triton. CPU tensors run Triton when ``TRITON_INTERPRET=1`` was set before it was
imported (the interpreter), else the op's CPU path where it has one, else its reference. The two
context managers below override that at run time and are the only switch there is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Implementation = Literal["triton", "cpu", "ref"]

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
OPS = (
    "rms_norm",
    "linear",
    "write_kv",
    "paged_attention",
    "gated_mlp",
    "sample",
    "verify",
    "logprobs",
    "copy_blocks",
    "distill_loss",
)
_overrides: dict[str, Implementation] = {}


def implementation(op: str, device: torch.device, *, has_cpu: bool = False) -> Implementation:
    """Return which implementation of ``op`` runs for tensors on ``device``.

    ``has_cpu`` says whether the op has a CPU path; without one "cpu" means the reference.
    """
    if not _overrides and not INTERPRETED and device.type == "cpu":  # 270 times a step: be short
        return "cpu" if has_cpu else "ref"
    choice = _overrides.get(op)
    if choice is None:
        choice = "triton" if device.type != "cpu" or INTERPRETED else "cpu"
    if choice == "cpu" and not (has_cpu and device.type == "cpu"):
        return "ref"
    return choice


@contextmanager
def use_implementation(choice: Implementation, *ops: str) -> Iterator[None]:
    """Run ``ops`` (all of them if none is named) with ``choice`` inside the ``with`` block."""
    unknown = set(ops) - set(OPS)
    if unknown:
        raise ValueError(f"ops: unknown {sorted(unknown)}, expected some of {list(OPS)}")
    saved = dict(_overrides)
    _overrides.update(dict.fromkeys(ops or OPS, choice))
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(saved)


@contextmanager
def use_reference(*ops: str) -> Iterator[None]:
    """Swap ``ops`` (all of them if none is named) to their PyTorch references."""
    with use_implementation("ref", *ops):
        yield
