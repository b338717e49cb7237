"""Warm-up: compile, set up and capture all that a load can need, before it comes.

Real forward passes, draws and verdicts run on fake tokens at the null block's slots: nothing of the
pools, the prefix cache, the statistics or the controller changes. That the set is complete is
tested by catching launches (tests/scheduler/test_warm_up.py) and, on a GPU, by counting kernels
(bench/gpu_check.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from triton.runtime.jit import JITFunction

from pagedraft.decoding.drafters.base import Drafter
from pagedraft.kernels.dispatch import INTERPRETED, implementation
from pagedraft.model.batch import StepBatch
from pagedraft.model.feature_head import FeatureHead
from pagedraft.model.graph_shapes import AttentionChoices
from pagedraft.model.graphs import GraphRunner
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.padding import StepShape
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.warm_draws import Job, draft_jobs, target_jobs
from pagedraft.scheduler.warm_steps import Limits, WarmStep, kernel_steps, small_steps

if TYPE_CHECKING:
    from pagedraft.scheduler.engine import Engine

Progress = Callable[[int, int, str], None]  # (how many are done, of how many, what was)


@dataclass(frozen=True)
class WarmUpReport:
    """What a warm-up did.

    seconds: by part: "steps", "draws", "graphs". num_steps: forward passes; num_draws: draws and
    verdicts. num_compiled: kernels that were not yet in this process. num_graphs: captured ones;
    failed_graphs: shapes that will run without.
    """

    seconds: dict[str, float]
    num_steps: int
    num_draws: int
    num_compiled: int
    num_graphs: int = 0
    failed_graphs: list[StepShape] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [
            f"warm-up: {sum(self.seconds.values()):.1f} s, {self.num_steps} passes, "
            f"{self.num_draws} draws, {self.num_compiled} kernels compiled"
        ]
        if self.num_graphs or self.failed_graphs:
            parts.append(f"{self.num_graphs} graphs captured")
        if self.failed_graphs:
            parts.append(f"{len(self.failed_graphs)} shapes run without a graph")
        return ", ".join(parts)


def warm_up(
    engine: Engine, progress: Progress | None = None, runners: Seq[GraphRunner] = ()
) -> WarmUpReport:
    """Run what compiles every kernel that the engine's steps can launch, then capture graphs.

    runners: of the target and of drafting models, captured at the end. progress: told after each
    pass, draw and graph. Raises RuntimeError while requests wait or run.
    """
    num_requests = len(engine.running) + len(engine.waiting)
    if num_requests:
        raise RuntimeError(
            f"warm_up: expected an engine without requests, got {num_requests} that wait or run"
        )
    device = engine.target.device
    compiled = num_compiled_kernels()
    steps, draws = jobs_of(engine)
    counter = _Counter(len(steps) + len(draws) + sum(len(r.shapes) for r in runners), progress)
    seconds = {"steps": counter.run(steps, device), "draws": counter.run(draws, device)}
    began = time.perf_counter()
    for runner in runners:
        runner.capture_all(lambda done, total, shape: counter.count(f"graph: {shape}"))
    seconds["graphs"] = time.perf_counter() - began
    return WarmUpReport(
        seconds,
        num_steps=len(steps),
        num_draws=len(draws),
        num_compiled=num_compiled_kernels() - compiled,
        num_graphs=sum(len(runner.captured) for runner in runners),
        failed_graphs=[shape for runner in runners for shape in runner.failed],
    )


def jobs_of(engine: Engine) -> tuple[list[Job], list[Job]]:
    """The passes and the draws of a warm-up, each with its name; they can run in any order.

    Triton's interpreter, which is slow and compiles nothing, gets one of each.
    """
    steps = [job for model in models_of(engine) for job in _model_jobs(model)]
    draws = list(_draw_jobs(engine))
    is_triton = implementation("paged_attention", engine.target.device) == "triton"
    return (steps[:1], draws[:1]) if INTERPRETED and is_triton else (steps, draws)


class _Counter:
    """Runs jobs and tells how far it is."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.done, self.progress = total, 0, progress

    def count(self, name: str) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total, name)

    def run(self, jobs: Seq[Job], device: torch.device) -> float:
        """Run all jobs; return the seconds until the device had done them."""
        began = time.perf_counter()
        for name, job in jobs:
            job()
            self.count(name)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began


class RunModel(NamedTuple):
    """A model that an engine runs, its pool, its largest step, and the drafter that it serves."""

    model: Transformer
    cache: KVCache
    limits: Limits
    drafter: Drafter | None = None

    def run(self, batch: StepBatch) -> object:
        """A pass; a feature head reads states that are nobody's."""
        if not isinstance(self.model, FeatureHead):
            return self.model.forward(batch, self.cache)
        sizes = batch.tokens_T.shape[0], self.model.config.embed_dim
        dtype, device = self.model.activation_dtype, self.model.device
        return self.model.forward(batch, self.cache, torch.zeros(sizes, dtype=dtype, device=device))


def models_of(engine: Engine) -> Iterator[RunModel]:
    """The target and the models that draft."""
    target, max_rows = engine.target, engine.max_rows
    capacity = engine.pool.num_usable * engine.pool.block_size

    def limits(model: Transformer, max_tokens: int) -> Limits:
        return Limits(max_rows, max_tokens, min(model.config.max_positions, capacity))

    yield RunModel(target, engine.cache, limits(target, engine.token_budget))
    for drafter in engine.speculation.drafters.values():
        model, cache = getattr(drafter, "model", None), getattr(drafter, "cache", None)
        if isinstance(model, GraphRunner):
            model = model.target
        if isinstance(model, Transformer) and isinstance(cache, KVCache):
            catch_up = getattr(drafter, "catch_up_tokens", 0)
            yield RunModel(model, cache, limits(model, max_rows + catch_up), drafter)


def _model_jobs(run_model: RunModel) -> Iterator[Job]:
    model, cache, limits, _ = run_model
    device, block_size = model.device, cache.block_size
    if runs_kernels(device):
        steps = kernel_steps(limits, AttentionChoices(model, cache))
    else:
        steps = small_steps(limits)
    for step in steps:

        def run(step: WarmStep = step) -> object:
            return run_model.run(step.batch(block_size, device))

        yield f"pass: {step.shape}", run


def _draw_jobs(engine: Engine) -> Iterator[Job]:
    vocab_size, device = engine.target.config.vocab_size, engine.target.device
    drafters = engine.speculation.drafters
    yield from target_jobs(vocab_size, device, has_drafts=bool(drafters))
    for drafting in list(models_of(engine))[1:]:
        yield from draft_jobs(drafting.model.config.vocab_size, vocab_size, device)


def runs_kernels(device: torch.device) -> bool:
    """Whether steps on ``device`` launch compiled kernels; the interpreter compiles none."""
    return not INTERPRETED and implementation("paged_attention", device) == "triton"


def num_compiled_kernels() -> int:
    """Kernels of this project that are compiled and loaded in this process, on all devices."""
    total = 0
    for name, module in list(sys.modules.items()):
        if name.startswith("pagedraft.kernels."):
            kernels = [
                value
                for value in vars(module).values()
                if isinstance(value, JITFunction) and value.fn.__module__ == name
            ]
            total += sum(len(cache[0]) for fn in kernels for cache in fn.device_caches.values())
    return total
