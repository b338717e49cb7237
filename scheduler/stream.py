"""A stream: what one submission yields to a coroutine, as fast as it reads and no faster.

The engine's thread reports ``Update``s, the event loop puts them into the stream, and the reader
takes ``Part``s out. What is not read yet is merged, so a reader that sleeps holds its own tokens
and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagedraft.decoding.detokenize import Detokenizer
from pagedraft.decoding.failure import describe
from pagedraft.scheduler.llm import Completion
from pagedraft.scheduler.request import FinishReason, Request


class EngineDied(RuntimeError):
    """The engine failed as a whole: ``__cause__`` says how; nothing runs on it any more."""

    @classmethod
    def of(cls, cause: BaseException) -> EngineDied:
        """A new one; each who waits is to raise one of its own, as tracebacks grow in it."""
        died = cls(f"the engine died: {describe(cause)}")
        died.__cause__ = cause
        return died


@dataclass
class Update:
    """What is new of a request: its tokens since the last update, and whether it has ended.

    logprobs: of the tokens, if the request asked for them. text: what is final since the last
    update; of requests without stop strings "", as the reader makes theirs. error: why the engine
    refused the request, which then never ran.
    """

    request: Request
    token_ids: list[int]
    logprobs: list[dict[int, float]]
    text: str = ""
    is_last: bool = False
    error: Exception | None = None

    def merge(self, later: Update) -> None:
        """Add what followed."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.text += later.text
        self.is_last = later.is_last


@dataclass(slots=True)
class Part:
    """What a stream yields: tokens of one sample, of one step or of several that were not read.

    text: what has become final; tokens without text yet have theirs in a later part. All parts
        joined are the completion's text and token_ids.
    logprobs: a dict per token as in Completion, if the request asked for them.
    index: which of the prompt's n samples it is.
    finish_reason, stop_reason, error: as in Completion, in a sample's last part, else None.
    """

    token_ids: list[int]
    text: str
    logprobs: list[dict[int, float]] | None = None
    index: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass
class _Sample:
    """How far the reader is with one request.

    detokenizer: the reader's own; None where the engine makes the text, which looks for stop
        strings in it, and where there is no tokenizer.
    """

    request: Request
    detokenizer: Detokenizer | None
    num_shown: int = 0  # characters
    is_read: bool = False  # to the end


class Stream:
    """An async iterator over the parts of one submission, of its n samples as they come.

    Made by ``AsyncEngine.submit``; lives in its event loop. Dropping it aborts what still runs.
    """

    _num_running = 0  # samples that have not ended

    def __init__(
        self,
        requests: list[Request],
        tokenizer: Any,
        complete: Callable[[Request], Completion],
        abort: Callable[[list[Request]], None],
    ) -> None:
        self.requests = requests
        is_own = tokenizer is not None and requests[0].output_text is None
        self._samples = {
            request: _Sample(request, Detokenizer(tokenizer) if is_own else None)
            for request in requests
        }
        self._complete = complete
        self._abort = abort
        self._unread: dict[Request, Update] = {}
        self._refusal: Exception | None = None
        self._cause: BaseException | None = None  # of the engine's death
        self._has_news = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._num_running = len(requests)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Part:
        """The next part. Raises EngineDied if the engine failed, after what came before that."""
        while not self._unread:
            self._raise_failure()
            if all(sample.is_read for sample in self._samples.values()):
                raise StopAsyncIteration
            self._has_news.clear()
            await self._has_news.wait()
        request = next(iter(self._unread))
        return self._read(self._samples[request], self._unread.pop(request))

    async def completions(self) -> list[Completion]:
        """Wait until all samples have ended; raises EngineDied if the engine fails before."""
        await self._has_ended.wait()
        self._raise_failure()
        return [self._complete(request) for request in self.requests]

    def abort(self) -> None:
        """End what still runs, within a step: its last part says "abort". Any thread may call."""
        if self._num_running and self._cause is None:
            self._abort(self.requests)

    async def aclose(self) -> None:
        """Abort; for a reader that goes."""
        self.abort()

    def __del__(self) -> None:
        self.abort()

    def put(self, update: Update) -> None:
        """Take what the engine reports; to be called in the event loop."""
        if update.error is not None:
            self._refusal, self._num_running = update.error, 0
            self._stop_waiting()
            return
        self._num_running -= update.is_last
        if update.request in self._unread:
            self._unread[update.request].merge(update)
        elif not self._samples[update.request].is_read:
            self._unread[update.request] = update
        self._has_news.set()
        if self._num_running == 0:
            self._has_ended.set()

    def fail(self, cause: BaseException) -> None:
        """The engine died of ``cause``; to be called in the event loop."""
        if self._num_running:
            self._cause = cause
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        self._has_news.set()
        self._has_ended.set()

    def _raise_failure(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        if self._cause is not None:
            raise EngineDied.of(self._cause)

    def _read(self, sample: _Sample, update: Update) -> Part:
        request, error = sample.request, None
        try:
            text = _text(sample, update)
        except Exception as failure:  # whatever a tokenizer raises on what a model made
            text, error = "", f"text: {describe(failure)}"
            if not update.is_last:
                self._abort([request])
        sample.num_shown += len(text)
        sample.is_read = update.is_last or error is not None
        part = Part(
            token_ids=update.token_ids,
            text=text,
            logprobs=None if request.params.logprobs is None else update.logprobs,
            index=request.sequence.sample_index,
        )
        if sample.is_read:
            part.finish_reason, part.stop_reason = request.finish_reason, request.stop_reason
            part.error = request.error
        if error is not None:
            part.finish_reason, part.stop_reason, part.error = "error", None, error
        return part


def _text(sample: _Sample, update: Update) -> str:
    """The text that is final with this update, all of it at the end."""
    own, output_text = sample.detokenizer, sample.request.output_text
    if own is not None:
        final = "".join(map(own.push, update.token_ids))
        return final + own.pending if update.is_last else final
    if update.is_last and output_text is not None:
        return output_text.text[sample.num_shown :]
    return update.text
