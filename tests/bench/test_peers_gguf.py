"""The GGUF file of a model folder, with a stand-in for its converter, then on to tokens."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from pagedraft.bench.peers import environment, in_llama_cpp
from pagedraft.bench.peers import gguf_file as gguf_module
from pagedraft.bench.peers.base import PeerRequest, PeerUnavailable
from pagedraft.bench.peers.gguf_file import gguf_file
from pagedraft.tests.bench.fake_llama_server import answer, install

PROMPTS = [[1, 2, 3], [40, 50]]
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path) -> Path:
    """What stands for a model folder."""
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


@pytest.fixture
def converter(tmp_path) -> Path:
    """Writes its arguments to the file that it is to make."""
    path = tmp_path / "convert_hf_to_gguf.py"
    path.write_text("import sys\nopen(sys.argv[5], 'w').write(' '.join(sys.argv[1:4]))\n")
    return path


def test_a_gguf_file_is_made_once_for_the_same_weights(folder, converter, tmp_path):
    cache = tmp_path / "cache"
    first = gguf_file(folder, torch.bfloat16, converter, cache=cache)
    assert first.read_text() == f"{folder} --outtype bf16"
    made = first.stat().st_mtime_ns
    time.sleep(0.01)
    assert gguf_file(folder, torch.bfloat16, converter, cache=cache).stat().st_mtime_ns == made
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert gguf_file(folder, torch.bfloat16, converter, cache=cache) != first
    assert [path.suffix for path in cache.iterdir()] == [".gguf", ".gguf"]


def test_a_converter_that_fails_says_why_and_leaves_nothing(folder, converter, tmp_path):
    converter.write_text(converter.read_text() + "sys.exit('Model FooForBar is not supported')\n")
    cache = tmp_path / "cache"
    with pytest.raises(PeerUnavailable, match="status 1 .* FooForBar is not supported"):
        gguf_file(folder, torch.bfloat16, converter, cache=cache)
    assert list(cache.iterdir()) == []


def test_a_converter_of_an_environment_finds_its_packages(folder, converter, tmp_path, monkeypatch):
    site = tmp_path / "lib" / "site-packages"
    inside = site / "vendor" / converter.name
    inside.parent.mkdir(parents=True)
    inside.write_text("import os, sys\nopen(sys.argv[5], 'w').write(os.environ['PYTHONPATH'])\n")
    monkeypatch.setenv("PYTHONPATH", "before")
    file = gguf_file(folder, torch.bfloat16, inside, cache=tmp_path / "cache")
    assert file.read_text() == f"{site}:before"


def test_integer_weights_are_refused(folder, converter, tmp_path):
    with pytest.raises(PeerUnavailable, match="expected a dtype of .*, got torch.int8"):
        gguf_file(folder, torch.int8, converter, cache=tmp_path)


def test_open_peer_goes_from_weights_to_tokens(folder, converter, tmp_path, monkeypatch):
    """The converter is found beside the program, as in a source tree."""
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_LLAMA", "")
    monkeypatch.setenv("FAKE_LLAMA_LOG", str(log))
    monkeypatch.setattr(gguf_module, "FOLDER", tmp_path / "cache")
    request = PeerRequest(
        folder, torch.float16, CPU, 1, tmp_path / "bin" / "python", install(tmp_path)
    )
    peer = in_llama_cpp.open_peer(request)
    assert peer.run(PROMPTS, 3).token_ids == [answer(prompt, 3) for prompt in PROMPTS]
    assert peer.facts["weights"] == "f16"
    arguments = json.loads(log.read_text().splitlines()[0])["arguments"]
    assert arguments[arguments.index("--model") + 1].endswith("-f16.gguf")
    peer.close()


def test_a_server_that_is_not_there_is_a_reason(folder, tmp_path):
    request = PeerRequest(folder, torch.bfloat16, CPU, 1, None, tmp_path / "nowhere")
    with pytest.raises(PeerUnavailable, match="nowhere: no such file"):
        in_llama_cpp.open_peer(request)


def test_what_is_not_installed_is_named_from_the_repository(monkeypatch, tmp_path):
    """Reasons go into documents that are kept: no folder of this machine in them."""
    monkeypatch.setattr(environment, "ENVIRONMENT", environment.ROOT / "build" / "absent")
    monkeypatch.setenv("PATH", str(tmp_path))
    request = PeerRequest(tmp_path, torch.bfloat16, CPU, 1)
    with pytest.raises(PeerUnavailable, match="^build/absent/bin/python: no such interpreter"):
        environment.find_python(request)
    with pytest.raises(PeerUnavailable, match="not on PATH and not build/absent/bin/llama-server"):
        environment.find_llama_server(request)
    with pytest.raises(PeerUnavailable, match="is not in build/absent; `make bench-peers`"):
        environment.find_converter(request)


def test_a_program_on_path_comes_before_the_environment(monkeypatch, tmp_path):
    program = install(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.find_llama_server(PeerRequest(tmp_path, torch.bfloat16, CPU, 1)) == program
