"""What a warm-up and a load would compile on a GPU, for test_warm_up.py: prints one JSON document.

Engines run for real on CPU tensors, but no kernel does: each launch goes through Triton's own
binder (bench/record.py), whose key is what Triton compiles for. Kernels that decide what the host
reads next get a random outcome. Runs in a process of its own, with TRITON_INTERPRET=0.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pagedraft.bench.inspect_inputs import Setup, meta_weights
from pagedraft.bench.record import Call, bind_launch
from pagedraft.bench.shapes import CONFIGS
from pagedraft.kernels import paged_attention_launch
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.kernels.weight_quant import QuantWeight
from pagedraft.model import graph_shapes
from pagedraft.model.feature_head import FeatureHead
from pagedraft.model.graphs import GraphLimits, GraphRunner, Run
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler import warm_up as warm_up_module
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.warm_up import warm_up
from pagedraft.tests.scheduler.random_load import run_load

TARGET = GPUTarget("cuda", 90, 32)
CHOOSE = random.Random(0)
MAX_POSITIONS = 5000
CALL = Call("", "", lambda: None)
Keys = dict[str, str]  # key -> kernel


def config_of(vocab_size: int, group: int, num_layers: int = 2) -> Any:
    """A tiny Llama; only its sizes matter."""
    sizes = {"embed_dim": 64, "head_dim": 16, "mlp_dim": 128, "vocab_size": vocab_size}
    sizes |= {"num_heads": 2 * group, "num_kv_heads": 2, "num_layers": num_layers}
    return replace(CONFIGS["llama-8b"], **sizes, max_positions=MAX_POSITIONS)


def model_of(config: Any, weights: str = "auto", dtype: str = "bf16") -> Transformer:
    """A model of zeros, packed for the kernels."""
    return Transformer(config, zeros_of(config, weights, dtype))


def zeros_of(config: Any, weights: str = "auto", dtype: str = "bf16") -> dict[str, Any]:
    """The weights of a model, all zeros."""
    setup = Setup("tiny", config, config.num_layers, weights=weights, dtype=dtype)
    return {name: _zeros(weight) for name, weight in meta_weights(setup).items()}


def _zeros(weight: Any) -> Any:
    if isinstance(weight, torch.Tensor):
        return torch.zeros_like(weight, device="cpu")
    fields = {
        name: torch.zeros_like(value, device="cpu")
        for name, value in vars(weight).items()
        if isinstance(value, torch.Tensor)
    }
    assert isinstance(weight, QuantWeight)
    return replace(weight, **fields)


def _outcome(fn: JITFunction, args: tuple[Any, ...]) -> None:
    """Let a kernel that the host listens to say something."""
    named = dict(zip(fn.arg_names, args, strict=False))
    if "token_ptr" in named and fn.__name__ == "_merge_kernel" and "chosen_ptr" not in named:
        named["token_ptr"].random_(3, 90)
    if {"accepted_ptr", "next_ptr"} <= set(named):
        starts = named["start_ptr"].tolist()
        pairs = zip(starts, starts[1:], strict=False)
        counts = [CHOOSE.randint(0, end - start) for start, end in pairs]
        named["accepted_ptr"].copy_(torch.tensor(counts))
        named["next_ptr"].random_(3, 90)
    if "chosen_ptr" in named:
        named["chosen_ptr"].fill_(-1.0)
        named["top_id_ptr"].zero_()
        named["top_logprob_ptr"].fill_(-1.0)


@contextmanager
def keys_caught() -> Iterator[Keys]:
    """Collect the keys of all launches inside the ``with`` block; none runs."""
    keys: Keys = {}

    def run(fn: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = bind_launch(CALL, fn, "sm_90", TARGET, grid, args, kwargs)
        assert launch.error is None, launch.error
        keys[launch.key] = launch.kernel
        _outcome(fn, args)

    original = JITFunction.run
    JITFunction.run = run
    try:
        with use_implementation("triton"):
            yield keys
    finally:
        JITFunction.run = original


def _plain() -> LLM:
    return LLM(model_of(config_of(97, 4)), speculate="off", **OPTIONS)


def _int8_kv_and_a_draft_model() -> LLM:
    draft = model_of(config_of(101, 2, num_layers=1))
    options = {**OPTIONS, "max_rows": 40, "kv_dtype": "int8"}
    return LLM(model_of(config_of(97, 4)), draft, speculate="draft+ngram", **options)


def _int8_weights_and_own_layers() -> LLM:
    target = model_of(config_of(128, 1), weights="int8")
    return LLM(target, speculate="layers+suffix", **{**OPTIONS, "kv_dtype": "fp8"})


def _int4_weights_fp16() -> LLM:
    target = model_of(config_of(98, 8), weights="int4", dtype="fp16")
    return LLM(target, speculate="ngram", **{**OPTIONS, "max_rows": 3, "token_budget": 48})


def _fp32_one_row() -> LLM:
    target = model_of(config_of(97, 3), dtype="fp32")
    return LLM(target, speculate="ngram", **{**OPTIONS, "max_rows": 1})


def _feature_head() -> LLM:
    config = config_of(97, 4, num_layers=1)
    size = config.embed_dim
    weights = zeros_of(config) | {"fuse": torch.zeros(size, 2 * size, dtype=torch.bfloat16)}
    head = FeatureHead(config, weights)
    return LLM(model_of(config_of(97, 4)), head, speculate="draft", **OPTIONS)


OPTIONS: dict[str, Any] = {
    "block_size": 64,
    "kv_tokens": 40_000,
    "max_rows": 12,
    "token_budget": 256,
}
# name -> (engine, requests, whether tiles of 64 rows are used)
LOADS: dict[str, tuple[Callable[[], LLM], int, bool]] = {
    "plain": (_plain, 20, False),
    "int8 KV, a draft model": (_int8_kv_and_a_draft_model, 40, True),
    "int8 weights, fp8 KV, own layers": (_int8_weights_and_own_layers, 20, False),
    "int4 weights, fp16": (_int4_weights_fp16, 12, True),
    "fp32, one row": (_fp32_one_row, 4, False),
    "a feature head": (_feature_head, 20, False),
}


def set_up(is_wide: bool) -> None:
    """Let this process believe what a device's self-test found, and that prefixes pay off early."""
    CHOOSE.seed(1)
    torch.manual_seed(1)
    paged_attention_launch.LAUNCH_BYTES = 0
    for module in (paged_attention_launch, graph_shapes):
        module.wide_tiles = lambda *args: is_wide


