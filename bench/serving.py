"""Serving: latencies under requests that arrive at random, and goodput within a latency target.

    python -m pagedraft.bench.serving [--quick] [--arrivals poisson bursty] [--mix code chat]
    python -m pagedraft.bench.serving --url http://127.0.0.1:8000 [--model its-folder]

Requests arrive whether or not others were answered (open loop), and every latency counts from the
time at which one was due. At every rate: TTFT, ITL per token and the gap between steps, what was
served, the queue, what failed; with and without speculation. Then the goodput: the largest rate at
which p99 TTFT and p99 ITL stay within ``--target-ms``, by bisection.

Without ``--url`` the engine and those who ask it are in one process, and share its cores and
Python's lock. No figure is printed unless a sample of the answers under load is, token for token,
what the same requests get alone without speculation, and every request and block is gone at the
end. Over HTTP outputs are not compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pagedraft.bench import figures
from pagedraft.bench.plot import save_chart
from pagedraft.bench.report import RESULTS, header, print_header, results_folder, write_json
from pagedraft.bench.serving_bed import (
    OFF,
    InProcess,
    OverHttp,
    check_nothing_left,
    check_outputs,
)
from pagedraft.bench.serving_charts import draw_curve, draw_distribution
from pagedraft.bench.serving_http import Address, HttpClient, ServingError, first_model
from pagedraft.bench.serving_measure import Measurement, Results
from pagedraft.bench.serving_options import parse, settings_of
from pagedraft.bench.serving_rows import HEADERS, failures
from pagedraft.bench.table import print_table
from pagedraft.decoding.load import read_tokenizer
from pagedraft.model.demo import resolve_model
from pagedraft.scheduler.async_engine import AsyncEngine
from pagedraft.scheduler.llm import LLM

NOTES = """\
ms, medians of the rounds. Latencies count from when a request was due. ITL: the gap between two
chunks over the tokens of the later one; the gap itself beside it. in flight: requests not answered
yet when one arrives, mean and most; waiting: most that were not admitted; late: sent more than 5 ms
after they were due; kept: p99 TTFT and p99 ITL were within the target in every round."""


def measure_engine(options: argparse.Namespace) -> tuple[Results, dict[str, Any]]:
    """Measure the engine in this process, and check what it gave."""
    device = torch.device(options.device)
    kv_tokens = options.kv_tokens or (16384 if device.type == "cpu" else None)
    llm = LLM(
        resolve_model(options.model),
        draft=None if options.draft is None else resolve_model(options.draft),
        speculate=options.speculate,
        dtype="bf16",
        device=device,
        kv_tokens=kv_tokens,
    )
    speculations = (OFF,) if options.speculate == OFF else (OFF, options.speculate)
    targets = options.target_ms if options.pace else None

    async def measured() -> Results:
        async with AsyncEngine(llm) as engine:
            return await Measurement(
                InProcess(engine, speculations, targets), settings_of(options)
            ).run()

    results = asyncio.run(measured())
    check_nothing_left(llm)
    num_same = check_outputs(llm, results.answers, options.seed)
    facts = {"where": "in process", "paced": options.pace, "outputs_compared": num_same}
    return results, {**facts, "draft": options.draft, "kv_tokens": kv_tokens}


def measure_server(options: argparse.Namespace) -> tuple[Results, dict[str, Any]]:
    """Measure a server."""
    address = Address.of(options.url)
    folder = None if options.model is None else resolve_model(options.model)

    async def measured() -> tuple[Results, str]:
        model = options.served_model or await first_model(address, options.header)
        client = HttpClient(address, model, options.body, options.header)
        tokenizer = None if folder is None else read_tokenizer(folder)
        bed = OverHttp(client, tokenizer, options.label, options.max_context)
        return await Measurement(bed, settings_of(options)).run(), model

    results, served = asyncio.run(measured())
    facts = {"where": "http", "url": options.url, "served_model": served}
    prompts = "text" if options.model is None else "token ids"
    return results, {**facts, "body": options.body, "prompts": prompts, "outputs_compared": 0}


def show(results: Results, target_ms: float) -> None:
    """Print what an idle server does, a table for each load, and the goodputs."""
    for idle in results.idle:
        print(
            f"idle, {idle.mix}, speculation {idle.speculation}: TTFT p50 {idle.ttft:.1f} ms, "
            f"ITL p50 {idle.itl:.1f} ms (no load can do better)"
        )
    for arrivals, mix in dict.fromkeys((row.arrivals, row.mix) for row in results.rows):
        rows = [row for row in results.rows if (row.arrivals, row.mix) == (arrivals, mix)]
        first = rows[0].rounds[0]
        title = f"{arrivals} arrivals, {mix}: {first.mean_prompt:.0f} tokens of prompt, "
        title += f"{first.mean_new:.0f} new on average, target {target_ms:g} ms"
        print_table(title, HEADERS, [row.cells() for row in rows])
        for reason, count in failures(rows).items():
            print(f"failed: {count} x {reason}")
    print(NOTES)
    for found in results.found:
        print(f"goodput at {target_ms:g} ms, {found.arrivals}, {found.mix}, {found.speculation}:")
        print("\n".join(f"  {line}" for line in found.lines()))


def draw(results: Results, options: argparse.Namespace, stem: Path, facts: dict[str, Any]) -> None:
    """Write the charts of every load beside the JSON."""
    target_ms = options.target_ms
    for arrivals, mix in dict.fromkeys((row.arrivals, row.mix) for row in results.rows):
        rows = [row for row in results.rows if (row.arrivals, row.mix) == (arrivals, mix)]
        goodput = {
            one.speculation: one.goodput.kept
            for one in results.found
            if (one.arrivals, one.mix) == (arrivals, mix)
        }
        load = f"{arrivals} arrivals, {mix}"
        charts = {
            "curve": draw_curve(rows, goodput, target_ms, f"Latency and throughput, {load}"),
            "ttft": draw_distribution(rows, "TTFT", target_ms, f"TTFT, {load}"),
            "itl": draw_distribution(rows, "ITL", target_ms, f"ITL per token, {load}"),
        }
        how = f"measured {facts['where']}, {options.repeat} rounds of {options.seconds:g} s a rate"
        for name, chart in charts.items():
            path = stem.with_name(f"{stem.name}-{arrivals}-{mix}-{name}.png")
            save_chart(chart, path, facts, how)


def document_of(results: Results, facts: dict[str, Any]) -> dict[str, Any]:
    """Everything as one JSON document."""
    found = [one.figure() for one in results.found]
    rows = [figure for row in results.rows for figure in row.figures()]
    return {
        "bench": "serving",
        **facts,
        "figures": figures.as_json([*found, *rows]),
        "idle": [{k: _finite(v) for k, v in asdict(one).items()} for one in results.idle],
        "rows": [row.document() for row in results.rows],
        "goodput": [one.document() for one in results.found],
    }


def _finite(value: Any) -> Any:
    return None if value != value else value


def _stem(options: argparse.Namespace, served: str | None) -> Path:
    """Folder and first part of the names of what is written."""
    if options.url is None:
        folder, name = results_folder(torch.device(options.device)), Path(options.model).name
    else:
        folder = RESULTS / f"http-{_slug(options.url.split('://')[-1])}"
        name = _slug(str(served))
    folder = Path(options.out) if options.out else folder
    return folder / f"serving-{name}{'-quick' if options.quick else ''}"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = parse(arguments)
    facts = header(torch.device(options.device if options.url is None else "cpu"))
    if options.url is not None:
        facts["device"] = f"{options.url}, asked from {facts['device']}"
    print_header(facts)
    try:
        measure = measure_engine if options.url is None else measure_server
        results, more = measure(options)
    except (ServingError, OSError) as error:
        print(f"{options.url or options.model}: {error}", file=sys.stderr)
        return 1
    settings = asdict(settings_of(options))
    facts |= {"model": options.model, "speculate": options.speculate, **more, "settings": settings}
    show(results, options.target_ms)
    stem = _stem(options, more.get("served_model"))
    draw(results, options, stem, facts)
    document = document_of(results, facts)
    write_json(stem.with_name(stem.name + ".json"), document)
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
