"""A stand-in for llama.cpp's server: its options, its two routes, and the ways in which it breaks.

``FAKE_LLAMA`` in the environment is the way: nothing, or dies, sleeps, refuses, hangs, garbage,
short, breaks, error, text (tokens that a stream does not tell) or pair (waits for two requests).
``FAKE_LLAMA_LOG`` is a file that gets the arguments and every request, a JSON object a line.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FIRST_SECONDS = 0.05  # from a request to its first token
FAULT = os.environ.get("FAKE_LLAMA", "")
BOTH = threading.Barrier(2)


def answer(prompt: list[int], num_tokens: int) -> list[int]:
    """What the stand-in says to a prompt."""
    return [(sum(prompt) + 7 * index) % 97 for index in range(num_tokens)]


def install(folder: Path) -> Path:
    """Write this file as an executable llama-server to the folder."""
    path = folder / "llama-server"
    path.write_text(f"#!{sys.executable}\n" + Path(__file__).read_text())
    path.chmod(0o755)
    return path


def note(document: dict) -> None:
    """Add a line to the log."""
    path = os.environ.get("FAKE_LLAMA_LOG")
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(document) + "\n")


class Handler(BaseHTTPRequestHandler):
    """GET /health, POST /completion."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:  # noqa: N802
        """Ready, unless it sleeps."""
        status = 503 if FAULT == "sleeps" else 200
        self._whole(status, {"status": "ok"})

    def do_POST(self) -> None:  # noqa: N802
        """Answer, or break as asked."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        note({"path": self.path, "body": body})
        if FAULT == "refuses":
            self._whole(500, {"error": {"message": "no slot for you"}})
            return
        if FAULT == "hangs":
            time.sleep(60)
        if FAULT == "pair":
            BOTH.wait(60)  # no answer to one before the other is asked
        tokens = answer(body["prompt"], body["n_predict"])
        last = {"stop": True, "tokens": [], "tokens_predicted": len(tokens)}
        if body["stream"]:
            self._stream(tokens, last)
        else:
            self._whole(200, {**last, "tokens": tokens})

    def _stream(self, tokens: list[int], last: dict) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        time.sleep(FIRST_SECONDS)
        for index, token in enumerate(tokens):
            if FAULT == "garbage":
                self._chunk(b"data: <html>\n\n")
            if FAULT == "error":
                self._event({"error": {"message": "context is full"}})
            if FAULT == "breaks" and index == 2:
                os._exit(9)
            if FAULT == "text" and index % 3 == 1:
                continue  # ends inside a character: never told in a stream
            if FAULT == "short" and index > 1:
                continue
            self._event({"stop": False, "tokens": [token]})
        if FAULT == "short":
            last = {**last, "tokens_predicted": 2}
        self._event(last)
        self._chunk(b"")

    def _event(self, event: dict) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _whole(self, status: int, document: dict) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main(arguments: list[str]) -> int:
    """Serve on the port that the arguments name."""
    if arguments == ["--help"]:
        print("--spec-type none,draft-simple,ngram-simple   types of speculative decoding")
        print("--spec-ngram-simple-size-n N\n--spec-ngram-simple-size-m N")
        return 0
    if arguments == ["--version"]:
        print("version: 1 (fake)", file=sys.stderr)
        return 0
    note({"arguments": arguments, "pid": os.getpid()})
    if "--log-verbosity" in arguments:
        print("0.1 system_info: n_threads = 1 | FAKE = 1", file=sys.stderr, flush=True)
    if FAULT == "dies":
        print("error: model is not a model", file=sys.stderr)
        return 3
    port = int(arguments[arguments.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
