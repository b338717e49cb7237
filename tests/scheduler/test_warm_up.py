"""Warm-up: it meets every kernel that a load launches, and it disturbs nothing."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedraft.kernels.linear_config import linear_config
from pagedraft.kernels.linear_quant import quant_tile
from pagedraft.kernels.weight_quant import quantize_weight
from pagedraft.model.graph_shapes import AttentionChoices, GraphLimits
from pagedraft.model.graphs import GraphRunner, Run
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.padding import StepShape
from pagedraft.scheduler import warm_up as warm_up_module
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.warm_steps import TILE_ROWS, Limits, kernel_steps, small_steps
from pagedraft.scheduler.warm_up import WarmUpReport, num_compiled_kernels, warm_up
from pagedraft.tests.compare import assert_same_bits
from pagedraft.tests.scheduler.runs import GREEDY, mixed_params, random_prompts

CPU = torch.device("cpu")
LOADS = (
    "plain",
    "int8 KV, a draft model",
    "int8 weights, fp8 KV, own layers",
    "int4 weights, fp16",
    "fp32, one row",
    "a feature head",
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> dict[str, Any]:
    """What ``launch_keys.py`` prints, in a process whose kernels could be compiled."""
    cache = tmp_path_factory.mktemp("keys") / "cache"
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "pagedraft.tests.scheduler.launch_keys"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", LOADS)
def test_a_load_launches_what_is_warm(keys, name):
    assert keys[name]["missing"] == []
    assert keys[name]["num_warm"] > keys[name]["num_load"] > 20


@pytest.mark.parametrize("name", LOADS)
def test_graphs_launch_what_is_warm(keys, name):
    assert keys[name]["missing_in_graphs"] == []


def test_the_loads_meet_all_kernels(keys):
    met = {kernel for name in LOADS for kernel in keys[name]["kernels"]}
    assert met >= {
        *("paged_attention_kernel", "paged_units_kernel", "combine_kernel", "write_kv_kernel"),
        *("_linear_kernel", "_linear_add_norm_kernel", "_gated_linear_kernel", "channel_kernel"),
        *("group_kernel", "_add_rms_norm_kernel", "_gated_mlp_kernel", "_rms_norm_kernel"),
        *("_scan_kernel", "_merge_kernel", "_write_kernel", "_truncate_kernel", "_edit_kernel"),
        *("sums_kernel", "overlap_kernel", "draw_kernel", "_verify_kernel", "_split_kernel"),
        "_copy_blocks_kernel",
    }


def test_teeth_a_warm_up_that_is_too_short(keys):
    kernels = {line.partition(":")[0] for line in keys["teeth"]}
    assert {"_linear_kernel", "paged_attention_kernel", "_edit_kernel"} <= kernels


def choices_of(group: int, dtype: torch.dtype, is_wide: bool) -> AttentionChoices:
    config = SimpleNamespace(num_heads=8 * group, num_kv_heads=8, head_dim=128, num_layers=1)
    target: Any = SimpleNamespace(config=config, activation_dtype=dtype, device=CPU)
    choices = AttentionChoices(target, KVCache(config, 2, 64, dtype, CPU))
    choices._is_wide = is_wide
    return choices


def kinds(steps: list[StepShape], choices: AttentionChoices) -> set[Any]:
    found = map(choices, steps)
    return {(choice.shape, choice.split.unit, choice.has_total) for choice in found}


def random_shape(choose: random.Random, limits: Limits) -> StepShape:
    """Sizes that an engine's step can have."""
    num_rows = choose.randint(1, min(limits.max_rows, limits.max_tokens))
    room = limits.max_tokens - num_rows + 1
    most = min(choose.choice([1, 5, 9, 20, 10**6]), room, limits.max_context)
    span = choose.randint(1, most)
    least = span + num_rows - 1
    num_tokens = choose.randint(least, min(limits.max_tokens, num_rows * span))
    context = int(span + (limits.max_context - span) * choose.random() ** choose.choice([1, 4]))
    return StepShape(num_tokens, num_rows, span, context)


@pytest.mark.parametrize(
    "limits",
    [
        Limits(64, 512, 8192),
        Limits(3, 17, 40_000),
        Limits(1, 300, 5000),
        Limits(2, 700, 131_072),
        Limits(200, 100, 300),
        Limits(40, 2048, 2049),
        Limits(1, 1, 1),
        Limits(9, 64, 2048),
    ],
    ids=str,
)
@pytest.mark.parametrize("group", [1, 4, 5, 8, 40])
def test_steps_of_any_size_run_kernels_that_are_warm(group, limits):
    choose = random.Random(group)
    is_wide, dtype = group % 2 == 0, torch.float32 if group == 5 else torch.bfloat16
    choices = choices_of(group, dtype, is_wide)
    warm = kinds([step.shape for step in kernel_steps(limits, choices)], choices)
    shapes = [random_shape(choose, limits) for _ in range(1500)]
    assert kinds(shapes, choices) <= warm


def test_every_tile_of_a_linear_layer_is_warm():
    weight = quantize_weight(torch.randn(64, 128), "int4", 128)
    tiles = [
        lambda count: linear_config(count, 64, 128, 2).tile,
        lambda count: linear_config(count, 64, 16384, 2).tile,
        lambda count: linear_config(count, 64, 128, 4).tile,
        lambda count: quant_tile(count, weight, 2),
    ]
    for tile in tiles:
        assert {tile(count) for count in range(1, 600)} == {tile(count) for count in TILE_ROWS}


def test_warm_steps_are_few_and_within_the_limits():
    limits = Limits(64, 512, 8192)
    steps = kernel_steps(limits, choices_of(4, torch.bfloat16, is_wide=True))
    assert len(steps) == len(set(steps)) <= 45
    for step in steps:
        assert step.num_logits <= step.shape.num_tokens <= limits.max_tokens
        assert step.shape.num_rows <= limits.max_rows
        assert step.shape.max_kv_len <= limits.max_context