def capture_graphs(llm: LLM) -> None:
    """Run every shape that graphs would be captured for."""
    engine, max_context = llm.engine, llm.target.config.max_positions
    limits = GraphLimits(engine.max_rows, max_drafts=5, max_kv_len=max_context)

    def capture(run: Run) -> Run:
        run()
        return run

    GraphRunner(llm.target, engine.cache, limits, capture=capture).capture_all()


def missing(warm: Keys, load: Keys) -> list[str]:
    """What a load compiles after a warm-up: the kernel and the nearest key that is known."""
    return [f"{kernel}: {key}" for key, kernel in load.items() if key not in warm]


def compare(name: str) -> dict[str, Any]:
    """Warm an engine up, run its load, and tell what the load launched that was not warm."""
    make, num_requests, is_wide = LOADS[name]
    set_up(is_wide)
    began = time.perf_counter()
    with keys_caught() as warm:
        llm = make()
        report = warm_up(llm.engine)
    seconds = time.perf_counter() - began
    with keys_caught() as load:
        run_load(llm, num_requests, CHOOSE)
    with keys_caught() as graphs:
        capture_graphs(llm)
    return {
        "num_warm": len(warm),
        "num_load": len(load),
        "num_steps": report.num_steps,
        "seconds": [seconds, time.perf_counter() - began - seconds],
        "kernels": sorted(set(load.values())),
        "unused": sorted(kernel for key, kernel in warm.items() if key not in load),
        "missing": missing(warm, load),
        "missing_in_graphs": missing(warm, graphs),
    }


def teeth() -> list[str]:
    """What is missing after a warm-up of one step and one draw."""
    set_up(is_wide=False)
    patched = {"kernel_steps", "target_jobs"}
    saved = {name: getattr(warm_up_module, name) for name in patched}
    warm_up_module.kernel_steps = lambda *args: saved["kernel_steps"](*args)[:1]
    warm_up_module.target_jobs = lambda *args, **options: list(
        saved["target_jobs"](*args, **options)
    )[:1]
    with keys_caught() as warm:
        llm = _plain()
        warm_up(llm.engine)
    with keys_caught() as load:
        run_load(llm, 10, CHOOSE)
    for name, value in saved.items():
        setattr(warm_up_module, name, value)
    return missing(warm, load)


def main() -> None:
    """Print what was found of the named loads, all of them by default."""
    names = sys.argv[1:] or list(LOADS)
    found: dict[str, Any] = {name: compare(name) for name in names}
    found["teeth"] = teeth()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
