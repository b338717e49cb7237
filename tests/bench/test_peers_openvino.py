"""OpenVINO GenAI's child process with a stand-in for the library: the protocol, errors, the end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from pagedraft.bench.peers import in_openvino
from pagedraft.bench.peers.base import PeerFailed, PeerRequest, PeerUnavailable
from pagedraft.bench.peers.in_openvino import OpenVinoPeer

FAKE = Path(__file__).with_name("fake_openvino")
STEP_SECONDS = 0.02  # of the stand-in
PROMPTS = [[1, 2, 3], [40, 50, 60, 70]]


@pytest.fixture
def start(monkeypatch):
    """Make a peer whose library has a fault; it is closed afterwards."""
    opened = []

    def make(fault: str = "", **options) -> OpenVinoPeer:
        monkeypatch.setenv("PYTHONPATH", str(FAKE))
        monkeypatch.setenv("FAKE_OPENVINO", fault)
        peer = OpenVinoPeer(Path(sys.executable), Path("model.gguf"), 3, "f16", "bf16", **options)
        opened.append(peer)
        return peer

    yield make
    for peer in opened:
        peer.close()


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    return [(sum(prompt) + index) % 97 for index in range(num_tokens)]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("mode", ["plain", "lookup"])
def test_tokens_come_back_in_order(start, mode):
    """The library prints to the standard output, too: that is kept out of the answers."""
    run = start().run(PROMPTS, 5, mode)
    assert run.token_ids == [expected(prompt, 5) for prompt in PROMPTS]


def test_times_are_the_childs(start):
    run = start().run(PROMPTS, 6)
    assert len(run.first_seconds) == 2
    assert min(run.first_seconds) >= STEP_SECONDS
    assert max(run.first_seconds) < run.seconds
    assert run.seconds >= 6 * STEP_SECONDS


def test_modes_can_alternate(start):
    peer = start()
    runs = [peer.run(PROMPTS, 4, mode).token_ids for mode in ("plain", "lookup", "plain")]
    assert runs == [[expected(prompt, 4) for prompt in PROMPTS]] * 3


def test_facts_say_what_ran(start):
    facts = start().facts
    assert facts["version"] == "0.0-fake"
    assert facts["openvino"] == "0.0-runtime"
    assert facts["inference_precision"] == "bf16"
    assert facts["properties"] == {"INFERENCE_NUM_THREADS": 3, "KV_CACHE_PRECISION": "bf16"}
    assert facts["weights"] == "f16"
    assert facts["threads"] == 3


FAULTS = {
    "raises": "OpenVINO GenAI: RuntimeError: cache is too small",
    "hangs": "no answer within the time limit",
    "crashes": "ended with status 11",
    "short": r"expected 5 tokens for 2 prompts, got \[1, 1\]",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_run_ends_the_child_and_the_next_has_a_new_one(start, monkeypatch, fault):
    peer = start(fault, answer_limit=3.0 if fault == "hangs" else 60.0)
    pid = peer.child.process.pid
    with pytest.raises(PeerFailed, match=FAULTS[fault]):
        peer.run(PROMPTS, 5)
    assert not is_running(pid)
    monkeypatch.setenv("FAKE_OPENVINO", "")
    assert peer.run(PROMPTS[:1], 2).token_ids == [expected(PROMPTS[0], 2)]


def test_a_library_that_cannot_be_imported_is_told(start):
    with pytest.raises(PeerFailed, match="libopenvino_genai.so is missing"):
        start("absent")


def test_an_answer_without_times_is_a_failure(start, monkeypatch):
    peer = start()
    monkeypatch.setattr(peer.child, "exchange", lambda *_: {"token_ids": [[1]]})
    with pytest.raises(PeerFailed, match="expected 'seconds' in"):
        peer.run(PROMPTS[:1], 1)


def test_close_ends_the_child_and_may_be_called_twice(start):
    peer = start()
    pid = peer.child.process.pid
    assert is_running(pid)
    peer.close()
    peer.close()
    assert not is_running(pid)


WRONG = {
    "mode": ((PROMPTS, 4, "assisted"), "mode: expected one of"),
    "no prompts": (([], 4), "prompts: expected at least one"),
    "empty prompt": (([[]], 4), r"expected token ids in each, got none in \[0\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_it_refuses(start, case):
    arguments, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        start().run(*arguments)


def test_on_a_gpu_it_does_not_run(tmp_path):
    request = PeerRequest(tmp_path, torch.bfloat16, torch.device("cuda"), 1)
    with pytest.raises(PeerUnavailable, match="on the CPU only"):
        in_openvino.open_peer(request)
