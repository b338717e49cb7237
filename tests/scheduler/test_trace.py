"""Traces: what viewers need of them, and that one harms nobody, whatever happens to its file."""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from pagedraft.decoding.params import SamplingParams
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.scheduler.trace import Trace
from pagedraft.scheduler.trace_file import TraceFile, Track, named, read_lines
from pagedraft.tests.scheduler.traced import random_run, traced_llm

pytestmark = pytest.mark.usefixtures("cpu_path")
PROMPT = [5, 9, 33, 7, 41]


@pytest.fixture(scope="module")
def events(target, tmp_path_factory) -> list[dict[str, Any]]:
    """Of a run in which everything happens."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    with use_implementation("cpu"):
        llm = traced_llm(path, target)
        random_run(llm, seed=1)
    llm.trace.close()
    return json.loads(path.read_text())


def test_all_kinds_of_events_are_there(events):
    names = {event["name"] for event in events}
    expected = {"process_name", "thread_name", "settings", "submit", "abort", "preempt", "raise"}
    expected |= {"clear", "step", "plan", "draft", "forward", "verify+commit", "queued", "prompt"}
    expected |= {"decode", "end", "requests", "blocks", "tokens"}
    assert expected <= names
    assert {event["ph"] for event in events} == {"M", "X", "i", "C"}


def test_slices_of_a_track_nest_or_follow_each_other(events):
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1000)
            tracks[event["pid"], event["tid"]].append((begin, begin + round(event["dur"] * 1000)))
    assert all(_nest(sorted(spans, key=lambda s: (s[0], -s[1]))) for spans in tracks.values())


def _nest(spans: list[tuple[int, int]]) -> bool:
    stack: list[int] = []
    for begin, end in spans:
        while stack and stack[-1] <= begin:
            stack.pop()
        if stack and end > stack[-1]:
            return False
        stack.append(end)
    return True


def test_every_request_has_a_named_track_that_ends(events):
    names = {e["tid"] for e in events if e["name"] == "thread_name" and e["pid"] == 2}
    submitted = {e["tid"] for e in events if e["name"] == "submit"}
    ended = Counter(e["tid"] for e in events if e["name"] in ("end", "abort", "raise"))
    assert names == submitted == set(ended)
    assert set(ended.values()) == {1}


def test_counters_add_up(events):
    usable = next(e for e in events if e["name"] == "settings")["args"]["engine"]["num_blocks"] - 1
    blocks = [e["args"] for e in events if e["name"] == "blocks"]
    assert {sum(args.values()) for args in blocks} == {usable}
    fed = sum(e["args"]["fed"] for e in events if e["name"] == "tokens")
    rows = [e["args"] for e in events if e["name"] in ("prompt", "decode")]
    assert fed == sum(row["fed"] + row["drafts"] for row in rows)
    assert any(row["accepted"] for row in rows)


def test_what_is_written_survives_without_an_end(target, tmp_path):
    path = tmp_path / "trace.json"
    llm = traced_llm(path, target)
    llm.submit(PROMPT, SamplingParams(max_tokens=3))
    llm.engine.step()
    lines = [event for _, event in read_lines(path)]
    assert lines[-1] is None
    assert any(event["name"] == "step" for event in lines[:-1])


def test_an_llm_without_a_trace_has_none(llm):
    assert llm.trace is None
    assert llm.engine.observers == []


# What a path is, and what the error says.
BAD_PATHS = {
    "a folder": (lambda folder: folder, "Is a directory"),
    "no folder": (lambda folder: folder / "no" / "trace.json", "No such file or directory"),
}


@pytest.mark.parametrize("name", BAD_PATHS)
def test_a_path_that_cannot_be_written_is_named_at_the_start(tmp_path, name):
    make, message = BAD_PATHS[name]
    path = make(tmp_path)
    with pytest.raises(OSError, match=f"trace: {path}: {message}"):
        Trace(path)


def test_a_full_disk_is_named_at_the_start(target):
    with pytest.raises(OSError, match="trace: /dev/full: No space left on device"):
        traced_llm(Path("/dev/full"), target)


@pytest.mark.parametrize("bad", [{"block_size": 7}, {"kv_tokens": 0}])
def test_an_llm_that_cannot_be_made_leaves_the_earlier_trace(target, tmp_path, bad):
    path = tmp_path / "trace.json"
    path.write_text("earlier")
    with pytest.raises(ValueError, match="expected"):
        traced_llm(path, target, **bad)
    Trace(path).close()
    assert path.read_text() == "earlier"
    traced_llm(path, target).trace.close()
    assert json.loads(path.read_text())[-1]["name"] == "settings"


class Full:
    """A file whose disk is full after so many bytes."""

    def __init__(self, file, room: int) -> None:
        self.file, self.room = file, room
        self.closed = False

    def write(self, data) -> int:
        if self.room == 0:
            raise OSError(28, "No space left on device")
        count = min(len(data), self.room)
        self.room -= count
        return self.file.write(data[:count])

    def fileno(self) -> int:
        return self.file.fileno()

    def truncate(self, size: int) -> int:
        return self.file.truncate(size)

    def close(self) -> None:
        self.closed = True
        self.file.close()


@pytest.mark.parametrize("room", [0, 1, 500, 3000])
def test_a_disk_that_becomes_full_costs_a_warning_only(target, tmp_path, caplog, room):
    path = tmp_path / "trace.json"
    plain = traced_llm(tmp_path / "other.json", target)
    expected = [r.sequence.token_ids for r in random_run(plain, seed=2)]
    llm = traced_llm(path, target)
    llm.trace._file._file = Full(llm.trace._file._file, room)
    with caplog.at_level(logging.WARNING):
        assert [r.sequence.token_ids for r in random_run(llm, seed=2)] == expected
    assert len(caplog.records) == 1
    assert f"trace: {path}: the rest is not written" in caplog.text
    llm.trace.close()
    assert [event for _, event in read_lines(path)][-1] is None


def test_settings_that_cannot_be_written_are_an_error_at_the_start(target, tmp_path):
    trace = Trace(tmp_path / "trace.json")
    trace._file._file = Full(trace._file._file, 100)
    llm = traced_llm(tmp_path / "other.json", target)
    with pytest.raises(OSError, match="No space left"):
        trace.begin(llm.engine, {})
    assert trace not in llm.engine.observers


def test_nothing_is_kept_of_requests_that_have_ended(target, tmp_path):
    llm = traced_llm(tmp_path / "trace.json", target)
    random_run(llm, seed=3)
    random_run(llm, seed=4)
    assert llm.trace._queued == {}
    assert llm.trace._told == []


def test_a_closed_trace_stays_closed(target, tmp_path):
    path = tmp_path / "trace.json"
    with traced_llm(path, target).trace as trace:
        pass
    size = path.stat().st_size
    trace.close()
    llm = traced_llm(tmp_path / "other.json", target)
    llm.engine.observers.append(trace)
    llm.generate([PROMPT], SamplingParams(max_tokens=2))
    assert path.stat().st_size == size
    assert json.loads(path.read_text())[-1]["name"] == "settings"


def test_names_are_escaped_and_times_exact(tmp_path):
    path = tmp_path / "trace.json"
    file = TraceFile(path)
    file.begin()
    track = Track(1, 2)
    name = 'request "\\\n\u2028\ud800'
    first, second = file.span(10.0, 10.0000012345), file.span(10.0000012345, 11.0)
    file.write([named("thread", track, name), file.slice(track, "a", first)])
    file.write([file.slice(track, "b", second)])
    file.close()
    named_event, a, b = json.loads(path.read_text())
    assert named_event["args"]["name"] == name
    assert round(1000 * a["ts"]) + round(1000 * a["dur"]) == round(1000 * b["ts"])


# What stands in a file, and what the error says; the last line alone may be cut.
BAD_FILES = {
    "nothing": (b"", "not a trace"),
    "text": (b"Hello\nworld\n", "not a trace"),
    "bytes": (bytes(range(256)), "not a trace"),
    "one line": (b'[{"name":"a"}]\n', "not a trace"),
    "damaged": (b'[\n{"name":"a"},\n{"na\n{"name":"b"}\n]\n', ":3: expected an event"),
    "no object": (b"[\n7,\n]\n", ":2: expected an event"),
    "bad arguments": (b'[\n{"name":"a","args":[1]}\n]\n', ":2: expected an event"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_are_no_traces_are_named(tmp_path, name):
    content, message = BAD_FILES[name]
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        list(read_lines(path))
    assert str(path) in str(caught.value)
