"""The engine bench end to end on a tiny model, its gates, and peers that are missing or break."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from dataclasses import replace

import pytest

from pagedraft.bench import engine, engine_options
from pagedraft.bench.figures import read_figures
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.bench.toy_engine import ToyPeer
from pagedraft.tests.model.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("cpu_path")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 2}
SMALL = ("--rounds", "2", "--tokens", "12", "--edits", "2", "--prompts", "2")
SMALL += ("--batches", "2", "1", "--lengths", "1", "3", "auto", "--drafters", "suffix", "draft")
SMALL += ("--alphas", "0.8", "--device", "cpu")
MISSING = {"vLLM": "needs a CUDA device", "OpenVINO GenAI": "not installed: make bench-peers"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("engine") / "model"
    save_tiny(path, "llama", max_position_embeddings=256, **SIZES)
    return path


def few_first_tokens(patch):
    """Fewer repeats than the bench wants."""
    patch.setitem(engine_options.DEFAULTS, "ttft_short", ((100, 3), (100, 3)))
    patch.setitem(engine_options.DEFAULTS, "ttft_long", ((4, 3), (4, 3)))


def install(patch, folder):
    """Peers that run, opened in place of the real ones."""
    llm = LLM(folder, speculate="off", kv_tokens=8192, prefix_cache=False)
    made = [
        ToyPeer(llm, "transformers", ("plain", "lookup", "continuous")),
        ToyPeer(llm, "llama.cpp", ("plain", "lookup"), wrong_at=5),
    ]
    patch.setattr(engine, "open_peers", lambda *args, **options: (made, dict(MISSING)))
    few_first_tokens(patch)
    return made


@pytest.fixture
def peers(folder, monkeypatch):
    return install(monkeypatch, folder)


def run(folder, out, *more):
    """Exit status, what was printed, and the JSON document of its last line."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        status = engine.main(["--model", str(folder), *SMALL, "--out", str(out), *more])
    return status, printed.getvalue(), json.loads(printed.getvalue().splitlines()[-1])


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """One run of all parts: (out, peers, status, printed, document)."""
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch, use_implementation("cpu"):
        made = install(patch, folder)
        return out, made, *run(folder, out)


def test_dry_run(whole):
    out, peers, status, printed, document = whole
    assert status == 0
    assert json.loads((out / "engine-model-bf16.json").read_text()) == document
    assert [peer.is_closed for peer in peers] == [True, True]
    for title in ("Cases, this engine", "beside other engines", "first token", "A decode step"):
        assert title in printed
    assert "SYNTHETIC: synthetic acceptance" in printed
    charts = {path.name: path.read_bytes() for path in out.glob("*.png")}
    names = ["speedup-suffix", "speedup-synthetic-080", "acceptance", "itl-batch-1", "itl-batch-2"]
    names += ["ttft-64", "ttft-244"]
    assert set(charts) == {f"engine-model-bf16-{name}.png" for name in names}
    assert all(data.startswith(b"\x89PNG") for data in charts.values())


def test_figures(whole):
    figures = {figure.name: figure for figure in read_figures(whole[-1])}
    single = figures["engine/single stream, plain/over transformers plain"]
    assert (single.how, single.target, single.unit) == ("measured", 2.5, "x")
    assert figures["engine/16 requests, plain/over llama.cpp plain"].target == 1.0
    assert figures["engine/code edits, auto/over llama.cpp lookup"].target == 1.0
    assert figures["engine/code edits, plain/over llama.cpp plain"].target is None
    assert "engine/code edits, plain/over llama.cpp lookup" not in figures
    assert figures["engine/ttft 64/p99"].target == 100.0
    assert "engine/ttft 244/p95" not in figures  # of 4 samples
    assert figures["engine/batch=2, suffix, k=3/speedup"].how == "measured"
    assert figures["engine/batch=2, suffix, k=3/predicted_speedup"].how == "predicted"
    assert figures["engine/batch=2, SYNTHETIC 0.80, k=3/speedup"].how == "synthetic"
    assert figures["engine/batch=1, suffix, k=auto/itl_p99"].unit == "ms"
    assert "engine/step, batch=2, 4 tokens a row/over one" in figures
    assert "engine/int4 weights/over bf16" in figures


