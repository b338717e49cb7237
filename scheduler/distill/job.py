"""What the phases of a distillation share: options, prompts, the target, a clock, a watcher."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pagedraft.decoding.distill.prompts import (
    Encoded,
    Split,
    demo_prompts,
    encode_prompts,
    read_prompts,
    split,
)
from pagedraft.decoding.distill.run_folder import RunFolder
from pagedraft.decoding.distill.train import Progress
from pagedraft.decoding.load import load_model, load_tokenizer
from pagedraft.model.config import ModelConfig
from pagedraft.model.demo import resolve_model
from pagedraft.model.draft_save import check_replaceable
from pagedraft.model.fingerprint import fingerprint
from pagedraft.model.transformer import Transformer
from pagedraft.model.weight_files import SINGLE
from pagedraft.scheduler.distill.options import DistillOptions


class Watch:
    """What a run tells of itself; this one tells nobody.

    say: a line. writing: so many texts and tokens, and which share of the phase is done.
    training: after each step. checking: the held-out texts after step ``step``.
    """

    def say(self, line: str) -> None: ...

    def writing(self, num_texts: int, num_tokens: int, share: float) -> None: ...

    def training(self, step: int, num_steps: int, progress: Progress) -> None: ...

    def checking(self, step: int, progress: Progress) -> None: ...


class Clock:
    """Seconds that the phases of a run have taken, over all its interruptions."""

    def __init__(self, minutes: float, state: RunFolder) -> None:
        self.seconds: dict[str, float] = state.read("seconds") or {}
        self._total = 60 * minutes
        self._state = state

    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[float], float]]:
        """Times a phase; gives the ``time.perf_counter`` at which a share of the run is spent."""
        began = time.perf_counter()
        spent = sum(self.seconds.values())

        def deadline(share: float) -> float:
            return began + max(0.0, share * self._total - spent)

        try:
            yield deadline
        finally:
            self.add(name, time.perf_counter() - began)

    def add(self, name: str, seconds: float) -> None:
        """Count time that a phase has taken."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._state.write("seconds", self.seconds)


@dataclass(frozen=True)
class Job:
    """folder: the target's. layers: those of the target that the draft begins with.

    max_prompt_tokens, max_tokens: of a prompt and of a continuation.
    """

    options: DistillOptions
    watch: Watch
    folder: Path
    layers: list[int]
    split: Split
    state: RunFolder
    clock: Clock
    target: Transformer
    train_prompts: list[Encoded]
    held_out_prompts: list[Encoded]
    max_prompt_tokens: int
    max_tokens: int

    def settings(self) -> dict[str, Any]:
        """The options, as a report has them."""
        fixed = _fixed(self.options, self.folder, self.split)
        return fixed | _free(self.options, self.layers)


def prepare(options: DistillOptions, watch: Watch) -> Job:
    """Check everything that can be checked, and load the target. ValueError says what is wrong."""
    began = time.perf_counter()
    check_replaceable(options.out)
    folder = resolve_model(options.target)
    config = ModelConfig.from_folder(folder)
    layers = options.choose_layers(config.num_layers)
    max_prompt_tokens = min(options.sizes.prompt_tokens, config.max_positions // 2)
    max_tokens = min(options.sizes.tokens, config.max_positions - max_prompt_tokens)
    prompts = (
        demo_prompts(options.seed) if options.prompts is None else read_prompts(options.prompts)
    )
    sides = split(prompts, options.held_out, options.seed)
    target = load_model(options.target, device=options.device)
    options = replace(options, train=options.train.resolve(target.device))
    tokenizer = load_tokenizer(target)
    if tokenizer is None:
        raise ValueError(f"--target: {folder} has no tokenizer, so it cannot read prompts")
    train, held_out = (
        encode_prompts(side, tokenizer, max_prompt_tokens) for side in (sides.train, sides.held_out)
    )
    for name, side in (("train", train), ("be held out", held_out)):
        if not side:
            raise ValueError(f"--prompts: expected prompts to {name}, got none that has tokens")
    state = RunFolder(options.out, _fixed(options, folder, sides), _free(options, layers))
    if state.is_changed:
        watch.say(f"other options: training anew with the texts in {state.path}")
    elif state.is_resumed:
        watch.say(f"going on with the run in {state.path}")
    clock = Clock(options.minutes, state)
    clock.add("prepare", time.perf_counter() - began)
    return Job(
        options,
        watch,
        folder,
        layers,
        sides,
        state,
        clock,
        target,
        train,
        held_out,
        max_prompt_tokens,
        max_tokens,
    )


def _fixed(options: DistillOptions, folder: Path, sides: Split) -> dict[str, Any]:
    """What the texts depend on."""
    return {
        "target": str(options.target),
        "target_sha256": fingerprint(folder),
        "kind": options.kind,
        "seed": options.seed,
        "texts": options.texts,
        "skip": options.skip,
        "sizes": asdict(options.sizes),
        "prompts_sha256": sides.hashes,
    }


def _sha256(draft: Path) -> str:
    """Of a draft's weights."""
    with (draft / SINGLE).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _free(options: DistillOptions, layers: list[int]) -> dict[str, Any]:
    """What only training depends on, and how long it takes."""
    return {
        "layers": layers,
        "vocab": options.vocab,
        "minutes": options.minutes,
        "steps": options.steps,
        "on_policy": options.on_policy,
        "begin": None if options.begin is None else _sha256(options.begin),
        "train": asdict(options.train),
    }
