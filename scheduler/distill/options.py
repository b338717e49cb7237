"""What a distillation is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from pagedraft.decoding.distill.start import STARTS, pick_layers
from pagedraft.decoding.distill.train import TrainOptions
from pagedraft.decoding.params import check_int

KINDS = ("layers", "head")


@dataclass(frozen=True)
class Sizes:
    """Of texts, in tokens: prompts are cut to ``prompt_tokens``, continuations to ``tokens``.

    rows: texts that are written side by side. shard: texts that are kept at once. held_out: greedy
    texts that the report is made from. own: texts of an on-policy round.
    measured, measured_tokens: texts that the engine writes anew for the report, and their lengths.
    """

    prompt_tokens: int = 192
    tokens: int = 160
    rows: int = 32
    shard: int = 64
    held_out: int = 32
    own: int = 64
    measured: int = 4
    measured_tokens: int = 64


@dataclass(frozen=True)
class DistillOptions:
    """target: a folder, hub id or demo. out: the draft's folder.

    kind: "layers", a small decoder, or "head", one layer over the target's states.
    layers: how many of the target's, from where ``start`` says (STARTS); or which, ascending.
        None: 2, or the one that a head has.
    vocab: most tokens that the draft may propose. minutes: of the whole run.
    prompts: a text file or folder; None: the demo's. held_out: share of the prompts, by source.
    begin: a draft of the same kind, size and target whose training goes on; None: a new one.
    skip: prompts that are left out, because what goes on has learnt from them.
    texts, steps: in place of what fits the minutes. on_policy: rounds in which the draft writes.
        0 by default: a draft only counts after text that the target would have written, so texts
        of its own teach it states that decoding does not ask for.
    """

    target: str
    out: Path
    kind: str = "layers"
    layers: int | tuple[int, ...] | None = None
    start: str = "first"
    vocab: int = 16384
    minutes: float = 20.0
    prompts: Path | None = None
    held_out: float = 0.1
    texts: int | None = None
    steps: int | None = None
    on_policy: int = 0
    begin: Path | None = None
    skip: int = 0
    seed: int = 0
    device: str = "auto"
    train: TrainOptions = field(default_factory=TrainOptions)
    sizes: Sizes = field(default_factory=Sizes)

    def __post_init__(self) -> None:
        if Path(self.out).name in ("", ".."):
            raise ValueError(f"--out: expected the name of a folder, got {str(self.out)!r}")
        if self.kind not in KINDS:
            raise ValueError(f"--kind: expected one of {list(KINDS)}, got {self.kind!r}")
        if not 0 < self.minutes < math.inf:
            raise ValueError(f"--minutes: expected above 0, got {self.minutes}")
        if self.start not in STARTS:
            raise ValueError(f"--start: expected one of {list(STARTS)}, got {self.start!r}")
        check_int("--vocab", self.vocab, 1)
        check_int("--seed", self.seed, 0, 2**32 - 1)
        check_int("--on-policy", self.on_policy, 0)
        check_int("--skip", self.skip, 0)
        for name in ("texts", "steps"):
            if getattr(self, name) is not None:
                check_int(f"--{name}", getattr(self, name), 1)
        self._check_layers()
        if self.kind == "head" and self.on_policy:
            raise ValueError("--on-policy: a feature head cannot write texts of its own")

    def _check_layers(self) -> None:
        layers = self.layers
        if isinstance(layers, tuple):
            if not layers or layers[0] < 0 or any(a >= b for a, b in pairwise(layers)):
                raise ValueError(f"--layers: expected ascending layers, got {layers}")
        elif layers is not None:
            check_int("--layers", layers, 1)
        count = len(layers) if isinstance(layers, tuple) else layers
        if self.kind == "head" and count not in (None, 1):
            raise ValueError(f"--layers: a head has one layer, got {layers}")

    def choose_layers(self, num_target_layers: int) -> list[int]:
        """The target's layers that the draft begins with."""
        if isinstance(self.layers, tuple):
            if self.layers[-1] >= num_target_layers:
                raise ValueError(
                    f"--layers: the target has layers 0 to {num_target_layers - 1}, got "
                    f"{self.layers[-1]}"
                )
            return list(self.layers)
        count = self.layers or (1 if self.kind == "head" else 2)
        return pick_layers(count, num_target_layers, self.start)
