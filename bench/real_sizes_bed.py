"""What the real-size bench runs: a random model, an engine with CUDA graphs and one without.

Every output is held against plain decoding: an engine without drafter and graphs that nothing was
warmed up for, all prompts in one batch. Drafts are that output, spoiled at random (synthetic.py).
"""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from pagedraft.bench.random_model import random_model
from pagedraft.bench.shapes import CONFIGS, DTYPES, LLAMA_1B, LLAMA_8B, TINY, ModelShape, cut
from pagedraft.bench.synthetic import SyntheticDrafter
from pagedraft.decoding.drafters.base import Drafter
from pagedraft.decoding.params import SamplingParams
from pagedraft.model.config import ModelConfig
from pagedraft.model.graphs import Run
from pagedraft.scheduler.graph_runners import graph_runners
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.observer import StepRecord
from pagedraft.scheduler.warm_up import WarmUpReport, jobs_of, warm_up

MOST_WORKERS = 14
WORKER_BYTES = 6 << 30  # of device memory: two layers, embedding and head of the largest model
NUM_FIRST_LAYERS = 2  # the last layer's steps differ from the others'


@dataclass(frozen=True)
class Setting:
    """One model and what is run on it.

    dtype: a name of shapes.DTYPES. batches, drafts: rows at once and drafts a row of the engine
    table. num_prompt, num_new: tokens of its prompts and answers; a prompt is one token longer
    than its blocks, so that a batch of known prompts starts in one step. answer_prompt, answer_new,
    num_answers: of the short answer. gate_rows, gate_new: of the exactness gate. has_linears: time
    the linear ops of a long prompt, too.
    """

    name: str
    shape: ModelShape
    config: ModelConfig
    dtype: str = "bf16"
    is_dry: bool = False
    batches: tuple[int, ...] = (1, 8, 64)
    drafts: tuple[int, ...] = (0, 4, 8)
    num_prompt: int = 513
    num_new: int = 96
    answer_prompt: int = 512
    answer_new: int = 16
    num_answers: int = 50
    gate_rows: int = 8
    gate_new: int = 24
    block_size: int = 64
    token_budget: int = 512
    has_linears: bool = False

    @property
    def file(self) -> str:
        """Name of its JSON."""
        return f"real_sizes-{self.name}-{'dry' if self.is_dry else self.dtype}.json"

    @property
    def max_rows(self) -> int:
        return max(self.batches)

    @property
    def kv_tokens(self) -> int:
        """Capacity of a pool: all rows, a block more each, and as much for what is cached."""
        blocks = -(-(self.num_prompt + self.num_new) // self.block_size) + 2
        return self.max_rows * blocks * self.block_size

    @property
    def context(self) -> int:
        """Tokens of context in the middle of an answer of the engine table."""
        return self.num_prompt + self.num_new // 2

    def num_drafts(self, batch: int, k: int) -> int:
        """Drafts a row of ``batch`` rows: ``k``, or fewer where a step's tokens would exceed the
        budget."""
        return min(k, self.token_budget // batch - 1)


def _real(name: str, shape: ModelShape, **changes: Any) -> Setting:
    # Contexts of this bench are short; a longer table of positions changes no step of it.
    config = replace(CONFIGS[name], max_positions=1024)
    return Setting(shape.name, shape, config, **changes)


_TINY_CONFIG = ModelConfig(
    family="llama",
    num_layers=TINY.num_layers,
    embed_dim=TINY.embed_dim,
    num_heads=TINY.num_heads,
    num_kv_heads=TINY.num_kv_heads,
    head_dim=TINY.head_dim,
    mlp_dim=TINY.mlp_dim,
    vocab_size=TINY.vocab_size,
    max_positions=64,
    rms_eps=1e-5,
)
_TINY = Setting(
    *(TINY.name, TINY, _TINY_CONFIG, "fp32"),
    is_dry=True,
    batches=(1, 2),
    drafts=(0, 2),
    num_prompt=17,
    num_new=10,
    answer_prompt=16,
    answer_new=3,
    num_answers=2,
    gate_rows=2,
    gate_new=3,
    block_size=16,
    token_budget=32,
    has_linears=True,
)
SETTINGS = {
    setting.name: setting
    for setting in (
        _real("llama-1b", LLAMA_1B, num_answers=150),
        _real("llama-8b", LLAMA_8B, has_linears=True),
        _TINY,
    )
}
QUICK: dict[str, Any] = {"batches": (1, 8), "drafts": (0, 4), "num_answers": 20}


@dataclass
class Recorder:
    """Keeps the steps of an engine: an Observer that looks at nothing else."""

    records: list[StepRecord] = field(default_factory=list)

    def on_step(self, record: StepRecord) -> None:
        """Keep it."""
        self.records.append(record)

    def on_add(self, *_: Any) -> None: ...
    def on_abort(self, *_: Any) -> None: ...
    def on_preempt(self, *_: Any) -> None: ...
    def on_clear(self, *_: Any) -> None: ...
    def on_fail(self, *_: Any) -> None: ...


def greedy(num_tokens: int, k: int = 0) -> SamplingParams:
    """So many tokens, with ``k`` drafts a step."""
    return SamplingParams(
        max_tokens=num_tokens, temperature=0.0, ignore_eos=True, speculate=k > 0, k=k
    )


def make_llm(model: Any, setting: Setting, drafter: Drafter | None) -> LLM:
    """An engine over a loaded model with a pool of its own; nothing is warmed up."""
    return LLM(
        model,
        speculate="off",
        drafter=drafter,
        k=max(setting.drafts),
        block_size=setting.block_size,
        kv_tokens=setting.kv_tokens,
        max_rows=setting.max_rows,
        token_budget=setting.token_budget,
    )


class Bed:
    """A random model with its engines and the output that all of them have to give.

    engines: by whether CUDA graphs run. reports: of their warm-ups. reference: plain output by
    prompt. Raises RuntimeError where plain decoding fails, torch.OutOfMemoryError where there is no
    room.
    """

    def __init__(self, setting: Setting, device: torch.device, alpha: float) -> None:
        self.setting = setting
        self.device = device
        self.model = random_model(setting.config, dtype=DTYPES[setting.dtype], device=device)
        numbers = random.Random(0)
        self.prompts = self._prompts(numbers, setting.max_rows, setting.num_prompt)
        num_answers = min(setting.num_answers, 16)
        self.answer_prompts = self._prompts(numbers, num_answers, setting.answer_prompt)
        self.reference = self._plain_outputs()
        drafter = SyntheticDrafter(self.reference.items(), alpha)
        self.engines = {graphs: make_llm(self.model, setting, drafter) for graphs in (False, True)}
        self.reports = {graphs: warm(llm, graphs) for graphs, llm in self.engines.items()}

    def _prompts(self, numbers: random.Random, count: int, length: int) -> list[list[int]]:
        vocab_size = self.setting.config.vocab_size
        return [[numbers.randrange(vocab_size) for _ in range(length)] for _ in range(count)]

    def _plain_outputs(self) -> dict[tuple[int, ...], list[int]]:
        setting, outputs = self.setting, {}
        llm = make_llm(self.model, setting, None)
        for prompts, num_new in (
            (self.prompts, setting.num_new),
            (self.answer_prompts, setting.answer_new),
        ):
            completions = llm.generate(prompts, greedy(num_new))
            errors = [completion.error for completion in completions if completion.error]
            if errors:
                raise RuntimeError(f"plain decoding failed: {errors[0]}")
            for prompt, completion in zip(prompts, completions, strict=True):
                outputs[tuple(prompt)] = completion.token_ids
        return outputs

    def problems(
        self, prompts: Sequence[list[int]], outputs: Sequence[list[int]], num_new: int
    ) -> list[str]:
        """Where outputs of ``num_new`` tokens part from plain decoding."""
        found = []
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            wanted = self.reference[tuple(prompt)][:num_new]
            if output != wanted:
                pairs = enumerate(zip(output, wanted, strict=False))
                place = next((i for i, (a, b) in pairs if a != b), min(len(output), len(wanted)))
                found.append(
                    f"request {index}, token {place}: got {output[place : place + 1]}, plain "
                    f"decoding gave {wanted[place : place + 1]}"
                )
        return found


def warm(llm: LLM, with_graphs: bool) -> WarmUpReport:
    """Compile and set up all that the engine needs; capture graphs of its steps if wanted.

    Without CUDA a graph is the pass itself, run again on the graph's own inputs.
    """
    if not with_graphs:
        return warm_up(llm.engine)
    if llm.target.device.type == "cuda":
        return llm.engine.warm_up()
    runners = graph_runners(llm.engine, make_capture=lambda device: _capture)
    report = warm_up(llm.engine, runners=runners)
    llm.engine.launcher.forward = runners[0].forward
    return report


def _capture(run: Run) -> Run:
    run()
    return run


def compile_in_parallel(
    settings: Sequence[Setting], device: torch.device, num_workers: int | None = None
) -> int:
    """Compile what the engines will run, several processes at once, into Triton's cache on disk.

    num_workers: None for as many as cores and device memory allow. Returns how many there were.
    """
    if num_workers is None:
        room = torch.cuda.mem_get_info(device)[0] // WORKER_BYTES
        num_workers = max(1, min(MOST_WORKERS, (os.cpu_count() or 2) - 1, room))
    shares: list[Callable[[int], int]] = [
        partial(compile_share, setting, device, num_workers) for setting in settings
    ]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, spawn) as pool:
        futures = [pool.submit(share, number) for share in shares for number in range(num_workers)]
        for future in futures:
            future.result()
    return num_workers


def compile_share(setting: Setting, device: torch.device, count: int, number: int) -> int:
    """Run every ``count``-th job of a warm-up of the model's first layers, in any process."""
    config = cut(setting.config, NUM_FIRST_LAYERS)
    model = random_model(config, dtype=DTYPES[setting.dtype], device=device)
    llm = make_llm(model, setting, SyntheticDrafter([], 0.0))
    steps, draws = jobs_of(llm.engine)
    jobs = [*steps, *draws][number::count]
    for _, job in jobs:
        job()
    return len(jobs)
