"""The quality bench: the control is equal, a damaged model is worse, what is the same is said."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from pagedraft.bench import quality, quality_greedy, quality_report
from pagedraft.bench import quality_choice as choice
from pagedraft.bench import quality_text as text
from pagedraft.bench.figures import read_figures
from pagedraft.bench.quality import MODES, TASKS, TEXT, measure
from pagedraft.bench.quality_modes import CONTROL, Source
from pagedraft.bench.quality_report import LeftOut, verdict
from pagedraft.bench.quality_tasks import read_tasks
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.tests.bench import toy_quality as toy
from pagedraft.tests.bench.toy_quality import DAMAGED

pytestmark = pytest.mark.usefixtures("cpu_path")
CPU = torch.device("cpu")
BY_NAME = {mode.name: mode for mode in MODES}
FEW = [BY_NAME[name] for name in (CONTROL, "fast", "int8", "int4", "kv-int8")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quality") / "model"
    toy.save(folder)
    return folder


@pytest.fixture(scope="module")
def source(folder) -> Source:
    with use_implementation("cpu"):
        return toy.DamagedSource.read(folder, torch.float32, CPU)


@pytest.fixture(scope="module")
def probe(source):
    with use_implementation("cpu"):
        return toy.own_probe(source.model(BY_NAME[CONTROL])[0])


@pytest.fixture(scope="module")
def rows(source, probe):
    with use_implementation("cpu"):
        return {row.name: row for row in measure(source, probe, [*FEW, DAMAGED])}


def test_control_is_its_own_measure(rows, probe):
    control = rows[CONTROL]
    assert (control.ratio.value, control.ratio.error, control.same_best.value) == (1, 0, 1)
    assert control.greedy.same_answers.value == control.greedy.same_best.value == 1
    assert control.greedy.prefix.value == probe.num_new
    assert (control.change.lost, control.change.won) == (0, 0)
    assert control.groups["own"].value == control.groups["order"].value == 1
    assert control.groups["word"].value == 0


def test_damaged_model_is_worse_at_everything(rows):
    """Teeth: every figure sees it, and no interval holds "no difference"."""
    damaged = rows["damaged"]
    assert damaged.ratio.low > 1.05
    assert damaged.change.share.high < -0.2
    assert damaged.change.lost > damaged.change.won
    assert damaged.likelier.high < 0
    assert damaged.same_best.high < 0.6
    assert damaged.greedy.same_answers.value < 0.5
    assert damaged.greedy.same_best.high < 0.8
    assert damaged.greedy.prefix.value < 4
    assert verdict(damaged.ratio, 1.0, is_loss_up=True) == "loss"
    assert verdict(damaged.change.share, 0.0, is_loss_up=False) == "loss"


def test_quantised_modes_cost_less_than_damage(rows):
    control, int8, int4, kv = (rows[name] for name in (CONTROL, "int8", "int4", "kv-int8"))
    assert control.weight_bytes > int8.weight_bytes > int4.weight_bytes
    assert control.kv_bytes == int8.kv_bytes > kv.kv_bytes
    assert kv.weight_bytes == control.weight_bytes
    assert 0 < int8.ratio.error < int4.ratio.error < rows["damaged"].ratio.error
    assert 0 < kv.ratio.error < int4.ratio.error
    assert abs(int4.ratio.value - 1) < rows["damaged"].ratio.value - 1
    assert int8.perplexity == pytest.approx(control.perplexity * int8.ratio.value)


def test_fast_is_not_an_equal_number_on_a_cpu(rows, source, probe):
    """The row says why it has no figures, and what it says is true: the bits are the same."""
    assert isinstance(rows["fast"], LeftOut)
    assert "code path of exact on a CPU" in rows["fast"].reason
    few, stored = probe.tokens[:65], torch.float32
    fast, exact = (source.model(mode)[0] for mode in (BY_NAME["fast"], BY_NAME[CONTROL]))
    assert (fast.exact, exact.exact) == (False, True)
    losses, _ = text.score(fast, few, stored, window=64)
    assert torch.equal(losses, text.score(exact, few, stored, window=64)[0])


def _differs_by_chunk(monkeypatch):
    honest = text.score

    def score(model, tokens, stored, *, window, chunk=text.CHUNK):
        losses, best = honest(model, tokens, stored, window=window, chunk=chunk)
        return losses + chunk * 1e-9, best

    monkeypatch.setattr(text, "score", score)


def _differs_by_batch(monkeypatch):
    honest = choice.option_scores

    def option_scores(*arguments, chunk=choice.CHUNK):
        return [scores + chunk * 1e-9 for scores in honest(*arguments, chunk=chunk)]

    monkeypatch.setattr(choice, "option_scores", option_scores)


def _differs_by_decoding(monkeypatch):
    honest = quality_greedy.answers

    def answers(*arguments):
        first, *others = honest(*arguments)
        return [[*first[:-1], (first[-1] + 1) % 97], *others]

    monkeypatch.setattr(quality_greedy, "answers", answers)


FAULTS = {
    "losses differ when the text is fed in other chunks": _differs_by_chunk,
    "scores differ when tasks are fed one by one": _differs_by_batch,
    "answers are not its best tokens": _differs_by_decoding,
}


@pytest.mark.parametrize(("message", "break_it"), FAULTS.items(), ids=FAULTS)
def test_control_that_differs_stops_the_bench(source, probe, monkeypatch, message, break_it):
    """Teeth: a model whose numbers depend on how it is fed must not become the measure."""
    break_it(monkeypatch)
    with pytest.raises(RuntimeError, match=f"mode {CONTROL}: .*{message}"):
        measure(source, probe, FEW)


@pytest.mark.parametrize(
    ("where", "message"), {"embed": "text, token 0", "layers.1.qkv": "text, token 0"}.items()
)
def test_nan_logits_name_mode_and_place(source, probe, where, message):
    weights = {**source.weights, where: torch.full_like(source.weights[where], torch.nan)}
    with pytest.raises(RuntimeError, match=f"mode {CONTROL}: {message}: expected a finite"):
        measure(replace(source, weights=weights), probe, [BY_NAME[CONTROL]])


def test_figures_and_chart(rows, tmp_path):
    done = [row for row in rows.values() if not isinstance(row, LeftOut)]
    figures = {figure.name: figure for figure in quality_report.figures(done)}
    assert not any("/fast/" in name for name in figures)
    ratio = figures["quality/int8/perplexity_ratio"]
    assert (ratio.better, ratio.how, ratio.target) == ("lower", "measured", 1.01)
    assert ratio.low < ratio.value < ratio.high
    assert figures["quality/int4/same_answers"].better == "higher"
    assert figures["quality/kv-int8/accuracy_own"].value == rows["kv-int8"].groups["own"].value
    assert f"quality/{CONTROL}/perplexity_ratio" not in figures
    facts = {"device": "d", "threads": 1, "git": "g", "date": "now"}
    quality_report.draw(done, tmp_path / "chart.png", facts, "how")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def command(folder, tmp_path, monkeypatch):
    """The command line's options for the tiny model and a text of 200 characters."""
    monkeypatch.setattr(quality, "read_tokenizer", lambda _: toy.Characters())
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 5)
    small = ["--window", "32", "--tokens", "64", "--prompts", "2", "--new-tokens", "4"]
    files = ["--text", str(tmp_path / "text.txt"), "--out", str(tmp_path)]
    return ["--model", str(folder), "--device", "cpu", "--every", "9", *small, *files]


