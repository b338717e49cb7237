"""A server of completions that sends exactly the bytes it is told to, when it is told to."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

Script = Iterable[bytes | float]  # what to send, and seconds to sleep
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
DONE = b"data: [DONE]\n\n"


def event(text: str | None = None, *, usage: int | None = None, **choice: Any) -> bytes:
    """One event: a chunk with text, or one with the number of tokens alone."""
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": None} | choice]
    body: dict[str, Any] = {"object": "text_completion", "choices": choices}
    if usage is not None:
        body["usage"] = {"prompt_tokens": 7, "completion_tokens": usage}
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    """A chunk of a chunked body; the empty one ends it."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def until_close(*pieces: bytes | float) -> Script:
    """A body that ends with the connection."""
    return [HEAD + b"\r\n", *pieces]


def in_chunks(*pieces: bytes | float) -> Script:
    """A chunked body, a chunk a piece."""
    rows = [piece if isinstance(piece, float) else chunk(piece) for piece in pieces]
    return [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *rows, chunk(b"")]


def as_json(status: str, document: Any) -> Script:
    """An answer that is no stream."""
    body = json.dumps(document).encode()
    fields = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return [f"HTTP/1.1 {status}\r\n{fields}".encode() + body]


def counting(body: dict[str, Any]) -> Script:
    """What a good server does: two tokens a chunk, as many as were asked for."""
    num_tokens = body["max_tokens"]
    pairs = [min(2, num_tokens - begin) for begin in range(0, num_tokens, 2)]
    events = [event("ab"[:count], token_ids=[5] * count) for count in pairs]
    return in_chunks(*events, event("", finish_reason="length"), event(usage=num_tokens), DONE)


class FakeServer:
    """A context manager. completions: from a request's body to what is sent.

    bodies: of all requests. num_dropped: connections that the client closed before their end.
    """

    def __init__(self, completions: Callable[[dict[str, Any]], Script]) -> None:
        self.completions = completions
        self.bodies: list[dict[str, Any]] = []
        self.num_dropped = 0
        self.paths: list[str] = []
        self.heads: list[str] = []

    def __enter__(self) -> FakeServer:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.owner = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """Without a path."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"


class _Server(socketserver.ThreadingTCPServer):
    owner: FakeServer
    allow_reuse_address = True
    daemon_threads = False  # they are waited for at the end


class _Handler(socketserver.StreamRequestHandler):
    server: _Server
    disable_nagle_algorithm = True

    def handle(self) -> None:
        owner = self.server.owner
        head = b"".join(iter(self.rfile.readline, b"\r\n")).decode()
        length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
        data = self.rfile.read(length)
        path = head.split()[1]
        owner.paths.append(path)
        owner.heads.append(head)
        if path.endswith("/models"):
            script = as_json("200 OK", {"data": [{"id": "fake/one"}, {"id": "other"}]})
        else:
            owner.bodies.append(json.loads(data))
            script = owner.completions(owner.bodies[-1])
        try:
            self._play(script)
        except OSError:
            owner.num_dropped += 1

    def _play(self, script: Script) -> None:
        for piece in script:
            if isinstance(piece, float):
                time.sleep(piece)
            else:
                self.wfile.write(piece)
