"""The runs of the latency bench: streams that a prompt joins, a cached prompt, Poisson arrivals.

Times are ``time.perf_counter`` seconds. Prompts are random tokens, decoding is greedy and never
stops early, so a run does the same work with and without targets, and gives the same tokens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from pagedraft.decoding.params import SamplingParams
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.request import Request

NUM_STREAMS, STREAM_PROMPT, SETTLE_STEPS = 4, 64, 40
LENGTHS, SHARES, NUM_NEW = (64, 256, 1000), (5, 3, 2), 32  # of Poisson arrivals: prompts, outputs


@dataclass
class Joined:
    """Streams, and a prompt that joined them.

    median_gap: of the streams before. gaps: of the streams, from then to the prompt's first token.
    outputs: the streams' tokens, then the prompt's. itl_ms: the streams' target.
    """

    median_gap: float
    gaps: list[float]
    ttft: float
    outputs: list[list[int]] = field(repr=False)
    itl_ms: float | None = None

    @property
    def largest(self) -> float:
        """The largest gap over the median one."""
        return max(self.gaps) / self.median_gap


@dataclass
class Arrivals:
    """Requests that arrived at times of their own: TTFT from these times, and gaps."""

    ttft: list[float]
    gaps: list[float]
    seconds: float
    outputs: list[list[int]] = field(repr=False)


def greedy(num_tokens: int) -> SamplingParams:
    """So many tokens, always the same."""
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def prompt_of(llm: LLM, numbers: random.Random, num_tokens: int) -> list[int]:
    """Random tokens."""
    return [numbers.randrange(llm.target.config.vocab_size) for _ in range(num_tokens)]


def gaps_of(requests: Iterable[Request], since: float = 0.0) -> list[float]:
    """Seconds between steps that brought a request tokens, of those that ended after ``since``."""
    return [
        after - before
        for request in requests
        for (before, _), (after, _) in pairwise(request.stats.emissions)
        if after > since
    ]


def alone(llm: LLM, prompt: list[int]) -> tuple[float, list[int]]:
    """First-token seconds of a prompt on an idle engine without cached KV, and its token."""
    llm.reset_prefix_cache()
    [completion] = llm.generate([prompt], greedy(1))
    assert completion.stats.ttft is not None
    return completion.stats.ttft, completion.token_ids


def join(llm: LLM, prompt: list[int], streams: Sequence[list[int]], factor: float | None) -> Joined:
    """Let streams run for a while, then let a prompt arrive, and run until its first token.

    factor: the streams' target over their median gap, which is measured right before; None: none.
    """
    itl_ms = None
    if factor is not None:
        requests, gap = _settle(llm, streams, None)
        itl_ms = 1e3 * factor * gap
        for request in requests:
            llm.engine.abort(request)
    requests, gap = _settle(llm, streams, itl_ms)
    arrived = time.perf_counter()
    joining = llm.submit(prompt, greedy(1))
    try:
        while not joining.finished:
            llm.engine.step()
    finally:
        for request in [*requests, joining]:
            llm.engine.abort(request)
    assert joining.stats.ttft is not None
    return Joined(
        gap,
        gaps_of(requests, arrived),
        joining.stats.ttft,
        [request.sequence.output_ids for request in [*requests, joining]],
        itl_ms,
    )


def _settle(
    llm: LLM, streams: Sequence[list[int]], itl_ms: float | None
) -> tuple[list[Request], float]:
    """Streams that have run for SETTLE_STEPS, and the median gap of the later half of these."""
    llm.reset_prefix_cache()
    params = greedy(llm.target.config.max_positions - STREAM_PROMPT - 1)
    requests = [llm.submit(stream, params, itl_ms=itl_ms) for stream in streams]
    while min(len(request.stats.emissions) for request in requests) <= SETTLE_STEPS:
        llm.engine.step()
    gaps = gaps_of(requests[:1])
    return requests, median(gaps[len(gaps) // 2 :])


def cached(llm: LLM, numbers: random.Random, num_tokens: int, share: float) -> tuple[float, float]:
    """First-token seconds of a prompt without and with the KV of its first ``share``."""
    prompt = prompt_of(llm, numbers, num_tokens)
    num_shared = int(share * num_tokens)
    cold, expected = alone(llm, prompt)
    alone(llm, prompt[:num_shared] + prompt_of(llm, numbers, num_tokens - num_shared))
    [completion] = llm.generate([prompt], greedy(1))
    if completion.token_ids != expected:
        raise RuntimeError("cached KV changed the output: no speed is reported")
    assert completion.stats.ttft is not None
    return cold, completion.stats.ttft


def mixed_prompts(llm: LLM, numbers: random.Random, count: int, longest: int) -> list[list[int]]:
    """Prompts of LENGTHS in their SHARES, none longer than ``longest``."""
    lengths = [min(length, longest) for length in numbers.choices(LENGTHS, SHARES, k=count)]
    return [prompt_of(llm, numbers, length) for length in lengths]


def poisson_times(numbers: random.Random, count: int, rate: float) -> list[float]:
    """Seconds of ``count`` arrivals at ``rate`` a second."""
    now, times = 0.0, []
    for _ in range(count):
        now += numbers.expovariate(rate)
        times.append(now)
    return times


def serve(
    llm: LLM, prompts: Sequence[list[int]], times: Sequence[float], **targets: Any
) -> Arrivals:
    """Submit each prompt at its time, and run until all have ended."""
    llm.reset_prefix_cache()
    began = time.perf_counter()
    arrivals = list(zip(times, prompts, strict=True))
    requests: list[Request] = []
    try:
        while arrivals or llm.engine.has_work:
            now = time.perf_counter() - began
            while arrivals and arrivals[0][0] <= now:
                when, prompt = arrivals.pop(0)
                requests.append(llm.submit(prompt, greedy(NUM_NEW), **targets))
                requests[-1].stats.submitted = began + when  # a step ago, where one was running
            if llm.engine.has_work:
                llm.engine.step()
            else:
                time.sleep(max(0.0, arrivals[0][0] - now))
    finally:
        for request in requests:
            llm.engine.abort(request)
    return Arrivals(
        ttft=[request.stats.ttft or 0.0 for request in requests],
        gaps=gaps_of(requests),
        seconds=time.perf_counter() - began,
        outputs=[request.sequence.output_ids for request in requests],
    )


def same_start(one: Sequence[list[int]], other: Sequence[list[int]]) -> bool:
    """Whether runs of different length gave the same tokens as far as both went."""
    return all(a[: len(b)] == b[: len(a)] for a, b in zip(one, other, strict=True))