def test_command_line(command, tmp_path, capsys):
    assert quality.main([*command, "--modes", "fast,int8"]) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    assert [row["name"] for row in document["rows"]] == [CONTROL, "int8"]
    assert list(document["left_out"]) == ["fast"]
    assert (document["tokens"], document["prompts"], document["new_tokens"]) == (64, 2, 4)
    assert len(read_figures(document)) == len(document["figures"]) > 20
    assert "exact=False is the code path of exact on a CPU" in out
    assert "left out: modes fp32, int8-plain-head" in out
    [name] = [path.stem for path in tmp_path.glob("*.json")]
    assert json.loads((tmp_path / f"{name}.json").read_text()) == document
    assert (tmp_path / f"{name}.png").exists()


BAD = {
    "modes": (["--modes", "int5"], "modes: expected some of"),
    "empty text": (["--text", "EMPTY"], "text: expected some words, got none"),
    "no text": (["--text", "nowhere.txt"], "nowhere.txt cannot be read"),
    "short text": (["--window", "300"], "expected more than 300 tokens, a window, got 65"),
    "window": (["--window", "2048"], "window: expected 1 to 2047 tokens, got 2048"),
    "tokens": (["--tokens", "0"], "expected at least 1, got 0"),
    "prompts": (["--prompts", "17"], "prompts: expected 2 to 16, got 17"),
    "tasks": (["--tasks", "BROKEN"], "broken.jsonl:2: answer: expected an index below 2, got 2"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_bad_options(command, tmp_path, capsys, options, message):
    line = {"id": "a", "group": "g", "context": "c", "options": ["x", "y"], "answer": 1}
    (tmp_path / "broken.jsonl").write_text(
        f"{json.dumps(line)}\n{json.dumps({**line, 'id': 'b', 'answer': 2})}\n"
    )
    (tmp_path / "empty.txt").write_text(" \n")
    files = {"EMPTY": str(tmp_path / "empty.txt"), "BROKEN": str(tmp_path / "broken.jsonl")}
    with pytest.raises(SystemExit) as status:
        quality.main([*command, *(files.get(option, option) for option in options)])
    assert status.value.code == 2
    assert message in capsys.readouterr().err


def test_gate_fails_the_command(command, monkeypatch, capsys):
    _differs_by_chunk(monkeypatch)
    assert quality.main([*command, "--modes", "int8"]) == 1
    captured = capsys.readouterr()
    assert "fed in other chunks" in captured.err
    assert "Perplexity" not in captured.out


@pytest.mark.demo_model
def test_demo_model_is_above_chance_and_below_the_ceiling(tmp_path, capsys):
    """A set that a model gets all right, or guesses, says nothing about modes."""
    options = ["--modes", CONTROL, "--tokens", "64", "--window", "64", "--prompts", "2"]
    small = ["--new-tokens", "4", "--every", "3", "--device", "cpu", "--out", str(tmp_path)]
    assert quality.main([*options, *small]) == 0
    [row] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert 0.55 < row["accuracy"]["value"] < 0.9
    assert all(share["low"] > 0.2 for share in row["groups"].values())


def test_files():
    assert len(TEXT.read_text()) > 15_000
    assert len(read_tasks(TASKS)) >= 120
