"""Rows, figures and goodputs of the serving bench, from hand-made runs."""

from __future__ import annotations

import json
import math

import pytest

from pagedraft.bench.serving_charts import draw_curve, draw_distribution
from pagedraft.bench.serving_goodput import Goodput, Trial
from pagedraft.bench.serving_load import MIXES, Job, Load
from pagedraft.bench.serving_rows import HEADERS, Found, Row, failures
from pagedraft.bench.serving_run import TIME_LIMIT, Answer, Run
from pagedraft.bench.serving_summary import Summary, summarise
from pagedraft.scheduler.request import RequestStats

LOAD = Load(MIXES["code"], rate=2.0, cv=1.0, seconds=5.0, lead=0.0, seed="a")


def summary(ttft_ms: float, count: int = 10, failed: int = 0, gaps: int = 2) -> Summary:
    """A run of ``count`` requests of one TTFT, 20 ms between tokens; some others were given up."""
    times = [ttft_ms / 1e3 + 0.02 * step for step in range(gaps + 1)]
    job = Job(0.0, [1], 128, 16, True)
    answers = [
        Answer(job, RequestStats(0.0, [(when, 1) for when in times]), 0.0, times[-1])
        for _ in range(count)
    ]
    answers += [Answer(job, RequestStats(0.0), 0.0, 9.0, TIME_LIMIT) for _ in range(failed)]
    return summarise(Run(0.0, answers, [1] * count, [0] * count, False), LOAD, 100.0)


def row(*rounds: Summary, speculation: str = "off") -> Row:
    return Row("poisson", "code", speculation, 2.0, list(rounds))


def test_a_row_is_the_median_of_its_rounds():
    one = row(summary(50.0), summary(90.0), summary(60.0))
    assert one.value("TTFT p99") == pytest.approx(60.0)
    assert one.is_kept
    assert len(one.pooled("ttft")) == 30
    figures = {figure.name: figure for figure in one.figures()}
    p99 = figures["serving/poisson/code/off/TTFT p99 at 2 per s"]
    assert (p99.value, p99.low, p99.high) == pytest.approx((60.0, 54.0, 78.0))
    assert p99.unit == "ms"
    assert figures["serving/poisson/code/off/ITL p50 at 2 per s"].value == pytest.approx(20.0)
    assert figures["serving/poisson/code/off/tokens/s at 2 per s"].better == "higher"
    assert len(one.cells()) == len(HEADERS)


def test_one_round_that_misses_is_enough():
    assert not row(summary(50.0), summary(101.0)).is_kept


def test_what_a_row_has_not_is_left_out():
    one = row(summary(50.0, gaps=0))
    assert math.isnan(one.value("ITL p99"))
    assert not any("ITL" in figure.name or "gap" in figure.name for figure in one.figures())
    assert one.cells()[6:12] == ["-"] * 6
    assert "NaN" not in json.dumps(one.document())
    assert one.document()["rounds"][0]["ITL p99"] is None


def test_failures_are_added_up():
    rows = [row(summary(50.0, failed=1), summary(50.0, failed=2)), row(summary(50.0))]
    assert failures(rows) == {TIME_LIMIT: 3}
    assert rows[0].cells()[-2:] == ["3", "no"]


def test_a_goodput_says_how_sure_it_is():
    goodput = Goodput(2.0, 2.2, (Trial(2.0, True), Trial(2.2, False), Trial(2.0, True)), True)
    runs = {2.0: [summary(50.0, 150), summary(60.0, 150)], 2.2: [summary(200.0)]}
    found = Found("poisson", "code", "off", 100.0, goodput, runs)
    assert found.figure().value == 2.0
    assert found.figure().name == "serving/poisson/code/off/goodput at 100 ms"
    lines = "\n".join(found.lines())
    assert "2 requests/s kept the target; 2.2 missed it" in lines
    assert "300 requests at that rate, 0 missed" in lines
    assert "with 95% confidence" in lines
    assert found.document()["requests"] == 300


def test_a_goodput_of_nothing_gives_the_latencies_of_the_lowest_rate():
    goodput = Goodput(None, 0.5, (Trial(1.0, False), Trial(0.5, False)), False)
    runs = {1.0: [summary(900.0)], 0.5: [summary(240.0, failed=0), summary(260.0, failed=2)]}
    found = Found("poisson", "code", "off", 100.0, goodput, runs)
    assert found.figure().value == 0.0
    [first, second] = found.lines()
    assert first == "even the lowest rate tried, 0.5 requests/s, missed the target"
    assert second == "there p99 TTFT 4620 ms, p99 ITL 20 ms; 2 of 22 requests failed"
    assert found.document()["confidence_if_independent"] is None


def test_charts_have_the_target_and_a_line_for_each():
    rows = [row(summary(50.0)), row(summary(40.0, gaps=0), speculation="auto")]
    [axes] = draw_curve(rows, {"off": 1.5, "auto": None}, 100.0, "title").axes
    assert [line.get_label() for line in axes.get_lines() if line.get_label()[0] != "_"] == [
        "TTFT, speculation off",
        "ITL, speculation off",
        "TTFT, speculation auto",
        "ITL, speculation auto",
        "target 100 ms",
    ]
    assert [list(line.get_xdata()) for line in axes.get_lines()][2] == [1.5, 1.5]
    [axes] = draw_distribution(rows, "ITL", 100.0, "title").axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["2/s, speculation off", "target 100 ms"]  # the other has no ITL
