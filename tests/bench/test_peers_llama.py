"""llama.cpp's server, by a stand-in: what it is asked, what is read, nothing stays."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pagedraft.bench.peers.base import PeerFailed, PeerUnavailable
from pagedraft.bench.peers.in_llama_cpp import LlamaCppPeer
from pagedraft.tests.bench.fake_llama_server import FIRST_SECONDS, answer, install

PROMPTS = [[1, 2, 3], [40, 50]]


@pytest.fixture
def program(tmp_path) -> Path:
    """An executable llama-server."""
    return install(tmp_path)


@pytest.fixture
def log(tmp_path, monkeypatch) -> Path:
    """The file in which the stand-in notes its arguments and requests."""
    path = tmp_path / "log"
    monkeypatch.setenv("FAKE_LLAMA_LOG", str(path))
    return path


@pytest.fixture
def start(program, log, monkeypatch):
    """Make a peer whose servers have a fault; it is closed afterwards."""
    opened = []

    def make(fault: str = "", **options) -> LlamaCppPeer:
        monkeypatch.setenv("FAKE_LLAMA", fault)
        peer = LlamaCppPeer(program, Path("model.gguf"), 3, "bf16", **options)
        opened.append(peer)
        return peer

    yield make
    for peer in opened:
        peer.close()


def lines(log: Path, key: str) -> list:
    """The value of ``key`` in each line of the log that has it."""
    found = [json.loads(line) for line in log.read_text().splitlines()]
    return [line[key] for line in found if key in line]


def servers(log: Path, key: str = "pid") -> list:
    """Of each server but those that were started, and ended, to be asked what they are."""
    found = [json.loads(line) for line in log.read_text().splitlines()]
    started = [line for line in found if "pid" in line]
    return [line[key] for line in started if "--log-verbosity" not in line["arguments"]]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def value(arguments: list[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


def test_each_prompt_is_one_greedy_streamed_request(start, log):
    run = start().run(PROMPTS, 5)
    bodies = sorted(lines(log, "body"), key=lambda body: len(body["prompt"]), reverse=True)
    assert lines(log, "path") == ["/completion"] * 2
    assert [body["prompt"] for body in bodies] == PROMPTS
    asked = {key: bodies[0][key] for key in ("n_predict", "temperature", "stream")}
    assert asked == {"n_predict": 5, "temperature": 0, "stream": True}
    assert bodies[0]["ignore_eos"]
    assert bodies[0]["cache_prompt"] is False
    assert run.token_ids == [answer(prompt, 5) for prompt in PROMPTS]


def test_prompts_are_sent_at_once_and_first_tokens_timed(start):
    """A server that answers none before it has both does answer."""
    run = start("pair").run(PROMPTS, 3)
    assert min(run.first_seconds) >= FIRST_SECONDS
    assert max(run.first_seconds) < run.seconds


def test_a_server_has_slots_threads_and_room_for_the_prompts(start, log):
    start().run(PROMPTS, 300)
    arguments = servers(log, "arguments")[-1]
    assert value(arguments, "--parallel") == "2"
    assert value(arguments, "--ctx-size") == str(2 * 512)
    assert value(arguments, "--threads") == value(arguments, "--threads-batch") == "3"
    assert value(arguments, "--host") == "127.0.0.1"
    assert value(arguments, "--model") == "model.gguf"


def test_a_server_is_used_again_until_a_prompt_needs_more_room(start, log):
    peer = start()
    peer.run(PROMPTS[:1], 4)
    peer.run(PROMPTS[:1], 8)
    assert len(servers(log)) == 1
    peer.run(PROMPTS[:1], 300)
    first, second = servers(log)
    assert not is_running(first)
    assert is_running(second)


def test_modes_are_those_that_the_program_has(start, log):
    peer = start(draft=Path("draft.gguf"))
    assert peer.modes == ("plain", "lookup", "assisted")
    peer.run(PROMPTS, 2)
    peer.run(PROMPTS, 2, "lookup")
    peer.run(PROMPTS, 2, "assisted")
    plain, lookup, assisted = servers(log, "arguments")
    assert "--spec-type" not in plain
    assert value(lookup, "--spec-type") == "ngram-simple"
    assert value(assisted, "--model-draft") == "draft.gguf"
    assert start().modes == ("plain", "lookup")


def test_facts_say_what_ran(start):
    facts = start().facts
    assert facts["version"] == "1 (fake)"
    assert facts["weights"] == "bf16"
    assert facts["threads"] == 3
    assert facts["system"] == "n_threads = 1 | FAKE = 1"
    assert facts["server"].startswith("llama-server --model model.gguf --threads 3")


def test_tokens_inside_a_character_are_asked_for_again(start, log):
    run = start("text").run(PROMPTS, 7)
    assert run.token_ids == [answer(prompt, 7) for prompt in PROMPTS]
    assert sorted(body["stream"] for body in lines(log, "body")) == [False, False, True, True]


FAULTS = {
    "refuses": "expected status 200, got 500: .*no slot for you",
    "garbage": "expected JSON objects, got '<html>'",
    "error": "context is full",
    "short": r"expected 7 tokens for 1 prompts, got \[2\]",
    "breaks": "expected token ids and a last event, got .*ended with status 9",
    "hangs": "no answer within the time limit",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_answer_fails_and_ends_the_server(start, log, fault):
    peer = start(fault, answer_limit=2.0 if fault == "hangs" else 60.0)
    with pytest.raises(PeerFailed, match=FAULTS[fault]):
        peer.run(PROMPTS[:1], 7)
    assert [is_running(pid) for pid in lines(log, "pid")] == [False, False]


def test_after_a_failure_the_next_run_has_a_new_server(start, monkeypatch):
    peer = start("breaks")
    with pytest.raises(PeerFailed):
        peer.run(PROMPTS[:1], 7)
    monkeypatch.setenv("FAKE_LLAMA", "")
    assert peer.run(PROMPTS[:1], 7).token_ids == [answer(PROMPTS[0], 7)]


def test_a_server_that_dies_at_the_start_says_why(start, log):
    with pytest.raises(PeerFailed, match="ended with status 3; .*model is not a model"):
        start("dies")


def test_a_server_that_never_gets_ready_is_ended(start, log):
    with pytest.raises(PeerFailed, match="not ready after 4 s; it still runs"):
        start("sleeps", start_limit=4.0)
    assert not is_running(lines(log, "pid")[0])


def test_close_ends_every_server_and_may_be_called_twice(start, log):
    peer = start()
    peer.run(PROMPTS, 2)
    peer.close()
    peer.close()
    assert [is_running(pid) for pid in lines(log, "pid")] == [False, False]


def test_a_forgotten_peer_ends_its_servers(start, program, log, monkeypatch):
    monkeypatch.setenv("FAKE_LLAMA", "")
    peer = LlamaCppPeer(program, Path("model.gguf"), 1, "bf16")
    peer.run(PROMPTS, 2)
    (pid,) = servers(log)
    assert is_running(pid)
    del peer
    assert not is_running(pid)


WRONG = {
    "mode": ((PROMPTS, 4, "continuous"), "mode: expected one of"),
    "no prompts": (([], 4), "prompts: expected at least one"),
    "empty prompt": (([[]], 4), r"expected token ids in each, got none in \[0\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_it_refuses(start, log, case):
    arguments, message = WRONG[case]
    peer = start()
    with pytest.raises(ValueError, match=message):
        peer.run(*arguments)
    assert lines(log, "body") == []


def test_a_program_that_cannot_run_is_a_reason(tmp_path):
    broken = tmp_path / "llama-server"
    broken.write_text("#!/bin/sh\necho needs a newer processor >&2\nexit 4\n")
    broken.chmod(0o755)
    with pytest.raises(PeerUnavailable, match="status 4: needs a newer processor"):
        LlamaCppPeer(broken, Path("model.gguf"), 1, "bf16")
