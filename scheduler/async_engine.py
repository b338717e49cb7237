"""AsyncEngine: an asyncio front of one LLM. Many coroutines submit, stream and abort at once.

A thread of its own runs the engine (engine_thread.py). Prompts are tokenised and checked in worker
threads, so that a long one holds up neither the steps nor the event loop; text is made in the event
loop by those who read it, except where stop strings are looked for, which the engine does. After
each step the event loop is woken once, for all streams.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar, Unpack
from weakref import WeakValueDictionary

from pagedraft.decoding.params import SamplingParams, check_int
from pagedraft.scheduler.engine_thread import (
    Counts,
    EngineClosed,
    EngineOverloaded,
    EngineThread,
)
from pagedraft.scheduler.llm import LLM, Completion
from pagedraft.scheduler.metrics import EngineStats
from pagedraft.scheduler.request import Request
from pagedraft.scheduler.stream import EngineDied, Part, Stream, Update
from pagedraft.scheduler.submission import Options

__all__ = ["AsyncEngine", "EngineClosed", "EngineDied", "EngineOverloaded", "Part", "Stream"]
NUM_TOKENISERS = 2  # threads: a short prompt need not wait for a long one
T = TypeVar("T")
Prompt = str | list[int] | list[dict[str, str]]  # text, token ids, or a conversation


@dataclasses.dataclass(frozen=True)
class AsyncStats:
    """The engine at one moment. Counts are requests, but for the blocks of the KV pool.

    num_waiting: to be admitted; those being tokenised and those that were preempted are among them.
    num_ended: by finish reason.
    """

    num_waiting: int
    num_running: int
    num_submitted: int
    num_refused: int
    num_ended: dict[str, int]
    num_free_blocks: int
    num_blocks: int
    engine: EngineStats


class AsyncEngine:
    """Serves one LLM to coroutines of one event loop.

    ``async with AsyncEngine(llm) as engine:`` starts it, and shuts it down at the end: it finishes
    what it has accepted, or aborts it if the block was left by an exception.

    max_waiting: most requests that may wait to be admitted; one more raises EngineOverloaded.

    The LLM is the engine's until it is shut down: nobody else may call its methods meanwhile. An
    error out of a step ends the engine: all who wait get EngineDied, and all who come later.
    """

    def __init__(self, llm: LLM, *, max_waiting: int = 256) -> None:
        check_int("max_waiting", max_waiting, 1)
        self.llm = llm
        self.max_waiting = max_waiting
        self._thread: EngineThread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: WeakValueDictionary[Request, Stream] = WeakValueDictionary()
        self._news: list[Update] = []
        self._news_lock = threading.Lock()
        self._has_started = asyncio.Event()  # or failed to
        self._ended = asyncio.Event()
        self._tokenisers = ThreadPoolExecutor(NUM_TOKENISERS, "pagedraft-tokenise")

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.shutdown(drain=kind is None)
        except asyncio.CancelledError:
            if kind is None:  # it was draining
                await self.shutdown(drain=False)
            raise

    async def start(self) -> None:
        """Start the engine in the running event loop, warmed up on a GPU; ``async with`` does."""
        if self._loop is not None:
            raise RuntimeError("AsyncEngine: it was started before; make a new one")
        if self.llm.owner is not None:
            raise RuntimeError("llm: expected one of its own; another AsyncEngine runs on it")
        if self.llm.engine.has_work:
            raise RuntimeError("llm: expected one without requests; some were submitted to it")
        self._loop = asyncio.get_running_loop()
        self.llm.owner = self
        try:
            self._thread = await self._start_thread(self._loop)
        except BaseException:
            self.llm.owner = None
            self._tokenisers.shutdown(wait=False)
            raise
        finally:
            self._has_started.set()

    async def _start_thread(self, loop: asyncio.AbstractEventLoop) -> EngineThread:
        if self.llm.tokenizer is not None:
            # The first call may change settings of the tokenizer, which threads then share.
            await self._in_worker(self.llm.tokenizer.encode, "")
        if self.llm.target.device.type == "cuda":  # no request shall wait for a compiler
            await self._in_worker(self.llm.engine.warm_up)
        thread = EngineThread(
            self.llm.engine, self.max_waiting, self._report, self._on_end, lambda: _is_over(loop)
        )
        thread.start()
        return thread

    async def shutdown(self, drain: bool = True) -> None:
        """End the engine and refuse new requests; may be called often, and by many at once.

        drain: finish what was accepted; False aborts it, also while another call drains. Returns
        when the thread has ended; a call that is cancelled stops waiting, and nothing else. Waits
        for a start; a no-op without one, or after one that failed.
        """
        if self._loop is None:
            return
        self._check_loop()
        await self._has_started.wait()
        if self._thread is None:
            return
        self._thread.stop(drain)
        await self._ended.wait()
        self._thread.join()
        self._tokenisers.shutdown(wait=False)  # what it has yet to do, it refuses

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Queue a prompt and return the stream of its samples; dropping that aborts them.

        Seeds of requests without one count the calls of this in their order.

        Raises EngineOverloaded at once where too many wait, ValueError or TypeError for what cannot
        run on this model, EngineClosed and EngineDied.
        """
        thread = self._running_thread()
        params = SamplingParams() if params is None else params
        count = params.n if isinstance(params, SamplingParams) else 1
        if count > self.max_waiting:
            raise ValueError(f"n: expected at most max_waiting, {self.max_waiting}, got {count}")
        thread.reserve(count)
        try:
            index = self.llm.take_index()
            requests = await self._in_worker(self._prepare, thread, prompt, params, index, options)
            stream = Stream(requests, self.llm.tokenizer, self.llm.completion, thread.abort)
            self._streams.update(dict.fromkeys(requests, stream))
            thread.submit(requests)
        except BaseException:
            thread.release(count)
            raise
        return stream

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[Options],
    ) -> AsyncIterator[Part]:
        """Yield the parts of the output as they come; ``aclose``, or dropping it, aborts.

        Raises as ``submit``, and EngineDied. A request that fails alone says so in its last part.
        """
        stream = await self.submit(prompt, params, **options)
        try:
            async for part in stream:
                yield part
        finally:
            stream.abort()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[Options],
    ) -> list[Completion]:
        """The completions of a prompt's n samples; raises as ``stream``. Cancelling aborts them."""
        stream = await self.submit(prompt, params, **options)
        try:
            return await stream.completions()
        finally:
            stream.abort()

    async def chat(
        self,
        messages: list[dict[str, str]],
        params: SamplingParams | None = None,
        **options: Unpack[Options],
    ) -> list[Completion]:
        """Like ``generate`` for a conversation: a list of {"role", "content"} messages."""
        if not _is_conversation(messages):
            raise ValueError(f"messages: expected a list of role and content, got {messages!r}")
        return await self.generate(messages, params, **options)

    def stats(self) -> AsyncStats:
        """What waits, runs and has ended."""
        engine = self.llm.engine
        thread = self._thread
        counts = Counts() if thread is None else thread.counts
        return AsyncStats(
            num_waiting=0 if thread is None else thread.num_waiting,
            num_running=len(engine.running),
            num_submitted=counts.num_submitted,
            num_refused=counts.num_refused,
            num_ended=dict(counts.num_ended),
            num_free_blocks=engine.pool.num_free,
            num_blocks=engine.pool.num_usable,
            engine=dataclasses.replace(engine.stats),
        )

    def _prepare(
        self,
        thread: EngineThread,
        prompt: Prompt,
        params: SamplingParams,
        index: int,
        options: Options,
    ) -> list[Request]:
        """Tokenise and check; the engine's thread then has little to do."""
        thread.check_open()
        ids: Any = prompt
        if _is_conversation(prompt):
            ids = self.llm.chat_ids(ids)
        requests = self.llm.prepare(ids, params, index, **options)
        self.llm.engine.check(requests[0])
        return requests

    async def _in_worker(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenisers, function, *args)

    def _running_thread(self) -> EngineThread:
        if self._thread is None:
            raise RuntimeError("AsyncEngine: expected 'async with' or start() before, got neither")
        self._check_loop()
        return self._thread

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("AsyncEngine: expected the event loop that it was started in")

    def _report(self, updates: list[Update]) -> None:
        """In the engine's thread: wake the event loop, unless it has yet to come for the last."""
        assert self._loop is not None
        with self._news_lock:
            is_expected = bool(self._news)
            self._news += updates
        if not is_expected:
            self._loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        """In the event loop: give streams what is new."""
        with self._news_lock:
            updates, self._news = self._news, []
        for update in updates:
            stream = self._streams.get(update.request)
            if stream is not None:  # else its reader has gone
                stream.put(update)

    def _on_end(self, cause: BaseException | None) -> None:
        """In the engine's thread, at its end."""
        self.llm.owner = None
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._close, cause)

    def _close(self, cause: BaseException | None) -> None:
        """In the event loop: nothing comes any more."""
        self._hand_out()
        self._ended.set()
        for stream in set(self._streams.values()):
            stream.fail(cause or EngineClosed("AsyncEngine: it ended before the request"))


def _is_conversation(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def _is_over(loop: asyncio.AbstractEventLoop) -> bool:
    return loop.is_closed() or not threading.main_thread().is_alive()
