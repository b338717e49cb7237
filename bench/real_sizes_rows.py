"""What the real-size bench measures: engine rows, passes, short answers, linears of a long prompt.

Every function returns a row, ready for JSON. A row whose tokens are not those of plain decoding has
a ``problem`` and no times.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from statistics import median
from typing import Any

import torch

from pagedraft.bench.ceiling import Ceiling
from pagedraft.bench.inspect_cost import STAGE_COSTS, StepSizes
from pagedraft.bench.inspect_inputs import Setup
from pagedraft.bench.kernels import measure_case
from pagedraft.bench.layer_cases import Maker
from pagedraft.bench.linear_cases import fused_cases, plain_cases
from pagedraft.bench.real_sizes_bed import Bed, Recorder, Setting, greedy
from pagedraft.bench.shapes import DTYPES, StepShape
from pagedraft.bench.timing import measure
from pagedraft.kernels.cost import Cost
from pagedraft.model.batch import Span, build_step_batch
from pagedraft.model.config import ModelConfig
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.metrics import percentile
from pagedraft.scheduler.observer import StepRecord

Row = dict[str, Any]
LAYER_STAGES = ("qkv", "attention", "o_norm", "gate_up", "down_norm")
# What a stage launches where its neighbours are fused into the product, as in the forward pass.
FUSED_OPS = {"o_norm": ("linear",), "gate_up": ("linear",), "down_norm": ("linear",)}
PROMPT_PARTS = ("qkv", "gate_up_act", "o_norm", "down_norm")  # of a layer, as the forward runs them
PASS_SECONDS, LINEAR_SECONDS = 0.3, 0.2
MIN_STEPS = 2  # of whole batches, below which a row says that it has too few


@dataclass(frozen=True)
class Case:
    """One engine row. graphs: whether CUDA graphs run; k: drafts a row that were asked for."""

    graphs: bool
    batch: int
    k: int

    @property
    def name(self) -> str:
        """What figures and problems call it."""
        return f"{'graphs' if self.graphs else 'eager'}/batch {self.batch}/k {self.k}"

    @property
    def blank(self) -> Row:
        """What its row says before anything is measured."""
        return {"name": self.name, **asdict(self), "problem": None}


@dataclass(frozen=True)
class Answers:
    """Short answers one after another: with graphs or without, ``k`` drafts a step, how many."""

    graphs: bool
    k: int
    count: int

    @property
    def name(self) -> str:
        """What figures and problems call them."""
        return f"{'graphs' if self.graphs else 'eager'}/answer/k {self.k}"

    @property
    def blank(self) -> Row:
        """What their row says before anything is measured."""
        return {"name": self.name, **asdict(self), "problem": None}


def step_cost(config: ModelConfig, step: StepShape, dtype: str) -> Cost:
    """Least bytes and flops of a whole step, its greedy draw and verdict included."""
    sizes = StepSizes(Setup(step.name, config, config.num_layers, dtype=dtype), step)
    last = config.num_layers
    after = ("head", "sample") if step.num_logits == step.num_rows else ("head", "sample", "verify")
    stages = chain(
        [(-1, "input_norm")],
        ((layer, stage) for layer in range(last) for stage in LAYER_STAGES),
        ((last, stage) for stage in after),
    )
    total = Cost(0, 0)
    for layer, stage in stages:
        costs = STAGE_COSTS[stage](sizes, layer, set())
        for op in FUSED_OPS.get(stage, tuple(costs)):
            total += costs[op]
    return total


def pass_shape(setting: Setting, batch: int, num_drafts: int) -> StepShape:
    """The step of ``batch`` rows with so many drafts, in the middle of their answers."""
    name = f"verify{batch}x{num_drafts}" if num_drafts else f"decode{batch}"
    return StepShape(name, batch, num_drafts + 1, setting.context)


def prompt_shape(setting: Setting) -> StepShape:
    """The step that reads the prompt of a short answer."""
    length = setting.answer_prompt
    return StepShape(f"prefill{length}", 1, length, length)


def pass_row(bed: Bed, step: StepShape, ceiling: Ceiling) -> Row:
    """Time a forward pass on the device: on CUDA from a graph of passes back to back."""
    llm, setting = bed.engines[False], bed.setting
    cache, size = llm.engine.cache, setting.block_size
    for pool in cache.tensors:
        pool.normal_()
    blocks = -(-step.context // size)
    spans = [
        Span(
            [token % setting.config.vocab_size for token in range(row, row + step.span)],
            step.context - step.span,
            range(1 + row * blocks, 1 + (row + 1) * blocks),
            step.num_logits // step.num_rows,
        )
        for row in range(step.num_rows)
    ]
    layout: dict[str, Any] = {"block_size": size, "row_multiple": bed.model.row_multiple}
    batch = build_step_batch(spans, device=bed.device, **layout)
    budget = 0.0 if setting.is_dry else PASS_SECONDS
    timing = measure([lambda: bed.model.forward(batch, cache)], bed.device, budget=budget)
    llm.reset_prefix_cache()  # what it knew is overwritten
    cost = step_cost(setting.config, step, setting.dtype)
    row: Row = {"step": step.name, "batch": step.num_rows, "span": step.span}
    row |= {"context": step.context, **cost._asdict(), "time": asdict(timing)}
    floor = ceiling.floor(cost)
    return row | {"floor": floor, "share_of_floor": floor / timing.median}


def engine_row(bed: Bed, case: Case, ceiling: Ceiling) -> Row:
    """Run one batch to its end; times are of steps in which every row decodes with all drafts."""
    setting, llm = bed.setting, bed.engines[case.graphs]
    prompts = bed.prompts[: case.batch]
    k = setting.num_drafts(case.batch, case.k)
    row = case.blank | {"drafts": k}
    llm.generate(prompts, greedy(1))  # their KV is in the cache then
    with recording(llm) as recorder:
        completions = llm.generate(prompts, greedy(setting.num_new, k))
    problems = bed.problems(prompts, [c.token_ids for c in completions], setting.num_new)
    if problems:
        return row | {"problem": "; ".join(problems[:4])}
    steps = list(whole_steps(recorder.records, case.batch, k))
    drafted = sum(sum(completion.stats.drafted) for completion in completions)
    accepted = sum(sum(completion.stats.accepted) for completion in completions)
    passes = sum(len(completion.stats.passes) for completion in completions)
    row |= {"num_steps": len(steps), "accepted": accepted / drafted if drafted else None}
    row["tokens_per_pass"] = case.batch * setting.num_new / passes
    if len(steps) < MIN_STEPS:
        return row | {"left_out": f"{len(steps)} steps of a whole batch, {MIN_STEPS} are needed"}
    seconds = [step.seconds for step in steps]
    floor = ceiling.floor(
        step_cost(setting.config, pass_shape(setting, case.batch, k), setting.dtype)
    )
    row["step_ms"] = [1e3 * percentile(seconds, p) for p in (20, 50, 80)]
    row["launch_ms"] = 1e3 * median(step.launch_seconds for step in steps)
    row["tokens_per_second"] = sum(step.num_kept for step in steps) / sum(seconds)
    row |= {"floor_ms": 1e3 * floor, "share_of_floor": floor / median(seconds)}
    return row


@contextmanager
def recording(llm: LLM) -> Iterator[Recorder]:
    """Record the steps of an engine inside a ``with`` block."""
    recorder = Recorder()
    llm.engine.observers.append(recorder)
    try:
        yield recorder
    finally:
        llm.engine.observers.remove(recorder)


@dataclass(frozen=True)
class WholeStep:
    """A step in which every row of a batch decoded.

    seconds: from the end of the step before to its own. launch_seconds: from the start of its plan
    until all of it was launched. num_kept: tokens that it gave.
    """

    seconds: float
    launch_seconds: float
    num_kept: int


def whole_steps(records: Sequence[StepRecord], batch: int, k: int) -> Iterator[WholeStep]:
    """The steps of ``batch`` rows with ``k`` drafts each and no prompt."""
    for before, record in pairwise(records):
        num_drafts = sum(len(proposal.tokens) for proposal in record.drafts.values())
        num_fed = sum(record.scheduled.values())
        if len(record.scheduled) == batch and num_drafts == batch * k == num_fed - batch:
            yield WholeStep(
                record.finished - before.finished, record.launched - record.began, record.num_kept
            )


def answer_row(bed: Bed, answers: Answers) -> Row:
    """Whole seconds of short answers; nothing of a prompt is cached."""
    setting, llm, row = bed.setting, bed.engines[answers.graphs], answers.blank
    seconds, ttft, outputs = [], [], []
    prompts = [bed.answer_prompts[i % len(bed.answer_prompts)] for i in range(answers.count + 1)]
    for prompt in prompts:  # the first one warms up
        llm.reset_prefix_cache()
        began = time.perf_counter()
        [completion] = llm.generate([prompt], greedy(setting.answer_new, answers.k))
        seconds.append(time.perf_counter() - began)
        ttft.append(completion.stats.ttft)
        outputs.append(completion.token_ids)
    problems = bed.problems(prompts, outputs, setting.answer_new)
    if problems:
        return row | {"problem": "; ".join(problems[:4])}
    for key, values in (("seconds", seconds[1:]), ("ttft", ttft[1:])):
        row[f"{key}_ms"] = {f"p{p}": 1e3 * percentile(values, p) for p in (20, 50, 80, 99)}
    return row


def gate_problems(bed: Bed) -> list[str]:
    """Run short outputs of a row and of some, with every k, with graphs and without.

    Returns what differs from plain decoding, and whether graphs ran at all.
    """
    setting, found = bed.setting, []
    for graphs, llm in bed.engines.items():
        for batch in dict.fromkeys((1, min(setting.gate_rows, setting.max_rows))):
            for k in setting.drafts:
                case = Case(graphs, batch, k)
                prompts = bed.prompts[:batch]
                completions = llm.generate(prompts, greedy(setting.gate_new, k))
                outputs = [completion.token_ids for completion in completions]
                problems = bed.problems(prompts, outputs, setting.gate_new)
                found += [f"{case.name}: {problem}" for problem in problems]
    runner = getattr(bed.engines[True].engine.launcher.forward, "__self__", None)
    if getattr(runner, "num_replays", 0) == 0:
        found.append("graphs: no step was replayed from a graph")
    return found


def prompt_linears(setting: Setting, device: torch.device, ceiling: Ceiling) -> list[Row]:
    """A layer's linear ops at 2048 rows, gated and timed as ``bench kernels`` does."""
    length = 32 if setting.is_dry else 2048
    step = StepShape(f"prefill{length}", 1, length, length)
    make = Maker(setting.shape, step, DTYPES[setting.dtype], device)
    budget = 0.0 if setting.is_dry else LINEAR_SECONDS
    cases = [case for case in (*plain_cases(make), *fused_cases(make)) if case.part in PROMPT_PARTS]
    return [measure_case(case, device, ceiling, budget) | {"rows": length} for case in cases]