@pytest.mark.parametrize("limits", [Limits(1, 1, 1), Limits(3, 2, 100), Limits(64, 512, 8192)])
def test_small_steps_are_within_the_limits(limits):
    for step in small_steps(limits):
        assert sum(step.spans) == step.shape.num_tokens <= limits.max_tokens
        assert len(step.spans) <= limits.max_rows
        assert max(step.spans) <= limits.max_context


pytest_cpu = pytest.mark.usefixtures("cpu_path")


@pytest_cpu
def test_a_processor_is_warmed_up_and_nothing_changes(target):
    llm = LLM(target, target, speculate="draft+ngram", block_size=8, kv_tokens=128, k=2)
    prompts = random_prompts(97, (20, 9))
    before = [c.token_ids for c in llm.generate(prompts, mixed_params(2, 6))]
    engine = llm.engine
    pools = [tensor.clone() for cache in engine.caches for tensor in cache.tensors]
    state = (engine.pool.num_free, engine.pool.num_evictable, engine.num_steps)
    done: list[tuple[int, int, str]] = []
    report = warm_up(engine, lambda *call: done.append(call))
    assert state == (engine.pool.num_free, engine.pool.num_evictable, engine.num_steps)
    after = [tensor for cache in engine.caches for tensor in cache.tensors]
    for tensor, saved in zip(after, pools, strict=True):
        assert_same_bits(tensor, saved)
    engine.check_integrity()
    assert [count for count, _, _ in done] == list(range(1, len(done) + 1))
    assert {total for _, total, _ in done} == {len(done)}
    assert report.num_steps + report.num_draws == len(done)
    assert report.num_compiled == report.num_graphs == 0
    [again] = llm.generate(prompts[:1], mixed_params(1, 6))
    assert again.token_ids == before[0]
    assert again.stats.num_cached_tokens == 16


@pytest_cpu
@pytest.mark.parametrize("speculate", ["off", "ngram", "layers"])
def test_every_kind_of_engine_is_warmed_up(target, speculate):
    llm = LLM(target, speculate=speculate, block_size=8, kv_tokens=16, max_rows=1, token_budget=3)
    report = warm_up(llm.engine)
    assert report.num_steps == (8 if speculate == "layers" else 4)
    assert (report.num_draws > 90) == (speculate != "off")


@pytest_cpu
@pytest.mark.parametrize("runs", [False, True], ids=["waits", "runs"])
def test_it_refuses_while_requests_live(llm, runs):
    request = llm.submit([5, 6, 7], GREEDY)
    if runs:
        llm.engine.step()
    with pytest.raises(RuntimeError, match="without requests, got 1 that wait or run"):
        warm_up(llm.engine)
    llm.engine.abort(request)
    warm_up(llm.engine)


class Refusing:
    """A capture that works for shapes of few tokens."""

    def __init__(self, most: int) -> None:
        self.count, self.most = 0, most

    def __call__(self, run: Run) -> Run:
        self.count += 1
        if self.count <= self.most:
            raise torch.OutOfMemoryError("none left")
        run()
        return run


@pytest_cpu
def test_graphs_are_captured_at_the_end(target):
    llm = LLM(target, block_size=8, kv_tokens=96, max_rows=2, k=2)
    limits = GraphLimits(max_rows=2, max_drafts=2, max_kv_len=64)
    runner = GraphRunner(target, llm.engine.cache, limits, capture=Refusing(most=1))
    names: list[str] = []
    report = warm_up(llm.engine, lambda done, total, name: names.append(name), [runner])
    assert report.num_graphs == len(runner.shapes) - 1
    assert report.failed_graphs == [max(runner.shapes)]
    graphs = [f"graph: {shape}" for shape in sorted(runner.shapes, reverse=True)]
    assert names[-len(graphs) :] == graphs


@pytest_cpu
def test_models_that_draft_have_limits_of_their_own(target):
    llm = LLM(target, target, speculate="draft", block_size=8, kv_tokens=64, max_rows=5)
    own, drafting = warm_up_module.models_of(llm.engine)
    assert own.model is drafting.model is target
    assert [own.cache, drafting.cache] == llm.engine.caches
    assert own.limits == Limits(5, 512, 64)
    assert drafting.limits == Limits(5, 517, 64)
    assert (own.drafter, drafting.drafter) == (None, llm.engine.speculation.drafters["draft"])


def test_interpreted_kernels_are_not_counted():
    assert num_compiled_kernels() == 0


REPORTS: dict[str, tuple[WarmUpReport, str]] = {
    "plain": (
        WarmUpReport({"steps": 1.5, "draws": 0.5}, 4, 10, 3),
        "warm-up: 2.0 s, 4 passes, 10 draws, 3 kernels compiled",
    ),
    "graphs": (
        WarmUpReport({"steps": 1.0}, 1, 1, 0, 7, [StepShape(1, 1, 1, 1)]),
        "warm-up: 1.0 s, 1 passes, 1 draws, 0 kernels compiled, 7 graphs captured, "
        "1 shapes run without a graph",
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_reports_read_as_one_line(name):
    report, expected = REPORTS[name]
    assert str(report) == expected


def test_a_failing_pass_is_not_hidden(llm, monkeypatch):
    def fail(*args: Any) -> None:
        raise ValueError("a kernel that does not compile")

    jobs: Callable[..., Any] = lambda *args: iter([("pass", fail)])  # noqa: E731
    monkeypatch.setattr(warm_up_module, "_model_jobs", jobs)
    with pytest.raises(ValueError, match="a kernel that does not compile"):
        warm_up(llm.engine)
