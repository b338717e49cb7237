"""The latency bench: a dry run on a tiny model, the gates, and the arithmetic of its verdicts."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest

from pagedraft.bench import latency, latency_runs
from pagedraft.bench.figures import read_figures
from pagedraft.bench.latency import checks
from pagedraft.bench.latency_runs import Joined, gaps_of, join, poisson_times, prompt_of, same_start
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.model.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("cpu_path")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("latency") / "model"
    save_tiny(path, "llama")
    return path


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Sizes that a tiny model runs in a second."""
    for name, value in (("STREAM_PROMPT", 5), ("SETTLE_STEPS", 6), ("NUM_NEW", 4)):
        monkeypatch.setattr(latency_runs, name, value)
    monkeypatch.setattr(latency_runs, "LENGTHS", (3, 9, 20))


@pytest.fixture
def llm(folder):
    return LLM(folder, speculate="off", kv_tokens=512, block_size=8)


def test_dry_run(folder, tmp_path, capsys):
    arguments = ["--model", str(folder), "--rounds", "2", "--prompt", "40", "--requests", "5"]
    status = latency.main([*arguments, "--device", "cpu", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    document = json.loads(printed.splitlines()[-1])
    assert json.loads((tmp_path / "latency-model.json").read_text()) == document
    assert len(document["joined"]) == len(document["cached"]) == 2
    passed = [figure.is_met for figure in read_figures(document)]
    assert len(passed) == 6
    assert status == (0 if all(passed) else 1)
    assert printed.count("\npass  ") + printed.count("\nFAIL  ") == 6
    assert printed.count("\npass  ") == sum(passed)
    served = document["served"]
    assert served["itl_ms"] > 0
    assert set(served["paced"]["ttft_ms"]) == {"p50", "p95", "p99"}


def test_a_run_leaves_nothing_behind(llm):
    numbers = random.Random(0)
    streams = [prompt_of(llm, numbers, 5) for _ in range(3)]
    run = join(llm, prompt_of(llm, numbers, 30), streams, 1.0)
    assert not llm.engine.has_work
    assert not llm.engine.pace.has_targets
    llm.engine.check_integrity()
    assert len(run.gaps) >= 3
    assert [len(output) > 6 for output in run.outputs] == [True, True, True, False]
    assert len(run.outputs[-1]) == 1


def test_an_output_that_targets_changed_stops_the_bench(llm, monkeypatch):
    """Teeth: one token differs."""
    honest = latency_runs.join

    def wrong(llm, prompt, streams, factor):
        run = honest(llm, prompt, streams, factor)
        run.outputs[0][2] += factor is not None
        return run

    monkeypatch.setattr(latency_runs, "join", wrong)
    with pytest.raises(RuntimeError, match="targets changed the output"):
        latency.join_rounds(llm, random.Random(0), 1, 30)


def test_an_output_that_the_cache_changed_stops_the_bench(llm, monkeypatch):
    honest = latency_runs.alone
    monkeypatch.setattr(latency_runs, "alone", lambda llm, prompt: (honest(llm, prompt)[0], [-1]))
    with pytest.raises(RuntimeError, match="cached KV changed the output"):
        latency.cached_rounds(llm, random.Random(0), 1, 30)


def test_gaps_are_between_steps_that_brought_tokens():
    request = SimpleNamespace(
        stats=SimpleNamespace(emissions=[(1.0, 1), (1.5, 3), (2.0, 1), (4.0, 1)])
    )
    assert gaps_of([request]) == [0.5, 0.5, 2.0]
    assert gaps_of([request, request], since=1.9) == [0.5, 2.0, 0.5, 2.0]
    assert gaps_of([]) == []


def test_the_largest_gap_is_relative():
    assert Joined(0.5, [0.6, 1.5, 0.5], 1.0, []).largest == 3.0


def test_arrivals_come_at_the_rate():
    times = poisson_times(random.Random(0), 2000, 4.0)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(500.0, rel=0.1)


@pytest.mark.parametrize(
    "one, other, same",
    [
        ([[1, 2, 3], [4]], [[1, 2], [4]], True),
        ([[1, 2]], [[1, 2, 3]], True),
        ([[1, 2, 3]], [[1, 3]], False),
    ],
)
def test_runs_of_different_length_are_compared(one, other, same):
    assert same_start(one, other) == same


ROW = {"largest": 1.9, "p50": 1.0, "late": 0.05, "ttft": 2.9}
BAD = {"largest": 9, "p50": 1, "late": 1.0, "ttft": 9}
CASES = {
    "all met": ([ROW], [5.0], 0.95, ""),
    "a large gap": ([{**ROW, "p50": 0.9}], [5.0], 1.0, "largest gap over median gap"),
    "all slow": ([{**ROW, "largest": 2.1, "p50": 2.0}], [5.0], 1.0, "the same over that before"),
    "late tokens": ([{**ROW, "late": 0.06}], [5.0], 1.0, "gaps within the target"),
    "a slow prompt": ([{**ROW, "ttft": 3.1}], [5.0], 1.0, "TTFT over that of an idle engine"),
    "a cache of little use": ([ROW], [4.9], 1.0, "TTFT cut by a cached prompt"),
    "late under load": ([ROW], [9.0], 0.94, "gaps kept under load"),
    "medians": ([ROW, ROW, BAD], [1.0, 6.0, 7.0], 1.0, ""),
}


@pytest.mark.parametrize("joined, cuts, kept, missed", CASES.values(), ids=CASES)
def test_verdicts(joined, cuts, kept, missed):
    verdicts = checks(
        [{"paced": row} for row in joined],
        [{"cut": cut} for cut in cuts],
        {"paced": {"gaps_kept": kept}},
    )
    assert [verdict.name for verdict in verdicts if not verdict.passed] == [missed] * bool(missed)
