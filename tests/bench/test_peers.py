"""Other engines: opening them, what they refuse, and transformers' modes on a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pagedraft.bench.peers import base, close_peers, in_vllm, open_peers
from pagedraft.bench.peers.base import PeerFailed, check_tokens
from pagedraft.bench.peers.in_transformers import TransformersPeer
from pagedraft.tests.model.tiny import save_tiny

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 10, 11], [40, 41, 42, 40, 41, 42, 40]]
NUM_TOKENS = 12
MODES = ("plain", "lookup", "assisted", "continuous")


def greedy(model, prompt: list[int], num_tokens: int) -> list[int]:
    """The new tokens, each from a forward pass over everything before it."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(folder, a smaller model's folder, expected tokens); EOS is a token that comes early."""
    root = tmp_path_factory.mktemp("peers")
    model = save_tiny(root / "model")
    expected = [greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    save_tiny(root / "model", eos_token_id=expected[0][1])
    save_tiny(root / "small", seed=1, num_hidden_layers=1)
    return root / "model", root / "small", expected


@pytest.fixture(scope="module")
def peer(tiny):
    opened = TransformersPeer(tiny[0], torch.float32, CPU, 1, tiny[1])
    yield opened
    opened.close()


def test_it_has_every_mode(peer):
    assert peer.modes == MODES
    assert peer.facts["weights"] == "float32"
    assert peer.facts["threads"] == 1


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_full_forward_passes(peer, tiny, mode):
    """EOS among them is passed, in every mode and for every length of prompt."""
    run = peer.run(PROMPTS, NUM_TOKENS, mode)
    assert run.token_ids == tiny[2]


@pytest.mark.parametrize("mode", MODES)
def test_first_tokens_come_before_the_end(peer, mode):
    run = peer.run(PROMPTS, NUM_TOKENS, mode)
    assert len(run.first_seconds) == len(PROMPTS)
    assert 0 < min(run.first_seconds) < max(run.first_seconds) + 1e-9 < run.seconds


def test_prompts_of_a_lookup_run_one_after_another(peer):
    first = peer.run(PROMPTS, NUM_TOKENS, "lookup").first_seconds
    assert first == sorted(first)
    assert len(set(first)) == len(PROMPTS)


def test_threads_are_set_for_the_run_only(tiny, monkeypatch):
    """torch's number of threads is asked where the model runs."""
    peer = TransformersPeer(tiny[0], torch.float32, CPU, 2)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    seen = []
    monkeypatch.setattr(
        peer.model, "generate", lambda ids, **_: seen.append(torch.get_num_threads()) or ids
    )
    with pytest.raises(PeerFailed, match=r"expected 3 tokens for 1 prompts, got \[0\]"):
        peer.run([[5, 6]], 3)
    assert seen == [2]
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


def test_generate_takes_options(peer, tiny):
    found = peer.generate(PROMPTS[:1], NUM_TOKENS, prompt_lookup_num_tokens=4)
    assert found == tiny[2][:1]


WRONG = {
    "mode": ((PROMPTS, 4, "beam"), r"mode: expected one of \('plain', .*, got 'beam'"),
    "no prompts": (([], 4, "plain"), "prompts: expected at least one, got none"),
    "empty prompt": (([[1], []], 4, "plain"), r"expected token ids in each, got none in \[1\]"),
    "no tokens": ((PROMPTS, 0, "plain"), "num_tokens: expected at least 1, got 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_it_refuses(peer, case):
    arguments, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        peer.run(*arguments)


def test_a_row_too_short_is_a_failure():
    with pytest.raises(PeerFailed, match=r"expected 2 tokens for 2 prompts, got \[2, 1\]"):
        check_tokens("x", [[1, 2], [3]], 2, 2)


def test_each_peer_that_does_not_run_has_a_reason(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    peers, reasons = open_peers(tiny[0], torch.float32, CPU, 1, python=tmp_path / "bin" / "python")
    close_peers(peers)
    assert [peer.name for peer in peers] == ["transformers"]
    assert "llama-server is not on PATH" in reasons["llama.cpp"]
    assert "make bench-peers" in reasons["llama.cpp"]
    assert "no such interpreter" in reasons["OpenVINO GenAI"]
    assert reasons["vLLM"] == "needs a CUDA device, this run is on cpu"


def test_only_what_is_asked_for_is_opened(tmp_path):
    peers, reasons = open_peers(tmp_path, torch.float32, CPU, 1, only=["transformers"])
    assert peers == []
    assert "cannot load" in reasons["transformers"]
    assert {reasons[name] for name in reasons if name != "transformers"} == {"not asked for"}


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"only: expected names of .*, got \['llama'\]"):
        open_peers(tmp_path, torch.float32, CPU, 1, only=["llama"])


def test_threads_below_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match="threads: expected at least 1, got 0"):
        open_peers(tmp_path, torch.float32, CPU, 0)


class Closable:
    """Something with a name that counts how often it was closed, and may fail at it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.num_closed = error, 0

    def close(self) -> None:
        self.num_closed += 1
        if self.error:
            raise self.error


def test_an_error_while_opening_closes_what_is_open(monkeypatch, tmp_path):
    """Not a reason, but a fault of the code: it is raised, and no process stays behind."""
    opened = Closable()

    def modules(name: str) -> SimpleNamespace:
        if name.endswith("in_transformers"):
            return SimpleNamespace(open_peer=lambda _: opened)
        return SimpleNamespace(open_peer=lambda _: {}["absent"])

    monkeypatch.setattr(base, "import_module", modules)
    with pytest.raises(KeyError, match="absent"):
        open_peers(tmp_path, torch.float32, CPU, 1)
    assert opened.num_closed == 1


def test_one_that_fails_to_close_keeps_none_open():
    peers = [Closable(), Closable(OSError("stuck")), Closable()]
    with pytest.raises(OSError, match="stuck"):
        close_peers(peers)
    assert [peer.num_closed for peer in peers] == [1, 1, 1]


class FakeVllm(SimpleNamespace):
    """The part of vLLM that is called, noting what it was given."""

    __version__ = "0.0-fake"
    SamplingParams = staticmethod(lambda **options: options)

    def LLM(self, **options):  # noqa: N802
        self.options = options
        return SimpleNamespace(generate=self._generate)

    def _generate(self, inputs, params, use_tqdm):
        self.params = params
        rows = [
            [sum(one["prompt_token_ids"]) + step for step in range(params["max_tokens"])]
            for one in inputs
        ]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(row))]) for row in rows]


def cuda_request(folder: Path) -> base.PeerRequest:
    return base.PeerRequest(folder, torch.bfloat16, torch.device("cuda"), 1)


def test_vllm_is_asked_for_greedy_tokens_past_eos(monkeypatch, tmp_path):
    fake = FakeVllm(__spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm", fake)
    opened = in_vllm.open_peer(cuda_request(tmp_path))
    run = opened.run([[1, 2], [3]], 2)
    assert run.token_ids == [[3, 4], [3, 4]]
    assert run.first_seconds == []
    assert fake.options["dtype"] == "bfloat16"
    assert not fake.options["enable_prefix_caching"]
    assert fake.params["temperature"] == 0
    assert fake.params["ignore_eos"]


def test_without_vllm_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(in_vllm.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(base.PeerUnavailable, match="vllm is not installed"):
        in_vllm.open_peer(cuda_request(tmp_path))
