"""``--trace`` and ``pagedraft replay``: what they print, and the exit status."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pagedraft.kernels.dispatch import use_implementation
from pagedraft.scheduler.cli import main
from pagedraft.tests.model.tiny import save_tiny
from pagedraft.tests.scheduler.traced import edited, random_run, traced_llm

pytestmark = pytest.mark.usefixtures("cpu_path")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    save_tiny(folder / "model", "llama")
    path = folder / "trace.json"
    with use_implementation("cpu"):
        llm = traced_llm(path, folder / "model", dtype="fp32")
        random_run(llm, seed=4)
    llm.trace.close()
    return path


def test_a_run_that_is_the_same_ends_with_status_0(recorded, capsys):
    assert main(["replay", str(recorded)]) == 0
    schedule, tokens = capsys.readouterr().out.splitlines()
    assert schedule.startswith("schedule: identical (")
    assert tokens.startswith("tokens: identical (")
    assert tokens.endswith("requests)")


def test_the_model_may_have_moved(recorded, tmp_path, capsys):
    shutil.copytree(recorded.parent / "model", tmp_path / "moved")
    edit = tmp_path / "trace.json"
    shutil.copy(recorded, edit)
    edited(edit, "settings", lambda args: args["options"].update(model="/no/such") is None)
    assert main(["replay", str(edit), "--device", "cpu"]) == 2
    assert "/no/such" in capsys.readouterr().err
    assert main(["replay", str(edit), "--model", str(tmp_path / "moved")]) == 0


def test_a_run_that_differs_ends_with_status_1(recorded, tmp_path, capsys):
    def change(args: dict) -> bool:
        row = next((r for r in args["rows"] if "tokens" in r), None)
        if row is not None:
            row["tokens"][0] = (row["tokens"][0] + 1) % 97
        return row is not None

    path = tmp_path / "trace.json"
    shutil.copy(recorded, path)
    edited(path, "step", change)
    assert main(["replay", str(path)]) == 1
    schedule, tokens = capsys.readouterr().out.splitlines()
    assert schedule.startswith("schedule: identical until there (")
    assert tokens.startswith("tokens: differ at step ")
    assert "output position 0: recorded token" in tokens


def test_a_trace_that_is_cut_off_says_so(recorded, tmp_path, capsys):
    path = tmp_path / "trace.json"
    path.write_bytes(recorded.read_bytes()[:-100])
    assert main(["replay", str(path)]) == 0
    assert "note: the trace has no end" in capsys.readouterr().out


def test_another_torch_is_noted(recorded, tmp_path, capsys):
    path = tmp_path / "trace.json"
    shutil.copy(recorded, path)
    edited(path, "settings", lambda args: args.update(torch="1.0") is None)
    assert main(["replay", str(path)]) == 0
    assert "note: recorded with torch 1.0, replayed with" in capsys.readouterr().out


def replace_in(args: dict, **values) -> bool:
    args.update(values)
    return True


# event, change, what the error says
BAD = {
    "format": ("settings", {"format": 99}, "format: expected 1, got 99: another version"),
    "no sizes": ("settings", {"engine": {}}, "settings.engine: block_size: expected int, got None"),
    "no options": ("settings", {"options": None}, "settings: options: expected dict, got None"),
    "an option": ("settings", {"options": {"color": 1}}, "LLM has no option 'color'"),
    "a step": ("step", {"step": 7}, "step: expected 0, got 7"),
    "no rows": ("step", {"rows": None}, "step: rows: expected list, got None"),
    "a row": ("step", {"rows": [3]}, "row: expected an object, got 3"),
    "a stranger": ("step", {"admitted": [77]}, "step: request 77 was not submitted before"),
    "a parent": ("submit", {"parent": 50}, "submit: request 50 was not submitted before"),
    "a prompt": ("submit", {"prompt": "hi"}, "submit: prompt: expected list, got 'hi'"),
    "a time": ("submit", {"before_step": 50}, "before_step: expected 0, got 50"),
    "processors": ("submit", {"num_processors": 2}, "has logits processors: functions"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_traces_are_one_line_and_status_2(recorded, tmp_path, capsys, name):
    kind, values, message = BAD[name]
    path = tmp_path / "trace.json"
    shutil.copy(recorded, path)
    edited(path, kind, lambda args: replace_in(args, **values))
    assert main(["replay", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


BAD_FILES = {
    "none": (None, "No such file"),
    "empty": ("", "not a trace"),
    "no trace": ("[\n" + json.dumps({"name": "a", "args": {}}) + "\n]\n", "it has no settings"),
    "cut in its settings": ('[\n{"name":"settings","cat":"re', "expected the settings"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_are_no_traces_are_one_line_and_status_2(tmp_path, capsys, name):
    content, message = BAD_FILES[name]
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_text(content)
    assert main(["replay", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert str(path) in error
    assert len(error.splitlines()) == 1


def test_another_model_is_refused(recorded, tmp_path, capsys):
    save_tiny(tmp_path / "other", "llama", vocab_size=61)
    assert main(["replay", str(recorded), "--model", str(tmp_path / "other")]) == 2
    assert "model.config.vocab_size: expected '97' as recorded, got '61'" in capsys.readouterr().err


def test_a_trace_that_cannot_be_written_is_one_line_and_status_2(recorded, tmp_path, capsys):
    arguments = ["generate", "hi", "--model", str(recorded.parent / "model")]
    assert main([*arguments, "--trace", str(tmp_path / "no" / "trace.json")]) == 2
    assert "trace.json: No such file or directory" in capsys.readouterr().err


@pytest.mark.demo_model
def test_an_answer_is_traced_and_replayed(tmp_path, capsys):
    path = tmp_path / "trace.json"
    arguments = ["generate", "What is the capital of France?", "--max-tokens", "8"]
    options = ["--device", "cpu", "--kv-tokens", "512", "--trace", str(path)]
    assert main([*arguments, *options]) == 0
    assert json.loads(path.read_text())[-1]["ph"] == "C"
    assert main(["replay", str(path)]) == 0
    assert "tokens: identical (" in capsys.readouterr().out
