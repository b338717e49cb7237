"""All parts in a row: each ends alone, its figures come together, and a bad name is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import pytest

from pagedraft.bench import __main__ as all_parts
from pagedraft.bench.figures import Figure, as_json, from_samples, read_figures

GOOD = Figure("a/x/speed", 2.0, "x", "higher", "measured", low=1.9, high=2.1, target=1.5)
MISSED = Figure("a/x/us", 9.0, "us", "lower", "measured", target=5.0)
FREE = Figure("a/x/count", 3.0, "launches", "lower", "counted")
DOCUMENT = json.dumps({"bench": "a", "figures": as_json([GOOD, MISSED, FREE])})


@dataclass(frozen=True)
class Script(all_parts.Part):
    """A part that runs a line of Python."""

    def command(self, folder):
        return [sys.executable, "-c", self.module]


PARTS = {
    "good": Script("good", f"print('a table'); print({DOCUMENT!r})"),
    "failing": Script("failing", f"print({DOCUMENT!r}); raise SystemExit(1)"),
    "silent": Script("silent", "pass"),
    "broken": Script("broken", "print('{not JSON')"),
    "endless": Script(
        "endless", f"import time; print({DOCUMENT!r}, flush=True); time.sleep(60)", limit=0.7
    ),
}
EXPECTED = {  # verdict, figures
    "good": ("ok", 3),
    "failing": ("FAILED", 3),
    "silent": ("ok", 0),
    "broken": ("ok", 0),
    "endless": ("OUT OF TIME", 3),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_ends_with_a_verdict_and_its_figures(name, tmp_path):
    outcome = all_parts.run_part(PARTS[name], tmp_path)
    assert (outcome.verdict, len(outcome.figures)) == EXPECTED[name]
    assert outcome.seconds < 30


@pytest.mark.parametrize(("names", "status"), [(["good"], 0), (["good", "failing"], 1)])
def test_one_table_and_one_json_line_at_the_end(names, status, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(all_parts, "PARTS", tuple(PARTS.values()))
    assert all_parts.main([*names, "--out", str(tmp_path)]) == status
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(lines[-1])
    assert [part["verdict"] for part in document["parts"]] == [EXPECTED[name][0] for name in names]
    assert any("a/x/speed" in line and "met" in line for line in lines)
    assert any("a/x/us" in line and "missed" in line for line in lines)
    assert not any("a/x/count" in line for line in lines)
    saved = json.loads((tmp_path / "all.json").read_text())
    assert len(saved["figures"]) == 3 * len(names)


def test_what_runs_by_default_has_to_end_within_the_total(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(all_parts, "PARTS", (PARTS["good"], PARTS["silent"]))
    monkeypatch.setattr(all_parts, "TOTAL", 0.0)
    assert all_parts.main(["--out", str(tmp_path)]) == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [part["verdict"] for part in document["parts"]] == ["OUT OF TIME", "OUT OF TIME"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["enginee"], "unknown parts ['enginee']"), (["--op", "linear,lineal"], "unknown ops")],
)
def test_a_name_that_there_is_not_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as refused:
        all_parts.main(arguments)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_one_op_is_a_run_of_the_kernels_part():
    (part,) = all_parts.choose([], "linear")
    assert part.command(all_parts.Path("there"))[2:5] == [
        "pagedraft.bench.kernels",
        "--op",
        "linear",
    ]


class TestFigures:
    @pytest.mark.parametrize(
        ("figure", "is_met"), [(GOOD, True), (MISSED, False), (FREE, None)], ids=["a", "b", "c"]
    )
    def test_a_target_is_met_in_its_direction(self, figure, is_met):
        assert figure.is_met is is_met

    def test_they_come_back_as_they_were(self):
        figures = [GOOD, MISSED, FREE]
        assert read_figures({"figures": as_json(figures)}) == figures

    def test_samples_become_a_median_between_percentiles(self):
        figure = from_samples("a", [5.0, 1.0, 2.0, 3.0, 4.0], "s", "lower")
        assert (figure.value, figure.low, figure.high) == (3.0, 1.8, 4.2)
        assert from_samples("a", [5.0], "s", "lower").low is None

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"better": "more"}, "a: better: expected one of"),
            ({"how": "guessed"}, "a: how: expected one of"),
            ({"value": float("nan")}, "a: expected a finite number"),
        ],
    )
    def test_what_is_no_figure_is_refused(self, changes, message):
        facts = {"name": "a", "value": 1.0, "unit": "s", "better": "lower", "how": "measured"}
        with pytest.raises(ValueError, match=message):
            Figure(**facts | changes)

    def test_a_name_stands_for_one_figure(self):
        with pytest.raises(ValueError, match=r"got \['a/x/us'\] more than once"):
            as_json([MISSED, GOOD, MISSED])
        with pytest.raises(ValueError, match="at least one sample"):
            from_samples("a", [], "s", "lower")

    @pytest.mark.parametrize(
        ("document", "message"),
        [({}, "f: expected a list"), ({"figures": [{"name": "a"}]}, "f: figure 0 cannot be read")],
    )
    def test_a_document_without_figures_is_named(self, document, message):
        with pytest.raises(ValueError, match=message):
            read_figures(document, "f")
