"""Running coroutines against an AsyncEngine: never for ever, and no thread is left behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from pagedraft.decoding.params import SamplingParams
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.async_engine import AsyncEngine, Part
from pagedraft.scheduler.llm import LLM, Completion

T = TypeVar("T")
SECONDS = 30.0
OTHER = SamplingParams(max_tokens=6, temperature=0.8, seed=4, ignore_eos=True)


def run(coroutine: Coroutine[Any, Any, T], seconds: float = SECONDS) -> T:
    """``asyncio.run`` with a time limit; engine and tokeniser threads must have ended after it."""

    async def limited() -> T:
        task = asyncio.ensure_future(coroutine)
        await asyncio.wait([task], timeout=seconds)
        if not task.done():  # it may not even end when it is cancelled
            task.cancel()
            await asyncio.wait([task], timeout=2.0)
            raise TimeoutError(f"not done within {seconds} seconds")
        return task.result()

    try:
        return asyncio.run(limited())
    finally:
        check_no_thread_left()


def check_no_thread_left(seconds: float = 5.0) -> None:
    """Raise unless all threads of async engines end within ``seconds``."""
    deadline = time.monotonic() + seconds
    while (left := engine_threads()) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert left == []


def engine_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("pagedraft")]


async def until(condition, seconds: float = 10.0) -> None:
    """Wait until ``condition()`` holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


class Outcome(NamedTuple):
    """All of a completion but its statistics."""

    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[dict[int, float]] | None
    error: str | None
    index: int


def outcome(c: Completion) -> Outcome:
    return Outcome(
        c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs, c.error, c.index
    )


def joined(parts: list[Part]) -> Outcome:
    """What the parts of one sample say together."""
    last = parts[-1]
    assert [part.finish_reason is None for part in parts] == [True] * (len(parts) - 1) + [False]
    logprobs = None
    if last.logprobs is not None:
        logprobs = [entry for part in parts for entry in part.logprobs or []]
    return Outcome(
        [token for part in parts for token in part.token_ids],
        "".join(part.text for part in parts),
        last.finish_reason,
        last.stop_reason,
        logprobs,
        last.error,
        last.index,
    )


async def read(engine: AsyncEngine, prompt: Any, params: SamplingParams) -> list[Outcome]:
    """Stream a prompt to its end: the outcome of each sample."""
    parts: list[list[Part]] = [[] for _ in range(params.n)]
    async for part in engine.stream(prompt, params):
        parts[part.index].append(part)
    return [joined(row) for row in parts]


class Gate:
    """Holds the engine's thread inside its next forward pass until it is opened."""

    def __init__(self, monkeypatch, target: Transformer) -> None:
        self.is_open, self.is_reached = threading.Event(), threading.Event()
        forward = target.forward

        def held(batch, *args, **kwargs):
            self.is_reached.set()
            assert self.is_open.wait(20)
            return forward(batch, *args, **kwargs)

        monkeypatch.setattr(target, "forward", held)


def check_all_returned(llm: LLM) -> None:
    """Raise unless nothing waits or runs and every block is back."""
    llm.engine.check_integrity()
    assert not llm.engine.has_work
    assert llm.engine.pool.num_free == llm.engine.pool.num_usable


def run_beside_another(llm: LLM, prompt: Any, params: SamplingParams, **options) -> Completion:
    """The completion of a request; another one beside it must be what it is alone."""
    [alone] = llm.generate([[9, 8]], OTHER)
    request = llm.submit(prompt, params, **options)
    other = llm.submit([9, 8], OTHER)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    check_all_returned(llm)
    assert outcome(llm.completion(other)) == outcome(alone)
    return llm.completion(request)


class Panic(BaseException):
    """What native code raises that panics."""


def raises(error: BaseException) -> Callable[..., Any]:
    """A function of any arguments that raises."""

    def function(*args: Any) -> Any:
        raise error

    return function