def test_document(whole):
    """What a reader must know to judge the numbers is in the JSON."""
    document = whole[-1]
    assert document["peers"]["llama.cpp"] == {"version": "1.2.3", "threads": 1}
    assert document["threading"]["threads"] == document["threads"]
    assert any("OMP" in line.upper() for line in document["threading"]["openmp"])
    rows = {(row["case"], row["side"]): row for row in document["cases"]}
    agreeing = rows["16 requests", "transformers continuous"]
    assert (agreeing["same_outputs"], agreeing["outputs"]) == (16, 16)
    assert agreeing["first_difference"] is None
    wrong = rows["single stream", "llama.cpp plain"]
    assert (wrong["same_outputs"], wrong["first_difference"]) == (0, [5, 0])
    assert len(rows["code edits", "suffix k=8"]["tokens_per_s"]) == 2
    cells = {(cell["batch"], cell["drafter"], cell["k"]) for cell in document["sweep"]}
    drafters, lengths = ("suffix", "SYNTHETIC 0.80"), (0, 1, 3, "auto")
    assert cells == {(b, name, k) for b in (1, 2) for name in drafters for k in lengths}
    assert [row["weights"] for row in document["weights"]] == ["int8", "int4"]
    assert len(document["ttft"][0]["seconds"]["plain"]) == 100
    assert len(document["ttft"][0]["seconds"]["transformers plain"]) == 3


def test_what_is_missing_is_said(whole):
    *_, printed, document = whole
    lines = document["left_out"]
    assert "peer vLLM: needs a CUDA device" in lines
    assert "peer OpenVINO GenAI: not installed: make bench-peers" in lines
    assert "drafter draft: there is no draft model (--draft)" in lines
    assert "text: the model has no tokenizer: prompts are random tokens" in lines
    assert "code edits: assisted (--assistant): not a mode of transformers, llama.cpp here" in lines
    assert "TTFT of 475 tokens: the model has no room for such a prompt" in document["not_judged"]
    assert all(f"left out  {line}" in printed for line in lines)


def test_without_peers_aims_are_not_judged(folder, tmp_path, monkeypatch):
    missing = {"transformers": "not asked for", "llama.cpp": "no llama-server on PATH"}
    monkeypatch.setattr(engine, "open_peers", lambda *args, **options: ([], missing))
    few_first_tokens(monkeypatch)
    status, printed, document = run(folder, tmp_path, "--parts", "cases")
    assert status == 0
    line = "code edits over llama.cpp lookup >= 1: llama.cpp did not run: no llama-server on PATH"
    assert line in document["not_judged"]
    assert f"not judged  {line}" in printed
    assert "beside other engines" not in printed
    targets = [figure.name for figure in read_figures(document) if figure.target is not None]
    assert targets == ["engine/ttft 64/p99"]


def spoil(monkeypatch, is_spoilt):
    """Let the engine get the last token wrong where ``is_spoilt(llm, prompts)``."""
    honest = LLM.generate

    def generate(self, prompts, params=None):
        completions = honest(self, prompts, params)
        if not is_spoilt(self, prompts):
            return completions
        return [
            replace(one, token_ids=[*one.token_ids[:-1], one.token_ids[-1] ^ 1])
            for one in completions
        ]

    monkeypatch.setattr(LLM, "generate", generate)


GATES = {
    "drafts, cases": ("cases", lambda llm, prompts: bool(llm.engine.speculation.drafters)),
    "drafts, sweep": ("sweep", lambda llm, prompts: bool(llm.engine.speculation.drafters)),
    "batch": ("sweep", lambda llm, prompts: len(prompts) == 2),
}


@pytest.mark.parametrize("part, is_spoilt", GATES.values(), ids=GATES)
def test_no_speed_of_a_wrong_output(part, is_spoilt, folder, tmp_path, peers, monkeypatch):
    """Teeth: one token differs."""
    spoil(monkeypatch, is_spoilt)
    status, printed, document = run(folder, tmp_path, "--parts", part)
    assert status == 1
    assert "changed the output of prompt" in document["error"]
    assert "no speed is reported" in printed
    assert document["figures"] == []
    assert "tokens/s" not in printed
    assert list(tmp_path.iterdir()) == []


def test_a_peer_that_breaks_is_left_out(folder, tmp_path, peers):
    peers[1].fails_at = 2  # the warm-up and one round of the first case went well
    status, printed, document = run(folder, tmp_path, "--parts", "cases")
    assert status == 0
    assert "single stream, llama.cpp plain: the server died" in document["left_out"]
    rows = {(row["case"], row["side"]): row for row in document["cases"]}
    assert len(rows["single stream", "llama.cpp plain"]["tokens_per_s"]) == 1
    assert len(rows["16 requests", "llama.cpp plain"]["tokens_per_s"]) == 2


def test_what_does_not_fit_the_time_is_named(folder, tmp_path, peers):
    status, printed, document = run(folder, tmp_path, "--seconds", "0.001")
    assert status == 0
    lines = document["left_out"]
    assert "single stream: 1 of 2 rounds: out of time" in lines
    assert "TTFT of 64 tokens: 97 of 100: out of time" in lines
    line = "TTFT of 64 tokens, p99 <= 100 ms: 3 samples, 100 are needed"
    assert line in document["not_judged"]
    assert "batch 1: out of time" in lines
    assert "int8 weights: out of time" in lines
    assert document["sweep"] == document["weights"] == []
    assert len(document["cases"]) > 0
