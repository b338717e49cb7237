"""A peer's process: what it said is kept, and it ends with us whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagedraft.bench.peers.base import PeerFailed

GRACE = 5.0  # seconds that a process gets to end by itself


class Child:
    """A process in a group of its own, so that what it starts ends with it.

    has_pipes: talk to it through ``process.stdin`` and ``process.stdout``; otherwise its output
    goes to the log. Raises PeerFailed where the program cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        has_pipes: bool = False,
    ) -> None:
        self.name = Path(command[0]).name
        self.log = os.memfd_create("peer")
        pipe = subprocess.PIPE if has_pipes else None
        try:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                list(command),
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or self.log,
                stderr=self.log,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        except OSError as error:
            os.close(self.log)
            raise PeerFailed(f"{command[0]}: cannot be started: {error}") from error
        self.unread = b""
        self.close: Any = weakref.finalize(self, _end, self.process, self.log)

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def text(self) -> str:
        """All that it has said to the log; empty when closed."""
        if not self.close.alive:
            return ""
        return os.pread(self.log, os.fstat(self.log).st_size, 0).decode(errors="replace")

    def exchange(self, question: Mapping[str, Any] | None, limit: float) -> dict[str, Any]:
        """Send a JSON line (None sends nothing) and return the next one that comes.

        Raises PeerFailed where none comes within ``limit`` seconds, or it is no JSON object.
        """
        assert self.process.stdin is not None
        if question is not None:
            try:
                self.process.stdin.write(json.dumps(question).encode() + b"\n")
                self.process.stdin.flush()
            except OSError:
                raise PeerFailed(f"{self.name} {self.last_words()}") from None
        line = self._line(time.monotonic() + limit)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            said = line.decode(errors="replace").strip()[:200]
            raise PeerFailed(f"{self.name}: expected a JSON object, got {said!r}")
        return answer

    def _line(self, deadline: float) -> bytes:
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        while b"\n" not in self.unread:
            left = max(deadline - time.monotonic(), 0)
            if not select.select([pipe], [], [], left)[0]:
                raise PeerFailed(f"{self.name}: no answer within the time limit")
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(GRACE)
                raise PeerFailed(f"{self.name} {self.last_words()}")
            self.unread += chunk
        line, self.unread = self.unread.split(b"\n", 1)
        return line

    def last_words(self, num_lines: int = 4) -> str:
        """How it ended and its last lines, for an error message."""
        status = self.process.poll()
        state = "still runs" if status is None else f"ended with status {status}"
        lines = [line for line in self.text().splitlines() if line.strip()]
        return f"{state}; its last lines: " + (" | ".join(lines[-num_lines:]) or "none")


def _end(process: subprocess.Popen[bytes], log: int) -> None:
    """End the whole group: first politely, then not."""
    _signal(process, signal.SIGTERM)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _signal(process, signal.SIGKILL)
        process.wait()
    os.close(log)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
