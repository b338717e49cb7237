"""The attention sweep's documents, output, verdicts and figure, without a GPU.

Measured rows are made up where a verdict or a ratio must be known; otherwise the trial points run
here, whose times mean nothing.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from pagedraft.bench import attention_sweep, kernels
from pagedraft.bench.attention_baselines import BASELINES
from pagedraft.bench.attention_cases import (
    FULL,
    GRID,
    SHORT,
    TRIAL,
    prepare_attention,
    step_point,
)
from pagedraft.bench.attention_figures import figures_of
from pagedraft.bench.attention_sweep import H200, measure_baseline, measure_point, modelled, price
from pagedraft.bench.attention_targets import verdicts
from pagedraft.bench.ceiling import Ceiling
from pagedraft.bench.figures import read_figures
from pagedraft.bench.report import RESULTS

CPU = torch.device("cpu")
CEILING = Ceiling(copy_rate=1e12, matmul_rate=100e12)
TIMES = {"time", "text", "gb_s", "tflop_s", "share_of_ceiling", "baselines"}


def sweep(folder, *arguments: str) -> int:
    return kernels.main(["--sweep", "attention", "--out", str(folder), *arguments])


def saved(folder, select: str) -> dict:
    return json.loads((folder / f"attention-{select}.json").read_text())


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("select, points", [("full", FULL), ("short", SHORT)])
def test_without_a_gpu_nothing_is_measured(tmp_path, capsys, select, points):
    assert sweep(tmp_path, "--select", select) == 0
    text = capsys.readouterr().out
    assert "nothing measured" in text
    assert H200.name in text
    assert json.loads(text.splitlines()[-1])["measured"] is False
    document = saved(tmp_path, select)
    assert document["device"] == H200.name
    assert [row["point"] for row in document["rows"]] == [point.name for point in points]
    assert not any(TIMES & set(row) for row in document["rows"])


@pytest.mark.parametrize("select", ["full", "short"])
def test_saved_model_is_what_the_code_gives(select):
    """Where costs or launches changed on purpose, run the sweep and the figure again."""
    assert saved(RESULTS / "modelled", select) == json.loads(json.dumps(modelled(select)))


def test_floor_is_the_larger_of_both_times():
    decode, prompt = (price(point, H200.ceiling, True) for point in (GRID[0], FULL[len(GRID)]))
    assert decode["floor"] == pytest.approx(decode["bytes"] / 4.3e12)
    assert prompt["floor"] == pytest.approx(prompt["flops"] / 790e12)
    assert (decode["bound"], prompt["bound"]) == ("bytes", "flops")


def test_trial_measures_what_there_is(tmp_path, capsys):
    options = ("--select", "trial", "--device", "cpu", "--budget", "0.01", "--baselines", "sdpa")
    assert sweep(tmp_path, *options) == 0
    assert "not a benchmark" in capsys.readouterr().out
    rows = saved(tmp_path, "trial")["rows"]
    assert all(set(row) >= TIMES for row in rows)
    assert all(row["baselines"]["sdpa"]["time"]["median"] > 0 for row in rows)


@pytest.fixture
def known_ceiling(monkeypatch):
    monkeypatch.setattr(attention_sweep, "measure_ceiling", lambda *_: CEILING)


@pytest.mark.usefixtures("known_ceiling")
def test_points_after_the_limit_are_left_out(tmp_path, capsys):
    assert sweep(tmp_path, "--select", "trial", "--device", "cpu", "--limit", "0") == 0
    assert "not run: out of time" in capsys.readouterr().out
    rows = saved(tmp_path, "trial")["rows"]
    assert [row["left_out"] for row in rows] == ["out of time"] * len(TRIAL)


def test_unknown_baseline_is_named(tmp_path):
    with pytest.raises(ValueError, match="unknown \\['eager'\\]"):
        sweep(tmp_path, "--baselines", "sdpa,eager")


def test_failing_baseline_marks_its_own_cell(monkeypatch):
    def fails(point, t):
        raise RuntimeError("no such kernel\nand a long trace")

    def is_missing(point, t):
        raise ImportError("no module")

    monkeypatch.setitem(BASELINES, "flashinfer", fails)
    monkeypatch.setitem(BASELINES, "flash_attn", is_missing)
    row = measure_point(TRIAL[0], CPU, CEILING, ("sdpa", "flashinfer", "flash_attn"), 0.01)
    assert row["problem"] is None
    assert "time" in row["baselines"]["sdpa"]
    assert row["baselines"]["flashinfer"] == {"problem": "RuntimeError: no such kernel"}
    assert row["baselines"]["flash_attn"] == {"problem": "not installed"}


def test_baseline_that_computes_something_else_has_no_time(monkeypatch):
    sdpa = BASELINES["sdpa"]
    monkeypatch.setitem(BASELINES, "flex", lambda point, t: sdpa(replace(point, window=9), t))
    inputs = attention_sweep.point_inputs(TRIAL[1], CPU)
    out = prepare_attention(TRIAL[1])(inputs)()
    found = measure_baseline("flex", TRIAL[1], [inputs], out, CPU, 0.01)
    assert found["problem"].startswith("WRONG")


@pytest.mark.usefixtures("known_ceiling")
def test_wrong_numbers_have_no_time(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(attention_sweep, "gate", lambda prepare, inputs: "output 0: error 1")
    assert sweep(tmp_path, "--select", "trial", "--device", "cpu") == 1
    assert "WRONG: output 0: error 1" in capsys.readouterr().out
    assert not any(TIMES & set(row) for row in saved(tmp_path, "trial")["rows"])


def measured(times: dict[str, float], points=SHORT) -> dict:
    """A document in which each point takes its floor times ``times[step]``; others have no time."""
    rows = [price(point, CEILING, True) for point in points]
    for row in rows:
        if row["step"] in times:
            seconds = row["floor"] * times[row["step"]]
            row["time"] = {"median": seconds, "p20": seconds / 2, "p80": seconds * 2}
    return {
        **{"measured": True, "select": "short", "device": "Some GPU", "rows": rows},
        **{"threads": 1, "git": "abc1234", "date": "2026-01-01 00:00 UTC"},
        "ceiling": {"copy_rate": CEILING.copy_rate, "matmul_rate": CEILING.matmul_rate},
    }


VERDICT_CASES = {
    "fast": ({"decode": 1.1, "verify9": 1.1, "prefill": 1.5, "prompt": 1.5}, {"met"}),
    "slow": ({"decode": 1.3, "verify9": 1.6, "prefill": 1.8, "prompt": 1.8}, {"MISSED"}),
    "nothing": ({}, {"OPEN"}),
}


@pytest.mark.parametrize("name", VERDICT_CASES)
def test_verdicts(name):
    times, expected = VERDICT_CASES[name]
    judged = verdicts(measured(times))
    assert {verdict.word for verdict in judged} == expected
    assert {verdict.text().split()[1] for verdict in judged} == expected
    # Bandwidth of six decodes and verifies, three ratios, two prefills.
    assert len(judged) == 11


def test_verify_is_judged_against_decode_of_the_same_cache():
    judged = verdicts(measured({"decode": 1.0, "verify9": 1.2}))
    ratio = next(v for v in judged if v.name == "of decode, verify9 8x8192 cache int8")
    int8 = {p.step: price(p, CEILING, True)["floor"] for p in SHORT if p.cache == "int8"}
    assert ratio.value == pytest.approx(1.2 * int8["verify9"] / int8["decode"])
    assert not ratio.is_met


def test_model_is_not_judged():
    assert verdicts(modelled("short")) == []


def test_figures_of_a_model_are_counts_and_guesses():
    figures = {figure.name: figure for figure in read_figures(modelled("short"))}
    assert {figure.how for figure in figures.values()} == {"counted", "modelled"}
    point = step_point("decode", 65536)
    row = price(point, H200.ceiling, True)
    found = figures[f"attention/short/{point.name}/bytes"]
    assert found.value == row["bytes"] + row["scratch"]["launched"]
    assert figures[f"attention/short/{point.name}/floor"].value == row["floor"] * 1e6
    ratio = figures["attention/short/verify9 of decode, context 65536/bytes"]
    assert 1.0 < ratio.value < 1.2


def test_figures_of_a_measurement_are_times_and_targets():
    document = measured({"decode": 1.1})
    figures = {figure.name: figure for figure in read_figures({"figures": figures_of(document)})}
    us = figures["attention/short/decode 8x8192/us"]
    assert (us.how, us.low, us.high) == ("measured", us.value / 2, us.value * 2)
    assert figures["attention/short/decode 8x8192/ceiling"].value == pytest.approx(100 / 1.1)
    target = figures["attention/short/target/of copy bandwidth, decode 8x8192"]
    assert target.is_met
    assert not any("verify9" in name for name in figures)  # it has no time


class TestFigure:
    """verify / decode of both kinds of document."""

    @pytest.fixture(autouse=True)
    def _needs_matplotlib(self):
        pytest.importorskip("matplotlib", reason="the figure needs matplotlib")

    def test_modelled_ratio_counts_partials(self):
        from pagedraft.bench.figure_verify import ratios

        kv, q = 8 * 8192 * 8 * 128 * 2 * 2, 8 * 32 * 128 * 2 * 2  # bytes of one query a row
        partials = 8 * 32 * 4 * 130 * 4 * 2  # four sections of 8192 keys, written and read
        expected = (kv + 9 * (q + partials)) / (kv + q + partials)
        assert dict(ratios(modelled("full"))[9, "sections"])[8192] == pytest.approx(expected)

    def test_measured_ratio_is_of_times(self):
        from pagedraft.bench.figure_verify import ratios

        document = measured({"decode": 2.0, "verify5": 3.0}, GRID)
        floors = {(row["step"], row["context"]): row["floor"] for row in document["rows"]}
        found = ratios(document)
        assert set(found) == {(5, "time")}
        ratio = dict(found[5, "time"])[2048]
        assert ratio == pytest.approx(1.5 * floors["verify5", 2048] / floors["decode", 2048])

    @pytest.mark.parametrize(
        "document, title, unit",
        [
            (
                modelled("full"),
                "verify(k+1) / decode(1), modelled bytes",
                "ratio of bytes, each key counted once",
            ),
            (
                measured({"decode": 2.0, "verify9": 3.0}, GRID),
                "verify(k+1) / decode(1), measured on Some GPU",
                "ratio of times",
            ),
        ],
        ids=["modelled", "measured"],
    )
    def test_figure_says_what_it_is(self, tmp_path, document, title, unit):
        from pagedraft.bench.figure_verify import figure_of, main

        axes = figure_of(document).axes[0]
        assert axes.get_title() == title
        assert axes.get_ylabel() == unit
        source = tmp_path / "attention-full.json"
        source.write_text(json.dumps(document))
        assert main([str(source)]) == 0
        assert (tmp_path / "verify_over_decode.png").read_bytes().startswith(b"\x89PNG")

    def test_no_numbers_no_figure(self):
        from pagedraft.bench.figure_verify import figure_of

        with pytest.raises(ValueError, match="got none with numbers"):
            figure_of(measured({}, GRID))
