"""KV slots that are owned and hold no token, over a mix of lengths like that of chats.

    python -m pagedraft.bench.kv_waste [--block-sizes 16 64] [--rows 64] [--steps 400]

The real engine beside the fake model (overhead_bed.py). All rows are full all the time: requests
wait from the first step on. The first ones begin as if they had run for a while, so that the mix of
ages is that of a long run from the start.

Lengths: prompts of 161.31 and answers of 337.99 tokens on average, ShareGPT as measured by Kwon et
al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023,
Fig. 11). The paper gives the means alone; the spread here is a log-normal's with sigma 1. Beside it
all lengths are the mean: a waste of half a block weighs more where there are no long contexts.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedraft.bench.figures import Figure, as_json
from pagedraft.bench.overhead_bed import FakeTarget, make_engine
from pagedraft.bench.report import header, print_header, results_folder, write_json
from pagedraft.bench.table import print_table
from pagedraft.decoding.params import SamplingParams
from pagedraft.decoding.sequence import Sequence as TokenSequence
from pagedraft.scheduler.engine import Engine
from pagedraft.scheduler.request import Request

MEAN_PROMPT, MEAN_ANSWER = 161.31, 337.99
SIGMAS = (1.0, 0.0)  # the mix, and all of mean length
MAX_CONTEXT = 2048
LIMITS = {16: 0.04, 64: 0.12}  # what the project aims at


@dataclass(frozen=True)
class Waste:
    """What one run wasted. expected: half a block less half a token a row, over the mean context.

    mean_context: tokens written in a row, the mean over rows and steps.
    """

    block_size: int
    sigma: float
    rows: int
    steps: int
    kv_waste: float
    expected: float
    mean_context: float
    num_ended: int

    @property
    def verdict(self) -> str:
        """Whether the limit for this block size is kept; "-" where there is none."""
        limit = LIMITS.get(self.block_size)
        return "-" if limit is None else "pass" if self.kv_waste <= limit else "fail"


def figures(results: Sequence[Waste]) -> list[Figure]:
    """Waste by block size and spread of lengths: draws are seeded, so equal everywhere."""
    return [
        Figure(
            f"kv_waste/block size {row.block_size}, sigma {row.sigma:g}, {row.rows} rows/waste",
            row.kv_waste,
            "of slots",
            "lower",
            "counted",
            target=LIMITS.get(row.block_size),
        )
        for row in results
    ]


class Lengths:
    """Draws prompt and answer lengths in tokens; both together leave room in the context."""

    def __init__(self, sigma: float, seed: int = 0) -> None:
        self.sigma = sigma
        self._rng = np.random.default_rng(seed)

    def draw(self) -> tuple[int, int]:
        """One request's."""
        prompt = min(self._one(MEAN_PROMPT), MAX_CONTEXT // 2)
        return prompt, min(self._one(MEAN_ANSWER), MAX_CONTEXT - prompt)

    def under_way(self) -> tuple[int, int]:
        """One of a long run, at any point of its answer: long ones are met more often."""
        while True:
            prompt, answer = self.draw()
            if self._rng.random() < answer / MAX_CONTEXT:
                done = int(self._rng.integers(answer))
                return prompt + done, answer - done

    def _one(self, mean: float) -> int:
        # A log-normal's mean is exp(mu + sigma^2 / 2); what exceeds the context is cut off.
        return max(1, round(self._rng.lognormal(math.log(mean) - self.sigma**2 / 2, self.sigma)))


def simulate(block_size: int, sigma: float, rows: int, steps: int) -> Waste:
    """Run ``steps`` steps of full rows."""
    target, lengths = FakeTarget(MAX_CONTEXT + 1), Lengths(sigma)
    num_blocks = 1 + rows * (MAX_CONTEXT // block_size + 1)
    engine = make_engine(target, max_rows=rows, num_blocks=num_blocks, block_size=block_size)
    engine.token_budget = rows * MAX_CONTEXT
    num_submitted = num_ended = 0
    for _ in range(rows):
        _submit(engine, target, num_submitted, *lengths.under_way())
        num_submitted += 1
    for _ in range(steps):
        while len(engine.running) + len(engine.waiting) < 2 * rows:
            _submit(engine, target, num_submitted, *lengths.draw())
            num_submitted += 1
        num_ended += sum(request.finished for request in engine.step())
    stats = engine.stats
    context = stats.slot_steps_used / stats.num_steps / rows
    half = (block_size - 1) / 2
    expected = half / (context + half)
    waste = (stats.kv_waste, expected, context)
    return Waste(block_size, sigma, rows, steps, *waste, num_ended)


def _submit(engine: Engine, target: FakeTarget, number: int, prompt: int, answer: int) -> None:
    token_ids = np.random.default_rng(number).integers(target.config.vocab_size, size=prompt)
    engine.add(
        Request(
            request_id=f"request-{number}",
            sequence=TokenSequence(token_ids.tolist(), prompt, 0.0, seed=number),
            params=SamplingParams(max_tokens=answer, temperature=0.0),
            stop_ids=frozenset(),
            max_context=MAX_CONTEXT + 1,
        )
    )


def show(results: Sequence[Waste]) -> None:
    """Print the table and what was aimed at."""
    headers = ["block", "lengths", "waste", "half a block", "context", "ended", "verdict"]
    rows = [
        [
            str(row.block_size),
            f"log-normal, sigma {row.sigma:g}" if row.sigma else "all of the mean",
            f"{row.kv_waste:.2%}",
            f"{row.expected:.2%}",
            f"{row.mean_context:.0f}",
            str(row.num_ended),
            row.verdict,
        ]
        for row in results
    ]
    print_table("KV slots owned without a token", headers, rows)
    aims = ", ".join(f"<= {limit:.0%} at {size}" for size, limit in LIMITS.items())
    print(f"aims: {aims}; half a block: what rows waste that end anywhere in a block")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pagedraft.bench.kv_waste")
    parser.add_argument("--block-sizes", nargs="+", type=int, default=(16, 64), help="tokens")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", default=None, help="folder for the JSON")
    options = parser.parse_args(arguments)
    facts = header(torch.device("cpu"))
    print_header(facts)
    with torch.inference_mode():
        results = [
            simulate(block_size, sigma, options.rows, options.steps)
            for sigma in SIGMAS
            for block_size in options.block_sizes
        ]
    show(results)
    rows: list[dict[str, Any]] = [asdict(row) | {"verdict": row.verdict} for row in results]
    document = {"bench": "kv_waste", **facts, "rows": rows, "figures": as_json(figures(results))}
    folder = Path(options.out) if options.out else results_folder(torch.device("cpu"))
    write_json(folder / "kv_waste.json", document)
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
