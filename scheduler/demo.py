"""``pagedraft demo``: one full batch of real requests, with speculation and without, compared."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pagedraft.decoding.params import SamplingParams
from pagedraft.scheduler.demo_prompts import REQUESTS
from pagedraft.scheduler.llm import LLM, Completion
from pagedraft.scheduler.metrics import EngineStats, Summary, percentile, summarise


def run_demo(llm: LLM, max_tokens: int) -> int:
    """Run the demo's requests both ways and return the exit status: 1 if any output differs.

    Greedy and seeded sampled rows share the batch. Speculation is turned off for the second run by
    the requests themselves, so both use one model, one pool and one engine.
    """
    console = Console(highlight=False)
    questions = [request.prompt for request in REQUESTS]
    prompts = [llm.chat_ids([{"role": "user", "content": question}]) for question in questions]
    params = [
        SamplingParams(
            max_tokens=max(1, round(max_tokens * request.length)),
            temperature=request.temperature,
            seed=seed,
        )
        for seed, request in enumerate(REQUESTS)
    ]
    llm.generate(prompts, [replace(row, max_tokens=2) for row in params])  # warm up
    label = f"{len(prompts)} requests at once, with speculation"
    drafted, with_drafts = _measure(llm, prompts, params, label, console)
    undrafted = [replace(row, speculate=False) for row in params]
    plain, without = _measure(llm, prompts, undrafted, "the same without speculation", console)

    for question, row, completion in zip(questions, params, drafted, strict=True):
        console.print(_answer(question, row, completion))
    console.print(_table(with_drafts, without))
    console.print(_positions(with_drafts))
    speedup = with_drafts.tokens_per_second / without.tokens_per_second
    console.print(f"speed-up by speculation: {speedup:.2f}x")
    same = [
        (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        for a, b in zip(drafted, plain, strict=True)
    ]
    console.print(f"identical output: {'yes' if all(same) else 'no'}")
    for index in (i for i, equal in enumerate(same) if not equal):
        console.print(f"  request {index} differs: {questions[index][:60]!r}")
    failed = [c.error for c in (*drafted, *plain) if c.error]
    for error in failed:
        console.print(f"  request failed: {error}")
    return 0 if all(same) and not failed else 1


def _measure(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    label: str,
    console: Console,
) -> tuple[list[Completion], Summary]:
    """Run all requests together, showing how many tokens there are so far."""
    llm.engine.stats = EngineStats()
    llm.reset_prefix_cache()
    began = time.perf_counter()
    requests = [llm.submit(prompt, row) for prompt, row in zip(prompts, params, strict=True)]
    with console.status(label) as status:
        while llm.engine.has_work:
            llm.engine.step()
            status.update(f"{label}: {llm.engine.stats.num_committed} tokens")
    seconds = time.perf_counter() - began
    console.print(f"{label}: {llm.engine.stats.num_committed} tokens in {seconds:.1f} s")
    completions = [llm.completion(request) for request in requests]
    stats = [completion.stats for completion in completions]
    return completions, summarise(stats, seconds, llm.engine.stats.kv_waste)


def _answer(question: str, params: SamplingParams, completion: Completion) -> Panel:
    drawn = "greedy" if params.temperature == 0 else f"temperature {params.temperature}"
    stats = completion.stats
    facts = (
        f"{drawn} · {len(completion.token_ids)} tokens · {completion.finish_reason} · "
        f"{stats.tokens_per_pass:.2f} tokens per pass"
    )
    title = question.splitlines()[0]
    return Panel(
        Text(completion.text.strip()), title=Text(title), subtitle=facts, title_align="left"
    )


def _table(with_drafts: Summary, without: Summary) -> Table:
    table = Table(title="Eight requests at once", title_justify="left")
    table.add_column("")
    table.add_column("with speculation", justify="right")
    table.add_column("without", justify="right")
    for label, read in (
        ("tokens/s", lambda s: f"{s.tokens_per_second:.1f}"),
        ("TTFT p50 / p95 / p99 (ms)", lambda s: _percentiles(s.ttft)),
        ("ITL p50 / p95 / p99 (ms)", lambda s: _percentiles(s.inter_token_latencies)),
        ("tokens per target pass", lambda s: f"{s.tokens_per_pass:.2f}"),
        ("drafts accepted", lambda s: _share(s.acceptance)),
        ("KV waste", lambda s: _share(s.kv_waste)),
    ):
        table.add_row(label, read(with_drafts), read(without))
    return table


def _positions(summary: Summary) -> str:
    shares = " ".join(_share(share) for share in summary.acceptance_by_position)
    return f"drafts accepted by position: {shares or 'no drafts'}"


def _percentiles(seconds: Sequence[float]) -> str:
    return " / ".join(f"{1e3 * percentile(seconds, p):.0f}" for p in (50, 95, 99))


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.0f}%"
