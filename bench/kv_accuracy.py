"""What a quantised KV pool costs in accuracy and buys in memory, on a real model.

    python -m pagedraft.bench.kv_accuracy [--model demo] [--dtype bf16] [--tokens 64]

The model answers the demo's prompts greedily from a pool of its own dtype. Then every kind of pool
is fed the same prompts and answers: how far are the logits of the answers' positions, at how many
of them is the best token the same? And each kind answers by itself: how many answers are the same,
and how many tokens do they share before they part? The first row compares the model with itself and
must be all equal, or nothing is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from pagedraft.bench.report import header, print_header, results_folder, write_json
from pagedraft.bench.table import print_table
from pagedraft.decoding.load import load_model, resolve_kv_dtype
from pagedraft.decoding.params import SamplingParams
from pagedraft.model.batch import Span, build_step_batch
from pagedraft.model.kv_cache import KVCache, kv_bytes_per_token
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.demo_prompts import REQUESTS
from pagedraft.scheduler.llm import LLM

KV_DTYPES = ("auto", "int8", "fp8")
BLOCK_SIZE = 64
HEADERS = (
    *("KV", "bytes/token", "tokens/GB", "largest logit error", "mean", "same best token"),
    *("same answers", "shared tokens"),
)


@dataclass(frozen=True)
class Accuracy:
    """One kind of pool against the model's own dtype.

    largest_error, mean_error: of the logits, absolute; logit_spread: the median standard deviation
    of a position's logits, to compare them with.
    same_best: share of positions whose best token is the same, given the same context.
    same_answers: of num_answers, which it gave by itself; shared_tokens: median number of tokens
    before an answer parts.
    """

    kv_dtype: str
    stored: str
    bytes_per_token: int
    largest_error: float
    mean_error: float
    logit_spread: float
    same_best: float
    same_answers: int
    num_answers: int
    shared_tokens: float

    @property
    def tokens_per_gb(self) -> int:
        return 10**9 // self.bytes_per_token


def answers(
    model: Transformer, prompts: Sequence[list[int]], kv_dtype: str, num_tokens: int
) -> list[list[int]]:
    """Greedy continuations of ``num_tokens``, all prompts together."""
    capacity = sum(len(prompt) + num_tokens + BLOCK_SIZE for prompt in prompts)
    llm = LLM(model, speculate="off", kv_dtype=kv_dtype, kv_tokens=capacity, block_size=BLOCK_SIZE)
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    completions = llm.generate([list(prompt) for prompt in prompts], params)
    failed = [completion.error for completion in completions if completion.error]
    if failed:
        raise RuntimeError(f"kv_dtype {kv_dtype}: a request failed: {failed[0]}")
    return [completion.token_ids for completion in completions]


def forced_logits(
    model: Transformer, prompt: list[int], answer: list[int], stored: torch.dtype
) -> torch.Tensor:
    """Logits [len(answer), V] that predict ``answer``, from a pool that stores ``stored``."""
    tokens = prompt + answer[:-1]
    blocks = list(range(1, 2 + len(tokens) // BLOCK_SIZE))
    pool = KVCache(model.config, 1 + len(blocks), BLOCK_SIZE, stored, model.device)
    batch = build_step_batch(
        [Span(tokens, 0, blocks, num_logits=len(answer))],
        block_size=BLOCK_SIZE,
        device=model.device,
        row_multiple=model.row_multiple,
    )
    return model.forward(batch, pool)


def compare(
    model: Transformer,
    prompts: Sequence[list[int]],
    expected: Sequence[list[int]],
    kv_dtype: str,
) -> Accuracy:
    """Measure one kind of pool; expected: the greedy answers from a pool of the model's dtype."""
    stored = resolve_kv_dtype(kv_dtype) or model.activation_dtype
    largest, means, spreads, num_same, num_positions = 0.0, [], [], 0, 0
    for prompt, answer in zip(prompts, expected, strict=True):
        exact_QV = forced_logits(model, prompt, answer, model.activation_dtype)
        logits_QV = forced_logits(model, prompt, answer, stored)
        error_QV = (logits_QV - exact_QV).abs()
        largest = max(largest, float(error_QV.max()))
        means.append(float(error_QV.mean()))
        spreads.append(float(exact_QV.std(-1).median()))
        num_same += int((logits_QV.argmax(-1) == exact_QV.argmax(-1)).sum())
        num_positions += len(answer)
    own = answers(model, prompts, kv_dtype, len(expected[0]))
    shared = [shared_prefix(a, b) for a, b in zip(own, expected, strict=True)]
    return Accuracy(
        kv_dtype=kv_dtype,
        stored=str(stored).removeprefix("torch."),
        bytes_per_token=kv_bytes_per_token(model.config, stored),
        largest_error=largest,
        mean_error=sum(means) / len(means),
        logit_spread=median(spreads),
        same_best=num_same / num_positions,
        same_answers=sum(a == b for a, b in zip(own, expected, strict=True)),
        num_answers=len(prompts),
        shared_tokens=median(shared),
    )


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def measure(
    model: Transformer, prompts: Sequence[list[int]], num_tokens: int, kv_dtypes: Sequence[str]
) -> list[Accuracy]:
    """One Accuracy a kind of pool; raises RuntimeError if the model differs from itself."""
    expected = answers(model, prompts, "auto", num_tokens)
    control = compare(model, prompts, expected, "auto")
    if control.largest_error or control.same_answers < len(prompts):
        raise RuntimeError(f"the pool of the model's own dtype differs from itself: {control}")
    others = [kv_dtype for kv_dtype in kv_dtypes if kv_dtype != "auto"]
    return [control, *(compare(model, prompts, expected, kv_dtype) for kv_dtype in others)]


def _cells(row: Accuracy) -> list[str]:
    return [
        row.stored if row.kv_dtype == "auto" else row.kv_dtype,
        str(row.bytes_per_token),
        str(row.tokens_per_gb),
        f"{row.largest_error:.3f}",
        f"{row.mean_error:.4f}",
        f"{100 * row.same_best:.1f} %",
        f"{row.same_answers} of {row.num_answers}",
        f"{row.shared_tokens:g}",
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pagedraft.bench.kv_accuracy", description=__doc__
    )
    parser.add_argument("--model", default="demo", help="local folder, hub id or demo")
    parser.add_argument("--dtype", default="bf16", help="of the weights")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--kv-dtypes", default=",".join(KV_DTYPES[1:]), help="comma-separated")
    parser.add_argument("--out", default=None, help="folder for the JSON")
    options = parser.parse_args(arguments)
    model = load_model(options.model, dtype=options.dtype, device=options.device)
    chat = LLM(model, speculate="off", kv_tokens=BLOCK_SIZE)
    prompts = [chat.chat_ids([{"role": "user", "content": row.prompt}]) for row in REQUESTS]
    facts = header(model.device) | {"model": options.model, "dtype": options.dtype}
    print_header(facts)
    rows = measure(model, prompts, options.tokens, options.kv_dtypes.split(","))
    print_table(f"KV pools against {rows[0].stored}", HEADERS, [_cells(row) for row in rows])
    print(f"spread (standard deviation) of a position's logits: {rows[0].logit_spread:.2f}")
    document = {
        **{"bench": "kv_accuracy", **facts, "new_tokens": options.tokens},
        "rows": [{**asdict(row), "tokens_per_gb": row.tokens_per_gb} for row in rows],
    }
    folder = Path(options.out) if options.out else results_folder(model.device)
    name = f"kv-accuracy-{Path(options.model).name}-{options.dtype}.json"
    write_json(folder / name, document)
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
