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
    "no prompt": ("submit", {"prompt": []}, "request 'request-0': prompt: expected at least one"),
    "words": ("submit", {"prompt": ["a"]}, "request 'request-0': "),
    "a token": ("submit", {"prompt": [99999]}, "request 'request-0': prompt[0]: expected a token"),
    "a priority": ("submit", {"priority": "x"}, "request 'request-0': priority: expected an int"),
    "heat": ("submit", {"temperature": -1}, "request 'request-0': temperature: expected from 0"),
    "a seed": ("submit", {"seed": "x"}, "request 'request-0': invalid literal for int()"),
    "a parameter": ("submit", {"params": {"bogus": 1}}, "request 'request-0': "),
    "bias": ("submit", {"params": {"logit_bias": 5}}, "request 'request-0': AttributeError: "),
    "rules": ("submit", {"rules": {"top_k": "x"}}, "trace.json: "),
    "no context": ("submit", {"max_context": None}, "max_context: expected int, got None"),
    "swaps": ("step", {"swaps": 7}, "trace.json: 'int' object is not iterable"),
    "nobody": ("step", {"admitted": [[1]]}, "trace.json: unhashable type"),
    "swap": ("settings", {"swap": 5}, "trace.json: AttributeError: 'int' object"),
    "model": ("settings", {"model": {"config": 5}}, "trace.json: model.config: expected 5"),
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


def damage_row(key: str, value: object):
    """A change of the first row that has drafts."""

    def change(args: dict) -> bool:
        row = next((r for r in args["rows"] if "drafts" in r), None)
        if row is not None:
            row[key] = value
        return row is not None

    return change


# key and value of a row, and what the error says
BAD_ROWS = {
    "a word": ("drafts", ["a"], "drafts: expected token ids from 0 to 96, got 'a'"),
    "a large draft": ("drafts", [10**30], "drafts: expected token ids from 0 to 96, got 1000"),
    "a negative draft": ("drafts", [-5], "drafts: expected token ids from 0 to 96, got -5"),
    "no list": ("drafts", 5, "'int' object is not iterable"),
    "bad zlib": ("q", {"shape": [1], "zlib": "eJwD"}, "error: Error -5 while decompressing"),
    "no zlib": ("q", {"shape": [1]}, "KeyError: 'zlib'"),
    "tokens": ("tokens", 5, "TypeError"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_one_line_and_status_2(recorded, tmp_path, capsys, name):
    key, value, message = BAD_ROWS[name]
    path = tmp_path / "trace.json"
    shutil.copy(recorded, path)
    edited(path, "step", damage_row(key, value))
    assert main(["replay", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{path}: " in error
    assert message in error or message == "TypeError"
    assert len(error.splitlines()) == 1


def test_a_submission_inside_a_callback_that_is_bad_is_no_difference(recorded, tmp_path, capsys):
    path = tmp_path / "trace.json"
    shutil.copy(recorded, path)

    def change(args: dict) -> bool:
        args["priority"] = "x" if args["caller"] is not None else args["priority"]
        return args["caller"] is not None

    edited(path, "submit", change)
    assert main(["replay", str(path)]) == 2
    assert "priority: expected an integer, got 'x'" in capsys.readouterr().err


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
