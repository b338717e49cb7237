"""What bench-compare says of two documents or folders, and what it refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from pagedraft.bench import compare
from pagedraft.bench.figures import Figure, as_json
from pagedraft.tests.bench.made_figures import counted, timed


@pytest.fixture
def save(tmp_path):
    """A function that writes figures, or anything, as a document and returns its path."""

    def saved(name: str, rows: Any, **facts: Any) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(rows, list) and all(isinstance(row, Figure) for row in rows):
            rows = as_json(rows)
        document = {"device": "H200", "threads": 2, "dtype": "bf16", **facts, "figures": rows}
        path.write_text(json.dumps(document))
        return str(path)

    return saved


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_document_says_what_changed(save, tmp_path, capsys):
    better = Figure("b", 5.0, "tok/s", "higher", "measured")
    same = Figure("c", 7, "launches", "lower", "counted")
    new = Figure("d", 1, "s", "lower", "measured")
    gone = Figure("e", 1, "s", "lower", "measured")
    before = save("x.json", [timed(100, 98, 102), better, same, gone], git="1234567")
    faster = Figure("b", 10.0, "tok/s", "higher", "measured")
    after = save("y.json", [timed(150, 148, 152), faster, same, new], git="89abcde")
    assert compare.main([before, after, "--json", str(tmp_path / "z.json")]) == 1
    printed = capsys.readouterr().out
    document = json.loads(printed.splitlines()[-1])
    assert document["counts"] == {
        "gone": 1,
        "worse": 1,
        "better": 1,
        "new": 1,
        "moved": 0,
        "same": 1,
    }
    marks = [(change["name"], change["mark"], change["ratio"]) for change in document["changes"]]
    assert marks == [
        ("e", "gone", None),
        ("a", "worse", 1.5),
        ("b", "better", 2.0),
        ("d", "new", None),
    ]
    assert json.loads((tmp_path / "z.json").read_text()) == document
    assert re.search(r"^a +100 \[98 102\] us +150 \[148 152\] us +\+50.0 % +worse$", printed, re.M)
    assert "git  1234567  ->  89abcde" in printed


def test_equal_documents_are_no_failure(save, capsys):
    path = save("x.json", [timed(100, 98, 102), Figure("b", 7, "launches", "lower", "counted")])
    assert compare.main([path, path]) == 0
    assert last_line(capsys)["changes"] == []
    assert compare.main([path, path, "--all"]) == 0
    assert [change["mark"] for change in last_line(capsys)["changes"]] == ["same", "same"]


def test_better_and_new_figures_are_no_failure(save):
    before = save("x.json", [timed(100, 98, 102)])
    after = save("y.json", [timed(50, 49, 51), Figure("b", 7, "launches", "lower", "counted")])
    assert compare.main([before, after]) == 0


def test_a_share_of_the_ceiling_is_shown_and_not_judged(save, capsys):
    """Between two runs the ceiling moved, the time did not."""
    time, share = timed(100, 98, 102), Figure("a/ceiling", 50.0, "%", "higher", "measured", 49, 51)
    before = save("x.json", [time, share])
    after = save("y.json", [time, replace(share, value=10.0, low=9.0, high=11.0)])
    assert compare.main([before, after]) == 0
    assert [change["mark"] for change in last_line(capsys)["changes"]] == ["moved"]
    assert compare.main([before, save("z.json", [time])]) == 1


ROW = {"name": "a", "value": 1.0, "unit": "us", "better": "lower", "how": "measured"}
# name -> the figures of the second document, what is said of it.
UNUSABLE = {
    "no list": (None, "y.json: document: expected a list 'figures', got NoneType"),
    "empty": ([], "y.json: expected at least one figure, got none"),
    "not a figure": ([3], "y.json: document: figure 0 cannot be read"),
    "unknown field": ([ROW | {"speed": 1}], "figure 0 cannot be read"),
    "no value": ([{k: v for k, v in ROW.items() if k != "value"}], "figure 0 cannot be read"),
    "NaN": ([ROW | {"value": float("nan")}], "y.json: a: expected a finite number, got nan"),
    "infinite": ([ROW | {"value": float("inf")}], "expected a finite number, got inf"),
    "text": ([ROW | {"value": "1.0"}], "figure 0 cannot be read"),
    "truth": ([ROW | {"value": True}], "a: expected numbers, got [True, None, None]"),
    "text as low": ([ROW | {"low": "1", "high": 2}], "a: expected numbers, got [1.0, '1', 2]"),
    "low alone": ([ROW | {"low": 1.0}], "a: expected low and high or neither, got [1.0, None]"),
    "low above high": ([ROW | {"low": 2.0, "high": 1.0}], "expected finite low <= high"),
    "low of NaN": ([ROW | {"low": float("nan"), "high": 1.0}], "expected finite low <= high"),
    "twice": ([ROW, ROW], "expected each figure once, got ['a'] more than once"),
    "no name": ([ROW | {"name": ""}], "name of a figure: expected text, got ''"),
    "unknown how": ([ROW | {"how": "guessed"}], "a: how: expected one of"),
    "unknown better": ([ROW | {"better": "more"}], "a: better: expected one of"),
    "another unit": ([ROW | {"unit": "ms"}], "a: unit: expected 'us', got 'ms'"),
    "got otherwise": ([ROW | {"how": "modelled"}], "a: how: expected 'measured', got 'modelled'"),
    "another bench": ([ROW | {"name": "z"}], "expected two runs of one bench"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_figures(name, save, capsys):
    rows, message = UNUSABLE[name]
    assert compare.main([save("x.json", [ROW]), save("y.json", rows)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


# name -> what stands in the second file, what is said of it.
NO_DOCUMENTS = {
    "broken": ('{"figures": [', "y.json: broken JSON"),
    "list": ("[1, 2]", "y.json: expected a JSON object, got a list"),
    "binary": ("\x00\x01", "y.json: broken JSON"),
    "empty": ("", "y.json: broken JSON"),
}


@pytest.mark.parametrize("name", NO_DOCUMENTS)
def test_no_document(name, save, tmp_path, capsys):
    text, message = NO_DOCUMENTS[name]
    (tmp_path / "y.json").write_text(text)
    assert compare.main([save("x.json", [ROW]), str(tmp_path / "y.json")]) == 2
    assert message in capsys.readouterr().err


def test_no_file(save, tmp_path, capsys):
    assert compare.main([save("x.json", [ROW]), str(tmp_path / "y.json")]) == 2
    assert "y.json: expected a file or a folder, there is none" in capsys.readouterr().err
    assert compare.main([save("x.json", [ROW]), str(tmp_path)]) == 2
    assert "expected two files or two folders" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--margin", "--single"])
@pytest.mark.parametrize("value", ["nan", "-0.1", "inf"])
def test_bad_margin(option, value, save, capsys):
    path = save("x.json", [ROW])
    assert compare.main([path, path, f"{option}={value}"]) == 2
    assert f"{option}: expected a share of 0 or more, got {value}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fact, value", [("device", "A100"), ("threads", 1), ("dtype", "fp16"), ("model", "1b")]
)
def test_other_conditions_are_refused_unless_meant(fact, value, save, capsys):
    before = save("x.json", [timed(100, 98, 102)], model="8b")
    after = save("y.json", [timed(100, 98, 102)], **{"model": "8b", fact: value})
    assert compare.main([before, after]) == 2
    printed = capsys.readouterr().err
    assert f"{fact}: expected" in printed
    assert "--across compares all the same" in printed
    assert compare.main([before, after, "--across"]) == 0


def test_counts_of_another_machine_can_be_compared(save):
    before = save("x.json", [counted(7)])
    after = save("y.json", [counted(8)], device="A100", threads=16)
    assert compare.main([before, after]) == 1
    assert compare.main([before, save("z.json", [counted(7)], dtype="fp16")]) == 2


def test_only_what_matches_is_compared(save, capsys):
    before = save("x.json", [timed(100, 98, 102), Figure("b", 7, "launches", "lower", "counted")])
    after = save("y.json", [timed(100, 98, 102)])
    assert compare.main([before, after]) == 1
    assert compare.main([before, after, "--match", "a"]) == 0
    assert compare.main([before, after, "--match", "z"]) == 2
    assert "--match: expected part of a figure's name, got 'z'" in capsys.readouterr().err


def test_folders(save, tmp_path, capsys):
    save("old/one/a.json", [timed(100, 98, 102)])
    save("old/b.json", [counted(7), Figure("b", 2, "launches", "lower", "counted")])
    save("new/one/a.json", [timed(150, 148, 152)])
    save("new/c.json", [counted(7)])
    (tmp_path / "old" / "trace.json").write_text("{}")
    assert compare.main([str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    document = last_line(capsys)
    assert {change["name"]: change["mark"] for change in document["changes"]} == {
        "b.json: a": "gone",
        "b.json: b": "gone",
        "one/a.json: a": "worse",
        "c.json: a": "new",
    }
    assert document["left_out"] == ["trace.json"]


def test_an_error_in_a_folder_names_the_document(save, tmp_path, capsys):
    save("old/a.json", [timed(100, 98, 102)])
    save("new/a.json", [timed(100, 98, 102)], device="A100")
    assert compare.main([str(tmp_path / "old"), str(tmp_path / "new")]) == 2
    assert "compare: a.json: device: expected 'H200' in both" in capsys.readouterr().err


def test_folders_without_a_pair(save, tmp_path, capsys):
    save("old/a.json", [timed(100, 98, 102)])
    save("new/b.json", [timed(100, 98, 102)])
    assert compare.main([str(tmp_path / "old"), str(tmp_path / "new")]) == 2
    assert "expected a document with figures that both have" in capsys.readouterr().err
