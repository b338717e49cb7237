"""Train and held-out prompts, apart by source."""

from __future__ import annotations

import hashlib
import json
import platform
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagedraft.decoding.distill.prompt import Prompt, distinct


@dataclass(frozen=True)
class Split:
    """Two sides without a common source or prompt, each in the order of the prompts.

    num_repeated: prompts that were left out because an earlier one is the same.
    """

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    num_repeated: int = 0

    @property
    def hashes(self) -> dict[str, str]:
        """The sha256 of the texts of each side, in order, as hexadecimal digits."""
        return {"train": _sha256(self.train), "held_out": _sha256(self.held_out)}

    def facts(self) -> dict[str, Any]:
        """What a report says about the prompts: hashes, numbers by kind, the version of Python."""
        sides = {"train": self.train, "held_out": self.held_out}
        return {
            "sha256": self.hashes,
            "prompts": {side: dict(kinds(prompts)) for side, prompts in sides.items()},
            "sources": {side: len({p.source for p in prompts}) for side, prompts in sides.items()},
            "repeated": self.num_repeated,
            "python": platform.python_version(),
        }


def kinds(prompts: Sequence[Prompt]) -> Counter[str]:
    """How many prompts there are of each kind."""
    return Counter(prompt.kind for prompt in prompts)


def _sha256(prompts: Sequence[Prompt]) -> str:
    texts = [[*(content for _, content in p.history), p.text] for p in prompts]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def split(prompts: Sequence[Prompt], held_out: float, seed: int) -> Split:
    """Hold out whole sources, about the share ``held_out`` of the prompts of every kind.

    Sources are taken in an order drawn with ``seed``, each if that brings the held-out numbers by
    kind closer to their share; then the smallest source with a kind that is not held out yet, where
    another one is left for training. The share is met as closely as the sizes of the sources allow.
    Repeated prompts are dropped first, so that no prompt is on both sides. Raises ValueError for a
    share outside (0, 1) and for fewer than two sources.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out: expected a share between 0 and 1, got {held_out!r}")
    different = distinct(prompts)
    sources = sorted({prompt.source for prompt in different})
    if len(sources) < 2:
        found = f"only {sources[0]!r}" if sources else "none"
        raise ValueError(f"prompts: expected at least two sources to hold one out, got {found}")
    chosen = _choose(different, sources, held_out, random.Random(f"split {seed}"))
    return Split(
        train=tuple(prompt for prompt in different if prompt.source not in chosen),
        held_out=tuple(prompt for prompt in different if prompt.source in chosen),
        num_repeated=len(prompts) - len(different),
    )


def _choose(
    prompts: Sequence[Prompt], sources: list[str], share: float, rng: random.Random
) -> set[str]:
    """The sources to hold out: neither none nor all of them."""
    sizes: dict[str, Counter[str]] = {source: Counter() for source in sources}
    for prompt in prompts:
        sizes[prompt.source][prompt.kind] += 1
    wanted = {kind: share * number for kind, number in kinds(prompts).items()}
    missing = dict(wanted)
    rng.shuffle(sources)
    chosen: set[str] = set()
    for source in sources[:-1]:
        # Relative to what is wanted of the kind: a rare kind counts as much as a common one.
        gain = sum(
            (abs(missing[kind]) - abs(missing[kind] - number)) / wanted[kind]
            for kind, number in sizes[source].items()
        )
        if gain > 0:
            chosen.add(source)
            for kind, number in sizes[source].items():
                missing[kind] -= number
    for kind in sorted(wanted):
        left = [source for source in sources if source not in chosen and kind in sizes[source]]
        if missing[kind] == wanted[kind] and len(left) > 1:
            smallest = min(left, key=lambda source: (sizes[source].total(), source))
            chosen.add(smallest)
            for other, number in sizes[smallest].items():
                missing[other] -= number
    return chosen or {min(sources, key=lambda source: (sizes[source].total(), source))}
