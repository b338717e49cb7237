"""The speculation bench: a dry run on a tiny model, the gate, and the arithmetic of its ratios."""

from __future__ import annotations

import json

import pytest

from pagedraft.bench import speculation
from pagedraft.bench.figures import read_figures
from pagedraft.bench.speculation import AUTO, PLAIN, Bench, Speeds, Text, cells
from pagedraft.bench.speculation_prompts import EDITS, QUESTIONS, random_prompts
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.model.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("cpu_path")
PROMPTS = [[5, 6, 7, 8] * 5, [9, 3] * 8]
TEXTS = [
    Text("loops", PROMPTS, 0.0, ignore_eos=True),
    Text("loops, 2 at once", PROMPTS, 0.8, ignore_eos=True, at_once=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("speculation") / "model"
    save_tiny(path, "llama")
    return path


def test_dry_run(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speculation, "texts", lambda llm, count: TEXTS)
    arguments = ["--model", str(folder), "--fixed", "1", "3", "--tokens", "12", "--rounds", "2"]
    arguments += ["--drafters", "ngram", "suffix", "--device", "cpu", "--out", str(tmp_path)]
    assert speculation.main(arguments) == 0
    printed = capsys.readouterr().out
    document = json.loads(printed.splitlines()[-1])
    assert json.loads((tmp_path / "speculation-model.json").read_text()) == document
    rows = document["rows"]
    assert [(row["drafter"], row["text"]) for row in rows] == [
        (drafter, text.name) for drafter in ("ngram", "suffix") for text in TEXTS
    ]
    assert all(list(row["speeds"]) == ["0", "1", "3", "auto"] for row in rows)
    assert all(row["ratios"]["0"] == 1.0 for row in rows)
    assert all(0 <= row["accepted"] <= row["drafted"] for row in rows)
    assert rows[0]["report"]["steps"] > 0
    assert "loops, 2 at once" in printed
    figures = {figure.name: figure.value for figure in read_figures(document)}
    assert len(figures) == 4 * len(rows)
    name = f"speculation/{rows[0]['drafter']}, {rows[0]['text']}/k=3 over plain"
    assert figures[name] == rows[0]["ratios"]["3"]


def test_an_output_that_drafts_changed_stops_the_bench(folder, monkeypatch):
    """Teeth: one token differs."""
    llm = LLM(folder, speculate="off", kv_tokens=64, block_size=8)
    bench = Bench(llm, "ngram", 8, {"kv_tokens": 128, "block_size": 8})
    honest = Bench._run

    def wrong(self, text, prompts, k):
        stats, output = honest(self, text, prompts, k)
        return stats, [[*row[:-1], row[-1] + (k == AUTO)] for row in output]

    monkeypatch.setattr(Bench, "_run", wrong)
    with pytest.raises(RuntimeError, match="loops: drafts changed the output of prompt 0"):
        bench.measure(TEXTS[0], 1, (PLAIN, 2, AUTO))


def test_ratios_are_medians_of_pairs():
    speeds = {"0": [10.0, 20.0, 10.0], "2": [20.0, 20.0, 30.0], "auto": [19.0, 38.0, 19.0]}
    report = {"mean_k": 1.5, "seconds_error": 0.04, "tokens_bias": -0.02}
    row = Speeds("edits", "ngram", speeds, drafted=10, accepted=5, report=report)
    assert (row.ratio(0), row.ratio(2), row.ratio(AUTO)) == (1.0, 2.0, 1.9)
    assert row.share_of_best == 0.95
    expected = ["ngram", "edits", "10.0", "2.00", "1.90", "0.95", "1.5", "0.50", "4 %", "-2 %"]
    assert cells(row) == expected


def test_prompts_are_eight_of_each_kind():
    numbers = random_prompts(100)
    assert len(EDITS) == len(QUESTIONS) == len(numbers) == 8
    assert len(set(EDITS)) == len(set(QUESTIONS)) == 8
    assert numbers == random_prompts(100)
    assert {len(prompt) for prompt in numbers} == {64}
