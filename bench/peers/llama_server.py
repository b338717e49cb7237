"""llama.cpp's HTTP server on the loopback address: started, asked for tokens, ended."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedraft.bench.peers.base import PeerFailed
from pagedraft.bench.peers.child import Child

HOST = "127.0.0.1"
START_LIMIT = 180.0  # seconds until a model must be loaded
ANSWER_LIMIT = 600.0  # seconds until every prompt of a call must be answered
BODY_SHOWN = 200  # characters of an answer in an error message


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt.

    token_ids: new tokens; a stream leaves out those that end inside a character. num_told: how many
    the server says it made. seconds: to the first token and to the end, on time.perf_counter.
    timings: the server's own.
    """

    token_ids: list[int]
    num_told: int
    first_at: float
    timings: dict[str, Any]


class LlamaServer:
    """One server process with a model loaded. Raises PeerFailed where it does not come up."""

    def __init__(self, command: Sequence[str], start_limit: float = START_LIMIT) -> None:
        self.port = _free_port()
        self.child = Child([*command, "--host", HOST, "--port", str(self.port)])
        try:
            self._wait_until_ready(start_limit)
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self.child.is_alive

    def close(self) -> None:
        """End the process; a second call does nothing."""
        self.child.close()

    def complete(
        self,
        prompts: Sequence[list[int]],
        num_tokens: int,
        *,
        stream: bool = True,
        limit: float = ANSWER_LIMIT,
    ) -> list[Answer]:
        """Send every prompt at once, each on a connection of its own, and wait for all answers.

        Raises PeerFailed where one is refused, is no answer, or is not there ``limit`` seconds
        after the call.
        """
        deadline = time.perf_counter() + limit
        bodies = [json.dumps(request(prompt, num_tokens, stream)).encode() for prompt in prompts]
        ask = self._stream if stream else self._whole
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda body: self._ask(ask, body, deadline), bodies))

    def _wait_until_ready(self, limit: float) -> None:
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if not self.is_alive:
                raise PeerFailed(f"llama.cpp: {self.child.name} {self.child.last_words()}")
            if self._is_healthy():
                return
            time.sleep(0.05)
        raise PeerFailed(
            f"llama.cpp: {self.child.name} was not ready after {limit:.0f} s; "
            f"it {self.child.last_words()}"
        )

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _ask(self, read: Callable[..., Answer], body: bytes, deadline: float) -> Answer:
        """One request; every way in which it can fail as PeerFailed."""
        left = max(deadline - time.perf_counter(), 0.01)
        connection = http.client.HTTPConnection(HOST, self.port, timeout=left)
        try:
            connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                said = response.read(BODY_SHOWN).decode(errors="replace")
                raise PeerFailed(f"llama.cpp: expected status 200, got {response.status}: {said}")
            return read(response, deadline)
        except TimeoutError:
            raise PeerFailed("llama.cpp: no answer within the time limit") from None
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(f"the connection broke ({type(error).__name__}: {error})") from error
        finally:
            connection.close()

    def _stream(self, response: http.client.HTTPResponse, deadline: float) -> Answer:
        """Read events; they are parsed after the last one has come, so as to take no time from it.

        An event of this server is one line "data: {...}"; the last has "stop": true.
        """
        events: list[tuple[float, bytes]] = []
        while line := response.readline():
            now = time.perf_counter()
            if now > deadline:
                raise TimeoutError
            if line.strip():
                events.append((now, line))
        token_ids: list[int] = []
        first_at = float("nan")
        final: dict[str, Any] = {}
        for now, line in events:
            event = _parse(line.removeprefix(b"data:"))
            if event.get("tokens") and not token_ids:
                first_at = now
            token_ids += event.get("tokens", [])
            final = event
        return self._answer(token_ids, first_at, final)

    def _whole(self, response: http.client.HTTPResponse, deadline: float) -> Answer:
        final = _parse(response.read())
        return self._answer(final.get("tokens", []), float("nan"), final)

    def _answer(self, token_ids: Any, first_at: float, final: dict[str, Any]) -> Answer:
        is_whole = final.get("stop") is True and isinstance(final.get("tokens_predicted"), int)
        is_ids = all(type(token_id) is int for token_id in token_ids)
        if not (is_whole and is_ids):
            said = json.dumps(final)[:BODY_SHOWN]
            raise self._broken(f"expected token ids and a last event, got {said}")
        return Answer(token_ids, final["tokens_predicted"], first_at, final.get("timings", {}))

    def _broken(self, what: str) -> PeerFailed:
        """With the server's last words: it closes connections a moment before it is seen dead."""
        time.sleep(0.2)
        return PeerFailed(f"llama.cpp: {what}; the server {self.child.last_words()}")


def request(prompt: list[int], num_tokens: int, stream: bool) -> dict[str, Any]:
    """The body of a request: greedy, nothing cached, token ids back."""
    return {
        "prompt": prompt,
        "n_predict": num_tokens,
        "temperature": 0,
        "samplers": ["temperature"],
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": stream,
    }


def server_command(
    program: Path, model: Path, threads: int, num_slots: int, slot_tokens: int
) -> list[str]:
    """Arguments for ``num_slots`` requests at once, each of up to ``slot_tokens`` tokens."""
    command = [str(program), "--model", str(model)]
    command += ["--threads", str(threads), "--threads-batch", str(threads)]
    command += ["--parallel", str(num_slots), "--ctx-size", str(num_slots * slot_tokens)]
    return command


def _parse(text: bytes) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        said = text.decode(errors="replace").strip()[:BODY_SHOWN]
        raise PeerFailed(f"llama.cpp: expected JSON objects, got {said!r}")
    if "error" in event:
        raise PeerFailed(f"llama.cpp: {json.dumps(event['error'])[:BODY_SHOWN]}")
    return event


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]
