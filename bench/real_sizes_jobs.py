"""What the real-size bench runs, in order, and how one job's rows come into its document."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pagedraft.bench.ceiling import Ceiling
from pagedraft.bench.real_sizes_bed import Bed, Setting
from pagedraft.bench.real_sizes_rows import (
    Answers,
    Case,
    Row,
    answer_row,
    engine_row,
    pass_row,
    pass_shape,
    prompt_linears,
    prompt_shape,
)
from pagedraft.bench.shapes import StepShape
from pagedraft.scheduler.warm_up import num_compiled_kernels

Document = dict[str, Any]
SECTIONS = ("rows", "passes", "answers", "linears")
ENGINE_SECTIONS = ("rows", "answers")  # what runs on warmed-up engines


@dataclass(frozen=True)
class Job:
    """One thing to measure.

    section: of SECTIONS, where its rows go. blank: what names the row in tables, times or not.
    run: returns the rows.
    """

    section: str
    name: str
    run: Callable[[], list[Row]] = field(repr=False)
    blank: Row = field(default_factory=dict)

    def without_times(self, **why: str) -> Row:
        """A row that says why it has no times: ``left_out`` or ``problem``."""
        return {"problem": None, **self.blank, **why}


def jobs_of(bed: Bed, ceiling: Ceiling) -> Iterator[Job]:
    """What is measured, what matters most first: graphs before eager steps, then few rows."""
    setting = bed.setting
    one, plain, some = setting.batches[0], setting.drafts[0], setting.drafts[1]
    few = max(2, setting.num_answers // 3)
    for case in _cases(setting, graphs=True):
        yield _row(bed, case, ceiling)
        step = pass_shape(setting, case.batch, setting.num_drafts(case.batch, case.k))
        yield _pass(bed, step, ceiling)
        if case == Case(True, one, plain):
            yield _answers(bed, Answers(True, plain, setting.num_answers))
            yield _pass(bed, prompt_shape(setting), ceiling)
        elif case == Case(True, one, some):
            yield _answers(bed, Answers(True, some, few))
    if setting.has_linears:
        blank = {"part": "linear ops of a prompt", "rows": ""}
        run = partial(prompt_linears, setting, bed.device, ceiling)
        yield Job("linears", "linears", run, blank)
    for case in _cases(setting, graphs=False):
        yield _row(bed, case, ceiling)
    yield _answers(bed, Answers(False, plain, few))


def _cases(setting: Setting, *, graphs: bool) -> Iterator[Case]:
    for batch in setting.batches:
        for k in setting.drafts:
            yield Case(graphs, batch, k)


def _row(bed: Bed, case: Case, ceiling: Ceiling) -> Job:
    return Job("rows", case.name, lambda: [engine_row(bed, case, ceiling)], case.blank)


def _pass(bed: Bed, step: StepShape, ceiling: Ceiling) -> Job:
    blank = {"step": step.name, "batch": step.num_rows, "span": step.span}
    return Job("passes", step.name, lambda: [pass_row(bed, step, ceiling)], blank)


def _answers(bed: Bed, answers: Answers) -> Job:
    return Job("answers", answers.name, lambda: [answer_row(bed, answers)], answers.blank)


def run_job(job: Job, document: Document) -> None:
    """Add the job's rows to the document; where it fails, a row that says why."""
    before = num_compiled_kernels()
    try:
        rows = job.run()
    except torch.OutOfMemoryError as error:
        rows = [job.without_times(left_out=f"out of memory: {first_line(error)}")]
    except Exception as error:
        traceback.print_exc()
        rows = [job.without_times(problem=f"{type(error).__name__}: {first_line(error)}")]
    document[job.section] += rows
    if job.section in ENGINE_SECTIONS:
        document["compiled_after_warm_up"] += num_compiled_kernels() - before
    document["problems"] += [f"{job.name}: {row['problem']}" for row in rows if row.get("problem")]


def first_line(error: Exception) -> str:
    """Of its message."""
    return (str(error).strip().splitlines() or [""])[0][:200]
