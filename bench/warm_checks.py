"""Checks of a warmed-up engine on a device: nothing compiles any more, graphs have the steps' bits.

Kernels are compiled by several processes first, into the cache that they share; the warm-up itself
then finds them there.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pagedraft.model.batch import build_step_batch
from pagedraft.model.graphs import GraphLimits, GraphRunner, Run
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.warm_up import jobs_of, num_compiled_kernels, warm_up

MAX_WORKERS = 8
MAX_DRAFTS = 4
BLOCK_SIZE = 16


def engine_of(folder: Path, *, device: torch.device, is_dry: bool) -> LLM:
    """A small engine over a saved model, with lookup drafts unless dry."""
    options: dict[str, Any] = {"dtype": "fp32" if is_dry else "bf16", "device": device.type}
    options |= {"max_rows": 2, "token_budget": 6} if is_dry else {"max_rows": 16}
    speculate = "off" if is_dry else "ngram"
    return LLM(folder, speculate=speculate, block_size=BLOCK_SIZE, kv_tokens=8192, **options)


def compile_share(folder: Path, number: int, count: int, options: dict[str, Any]) -> None:
    """Run every ``count``-th job of a warm-up in whichever process this is."""
    steps, draws = jobs_of(engine_of(folder, **options).engine)
    for _, job in [*steps, *draws][number::count]:
        job()


def warm_problems(
    save_model: Callable[[Path, int], Path], *, device: torch.device, is_dry: bool
) -> list[str]:
    """Return the kernels that a load compiles after a warm-up, and the graphs that differ.

    save_model: saves a tiny model of a seed into a folder and returns where.
    """
    options: dict[str, Any] = {"device": device, "is_dry": is_dry}
    with tempfile.TemporaryDirectory() as name:
        folder = save_model(Path(name), 0)
        if device.type == "cuda":
            count = min(MAX_WORKERS, os.cpu_count() or 1)
            share = partial(compile_share, folder, count=count, options=options)
            with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
                list(pool.map(share, range(count)))
        llm = engine_of(folder, **options)
    runner = graph_runner(llm)
    print(warm_up(llm.engine, runners=[runner]), flush=True)
    return [*load_problems(llm, is_dry=is_dry), *graph_problems(llm, runner, is_dry=is_dry)]


def graph_runner(llm: LLM) -> GraphRunner:
    """A runner of the target; without a GPU a graph is the pass itself."""

    def capture(run: Run) -> Run:
        run()
        return run

    engine = llm.engine
    limits = GraphLimits(engine.max_rows, MAX_DRAFTS, llm.target.config.max_positions)
    is_cpu = llm.target.device.type == "cpu"
    if is_cpu:  # few shapes: the interpreter is slow
        limits = GraphLimits(1, 0, 64)
    return GraphRunner(llm.target, engine.cache, limits, capture=capture if is_cpu else None)


def load_problems(llm: LLM, *, is_dry: bool) -> list[str]:
    """Run a random load; return how many kernels it compiled, and the errors of its requests."""
    from pagedraft.tests.scheduler.random_load import run_load

    before = num_compiled_kernels()
    count, longest = (2, 2) if is_dry else (60, 30)
    errors = run_load(llm, count, random.Random(0), longest=longest, seconds=20.0)
    grown = num_compiled_kernels() - before
    print(f"a random load: {llm.engine.num_steps} steps, {grown} kernels compiled", flush=True)
    problems = [f"a load after the warm-up compiled {grown} kernels"] if grown else []
    return [*problems, *(f"a request of the load failed: {error}" for error in errors)]


def graph_problems(llm: LLM, runner: GraphRunner, *, is_dry: bool) -> list[str]:
    """Replay random steps, from the host and from the device; return those with other bits."""
    from pagedraft.tests.model.steps import blocks_of, random_spans

    problems, target, cache = [], llm.target, llm.engine.cache
    for tensor in cache.tensors:
        tensor.copy_(torch.randn(tensor.shape, device=tensor.device))
    for seed in range(1 if is_dry else 24):
        num_rows, longest = (1, 1) if is_dry else (1 + seed % 16, 1 + seed % (MAX_DRAFTS + 1))
        sizes = {"block_size": BLOCK_SIZE, "context": 60 if is_dry else 300}
        spans = random_spans(seed, num_rows, longest, vocab=target.config.vocab_size, **sizes)
        if blocks_of(spans) > cache.num_blocks:
            continue
        layout: dict[str, Any] = {"block_size": BLOCK_SIZE, "row_multiple": target.row_multiple}
        batch = build_step_batch(spans, device=target.device, **layout)
        expected = target.forward(batch, cache).clone()
        for device in dict.fromkeys((target.device, torch.device("cpu"))):
            batch = build_step_batch(spans, device=device, **layout)
            if not torch.equal(runner.forward(batch, cache), expected):
                problems.append(f"graph of {num_rows} rows from {device}, seed {seed}: other bits")
    print(f"graphs: {runner.num_replays} replays, {runner.num_eager} without", flush=True)
    if runner.num_replays == 0:
        problems.append("graphs: no step was replayed")
    return problems
