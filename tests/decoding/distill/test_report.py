"""A run's report: its verdict, and text and figure that say what the JSON says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pagedraft.decoding.distill import report_figure
from pagedraft.decoding.distill.report import document, render, verdict, write_report
from pagedraft.decoding.distill.report_figure import figure_of
from pagedraft.decoding.distill.report_text import markdown
from pagedraft.tests.decoding.distill.judged import EMPTY, judgement, measured

FACTS = {
    "target": "demo",
    "device": "a machine",
    "seed": 7,
    "folder": Path("/models/demo"),
    "seconds": {"texts": 12.25, "train": 345.678901},
    "losses": [5.5, float("nan"), 2.25],
    "curve": [float(i) for i in range(20)],
    "hash": None,
    "command": "distill --kinds 'a|b'",
    "is_resumed": False,
    "notes": {},
}
PNG = b"\x89PNG\r\n\x1a\n"
# tokens a pass at k=1 -> expected 2.0 / 1.59375 = 1.25x; measured; the line.
GOOD, BAD, SLIGHT = 2.0, 1.2, 1.65
VERDICTS = {
    "gain": (GOOD, measured(), "k=1: 1.25x expected, 1.28x measured, single stream on H"),
    "slower": (
        GOOD,
        measured(0.94),
        "no gain: at best 0.94x measured at k=1 (1.25x expected), noise 2.4%, single stream on H",
    ),
    "within noise": (
        GOOD,
        measured(1.07, noise=0.08),
        "no gain: at best 1.07x measured at k=1 (1.25x expected), noise 8.0%, single stream on H",
    ),
    "not measured": (GOOD, None, "k=1: 1.25x expected, speed not measured, single stream on H"),
    "not expected": (
        BAD,
        None,
        "no gain: at best 0.75x expected at k=1, noise 5.0%, speed not measured, "
        "single stream on H",
    ),
    "hardly expected": (
        SLIGHT,
        None,
        "no gain: at best 1.04x expected at k=1, noise 5.0%, speed not measured, "
        "single stream on H",
    ),
    "changed output": (
        GOOD,
        measured(num_same=2),
        "fault: drafts changed the output at k=1, single stream on H",
    ),
    "a k beyond the estimate": (
        GOOD,
        measured(k=5),
        "k=5: not estimated, 1.28x measured, single stream on H",
    ),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts(name):
    tokens_per_pass, found, line = VERDICTS[name]
    assert verdict(judgement(tokens_per_pass), found, "H") == line
    text = markdown(document({"device": "H"}, judgement(tokens_per_pass), found), None)
    assert text.startswith(f"# Draft\n\n**{line}**\n")


def test_the_json_round_trips_and_makes_the_report_again(tmp_path):
    files = write_report(tmp_path / "made", FACTS, judgement(), measured())
    assert [file.name for file in files] == ["report.json", "report.md", "report.png"]
    loaded = json.loads(files[0].read_text(), parse_constant=pytest.fail)
    assert loaded == document(FACTS, judgement(), measured())
    again = render(tmp_path, loaded)
    contents = [[file.read_bytes() for file in made] for made in (files, again)]
    assert contents[0] == contents[1]
    assert contents[0][2].startswith(PNG)


def row_of(text: str, *cells: str) -> str:
    """The only line of a table that begins with ``cells``."""
    begin = f"| {' | '.join(cells)} |"
    [line] = [line for line in text.splitlines() if line.startswith(begin)]
    return line


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_text_has_the_figures_of_the_json():
    report = document(FACTS, judgement(), measured())
    text = markdown(report, "report.png")
    after = report["judgement"]["drafters"]["after"]
    assert "single stream on a machine**" in text
    assert "](report.png)" in text
    agreement = row_of(section(text, "Agreement with the target"), "all texts")
    assert agreement == "| all texts | 3 | 70 | 0.311 | 0.642 | 0.517 | 0.517 |" + (" 0.575 |" * 3)
    drafts = section(text, "Drafts on code")
    assert row_of(drafts, "2", "0.429") == "| 2 |" + " 0.429 | 0.250 |" * 3
    chat = section(text, "Drafts on chat")
    speedups = [report["judgement"]["drafters"][n]["kinds"]["chat"] for n in ("before", "after")]
    expected = [f"{found['rows'][0]['speedup']:.2f}x" for found in speedups]
    assert row_of(chat, "1", "1.35", "2.25", "1.45", *expected).endswith("| 1.86 | 1.28x |")
    arithmetic = section(text, "The arithmetic")
    costs = row_of(arithmetic, "after", "4.000", "1.000", "2.100", "0.250", "0.500", "0.100")
    assert costs.endswith("| 5.0% | 1.25 | 1.50 |")
    one = after["total"]["rows"][0]
    assert row_of(arithmetic, "1", "2.000", "1.250", "0.250", "0.062", "0.031").endswith(
        f"| {one['cost']:.3f} | {one['speedup']:.2f}x |"
    )
    engine = section(text, "Measured in the engine")
    assert row_of(engine, "all texts", "plain", "23.4")
    ran = row_of(engine, "all texts", "1", "29.9", "1.86", "0.86", "1.28x")
    assert ran.endswith("| 1.27x to 1.29x | 3 of 3 |")


def test_what_was_not_measured_is_said():
    text = markdown(document(FACTS, judgement(), None), None)
    assert "Speed in the engine: not measured." in text
    assert row_of(section(text, "Drafts on all texts"), "1", "1.10").endswith(
        "| not measured | not measured |"
    )
    assert row_of(text, "hash") == "| hash | not measured |"
    text = markdown(document(FACTS, judgement(), measured()), None)
    engine = section(text, "Measured in the engine")
    assert row_of(engine, "code") == "| code |" + " not measured |" * 7
    assert row_of(section(text, "Drafts on all texts"), "2", "1.20").endswith(
        "| not measured | not measured |"
    )


def test_a_kind_without_a_token():
    found = judgement()
    kinds = {name: {**one.kinds, "code": EMPTY} for name, one in found.drafters.items()}
    drafters = {name: replace(one, kinds=kinds[name]) for name, one in found.drafters.items()}
    text = markdown(document({}, replace(found, drafters=drafters), measured()), None)
    assert "No text of this kind has a token to draft: not measured." in text
    row = row_of(section(text, "Agreement with the target"), "code")
    assert row == "| code | 1 | 0 |" + " not measured |" * 7


def test_one_kind_is_not_told_twice():
    text = markdown(document({}, judgement(kinds=("chat",)), measured()), None)
    assert "All texts are of one kind: chat." in text
    assert text.count("\n## Drafts on ") == 1
    assert row_of(section(text, "Measured in the engine"), "all texts", "1")


def test_texts_that_became_others_are_said():
    found = measured()
    changed = replace(found, num_rewritten=2, total=replace(found.total, num_tokens=31))
    text = markdown(document({}, judgement(), changed), None)
    assert "wrote 2 of the texts otherwise" in text
    assert "Measured on 3 texts of 31 tokens in all, expected of texts of 70" in text
    text = markdown(document({}, judgement(), found), None)
    assert "otherwise" not in text
    assert "expected of texts of" not in text


def test_the_facts_are_a_table():
    text = section(markdown(document(FACTS, judgement()), None), "The run")
    assert row_of(text, "seconds.train") == "| seconds.train | 345.679 |"
    assert row_of(text, "losses") == "| losses | 5.5, nan, 2.25 |"
    assert row_of(text, "curve") == "| curve | 0, .., 19 (20 values) |"
    assert row_of(text, "command") == "| command | distill --kinds 'a\\|b' |"
    assert row_of(text, "folder") == "| folder | /models/demo |"
    assert row_of(text, "is_resumed") == "| is_resumed | no |"
    assert row_of(text, "notes") == "| notes | none |"


def test_without_matplotlib_there_is_no_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(report_figure.importlib.util, "find_spec", lambda name: None)
    files = write_report(tmp_path, FACTS, judgement(), measured())
    assert [file.name for file in files] == ["report.json", "report.md"]
    text = files[1].read_text()
    assert "matplotlib is not installed" in text
    assert "report.png" not in text


def test_the_figure_has_the_points_of_the_json():
    report = document(FACTS, judgement(), measured())
    places, tokens, speed = figure_of(report).axes

    def points(axes) -> dict[str, list[float]]:
        lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
        return {label: values for label, values in lines.items() if label[0] != "_"}

    assert points(places)["after"] == [23 / 40, 9 / 21]
    assert points(tokens)["after, expected"] == [2.0, 2.1]
    rows = report["judgement"]["drafters"]["before"]["total"]["rows"]
    assert points(speed)["before, expected"] == [row["speedup"] for row in rows]
    assert (points(tokens)["after, measured"], points(speed)["after, measured"]) == (
        [1.861],
        [1.283],
    )
    assert "after, measured" not in points(figure_of(document({}, judgement())).axes[2])
