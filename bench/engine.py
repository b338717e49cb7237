"""The engine on a real model against transformers: one process, same weights, same threads.

The machine may be shared, so ours and theirs run in turn and the ratio of each pair is what counts.
K=0 (speculation off) is the control of every row with drafts, and no speed is printed unless the
outputs with and without drafts are the same tokens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from pagedraft.bench.peers import TransformersPeer
from pagedraft.bench.table import print_table
from pagedraft.decoding.params import SamplingParams
from pagedraft.model.demo import resolve_model
from pagedraft.scheduler.demo_prompts import CHAT_QUESTIONS, CODE_EDITS
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.metrics import percentile

TEXT = """\
The lighthouse keeper had lived on the island for thirty years. Every evening he climbed the stairs,
lit the lamp and watched the ships pass on their way to the harbour. One night a storm came up from
the west, and the lamp went out. He took his tools, climbed the stairs once more, and then he saw"""


@dataclass(frozen=True)
class Row:
    """One comparison: tokens a second of each side (medians), and the median ratio of the pairs."""

    name: str
    target: float
    ours: float
    theirs: float
    ratio: float
    ratios: list[float]


def run(model: str = "demo", rounds: int = 3, num_tokens: int = 128) -> dict[str, Any]:
    """Measure, print the table and return it as a JSON-ready dict."""
    folder = resolve_model(model)
    llm = LLM(folder, dtype="bf16", device="cpu")
    peer = TransformersPeer(folder, torch.bfloat16)
    text_ids = (llm.tokenizer.encode(TEXT) * 2)[:64]
    edit_ids = llm.chat_ids([{"role": "user", "content": CODE_EDITS[0]}])
    batch_ids = [
        llm.chat_ids([{"role": "user", "content": f"{question} ({index})"}])
        for index in range(4)
        for question in CHAT_QUESTIONS
    ]
    llm.generate([text_ids, edit_ids], SamplingParams(max_tokens=4, temperature=0))
    same = _outputs_agree(llm, [text_ids, edit_ids], num_tokens)

    def ours(prompts: Sequence[list[int]], speculate: bool) -> Callable[[], float]:
        return lambda: _ours(llm, prompts, num_tokens, speculate)

    def theirs(prompts: Sequence[list[int]], **options: Any) -> Callable[[], float]:
        return lambda: _theirs(peer, prompts, num_tokens, options)

    rows = [
        _compare("single stream", 1.8, ours([text_ids], False), theirs([text_ids]), rounds),
        _compare("16 requests", 1.5, ours(batch_ids, False), theirs(batch_ids), rounds),
        _compare("code edit, ngram", 2.5, ours([edit_ids], True), theirs([edit_ids]), rounds),
        _compare("code edit, plain", 0.0, ours([edit_ids], False), theirs([edit_ids]), rounds),
    ]
    ttft = _ttft(llm, text_ids, 50)
    result = {
        "bench": "engine",
        "model": str(model),
        "prompt_tokens": {"text": len(text_ids), "edit": len(edit_ids)},
        "new_tokens": num_tokens,
        "threads": torch.get_num_threads(),
        "omp": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "KMP_", "GOMP_"))},
        "identical_with_speculation": same,
        "rows": [asdict(row) for row in rows],
        "ttft_64_ms": {f"p{p}": 1e3 * percentile(ttft, p) for p in (50, 95, 99)},
    }
    _print(rows, result)
    return result


def _outputs_agree(llm: LLM, prompts: Sequence[list[int]], num_tokens: int) -> bool:
    """The correctness gate: speculation must not be visible in the tokens."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    with_drafts = llm.generate(list(prompts), params)
    without = llm.generate(list(prompts), replace(params, speculate=False))
    if [c.token_ids for c in with_drafts] != [c.token_ids for c in without]:
        raise RuntimeError("speculation changed the output: no speed is reported")
    return True


def _ours(llm: LLM, prompts: Sequence[list[int]], num_tokens: int, speculate: bool) -> float:
    params = SamplingParams(
        max_tokens=num_tokens, temperature=0, ignore_eos=True, speculate=speculate
    )
    began = time.perf_counter()
    llm.generate(list(prompts), params)
    return len(prompts) * num_tokens / (time.perf_counter() - began)


def _theirs(
    peer: TransformersPeer, prompts: Sequence[list[int]], num_tokens: int, options: dict[str, Any]
) -> float:
    began = time.perf_counter()
    peer.generate(prompts, num_tokens, **options)
    return len(prompts) * num_tokens / (time.perf_counter() - began)


def _compare(
    name: str, target: float, ours: Callable[[], float], theirs: Callable[[], float], rounds: int
) -> Row:
    """Run both sides in turn, ``rounds`` times."""
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    ratios = [a / b for a, b in pairs]
    return Row(
        name=name,
        target=target,
        ours=median(a for a, _ in pairs),
        theirs=median(b for _, b in pairs),
        ratio=median(ratios),
        ratios=ratios,
    )


def _ttft(llm: LLM, token_ids: list[int], repeats: int) -> list[float]:
    """Seconds to the first token of one request on an idle engine."""
    params = SamplingParams(max_tokens=1, temperature=0)
    completions = [llm.generate(token_ids, params)[0] for _ in range(repeats)]
    return [c.stats.ttft for c in completions if c.stats.ttft is not None]


def _print(rows: Sequence[Row], result: dict[str, Any]) -> None:
    cells = [
        [
            row.name,
            f"{row.ours:.1f}",
            f"{row.theirs:.1f}",
            f"{row.ratio:.2f}x",
            f">= {row.target:.1f}x" if row.target else "-",
        ]
        for row in rows
    ]
    print_table(
        "Engine against transformers generate, bf16 weights, tokens/s",
        ["case", "pagedraft", "transformers", "ratio", "target"],
        cells,
    )
    ttft = result["ttft_64_ms"]
    print(
        "TTFT, 64-token prompt: "
        f"p50 {ttft['p50']:.0f} ms, p95 {ttft['p95']:.0f} ms, p99 {ttft['p99']:.0f} ms "
        "(target p99 <= 100 ms)"
    )
