"""The second phase of a distillation: the student learns the texts, and becomes a draft."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagedraft.decoding.distill.report import FILES
from pagedraft.decoding.distill.start import (
    choose_vocabulary,
    coverage,
    save_student,
    start_student,
)
from pagedraft.decoding.distill.student import Student
from pagedraft.decoding.distill.taught import Taught, num_output_tokens
from pagedraft.decoding.distill.train import Diverged, Progress, Trainer, read_first
from pagedraft.decoding.params import derive_seed
from pagedraft.model.draft_folder import load_draft
from pagedraft.scheduler.distill.job import Job
from pagedraft.scheduler.distill.texts import write_own
from pagedraft.scheduler.distill.write import HELD_OUT

REPORT_SHARE = 0.12  # of the run's time that is left for the report
SAVE_SECONDS = 60.0  # between checkpoints
PROBE_STEPS = 5  # steps that are timed, and forgotten, before their number is settled
LATE = 1.25  # times the run's minutes: where training ends on a machine that has slowed down


@dataclass(frozen=True)
class Outcome:
    """A trained draft. start: the folder of the untrained one. facts: how it was made."""

    out: Path
    start: Path
    held_out: list[Taught]
    facts: dict[str, Any]


def train(job: Job, texts: list[Taught]) -> Outcome:
    """Train a student on texts and write the draft."""
    with job.clock.phase("start"):
        training = _Training(job, texts)
    return training.run()


class _Training:
    def __init__(self, job: Job, texts: list[Taught]) -> None:
        self.job = job
        self.texts = texts
        self.held_out = job.state.texts(HELD_OUT)
        options, device = job.options, job.target.device
        self.ids_U = choose_vocabulary(texts, options.vocab, job.target.config.vocab_size)
        self.student, head_VE = start_student(
            job.folder,
            job.layers,
            device,
            kind=options.kind,
            texts=texts,
            begin=options.begin,
        )
        self.head_UE = head_VE if self.ids_U is None else head_VE[self.ids_U.to(device)]

    def run(self) -> Outcome:
        job = self.job
        start = job.state.path / "start"
        self._save(self.student, start)
        with job.clock.phase("train") as deadline:
            num_steps = self._num_steps(deadline)
            trainer = Trainer(self.student, self.head_UE, self.texts, job.options.train, num_steps)
            before, after = self._train(trainer, deadline(LATE))
        for file in FILES:  # of the draft that was there
            (job.options.out / file).unlink(missing_ok=True)
        self._save(self.student, job.options.out)
        facts = self._facts(trainer, {"before": before, "after": after})
        return Outcome(job.options.out, start, self.held_out, facts)

    def _save(self, student: Student, folder: Path) -> None:
        save_student(student, folder, self.job.folder, str(self.job.options.target), self.ids_U)

    def _num_steps(self, deadline: Callable[[float], float]) -> int:
        """Steps of the whole training: as asked, or what fits the time, which is settled once."""
        options, state = self.job.options, self.job.state
        if options.steps is not None:
            return options.steps
        plan = state.read("plan")
        if plan is None:
            student = copy.deepcopy(self.student)
            probe = Trainer(student, self.head_UE, self.texts, options.train, PROBE_STEPS)
            probe.advance()
            began = time.perf_counter()
            for _ in range(1, PROBE_STEPS):
                probe.advance()
            now = time.perf_counter()
            left = deadline(1 - REPORT_SHARE) - now
            plan = {"num_steps": max(1, int(left / (now - began) * (PROBE_STEPS - 1)))}
            state.write("plan", plan)
        return int(plan["num_steps"])

    def _train(self, trainer: Trainer, end: float) -> tuple[Progress, Progress]:
        """Progress on the held-out texts, before and after."""
        job, file = self.job, self.job.state.checkpoint
        before = trainer.examine(self.held_out)
        job.watch.checking(0, before)
        if file.exists():
            self._use_own(trainer, read_first(file))
            trainer.load(file)
            job.watch.say(f"at step {trainer.step} of {trainer.num_steps}")
        saved = time.perf_counter()
        try:
            while trainer.step < trainer.num_steps:
                if trainer.step in self._rounds(trainer.num_steps) and trainer.first < trainer.step:
                    self._write_own(trainer)
                    self._use_own(trainer, trainer.step)
                progress = trainer.advance()
                job.watch.training(trainer.step, trainer.num_steps, progress)
                now = time.perf_counter()
                if now - saved > SAVE_SECONDS:
                    job.watch.checking(trainer.step, trainer.examine(self.held_out))
                    trainer.save(file)
                    saved = time.perf_counter()
                if job.options.steps is None and now > end:
                    job.watch.say(f"out of time at step {trainer.step} of {trainer.num_steps}")
                    break
            after = trainer.examine(self.held_out)
            job.watch.checking(trainer.step, after)
        except Diverged:
            raise
        except BaseException:  # an interrupt, above all; inside an update the last save has to do
            if trainer.is_whole:
                trainer.save(file)
            raise
        trainer.save(file)
        return before, after

    def _rounds(self, num_steps: int) -> list[int]:
        """The steps before which the draft writes."""
        parts = self.job.options.on_policy + 1
        return [num_steps * part // parts for part in range(1, parts)]

    def _write_own(self, trainer: Trainer) -> None:
        """A round of texts that the draft writes, unless an earlier run has it."""
        job, kind = self.job, f"own-{trainer.step}"
        if job.state.last_shard(kind) is not None:
            return
        folder = job.state.path / "now"
        self._save(trainer.student, folder)
        index = self._rounds(trainer.num_steps).index(trainer.step)
        count = job.options.sizes.own
        first = index * count % len(job.train_prompts)
        texts = write_own(
            job.target,
            load_draft(folder, job.target),
            job.train_prompts[first : first + count],
            seed=derive_seed(job.options.seed, 1 + index),
            max_tokens=job.max_tokens,
        )
        if texts:
            job.state.add_texts(texts, kind)

    def _use_own(self, trainer: Trainer, first: int) -> None:
        """Let the texts of the rounds up to the one at step ``first`` be learnt, too."""
        rounds = [step for step in self._rounds(trainer.num_steps) if step <= first]
        if rounds:
            own = [text for step in rounds for text in self.job.state.texts(f"own-{step}")]
            trainer.use([*self.texts, *own], first)

    def _facts(self, trainer: Trainer, progress: dict[str, Progress]) -> dict[str, Any]:
        job = self.job
        asked = {name: value for name, value in job.settings().items() if value is not None}
        del asked["prompts_sha256"]  # in the facts of the prompts
        return {
            **asked,
            "prompts": job.split.facts(),
            "num_texts": len(self.texts),
            "num_tokens": num_output_tokens(self.texts),
            "num_held_out_texts": len(self.held_out),
            "vocab_coverage": coverage(self.held_out, self.ids_U),
            "num_steps": trainer.num_steps,
            "num_steps_done": trainer.step,
            "num_parameters": sum(weight.numel() for weight in self.student.parameters()),
            "held_out": {
                name: {"loss": found.loss, "alpha": found.alpha, "tokens": found.num_tokens}
                for name, found in progress.items()
            },
            "threads": torch.get_num_threads(),
        }
