"""This tree against another revision: what is slower is shown, and only that."""

from __future__ import annotations

import argparse
import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from pagedraft.bench.base_ratio import MIN_DIFFERENCE, compare, judge, paired_ratio, race
from pagedraft.bench.base_worker import digest
from pagedraft.tests.bench.toy_revisions import copy_of_package, trees


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> tuple[int, dict, str, Path]:
    """Return (status, saved document, printed text, root) of an edit against its slow revision."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    root, out = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("out")
    _, slow = copy_of_package(root)
    options = argparse.Namespace(
        **{"device": "cpu", "model": "tiny", "dtype": "fp32", "steps": "decode1"},
        **{"op": "rms_norm,gated_mlp", "base": slow, "pairs": 1, "rounds": 3, "budget": 0.18},
        out=str(out),
    )
    with redirect_stdout(io.StringIO()) as text:
        status = compare(options, root)
    saved = json.loads((out / "kernels-tiny-fp32-base.json").read_text())
    return status, saved, text.getvalue(), root


def row_of(document: dict, case: str) -> dict:
    return next(row for row in document["rows"] if row["case"] == f"decode1/{case}")


class TestCompare:
    """The whole command on a copy of this package."""

    def test_slower_op_is_shown_beyond_noise(self, compared):
        status, document, text, _ = compared
        row = row_of(document, "gated_mlp act")
        assert row["word"] == "slower"
        assert 2 < row["ratio"]["value"] < 4
        assert status == 0
        assert "decode1/gated_mlp act" in json.loads(text.splitlines()[-1])["slower"]

    def test_equal_op_is_within_noise(self, compared):
        row = row_of(compared[1], "rms_norm norm")
        assert row["word"] == "within noise"
        assert len(row["rounds"]["this"]) == len(row["rounds"]["base"]) == 3

    def test_case_of_one_side_is_said(self, compared):
        assert row_of(compared[1], "rms_norm add_norm")["word"] == "only in this"
        assert row_of(compared[1], "rms_norm old_norm")["word"] == "only in base"

    def test_figures_are_ratios_with_their_noise(self, compared):
        figures = {figure["name"]: figure for figure in compared[1]["figures"]}
        found = figures["kernels-base/tiny-fp32/decode1/gated_mlp act/of base"]
        assert found["low"] <= found["value"] <= found["high"]
        assert (found["better"], found["how"]) == ("lower", "measured")
        assert len(figures) == 2

    def test_document_says_what_both_sides_are(self, compared):
        document = compared[1]
        assert "and 2 changed files" in document["this"]
        assert document["base"].endswith("its own bench's cases")

    def test_nothing_stays_behind(self, compared):
        assert trees(compared[3]) == []


class FakeSide:
    """Answers with given seconds a case, and counts."""

    def __init__(self, cases: dict[str, list[float]], log: list, name: str, **answer) -> None:
        self.cases, self.missing, self._log, self._name = list(cases), {}, log, name
        self._seconds = {case: iter(seconds) for case, seconds in cases.items()}
        self._answer = {"problem": None, "digest": "same", "implementation": "cpu"} | answer

    def ask(self, request):
        self._log.append(self._name)
        return {**self._answer, "seconds": next(self._seconds[request["case"]]), "method": "clock"}


def fake_race(base_answer: dict, this=(1.0,) * 4, base=(1.0,) * 4) -> tuple[dict, list[str]]:
    log: list[str] = []
    sides = FakeSide({"a": this}, log, "this"), FakeSide({"a": base}, log, "base", **base_answer)
    row = {"case": "a"}
    race(*sides, row, [True, False, True, False], 1.0)
    judge(row)
    return row, log


def test_sides_take_turns_in_either_order():
    row, log = fake_race({})
    assert log == ["this", "base", "base", "this", "this", "base", "base", "this"]
    assert row["word"] == "within noise"


def test_rounds_of_several_pairs_of_processes_are_judged_together():
    def sides(seconds: float) -> tuple[FakeSide, FakeSide]:
        return FakeSide({"a": [seconds] * 2}, [], "this"), FakeSide({"a": [1.0] * 2}, [], "base")

    row = {"case": "a"}
    race(*sides(1.0), row, [True, False], 1.0)
    race(*sides(1.2), row, [True, False], 1.0)  # a pair of processes that differs
    judge(row)
    assert row["rounds"]["this"] == [1.0, 1.0, 1.2, 1.2]
    assert row["word"] == "within noise"


def test_other_inputs_are_not_compared():
    row, log = fake_race({"digest": "other"})
    assert row["word"].startswith("not compared")
    assert "ratio" not in row
    assert log == ["this", "base"]


def test_wrong_numbers_have_no_ratio():
    row, _ = fake_race({"problem": "output 0: error 1"})
    assert row["word"] == "WRONG in base: output 0: error 1"
    assert "ratio" not in row


RATIOS = {
    "equal": ([1.0, 1.01, 0.99, 1.0], [1.0] * 4, "within noise"),
    "slower by more than rounds spread": ([1.2, 1.21, 1.19, 1.2], [1.0] * 4, "slower"),
    "faster": ([1.0] * 4, [1.2, 1.21, 1.19, 1.2], "faster"),
    "less than processes differ": ([1.04] * 4, [1.0] * 4, "within noise"),
    "slower by less than rounds spread": ([1.0, 1.1, 1.2, 1.3], [1.0] * 4, "within noise"),
    "a machine that slows down for both": ([1.0, 2.0, 4.0], [1.0, 2.0, 4.0], "within noise"),
    "slower on a machine that slows down": ([1.2, 2.4, 4.8], [1.0, 2.0, 4.0], "slower"),
}


@pytest.mark.parametrize("name", RATIOS)
def test_verdict_follows_paired_ratios(name):
    this, base, word = RATIOS[name]
    assert paired_ratio(this, base).word == word


def test_least_difference_is_a_few_per_cent():
    assert paired_ratio([1 + 2 * MIN_DIFFERENCE] * 3, [1.0] * 3).word == "slower"


@pytest.mark.parametrize("this, base", [([1.0] * 2, [1.0] * 2), ([1.0] * 4, [1.0] * 3)])
def test_rounds_come_in_three_pairs_or_more(this, base):
    with pytest.raises(ValueError, match="three or more pairs"):
        paired_ratio(this, base)


DIGESTS = {
    "a value": {"x": torch.arange(4.0), "y": torch.tensor([0])},
    "a dtype": {"x": torch.ones(4, dtype=torch.bfloat16), "y": torch.tensor([1])},
    "a shape": {"x": torch.ones(2, 2), "y": torch.tensor([1])},
    "a name": {"z": torch.ones(4), "y": torch.tensor([1])},
}


@pytest.mark.parametrize("name", DIGESTS)
def test_digest_tells_inputs_apart_by(name):
    same = {"y": torch.tensor([1]), "x": torch.ones(4)}
    assert digest(same) == digest(dict(reversed(same.items())))
    assert digest(DIGESTS[name]) != digest(same)
