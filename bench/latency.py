"""Latency targets on a real model: gaps of streams that a prompt joins, cached prompts, arrivals.

    python -m pagedraft.bench.latency [--rounds 3] [--prompt 2000] [--requests 32]

1. Four streams decode, then a long prompt arrives: the largest gap over the streams' median gap
   while it is read (and over that before), and its first token against an idle engine. With a
   target between tokens (a multiple of the median gap before), and without as the control.
2. A prompt of which 90 % is cached against the same prompt without.
3. Requests of mixed prompts arrive at random (Poisson), at a stated share of what the engine can
   serve: percentiles of first-token times and gaps, with and without targets.

Ratios are of one round, and the median over rounds counts: the machine may be shared. No speed is
printed unless targets and cached KV left all tokens as they were.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pagedraft.bench import latency_runs as runs
from pagedraft.bench.figures import Figure, as_json
from pagedraft.bench.report import header, print_header, results_folder, write_json
from pagedraft.bench.table import print_table
from pagedraft.model.demo import resolve_model
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.metrics import percentile

ITL_FACTOR = 3.0  # target between tokens over the streams' median gap before the prompt
MOST_GAP, MOST_TTFT = 2.0, 3.0
CACHED_SHARE, LEAST_CUT = 0.9, 5.0
LOAD = 0.4  # arrivals over what the engine serves when all are there at once
LOADED_ITL_FACTOR, LOADED_TTFT_FACTOR = 4.0, 3.0  # over the gap and first token of an idle engine
LEAST_KEPT = 0.95  # of the gaps


@dataclass(frozen=True)
class Check:
    """One line of the verdict."""

    name: str
    value: float
    better: str
    target: float

    @property
    def figure(self) -> Figure:
        """As every bench tells it; medians of rounds."""
        unit = "of gaps" if "gaps" in self.name else "x"
        name = f"latency/{self.name}"
        return Figure(name, self.value, unit, self.better, "measured", target=self.target)

    @property
    def passed(self) -> bool:
        """Whether the aim was met."""
        return bool(self.figure.is_met)

    @property
    def aim(self) -> str:
        """In words."""
        return f"{'>=' if self.better == 'higher' else '<='} {self.target}"


def join_rounds(
    llm: LLM, numbers: random.Random, rounds: int, length: int, factor: float = ITL_FACTOR
) -> list[dict[str, Any]]:
    """A prompt alone, joining streams without targets, and joining streams with them."""
    rows = []
    for _ in range(rounds):
        prompt = runs.prompt_of(llm, numbers, length)
        streams = [
            runs.prompt_of(llm, numbers, runs.STREAM_PROMPT) for _ in range(runs.NUM_STREAMS)
        ]
        alone, token = runs.alone(llm, prompt)
        control = runs.join(llm, prompt, streams, None)
        paced = runs.join(llm, prompt, streams, factor)
        same = runs.same_start(control.outputs, paced.outputs)
        if not same or paced.outputs[-1] != token:
            raise RuntimeError("targets changed the output: no speed is reported")
        rows.append({"alone_ms": 1e3 * alone})
        for name, run in (("control", control), ("paced", paced)):
            itl_ms = run.itl_ms or 1e3 * factor * run.median_gap
            rows[-1][name] = {
                "itl_ms": itl_ms,
                "median_gap_ms": 1e3 * run.median_gap,
                "largest": run.largest,
                "p50": percentile(run.gaps, 50) / run.median_gap,
                "p95": percentile(run.gaps, 95) / run.median_gap,
                "late": sum(1e3 * gap > itl_ms for gap in run.gaps) / len(run.gaps),
                "ttft": run.ttft / alone,
            }
    return rows


def cached_rounds(
    llm: LLM, numbers: random.Random, rounds: int, length: int
) -> list[dict[str, float]]:
    """A prompt without and with most of it in the cache."""
    rows = []
    for _ in range(rounds):
        cold, hit = runs.cached(llm, numbers, length, CACHED_SHARE)
        rows.append({"cold_ms": 1e3 * cold, "hit_ms": 1e3 * hit, "cut": cold / hit})
    return rows


def serve_all(llm: LLM, numbers: random.Random, count: int, longest: int) -> dict[str, Any]:
    """Poisson arrivals without and with targets."""
    prompts = runs.mixed_prompts(llm, numbers, count, longest)
    at_once = runs.serve(llm, prompts, [0.0] * count)
    shortest = runs.serve(llm, [min(prompts, key=len)], [0.0])
    longest_one = runs.serve(llm, [max(prompts, key=len)], [0.0])
    itl = LOADED_ITL_FACTOR * median(shortest.gaps)
    ttft = LOADED_TTFT_FACTOR * longest_one.ttft[0]
    rate = LOAD * count / at_once.seconds
    times = runs.poisson_times(numbers, count, rate)
    control = runs.serve(llm, prompts, times)
    paced = runs.serve(llm, prompts, times, itl_ms=1e3 * itl, ttft_ms=1e3 * ttft)
    if not at_once.outputs == control.outputs == paced.outputs:
        raise RuntimeError("targets changed the output: no speed is reported")
    result: dict[str, Any] = {"load": LOAD, "requests_a_second": rate}
    result |= {"itl_ms": 1e3 * itl, "ttft_ms": 1e3 * ttft}
    for name, run in (("control", control), ("paced", paced)):
        result[name] = {
            "seconds": run.seconds,
            "ttft_ms": {f"p{p}": 1e3 * percentile(run.ttft, p) for p in (50, 95, 99)},
            "gap_ms": {f"p{p}": 1e3 * percentile(run.gaps, p) for p in (50, 95, 99)},
            "ttft_kept": sum(value <= ttft for value in run.ttft) / len(run.ttft),
            "gaps_kept": sum(gap <= itl for gap in run.gaps) / len(run.gaps),
        }
    return result


def checks(
    joined: Sequence[dict[str, Any]], cached: Sequence[dict[str, float]], served: dict[str, Any]
) -> list[Check]:
    """What was aimed at, and whether it was met."""
    gap = median(row["paced"]["largest"] / row["paced"]["p50"] for row in joined)
    before = median(row["paced"]["largest"] for row in joined)
    in_time = 1.0 - median(row["paced"]["late"] for row in joined)
    ttft = median(row["paced"]["ttft"] for row in joined)
    cut = median(row["cut"] for row in cached)
    kept = served["paced"]["gaps_kept"]
    return [
        Check("largest gap over median gap", gap, "lower", MOST_GAP),
        Check("the same over that before", before, "lower", MOST_GAP),
        Check("gaps within the target", in_time, "higher", LEAST_KEPT),
        Check("TTFT over that of an idle engine", ttft, "lower", MOST_TTFT),
        Check("TTFT cut by a cached prompt", cut, "higher", LEAST_CUT),
        Check("gaps kept under load", kept, "higher", LEAST_KEPT),
    ]


def show(
    joined: Sequence[dict[str, Any]],
    cached: Sequence[dict[str, float]],
    served: dict[str, Any],
    verdicts: Sequence[Check],
) -> None:
    """Print the tables and a line for each aim."""
    names = ("p50", "p95", "largest", "late", "ttft")
    rows = [
        [
            name,
            f"{row[name]['median_gap_ms']:.1f}",
            f"{row[name]['itl_ms']:.1f}",
            f"{row['alone_ms']:.0f}",
        ]
        + [f"{row[name][key]:.2f}" for key in names]
        for row in joined
        for name in ("control", "paced")
    ]
    headers = ["run", "gap ms", "target", "alone ms", "gap p50", "p95", "largest", "late", "TTFT"]
    title = f"A prompt joins {runs.NUM_STREAMS} streams; gaps over the median gap before it came"
    print_table(f"{title}, TTFT over alone", headers, rows)
    rows = [[f"{row[key]:.1f}" for key in ("cold_ms", "hit_ms", "cut")] for row in cached]
    print_table(
        f"{100 * CACHED_SHARE:.0f} % of a prompt cached", ["cold ms", "hit ms", "cut"], rows
    )
    rows = []
    for name in ("control", "paced"):
        row = served[name]
        times = [*row["ttft_ms"].values(), *row["gap_ms"].values()]
        kept = [f"{100 * row[key]:.0f} %" for key in ("ttft_kept", "gaps_kept")]
        rows.append([name, *[f"{value:.0f}" for value in times], *kept])
    headers = ["run", *[f"{what} {p}" for what in ("TTFT", "gap") for p in ("p50", "p95", "p99")]]
    title = f"Poisson arrivals at {LOAD} of capacity, ms; targets: TTFT {served['ttft_ms']:.0f}"
    print_table(f"{title}, gap {served['itl_ms']:.0f}", [*headers, "TTFT kept", "gaps kept"], rows)
    for check in verdicts:
        print(
            f"{'pass' if check.passed else 'FAIL'}  {check.name}: {check.value:.2f} ({check.aim})"
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status, 1 if an aim was missed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog="python -m pagedraft.bench.latency")
    parser.add_argument("--model", default="demo", help="local folder, hub id or demo")
    parser.add_argument("--device", default=device, choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=3, help="of the first two parts")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the long prompt")
    parser.add_argument(
        "--factor", type=float, default=ITL_FACTOR, help="streams' target over their median gap"
    )
    parser.add_argument("--requests", type=int, default=32, help="of the Poisson arrivals")
    parser.add_argument("--out", default=None, help="folder for the JSON")
    options = parser.parse_args(arguments)
    where = torch.device(options.device)
    facts = header(where)
    print_header(facts)
    folder = resolve_model(options.model)
    llm = LLM(folder, dtype="bf16", device=where, speculate="off", kv_tokens=16384)
    numbers = random.Random(0)
    runs.alone(llm, runs.prompt_of(llm, numbers, options.prompt))
    joined = join_rounds(llm, numbers, options.rounds, options.prompt, options.factor)
    print("streams: done", file=sys.stderr)
    cached = cached_rounds(llm, numbers, options.rounds, options.prompt)
    print("cached prompts: done", file=sys.stderr)
    served = serve_all(llm, numbers, options.requests, options.prompt)
    verdicts = checks(joined, cached, served)
    show(joined, cached, served, verdicts)
    document = {"bench": "latency", **facts, "model": options.model, "prompt": options.prompt}
    document |= {"joined": joined, "cached": cached, "served": served}
    document["figures"] = as_json([check.figure for check in verdicts])
    out = Path(options.out) if options.out else results_folder(where)
    write_json(out / f"latency-{Path(options.model).name}.json", document)
    print(json.dumps(document))
    return 0 if all(check.passed for check in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
