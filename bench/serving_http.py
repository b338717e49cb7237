"""A client of an OpenAI-compatible server: POST /v1/completions with ``stream``, answered as SSE.

Standard library only, a connection a request, whose set-up counts as latency. Times are taken when
a chunk of the body has been read, before it is parsed.

Tokens of a chunk are counted by what the server says: ``token_ids`` or ``logprobs`` of the chunk,
or ``usage`` in every chunk. If it only says the total at the end, and that is not one a chunk, it
is spread evenly over the chunks; if it says nothing, every chunk with text is one token. ``Answer.
counted_by`` says which, as ITL per token is no better than that; the step gap needs no counts.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from pagedraft.bench.serving_load import Job
from pagedraft.bench.serving_run import Answer, ServingError

READ_BYTES = 65536
SHOWN_CHARS = 200  # of what a server says about an error
DONE = "[DONE]"


@dataclass(frozen=True)
class Address:
    """Where a server is. path: of the API, as "/v1"."""

    host: str
    port: int
    is_https: bool
    path: str

    @classmethod
    def of(cls, url: str) -> Address:
        """From "http://host:port", also with "/v1" or "/v1/completions" after it."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: expected http://host:port or https://..., got {url!r}")
        is_https = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/completions")
        path = path if path.endswith("/v1") else path + "/v1"
        return cls(parts.hostname, parts.port or (443 if is_https else 80), is_https, path)


@dataclass(frozen=True)
class HttpClient:
    """Sends jobs to a server.

    model: as the server names it. body: fields besides the standard ones, or in place of them;
    None takes one out. headers: likewise.
    """

    address: Address
    model: str
    body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    async def send(self, job: Job, answer: Answer) -> None:
        """Read the stream to its end. Raises ServingError for whatever is no good answer."""
        body = {"model": self.model, "prompt": job.prompt, "max_tokens": job.num_new}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        body = {name: value for name, value in (body | self.body).items() if value is not None}
        tokens, events = TokenCount(answer), EventLines()
        try:
            async with Exchange(self.address, "/completions", self.headers, body) as it:
                await it.expect("text/event-stream")
                async with aclosing(it.body()) as body_parts:
                    async for data in body_parts:
                        when = time.perf_counter()
                        for event in events.feed(data):
                            tokens.take(event, when)
                        if tokens.is_closed:
                            break
            if not tokens.is_done:
                raise ServingError("the stream ended before the answer did")
        except (OSError, EOFError) as error:
            raise ServingError(f"connection: {type(error).__name__}: {error}") from error
        finally:
            tokens.settle()


async def first_model(address: Address, headers: Mapping[str, str]) -> str:
    """The first model that a server lists. Raises ServingError, or OSError where there is none."""
    async with Exchange(address, "/models", headers) as exchange:
        await exchange.expect("application/json")
        text = b"".join([data async for data in exchange.body()])
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ServingError(f"models: expected a list of them, got {_short(text)}") from None


class Exchange:
    """One request on a connection of its own, which is closed at the end, whatever that is."""

    def __init__(
        self,
        address: Address,
        path: str,
        headers: Mapping[str, str],
        body: Mapping[str, Any] | None = None,
    ) -> None:
        self.address = address
        data = b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        fields = {"Host": f"{address.host}:{address.port}", "Connection": "close"}
        fields |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
        lines = [f"{name}: {value}" for name, value in {**fields, **headers}.items()]
        head = "\r\n".join([f"{method} {address.path}{path} HTTP/1.1", *lines, "", ""])
        self.request = head.encode() + data

    async def __aenter__(self) -> Exchange:
        at = self.address
        self.reader, self.writer = await asyncio.open_connection(
            at.host, at.port, ssl=True if at.is_https else None
        )
        try:
            self.writer.write(self.request)
            await self.writer.drain()
        except BaseException:
            self.writer.transport.abort()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()  # nothing more is to be sent, nor waited for

    async def expect(self, content_type: str) -> None:
        """Read status and headers; raises ServingError for another status or content type."""
        status = (await self._line()).split(maxsplit=2)
        if len(status) < 2 or not status[0].startswith("HTTP/"):
            raise ServingError(f"status: expected an HTTP answer, got {' '.join(status)!r}")
        self.fields: dict[str, str] = {}
        while line := await self._line():
            name, _, value = line.partition(":")
            self.fields[name.strip().lower()] = value.strip()
        if status[1] != "200":
            said = _short(b"".join([data async for data in self.body()]))
            raise ServingError(f"HTTP {status[1]}: {said}")
        got = self.fields.get("content-type", "")
        if not got.startswith(content_type):
            raise ServingError(f"content-type: expected {content_type}, got {got!r}")

    async def body(self) -> AsyncIterator[bytes]:
        """The body piece by piece. Raises EOFError where the connection ends before it."""
        length = self.fields.get("content-length")
        if "chunked" in self.fields.get("transfer-encoding", "").lower():
            async for chunk in self._chunks():
                yield chunk
        elif length is not None:
            left = int(length)
            while left:
                data = await self.reader.read(min(left, READ_BYTES))
                if not data:
                    raise EOFError(f"it ended {left} bytes before the body")
                left -= len(data)
                yield data
        else:
            while data := await self.reader.read(READ_BYTES):
                yield data

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int((await self._line()).split(";")[0], 16):
            yield await self.reader.readexactly(size)
            await self._line()
        while await self._line():
            pass  # trailers

    async def _line(self) -> str:
        line = await self.reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError("it ended within a line")
        return line.decode("latin-1").rstrip("\r\n")


