"""What the serving bench sends its requests to: the engine in this process, or a server by HTTP."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from pagedraft.bench.serving_http import HttpClient
from pagedraft.bench.serving_load import (
    PromptSource,
    pieces_of_ids,
    pieces_of_text,
    random_ids,
    read_text,
)
from pagedraft.bench.serving_run import Answer, EngineClient, Send, greedy
from pagedraft.scheduler.async_engine import AsyncEngine
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.submission import Options

MAX_CONTEXT = 2048
GATE_REQUESTS, GATE_TOKENS = 8, 64
OFF = "off"


class Line(NamedTuple):
    """A way to send requests, and how many of them wait there to be admitted."""

    send: Send
    num_waiting: Callable[[], int]


class Bed(Protocol):
    """speculations: names of what is compared. max_context: most tokens of a request."""

    speculations: tuple[str, ...]
    max_context: int

    def source(self, text: str) -> PromptSource:
        """Prompts cut from ``text``, a name of ``read_text``."""

    def line(self, speculation: str, run_name: str) -> Line:
        """For the requests of one run."""


class InProcess:
    """An AsyncEngine over ``llm``. Every run has a cache salt of its own: none finds another's KV.

    target_ms: what the engine is told to keep, for first tokens and between tokens; None: nothing.
    """

    def __init__(
        self, engine: AsyncEngine, speculations: tuple[str, ...], target_ms: float | None
    ) -> None:
        self.engine = engine
        self.speculations = speculations
        self.target_ms = target_ms
        llm = engine.llm
        num_slots = llm.engine.pool.num_usable * llm.engine.pool.block_size
        self.max_context = min(MAX_CONTEXT, llm.target.config.max_positions, num_slots)

    def source(self, text: str) -> PromptSource:
        """Random tokens where the model has no tokenizer."""
        llm = self.engine.llm
        return source(llm.tokenizer, text) or random_ids(llm.target.config.vocab_size)

    def line(self, speculation: str, run_name: str) -> Line:
        """As the protocol says."""
        options: Options = {"cache_salt": run_name}
        if self.target_ms is not None:
            options |= {"ttft_ms": self.target_ms, "itl_ms": self.target_ms}
        client = EngineClient(self.engine, speculation != OFF, options)
        return Line(client.send, client.num_waiting)


class OverHttp:
    """A server; whether it speculates is its own affair, ``label`` says what it was told."""

    def __init__(self, client: HttpClient, tokenizer: Any, label: str, max_context: int) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.speculations = (label,)
        self.max_context = max_context

    def source(self, text: str) -> PromptSource:
        """Text where the server's tokens are not known."""
        return source(self.tokenizer, text) or pieces_of_text(read_text(text))

    def line(self, speculation: str, run_name: str) -> Line:
        """As the protocol says; how many wait is not known."""
        return Line(self.client.send, lambda: 0)


def source(tokenizer: Any, text: str) -> PromptSource | None:
    """Pieces of a text's tokens; None without a tokenizer."""
    if tokenizer is None:
        return None
    whole = read_text(text)  # longer than any model takes, which is no reason for a warning
    return pieces_of_ids(tokenizer.encode(whole, add_special_tokens=False, verbose=False))


def check_outputs(llm: LLM, answers: Sequence[Answer], seed: int) -> int:
    """Run some of the requests again, alone and plain; return how many.

    Raises RuntimeError if one gave other tokens, or if there is none.
    """
    done = [answer for answer in answers if answer.failure is None]
    if not done:
        raise RuntimeError("no request was answered: nothing to compare, no speed is reported")
    chosen = random.Random(seed).sample(done, min(GATE_REQUESTS, len(done)))
    for answer in chosen:
        llm.reset_prefix_cache()
        num_tokens = min(GATE_TOKENS, answer.job.num_new)
        [alone] = llm.generate([answer.job.prompt], greedy(num_tokens, speculate=False))
        is_whole = len(answer.token_ids) == answer.job.num_new
        if not is_whole or answer.token_ids[:num_tokens] != alone.token_ids:
            raise RuntimeError(
                f"the load changed the output: expected {alone.token_ids}, got "
                f"{answer.token_ids[:num_tokens]} and {len(answer.token_ids)} of "
                f"{answer.job.num_new} tokens; no speed is reported"
            )
    return len(chosen)


def check_nothing_left(llm: LLM) -> None:
    """Raise unless no request and no KV block is left, also of requests that were aborted."""
    engine = llm.engine
    engine.check_integrity()
    if engine.has_work or engine.pool.num_free != engine.pool.num_usable:
        raise RuntimeError(
            f"the load left {len(engine.running)} running and {len(engine.waiting)} waiting "
            f"requests, {engine.pool.num_free} of {engine.pool.num_usable} blocks are free"
        )
