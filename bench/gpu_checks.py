"""The exactness checks of ``gpu_check``: rows of kernels, requests of engines, a warmed-up engine.

    python -m pagedraft.bench.gpu_checks rows | engine | warm

Each prints what differs and ends with status 1 if anything does. With ``DRY=1`` tiny, on the CPU.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from pagedraft.bench.shapes import LLAMA_8B, TINY
from pagedraft.kernels.weight_quant import MIN_FP8_CAPABILITY, WEIGHT_FORMATS

DRY = os.environ.get("DRY", "0") == "1"
DEVICE = torch.device("cpu" if DRY else "cuda")


def row_jobs() -> dict[str, Callable[[], list[str]]]:
    """Return the checks of row equality by name."""
    from pagedraft.bench.row_checks import (
        ATTENTION_VARIANTS,
        attention_rows,
        fused_rows,
        linear_rows,
    )

    if DRY:
        setting = (replace(TINY, mlp_dim=64), torch.float16, DEVICE)
        counts = (1, 3)
        sizes = {"contexts": (40,), "spans": (1, 3), "num_rows": 2}
    else:
        setting = (LLAMA_8B, torch.bfloat16, DEVICE)
        counts = (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 200, 512)
        spans = (*range(1, 10), 16, 17, 32, 33, 64, 100, 128, 512)
        sizes = {"contexts": (600, 4097, 16384), "spans": spans, "num_rows": 8}
    jobs = {
        f"attention, {name}": partial(attention_rows, *setting, **sizes, variant=variant)
        for name, variant in ATTENTION_VARIANTS.items()
    }
    jobs["linear"] = partial(linear_rows, *setting, counts)
    jobs["linear with its neighbours"] = partial(fused_rows, *setting, counts)
    for weights in WEIGHT_FORMATS if _has_fp8() else WEIGHT_FORMATS[:2]:
        jobs[f"linear, {weights}"] = partial(linear_rows, *setting, counts, weights=weights)
    return jobs


def _has_fp8() -> bool:
    return DRY or torch.cuda.get_device_capability(DEVICE) >= MIN_FP8_CAPABILITY


def run_row_job(name: str) -> list[str]:
    """Run one check in whichever process this is; return what differs."""
    torch.manual_seed(0)
    if DRY:  # the stock interpreter multiplies with BLAS kernels that depend on the number of rows
        from pagedraft.tests import interpreter

        interpreter.install()
    problems = [f"{name}: {problem}" for problem in row_jobs()[name]()]
    print(f"{name}: {len(problems)} differences", flush=True)
    return problems


def row_equality() -> list[str]:
    """Return which rows of linear and paged_attention change bits with what runs beside them.

    On a GPU the checks run at once in processes of their own: most of their time is compilation.
    Says too whether this device's wide tiles (HGMMA) give the bits of smaller ones and are used.
    """
    from pagedraft.kernels.paged_attention_launch import wide_tiles

    used = {str(dtype): wide_tiles(DEVICE, dtype, 128) for dtype in (torch.bfloat16, torch.float16)}
    print(f"attention's wide tiles, used where their bits are those of others: {used}", flush=True)
    spawn = multiprocessing.get_context("spawn")
    num_workers = 1 if DRY else min(len(row_jobs()), (os.cpu_count() or 1) // 2 + 1)
    with ProcessPoolExecutor(num_workers, spawn) as pool:
        return [problem for found in pool.map(run_row_job, row_jobs()) for problem in found]


def _tiny_folder(parent: Path, seed: int) -> Path:
    """Save a random Llama; its outputs repeat little, as large initial weights make them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32 if DRY else 96,
        hidden_size=32 if DRY else 128,
        intermediate_size=32 if DRY else 192,
        num_hidden_layers=1 if DRY else 3,
        num_attention_heads=2 if DRY else 4,
        num_key_value_heads=1 if DRY else 2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    folder = parent / f"seed-{seed}"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _untrained(target: Path, kind: str) -> Path:
    """A draft of one of the target's layers that may propose half of the tokens."""
    from pagedraft.decoding.distill.start import save_student, start_student

    folder = target.with_name(f"draft-{kind}")
    student, _ = start_student(target, [0], torch.device("cpu"), kind=kind)
    save_student(student, folder, target, "the target", torch.arange(0, 96, 2))
    return folder


def engine_equality() -> list[str]:
    """Return which requests of a tiny random model change with speculation or with a batch."""
    from pagedraft.decoding.params import SamplingParams
    from pagedraft.model.draft_folder import KINDS
    from pagedraft.scheduler.llm import LLM

    prompts = [[5, 6, 7, 8] * 3, [11, 3], list(range(30)), [9] * 5]
    temperatures = (0.0, 0.8, 1.0, 0.0)
    length = 3 if DRY else 100
    params = [
        SamplingParams(max_tokens=length, temperature=temperature, seed=17 + index)
        for index, temperature in enumerate(temperatures)
    ]
    if DRY:
        prompts, params = prompts[:2], params[:2]
    options = {"dtype": "fp32" if DRY else "bf16", "device": DEVICE.type}
    options |= {"block_size": 16, "kv_tokens": 2048}
    problems = []
    with tempfile.TemporaryDirectory() as name:
        target, other = (_tiny_folder(Path(name), seed) for seed in range(2))
        plain = LLM(target, speculate="off", **options)
        expected = [
            plain.generate([prompt], [row])[0].token_ids
            for prompt, row in zip(prompts, params, strict=True)
        ]
        print("plain:", *expected, sep="\n  ")
        engines = {"plain batch": plain, "itself": ("draft", target, 3)}
        if not DRY:
            engines |= {
                "another model": ("draft", other, 4),
                "its first layer": ("layers", None, 2),
            }
            engines |= {"n-gram": ("ngram", None, 4), "any": ("draft+suffix", other, "auto")}
            engines |= {
                f"untrained {kind}": ("draft", _untrained(target, kind), 3) for kind in KINDS
            }
        for label, engine in engines.items():
            if isinstance(engine, tuple):
                speculate, draft, num_drafts = engine
                engine = LLM(target, draft, speculate=speculate, k=num_drafts, **options)
            outs = [completion.token_ids for completion in engine.generate(prompts, params)]
            problems += [
                f"{label}: request {index} gave {out}, plain {want}"
                for index, (out, want) in enumerate(zip(outs, expected, strict=True))
                if out != want
            ]
            print(f"{label}: compared", flush=True)
    return problems


def warm_engine() -> list[str]:
    """Return what a load compiles after a warm-up, and which graphs have other bits."""
    from pagedraft.bench.warm_checks import warm_problems

    if DRY:
        from pagedraft.tests import interpreter

        interpreter.install()
    return warm_problems(_tiny_folder, device=DEVICE, is_dry=DRY)


CHECKS: dict[str, Callable[[], list[str]]] = {
    "rows": row_equality,
    "engine": engine_equality,
    "warm": warm_engine,
}


def check(name: str) -> int:
    """Run one check in this process; print what differs."""
    problems = CHECKS[name]()
    print("\n".join(problems) if problems else "")
    print(f"{name}: {len(problems)} problems" if problems else f"{name}: nothing differs")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(check(sys.argv[1]))
