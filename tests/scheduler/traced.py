"""Runs that are traced, for the tests of traces and replays."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagedraft.decoding.params import SamplingParams
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.request import Request
from pagedraft.tests.scheduler.runs import mixed_params, random_prompts

OPTIONS: dict[str, Any] = {"block_size": 8, "kv_tokens": 96, "token_budget": 24, "k": 3}


def traced_llm(path: Path, model: Transformer | Path, **options: Any) -> LLM:
    """A small engine that traces to ``path``."""
    return LLM(model, trace=path, device="cpu", **{**OPTIONS, "speculate": "ngram", **options})


def random_run(llm: LLM, seed: int) -> list[Request]:
    """A workload with forks, prefix hits, preemptions, and aborts from everywhere, to its end."""
    choose = random.Random(seed)
    prompts = random_prompts(97, [5, 12, 17, 24, 9, 20], seed)
    params = mixed_params(6, max_tokens=10)
    requests: list[Request] = []
    acts = _callbacks(llm, requests, prompts)
    queue = list(zip(prompts, params, acts, strict=True))
    step = 0
    while queue or llm.engine.has_work:
        while queue and choose.random() < 0.5:
            prompt, row, act = queue.pop()
            requests.append(llm.submit(prompt, row, on_tokens=act, priority=choose.randint(0, 1)))
        if step == 3:
            requests += llm.submit_all(prompts[3], SamplingParams(max_tokens=7, n=2, seed=5))
        if step in (5, 9) and llm.engine.running:
            llm.engine.preempt(choose.choice(llm.engine.running))
        if step == 8 and llm.engine.has_work:
            llm.engine.abort(choose.choice([*llm.engine.running, *llm.engine.waiting]))
        if step == 12:
            llm.reset_prefix_cache()
        llm.engine.step()
        llm.engine.check_integrity()
        step += 1
    return requests


def _callbacks(
    llm: LLM, requests: list[Request], prompts: list[list[int]]
) -> list[Callable[[list[int]], None] | None]:
    """What the callbacks of ``random_run`` do, each at the first tokens."""

    def submit(tokens: list[int]) -> None:
        if len(requests) < 12:
            params = SamplingParams(max_tokens=4, temperature=0.0)
            requests.append(llm.submit(prompts[1] + tokens, params))

    def abort(tokens: list[int]) -> None:
        llm.engine.abort(requests[0])

    def fail(tokens: list[int]) -> None:
        raise OSError("nobody listens")

    return [None, submit, None, abort, fail, None]


def edited(path: Path, kind: str, change: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a trace: ``change`` is offered the arguments of events of ``kind`` until it says that
    it has changed them."""
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if f'"name":"{kind}"' not in line:
            continue
        comma = "," if line.endswith(",") else ""
        event = json.loads(line.removesuffix(","))
        if change(event["args"]):
            lines[number] = json.dumps(event, separators=(",", ":")) + comma
            path.write_text("\n".join(lines) + "\n")
            return
    raise AssertionError(f"nothing to change: {kind}")
