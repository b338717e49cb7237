"""The engine on a real model against transformers: one process, same weights, same threads.

The machine may be shared, so ours and theirs run in turn and the ratio of each pair is what counts.
K=0 (speculation off) is the control of every row with drafts, and no speed is printed unless the
outputs with and without drafts are the same tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pagedraft.bench.peers import TransformersPeer
from pagedraft.bench.report import header, print_header, results_folder, write_json
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


def run(model: str, device: torch.device, rounds: int, num_tokens: int) -> dict[str, Any]:
    """Measure, print the table and return everything as a JSON-ready dict."""
    folder = resolve_model(model)
    llm = LLM(folder, dtype="bf16", device=device, prefix_cache=False)
    peer = TransformersPeer(folder, torch.bfloat16, device)
    text_ids = llm.tokenizer.encode(TEXT)[:64]
    edit_ids = llm.chat_ids([{"role": "user", "content": CODE_EDITS[0]}])
    batch_ids = [
        llm.chat_ids([{"role": "user", "content": f"{question} ({index})"}])
        for index in range(4)
        for question in CHAT_QUESTIONS
    ]
    llm.generate([text_ids, edit_ids], SamplingParams(max_tokens=4, temperature=0))
    _check_outputs(llm, [text_ids, edit_ids], num_tokens)

    def ours(prompts: Sequence[list[int]], speculate: bool) -> Callable[[], float]:
        return lambda: _ours(llm, prompts, num_tokens, speculate)

    def theirs(prompts: Sequence[list[int]], **options: Any) -> Callable[[], float]:
        return lambda: _theirs(peer, prompts, num_tokens, options)

    lookup = theirs([edit_ids], prompt_lookup_num_tokens=8)
    rows = [
        _compare("single stream", 1.8, ours([text_ids], False), theirs([text_ids]), rounds),
        _compare("16 requests", 1.5, ours(batch_ids, False), theirs(batch_ids), rounds),
        _compare(
            "code edit: ngram, plain", 2.5, ours([edit_ids], True), theirs([edit_ids]), rounds
        ),
        _compare("code edit: plain, plain", 0, ours([edit_ids], False), theirs([edit_ids]), rounds),
        _compare("code edit: ngram, lookup", 0, ours([edit_ids], True), lookup, rounds),
    ]
    quantised = [
        _quantised(llm, weights, target, text_ids, rounds, num_tokens)
        for weights, target in (("int8", 1.0), ("int4", 1.5))
    ]
    ttft = _ttft(llm, text_ids, 100)
    result = {
        "model": model,
        "prompt_tokens": {"text": len(text_ids), "edit": len(edit_ids)},
        "new_tokens": num_tokens,
        "rows": [asdict(row) for row in rows],
        "weights": [asdict(row) for row in quantised],
        "ttft_64_ms": {f"p{p}": round(1e3 * percentile(ttft, p), 1) for p in (50, 95, 99)},
    }
    _print(rows, "Engine against transformers generate, bf16 weights, tokens/s", "transformers")
    _print(quantised, "Quantised against bf16 weights, single stream, tokens/s", "bf16")
    ttft_ms = result["ttft_64_ms"]
    print(
        "TTFT, 64-token prompt: "
        f"p50 {ttft_ms['p50']:.0f} ms, p95 {ttft_ms['p95']:.0f} ms, p99 {ttft_ms['p99']:.0f} ms "
        "(target p99 <= 100 ms)"
    )
    return result


def _check_outputs(llm: LLM, prompts: Sequence[list[int]], num_tokens: int) -> None:
    """The correctness gate: speculation must not be visible in the tokens."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    with_drafts = llm.generate(list(prompts), params)
    without = llm.generate(list(prompts), replace(params, speculate=False))
    if [c.token_ids for c in with_drafts] != [c.token_ids for c in without]:
        raise RuntimeError("speculation changed the output: no speed is reported")


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


def _quantised(
    llm: LLM, weights: str, target: float, prompt: list[int], rounds: int, num_tokens: int
) -> Row:
    """The same model with ``weights`` against itself as it is."""
    folder, device = llm.target.folder, llm.target.device
    assert folder is not None
    options = {"dtype": "bf16", "device": device, "speculate": "off", "prefix_cache": False}
    other = LLM(folder, weights=weights, **options)
    other.generate([prompt], SamplingParams(max_tokens=4, temperature=0))
    return _compare(
        weights,
        target,
        lambda: _ours(other, [prompt], num_tokens, False),
        lambda: _ours(llm, [prompt], num_tokens, False),
        rounds,
    )


def _ttft(llm: LLM, token_ids: list[int], repeats: int) -> list[float]:
    """Seconds to the first token of one request on an idle engine."""
    params = SamplingParams(max_tokens=1, temperature=0)
    completions = [llm.generate(token_ids, params)[0] for _ in range(repeats)]
    return [c.stats.ttft for c in completions if c.stats.ttft is not None]


def _print(rows: Sequence[Row], title: str, theirs: str) -> None:
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
        title,
        ["case", "pagedraft", theirs, "ratio", "target"],
        cells,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog="python -m pagedraft.bench.engine", description=__doc__)
    parser.add_argument("--model", default="demo", help="local folder, hub id or demo")
    parser.add_argument("--device", default=device, choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs a row")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a request")
    parser.add_argument("--out", default=None, help="folder for the JSON")
    options = parser.parse_args(arguments)
    where = torch.device(options.device)
    facts = header(where)
    print_header(facts)
    result = run(options.model, where, options.rounds, options.tokens)
    document = {"bench": "engine", **facts, **result}
    folder = Path(options.out) if options.out else results_folder(where)
    write_json(folder / f"engine-{Path(options.model).name}-bf16.json", document)
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