class EventLines:
    """Server-sent events out of bytes, however they are cut; lines end with LF or CRLF."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, data: bytes) -> Iterator[str]:
        """The data of every event that is complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            text = line.removesuffix(b"\r").decode("utf-8", "replace")
            name, _, value = text.partition(":")
            if name == "data":
                self._data.append(value.removeprefix(" "))
            elif not text and self._data:
                event, self._data = "\n".join(self._data), []
                yield event


class TokenCount:
    """Enters the tokens of a stream's events into an answer."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.is_done = False  # the server has said why the answer ended
        self.is_closed = False  # and that nothing follows
        self._total: int | None = None  # tokens so far, or of all, by ``usage``
        self._is_counting: bool | None = None  # whether the first chunk had ``usage`` already
        self._ways: set[str] = set()

    def take(self, data: str, when: float) -> None:
        """One event, which came at ``when``; raises ServingError for what is none."""
        if data.strip() == DONE:
            self.is_done = self.is_closed = True
            return
        try:
            event = json.loads(data)
            choices = event.get("choices") or []
            choice = choices[0] if choices else {}
            if event.get("error"):
                raise ServingError(f"error in the stream: {_short(json.dumps(event['error']))}")
            count, way = self._count(choice, event.get("usage"))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ServingError(f"event: expected a completion chunk, got {data[:80]!r}") from None
        self.is_done |= bool(choice.get("finish_reason"))
        if count:
            self.answer.stats.emissions.append((when, count))
            self._ways.add(way)

    def _count(self, choice: Mapping[str, Any], usage: Any) -> tuple[int, str]:
        """Tokens of a chunk, and what says so."""
        before = self._total or 0
        if usage and usage.get("completion_tokens") is not None:
            self._total = int(usage["completion_tokens"])
            self.answer.num_prompt = usage.get("prompt_tokens")
        if choice and self._is_counting is None:
            self._is_counting = self._total is not None
        if choice.get("token_ids") is not None:
            self.answer.token_ids += choice["token_ids"]
            return len(choice["token_ids"]), "token ids"
        if (choice.get("logprobs") or {}).get("tokens") is not None:
            return len(choice["logprobs"]["tokens"]), "logprobs"
        if choice and self._is_counting:
            return (self._total or 0) - before, "usage"
        return int(bool(choice.get("text"))), "chunks"

    def settle(self) -> None:
        """At the end: where chunks had to be counted, see whether the total says otherwise."""
        emissions = self.answer.stats.emissions
        self.answer.counted_by = way = "+".join(sorted(self._ways)) or "chunks"
        if way != "chunks" or not self.is_done or not emissions:
            return
        if self._total is None:
            self.answer.counted_by = "a token a chunk, assumed"
        elif self._total == len(emissions):
            self.answer.counted_by = "usage, a token a chunk"
        else:
            self.answer.counted_by = "usage, spread"
            counts = spread(self._total, len(emissions))
            rows = zip(emissions, counts, strict=True)
            emissions[:] = [(when, count) for (when, _), count in rows if count]


def spread(total: int, num_chunks: int) -> Sequence[int]:
    """Tokens of each chunk, as even as whole numbers are; the first has at least one."""
    ends = [math.ceil((i + 1) * total / num_chunks) for i in range(num_chunks)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _short(text: str | bytes) -> str:
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."
