"""A file of trace events in Chrome's JSON array format, one event a line.

Readers accept the array without its end too, and ``write`` hands its lines to the system at once,
so a crash of the process loses nothing. Times are ``time.perf_counter`` seconds; the file has them
in microseconds, to the nanosecond, so that slices nest exactly.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

CATEGORY = "replay"  # of events that a replay reads (trace_format.py)
encode = json.JSONEncoder(separators=(",", ":")).encode


class Track(NamedTuple):
    """Where an event is shown; Chrome's format calls the two process and thread."""

    pid: int
    tid: int


class TraceFile:
    """Writes events; the array is open until ``close``. Raises OSError where that fails.

    What the file held stays until ``begin``.
    """

    def __init__(self, path: str | Path) -> None:
        self._origin = time.perf_counter()
        self._separator = b"\n"
        self._has_begun = False
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115

    def begin(self) -> None:
        """Begin the array, in place of what the file held."""
        if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):  # devices and pipes hold nothing
            self._file.truncate(0)
        self._has_begun = True
        self._write_all(b"[")

    def write(self, events: Sequence[str]) -> None:
        """Append events, each a line."""
        if events:
            self._write_all(self._separator + ",\n".join(events).encode())
            self._separator = b",\n"

    def close(self) -> None:
        """End the array, if it has begun; a file that is closed already stays as it is."""
        if not self._file.closed:
            with self._file:
                if self._has_begun:
                    self._write_all(b"\n]\n")

    def abandon(self) -> None:
        """Close the file as it is."""
        self._file.close()

    def span(self, begin: float, end: float) -> str:
        """When something lasts, as ``slice`` takes it."""
        first, last = self._nanoseconds(begin), self._nanoseconds(end)
        return f'"ts":{first / 1000},"dur":{max(0, last - first) / 1000}'

    @staticmethod
    def slice(track: Track, name: str, span: str, args: str = "{}", category: str = "") -> str:
        """Something that lasts. args: JSON."""
        pid, tid = track
        return (
            f'{{"ph":"X","pid":{pid},"tid":{tid},"name":"{name}","cat":"{category}",'
            f'{span},"args":{args}}}'
        )

    def instant(
        self, track: Track, name: str, when: float, args: Mapping[str, Any], category: str = ""
    ) -> str:
        """Something that happens."""
        return (
            f'{{"ph":"i","s":"t","pid":{track.pid},"tid":{track.tid},"name":"{name}",'
            f'"cat":"{category}","ts":{self._nanoseconds(when) / 1000},"args":{encode(args)}}}'
        )

    def counter(self, track: Track, name: str, values: Mapping[str, int], when: float) -> str:
        """Numbers that belong together, as they are from now on."""
        args = ",".join(f'"{key}":{value}' for key, value in values.items())
        return (
            f'{{"ph":"C","pid":{track.pid},"tid":{track.tid},"name":"{name}",'
            f'"ts":{self._nanoseconds(when) / 1000},"args":{{{args}}}}}'
        )

    def _nanoseconds(self, when: float) -> int:
        return max(0, round((when - self._origin) * 1e9))

    def _write_all(self, data: bytes) -> None:
        left = memoryview(data)
        while left:  # a write may take a part only, as where a disk becomes full
            left = left[self._file.write(left) :]


def named(what: str, track: Track, name: str) -> str:
    """What a track is called. what: "process" or "thread"."""
    return (
        f'{{"ph":"M","pid":{track.pid},"tid":{track.tid},"name":"{what}_name",'
        f'"args":{{"name":{encode(name)}}}}}'
    )


def read_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Every event with its line number, from 1; None behind the last where the array has no end.

    A last line that is not complete ends the array: who wrote it was stopped. Raises OSError for a
    file that cannot be read, and ValueError, naming the line, for one that is no trace or damaged.
    """
    with open(path, "rb") as file:
        if file.readline(8).strip() != b"[":
            raise ValueError(f"{path}: not a trace: its first line is not [")
        line = 1
        for line, text in enumerate(file, start=2):
            if text.strip() == b"]":
                return
            try:
                event = json.loads(text.rstrip().removesuffix(b","))
            except ValueError:
                if not file.read(1):
                    break
                event = None
            if not isinstance(event, dict) or not isinstance(event.get("args", {}), dict):
                raise ValueError(f"{path}:{line}: expected an event, got {text[:60]!r}")
            yield line, event
    yield line, None
