"""One distillation from prompts to a draft's folder, in phases that can be interrupted.

write      the target continues prompts until a share of the time is spent
train      the student learns them, for as many steps as the rest of the time allows; between
           parts of it the draft may write texts of its own, which the target judges ("on-policy")
report     acceptance and speed, before and after, on prompts of other sources
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pagedraft.decoding.distill.judge import HeldOut, judge
from pagedraft.decoding.distill.prompts import (
    Split,
    demo_prompts,
    encode_prompts,
    read_prompts,
    split,
)
from pagedraft.decoding.distill.report import document, render
from pagedraft.decoding.distill.run_folder import RunFolder
from pagedraft.decoding.distill.start import (
    choose_vocabulary,
    coverage,
    save_student,
    start_student,
)
from pagedraft.decoding.distill.student import Student, spread_layers
from pagedraft.decoding.distill.taught import Taught, num_output_tokens
from pagedraft.decoding.distill.train import Progress, Trainer, TrainOptions, read_step
from pagedraft.decoding.estimate_text import Text
from pagedraft.decoding.load import default_sampling, load_model, load_tokenizer
from pagedraft.decoding.params import SamplingParams, check_int, derive_seed, logit_rules
from pagedraft.model.config import ModelConfig
from pagedraft.model.demo import resolve_model
from pagedraft.model.draft_folder import load_draft
from pagedraft.model.draft_save import check_replaceable
from pagedraft.model.fingerprint import fingerprint
from pagedraft.scheduler.distill_check import measure
from pagedraft.scheduler.distill_texts import Writer, write_own

KINDS = ("layers",)
WRITE_SHARE, REPORT_SHARE = 0.45, 0.12  # of the time
SHARD = 64  # texts kept at once
SAVE_SECONDS = 60.0  # between checkpoints
PROBE_STEPS = 4  # steps that are timed, and forgotten, before their number is settled
LATE = 1.3  # times the training's seconds: where a machine that slowed down ends it
NUM_HELD_OUT = 32  # texts
NUM_OWN_TEXTS = 64  # of a round
NUM_MEASURED, MEASURED_TOKENS = 8, 64  # texts of the report that the engine writes anew
MAX_PROMPT_TOKENS, MAX_TOKENS = 192, 160


@dataclass(frozen=True)
class DistillOptions:
    """target: a folder, hub id or demo. out: the draft's folder.

    layers: how many, the target's first, last and evenly between; or which, in order.
    vocab: most tokens that the draft may propose. minutes: of the whole run.
    prompts: a text file or folder; None: the demo's. held_out: share of the prompts, by source.
    texts, steps: in place of what fits the minutes. on_policy: rounds.
    """

    target: str
    out: Path
    kind: str = "layers"
    layers: int | tuple[int, ...] = 2
    vocab: int = 16384
    minutes: float = 20.0
    prompts: Path | None = None
    held_out: float = 0.1
    texts: int | None = None
    steps: int | None = None
    on_policy: int = 0
    seed: int = 0
    device: str = "auto"
    train: TrainOptions = field(default_factory=TrainOptions)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"--kind: expected one of {list(KINDS)}, got {self.kind!r}")
        if not 0 < self.minutes < float("inf"):
            raise ValueError(f"--minutes: expected above 0, got {self.minutes}")
        check_int("--vocab", self.vocab, 1)
        check_int("--seed", self.seed, 0, 2**32 - 1)
        check_int("--on-policy", self.on_policy, 0)
        for name in ("texts", "steps"):
            if getattr(self, name) is not None:
                check_int(f"--{name}", getattr(self, name), 1)
        if isinstance(self.layers, tuple):
            ascending = all(a < b for a, b in zip(self.layers, self.layers[1:], strict=False))
            if not self.layers or self.layers[0] < 0 or not ascending:
                raise ValueError(f"--layers: expected ascending layers, got {self.layers}")
        else:
            check_int("--layers", self.layers, 1)


class Watch:
    """What a run tells of itself; this one tells nothing.

    say: a line. writing: so many texts of how many (None: as many as the time allows).
    training: after each step. checking: the held-out texts, after step ``step``.
    """

    def say(self, line: str) -> None: ...

    def writing(self, num_texts: int, num_tokens: int, share: float) -> None: ...

    def training(self, step: int, num_steps: int, progress: Progress) -> None: ...

    def checking(self, step: int, progress: Progress) -> None: ...


@dataclass
class Outcome:
    """A trained draft in ``out``. start: the folder of the untrained one.

    held_out: greedy texts of other sources. facts: how it was made, for the report.
    """

    out: Path
    start: Path
    held_out: list[Taught]
    facts: dict[str, Any]


class DistillRun:
    """Runs ``options``; every method picks up where an earlier run was interrupted."""

    def __init__(self, options: DistillOptions, watch: Watch | None = None) -> None:
        self.options = options
        self.watch = watch or Watch()
        check_replaceable(options.out)
        self.folder = resolve_model(options.target)
        config = ModelConfig.from_folder(self.folder)
        self.layers = (
            list(options.layers)
            if isinstance(options.layers, tuple)
            else spread_layers(options.layers, config.num_layers)
        )
        if self.layers[-1] >= config.num_layers:
            raise ValueError(
                f"--layers: the target has layers 0 to {config.num_layers - 1}, got "
                f"{self.layers[-1]}"
            )
        self.split = self._prompts()
        self.state = RunFolder(options.out, self._settings())
        if self.state.is_resumed:
            self.watch.say(f"going on with the run in {self.state.path}")
        self._seconds: dict[str, float] = self.state.read("seconds") or {}
        self.target = load_model(options.target, device=options.device)
        tokenizer = load_tokenizer(self.target)
        if tokenizer is None:
            raise ValueError(f"--target: {self.folder} has no tokenizer, so it cannot read prompts")
        self.train_prompts, self.held_out_prompts = (
            encode_prompts(prompts, tokenizer, MAX_PROMPT_TOKENS)
            for prompts in (self.split.train, self.split.held_out)
        )
        for name, prompts in (("train", self.train_prompts), ("held-out", self.held_out_prompts)):
            if not prompts:
                raise ValueError(f"prompts: none is left to {name} on")
        self.max_tokens = min(MAX_TOKENS, config.max_positions - MAX_PROMPT_TOKENS)

    def _prompts(self) -> Split:
        options = self.options
        if options.prompts is None:
            prompts = demo_prompts(options.seed)
        else:
            prompts = read_prompts(options.prompts)
        return split(prompts, options.held_out, options.seed)

    def _settings(self) -> dict[str, Any]:
        options = self.options
        return {
            "target": str(options.target),
            "target_sha256": fingerprint(self.folder),
            "kind": options.kind,
            "layers": self.layers,
            "vocab": options.vocab,
            "minutes": options.minutes,
            "texts": options.texts,
            "steps": options.steps,
            "on_policy": options.on_policy,
            "seed": options.seed,
            "loss": options.train.loss,
            "learning_rate": options.train.learning_rate,
            "prompts": self.split.hashes,
        }

    def run(self) -> Outcome:
        """Write and train."""
        return self.train(self.write())

    # Writing ----------------------------------------------------------------------------------

    def write(self) -> list[Taught]:
        """The texts to learn from."""
        with self._phase("write") as deadline:
            if not self.state.texts("held-out"):
                self._keep(self._held_out(), "held-out")
            end = None if self.options.texts is not None else deadline(WRITE_SHARE)
            plan = self.state.read("written")
            if plan is None:
                self._write_until(end)
                self.state.write("written", {"done": True})
        texts = self.state.texts()
        if not texts:
            raise ValueError("--minutes: too few for a single text; give more")
        return texts

    def _held_out(self) -> list[Taught]:
        writer = self._writer(temperatures=(0.0,))
        prompts = self.held_out_prompts[:NUM_HELD_OUT]
        return [text for _, text in sorted(writer.write(prompts), key=lambda pair: pair[0]) if text]

    def _write_until(self, end: float | None) -> None:
        texts = self.state.texts()
        place = self.state.read("place") or {"next": 0}
        first, num_tokens = place["next"], num_output_tokens(texts)
        num_texts, began = len(texts), time.perf_counter()
        prompts = self.train_prompts[: self.options.texts]
        writer = self._writer()
        while first < len(prompts) and (end is None or time.perf_counter() < end):
            # A round of shards is written in full or, at the deadline, as far as it got.
            piece = prompts[first : first + SHARD]
            found: list[tuple[int, Taught]] = []
            for index, text in writer.write(piece, first, end):
                if text is not None:
                    found.append((index, text))
                    num_tokens += text.num_output
                share = (first + len(found)) / len(prompts)
                if end is not None:
                    share = max(share, (time.perf_counter() - began) / (end - began))
                self.watch.writing(num_texts + len(found), num_tokens, min(1.0, share))
            self._keep([text for _, text in sorted(found, key=lambda pair: pair[0])], "texts")
            num_texts += len(found)
            first += len(piece)
            self.state.write("place", {"next": first})

    def _writer(self, **options: Any) -> Writer:
        return Writer(
            self.target,
            seed=self.options.seed,
            max_prompt_tokens=MAX_PROMPT_TOKENS,
            max_tokens=self.max_tokens,
            **options,
        )

    def _keep(self, texts: Sequence[Taught], kind: str) -> None:
        if texts:
            self.state.add_texts(texts, kind)

    # Training ---------------------------------------------------------------------------------

    def train(self, texts: list[Taught]) -> Outcome:
        """Train a student on texts and write the draft."""
        options = self.options
        ids_U = choose_vocabulary(texts, options.vocab, self.target.config.vocab_size)
        device = self.target.device
        student, head_VE = start_student(self.folder, self.layers, device)
        head_UE = head_VE if ids_U is None else head_VE[ids_U.to(device)]
        start = self.state.path / "start"
        if not start.exists():
            save_student(student, start, self.folder, options.target, ids_U)
        held_out = self.state.texts("held-out")
        with self._phase("train") as deadline:
            num_steps = self._num_steps(student, head_UE, texts, deadline)
            end = deadline(LATE * (1 - REPORT_SHARE))
            trainer, progress = self._train(
                student, head_UE, ids_U, texts, held_out, num_steps, end
            )
        save_student(student, options.out, self.folder, options.target, ids_U)
        facts = self._facts(texts, held_out, ids_U, trainer, progress)
        return Outcome(options.out, start, held_out, facts)

    def _num_steps(
        self,
        student: Student,
        head_UE: torch.Tensor,
        texts: list[Taught],
        deadline: Callable[[float], float],
    ) -> int:
        """Steps of the whole training: as asked, or what fits the time, which is settled once."""
        if self.options.steps is not None:
            return self.options.steps
        plan = self.state.read("plan")
        if plan is None:
            probe = Trainer(copy.deepcopy(student), head_UE, texts, self.options.train, PROBE_STEPS)
            probe.advance()
            began = time.perf_counter()
            for _ in range(PROBE_STEPS - 1):
                probe.advance()
            now = time.perf_counter()
            left = deadline(1 - REPORT_SHARE) - now
            plan = {"num_steps": max(1, int(left / (now - began) * (PROBE_STEPS - 1)))}
            self.state.write("plan", plan)
        return int(plan["num_steps"])

    def _train(
        self,
        student: Student,
        head_UE: torch.Tensor,
        ids_U: torch.Tensor | None,
        texts: list[Taught],
        held_out: list[Taught],
        num_steps: int,
        end: float,
    ) -> tuple[Trainer, dict[str, Progress]]:
        trainer = Trainer(student, head_UE, texts, self.options.train, num_steps)
        before = trainer.examine(held_out)
        self.watch.checking(0, before)
        if self.state.checkpoint.exists():
            self._use_own(trainer, texts, read_step(self.state.checkpoint))
            trainer.load(self.state.checkpoint, {})
            self.watch.say(f"at step {trainer.step} of {num_steps}")
        saved = time.perf_counter()
        try:
            while trainer.step < num_steps:
                if trainer.step in self._rounds(num_steps):
                    self._write_own(trainer, ids_U)
                    self._use_own(trainer, texts, trainer.step)
                step = trainer.advance()
                self.watch.training(trainer.step, num_steps, step)
                now = time.perf_counter()
                if now - saved > SAVE_SECONDS and trainer.step < num_steps:
                    trainer.save(self.state.checkpoint, {})
                    self.watch.checking(trainer.step, trainer.examine(held_out))
                    saved = now
                if self.options.steps is None and now > end:
                    self.watch.say(f"out of time at step {trainer.step} of {num_steps}")
                    break
        except BaseException:  # an interrupt, above all: nothing that was learnt is lost
            trainer.save(self.state.checkpoint, {})
            raise
        trainer.save(self.state.checkpoint, {})
        after = trainer.examine(held_out)
        self.watch.checking(trainer.step, after)
        return trainer, {"before": before, "after": after}

    def _rounds(self, num_steps: int) -> list[int]:
        """The steps before which the draft writes."""
        parts = self.options.on_policy + 1
        return [num_steps * part // parts for part in range(1, parts)]

    def _write_own(self, trainer: Trainer, ids_U: torch.Tensor | None) -> None:
        """A round of texts that the draft writes, unless an earlier run has it."""
        kind = f"own-{trainer.step}"
        if self.state.texts(kind):
            return
        folder = self.state.path / "now"
        save_student(trainer.student, folder, self.folder, self.options.target, ids_U)
        draft = load_draft(folder, self.target)
        index = self._rounds(trainer.num_steps).index(trainer.step)
        first = index * NUM_OWN_TEXTS % len(self.train_prompts)
        prompts = self.train_prompts[first : first + NUM_OWN_TEXTS]
        seed = derive_seed(self.options.seed, 1 + index)
        texts = write_own(self.target, draft, prompts, seed=seed, max_tokens=self.max_tokens)
        self._keep(texts, kind)

    def _use_own(self, trainer: Trainer, texts: list[Taught], step: int) -> None:
        """Let the texts of all rounds before ``step`` be learnt, too."""
        rounds = [first for first in self._rounds(trainer.num_steps) if first <= step]
        # At the first step of a round its texts are yet to be written, or there already.
        done = [first for first in rounds if first < step or self.state.texts(f"own-{first}")]
        if done:
            own = [text for first in done for text in self.state.texts(f"own-{first}")]
            trainer.use([*texts, *own], done[-1])

    # Report -----------------------------------------------------------------------------------

    def report(self, outcome: Outcome, command: str) -> str:
        """Judge the draft, write the report beside it, and return the verdict in a line."""
        target = self.target
        with self._phase("report"):
            held_out = [self._held_out_text(text) for text in outcome.held_out]
            drafts = {
                name: load_draft(path, target)
                for name, path in (("before", outcome.start), ("after", outcome.out))
            }
            self.watch.say("judging the draft on held-out texts")
            judgement = judge(target, drafts, held_out)
            self.watch.say("measuring it in the engine")
            some = [
                replace(one, text=_shortened(one.text, MEASURED_TOKENS))
                for one in held_out[:NUM_MEASURED]
            ]
            measured = measure(target, drafts["after"], some, rounds=1)
        seconds = {name: round(value, 1) for name, value in self._seconds.items()}
        facts = {"command": command, **outcome.facts, "seconds": seconds}
        found = document(facts, judgement, measured)
        render(outcome.out, found)
        return str(found["verdict"])

    def _held_out_text(self, text: Taught) -> HeldOut:
        params = SamplingParams(max_tokens=self.max_tokens, temperature=0.0)
        defaults = default_sampling(self.folder)
        ids = text.token_ids.tolist()
        return HeldOut(
            Text(
                tuple(ids[: text.num_prompt]),
                tuple(ids[text.num_prompt :]),
                max_tokens=self.max_tokens,
                rules=logit_rules(params, defaults, frozenset(self.target.config.eos_token_ids)),
            ),
            text.kind,
        )

    # Around it --------------------------------------------------------------------------------

    @contextmanager
    def _phase(self, name: str) -> Iterator[Callable[[float], float]]:
        """Times a phase; gives the ``time.perf_counter`` at which a share of the run is spent."""
        began = time.perf_counter()
        spent = sum(self._seconds.values())

        def deadline(share: float) -> float:
            return began + max(0.0, share * 60 * self.options.minutes - spent)

        try:
            yield deadline
        finally:
            passed = time.perf_counter() - began
            self._seconds[name] = self._seconds.get(name, 0.0) + passed
            self.state.write("seconds", self._seconds)

    def _facts(
        self,
        texts: list[Taught],
        held_out: list[Taught],
        ids_U: torch.Tensor | None,
        trainer: Trainer,
        progress: dict[str, Progress],
    ) -> dict[str, Any]:
        return {
            **self._settings(),
            "prompts": self.split.facts(),
            "num_texts": len(texts),
            "num_tokens": num_output_tokens(texts),
            "num_held_out_texts": len(held_out),
            "coverage": coverage(held_out, ids_U),
            "num_steps": trainer.num_steps,
            "num_steps_done": trainer.step,
            "num_parameters": sum(weight.numel() for weight in trainer.student.parameters()),
            "seconds": {name: round(value, 1) for name, value in self._seconds.items()},
            "held_out": {name: found._asdict() for name, found in progress.items()},
            "threads": torch.get_num_threads(),
        }


def _shortened(text: Text, max_tokens: int) -> Text:
    return replace(text, output_ids=text.output_ids[:max_tokens], max_tokens=max_tokens)
