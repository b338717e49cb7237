"""The bench of real sizes in its dry mode: gates, limits, labels, what follows from its rows."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from pagedraft.bench import real_sizes, real_sizes_bed, real_sizes_jobs
from pagedraft.bench.random_model import random_model
from pagedraft.bench.real_sizes_bed import SETTINGS, Bed, compile_share, make_llm
from pagedraft.bench.real_sizes_jobs import SECTIONS, jobs_of, run_job
from pagedraft.bench.real_sizes_report import derive, figures_of
from pagedraft.bench.real_sizes_rows import Case, pass_shape, step_cost, whole_steps
from pagedraft.bench.report import RESULTS
from pagedraft.bench.synthetic import SyntheticDrafter
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.scheduler.warm_up import jobs_of as warm_jobs_of

pytestmark = pytest.mark.usefixtures("cpu_path")
CPU = torch.device("cpu")
TINY = SETTINGS["tiny"]


def test_floor_of_a_decode_step_is_the_design_s():
    """80 % of the floor at 4.3 TB/s is 4.4 ms."""
    setting = SETTINGS["8b"]
    cost = step_cost(setting.config, pass_shape(setting, 1, 0), "bf16")
    assert cost.bytes / 4.3e12 == pytest.approx(0.8 * 4.4e-3, rel=0.02)
    drafts = step_cost(setting.config, pass_shape(setting, 1, 8), "bf16")
    assert 1.0 < drafts.bytes / cost.bytes < 1.01
    assert drafts.flops / cost.flops == pytest.approx(9, rel=0.01)


def test_drafts_stay_within_a_step_s_budget():
    setting = SETTINGS["8b"]
    assert [setting.num_drafts(batch, 8) for batch in setting.batches] == [8, 8, 7]


@pytest.fixture(scope="module")
def bed() -> Bed:
    with use_implementation("cpu"):
        return Bed(TINY, CPU, alpha=0.7)


def test_problems_name_the_first_token_that_differs(bed):
    wanted = bed.reference[tuple(bed.prompts[1])]
    other = [*wanted[:2], wanted[2] + 1, *wanted[3:]]
    outputs = [bed.reference[tuple(bed.prompts[0])], other]
    [problem] = bed.problems(bed.prompts, outputs, TINY.num_new)
    assert problem == (f"request 1, token 2: got {other[2:3]}, plain decoding gave {wanted[2:3]}")


def test_graphs_run_and_nothing_is_spoiled(bed):
    """Rows that part from plain decoding would be named here."""
    document = {"problems": [], "compiled_after_warm_up": 0, **{name: [] for name in SECTIONS}}
    ceiling = SimpleNamespace(floor=lambda cost: cost.bytes * 1e-9)
    job = next(job for job in jobs_of(bed, ceiling) if job.name == "graphs/batch 2/k 2")
    runner = bed.engines[True].engine.launcher.forward.__self__
    before = runner.num_replays
    run_job(job, document)
    [row] = document["rows"]
    assert document["problems"] == []
    assert row["accepted"] > 0
    assert runner.num_replays > before


def test_all_jobs_of_a_warm_up_are_shared_out():
    llm = make_llm(random_model(TINY.config, dtype=torch.float32, device=CPU), TINY, None)
    llm.engine.speculation.drafters = {"x": SyntheticDrafter([], 0.0)}
    steps, draws = warm_jobs_of(llm.engine)
    shares = [compile_share(TINY, CPU, 3, number) for number in range(3)]
    assert sum(shares) == len(steps) + len(draws)
    assert min(shares) > 0


def run(tmp_path, capsys, *options: str) -> tuple[int, dict, str]:
    """Run the command line dry; return its status, the document of tiny, and what it printed."""
    status = real_sizes.main(
        ["--models", "tiny", "--device", "cpu", "--out", str(tmp_path), *options]
    )
    text = capsys.readouterr().out
    return status, json.loads(text.splitlines()[-1])["models"]["tiny"], text


def test_dry_run_is_whole_and_labelled(tmp_path, capsys):
    status, document, text = run(tmp_path, capsys)
    assert status == 0
    assert json.loads((tmp_path / "real_sizes-tiny-dry.json").read_text()) == document
    assert document["dry"]
    assert document["figures"] == []
    assert document["gate"] == "equal tokens"
    rows = [row for name in SECTIONS for row in document[name]]
    assert [row.get("left_out") for row in rows] == [None] * len(rows)
    assert len(document["rows"]) == 8
    lines = [line for line in text.splitlines() if line.startswith(("1  ", "2  "))]
    assert [line.split()[1:3] for line in lines if line.split()[1] != "0"] == [
        ["2", "SYNTHETIC"]
    ] * 4
    assert "DRY: a trial of the script" in text
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "real_sizes-tiny-dry-speedup.png",
        "real_sizes-tiny-dry-step.png",
    ]


def test_graphs_with_other_tokens_get_no_time(tmp_path, capsys, monkeypatch):
    def stale(run):
        run()
        return lambda: None  # logits stay those of the capture

    monkeypatch.setattr(real_sizes_bed, "_capture", stale)
    status, document, text = run(tmp_path, capsys)
    assert status == 1
    assert document["gate"] == "different tokens"
    assert all(problem.startswith("graphs/") for problem in document["problems"])
    assert not any(document[name] for name in SECTIONS)
    assert "tok/s" not in text


def test_kernels_compiled_after_the_warm_up_fail(tmp_path, capsys, monkeypatch):
    counts = iter(range(1000))
    monkeypatch.setattr(real_sizes_jobs, "num_compiled_kernels", lambda: next(counts))
    status, document, _ = run(tmp_path, capsys, "--limit", "1000")
    assert status == 1
    assert document["problems"] == [
        f"{document['compiled_after_warm_up']} kernels were compiled after the warm-up"
    ]
    assert document["rows"][0]["tokens_per_second"] > 0  # the times stand


def test_rows_without_time_say_so(tmp_path, capsys):
    status, document, text = run(tmp_path, capsys, "--limit", "0")
    rows = [row for name in SECTIONS for row in document[name]]
    assert status == 0
    assert {row["left_out"] for row in rows} == {"out of time"}
    assert text.count("left out: out of time") == len(rows)


ERRORS = {
    "no room": (torch.OutOfMemoryError("no room"), 0, "left_out", "out of memory: no room"),
    "wrong": (RuntimeError("bad\nmore"), 1, "problem", "RuntimeError: bad"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_row_that_fails_leaves_the_others(tmp_path, capsys, monkeypatch, name):
    error, expected_status, key, reason = ERRORS[name]

    def fail(*_):
        raise error

    monkeypatch.setattr(real_sizes_jobs, "engine_row", fail)
    status, document, _ = run(tmp_path, capsys)
    assert status == expected_status
    assert {row[key] for row in document["rows"]} == {reason}
    assert all("time" in row for row in document["passes"])


REFUSED = {
    "a real size on a CPU": (["--models", "8b", "--device", "cpu"], "a CPU takes tiny only"),
    "an unknown model": (["--models", "9b"], "unknown ['9b']"),
    "a dry run among results": (
        ["--models", "tiny", "--device", "cpu", "--out", str(RESULTS / "nvidia-h200")],
        "a dry run is no result",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(capsys, name):
    arguments, message = REFUSED[name]
    with pytest.raises(SystemExit):
        real_sizes.main(arguments)
    assert message in capsys.readouterr().err


def record(finished: float, num_rows: int, drafts: int, num_fed: int) -> SimpleNamespace:
    """A step of the engine that ended at ``finished``, planned 2 s and launched 1 s before."""
    proposals = {row: SimpleNamespace(tokens=[0] * drafts) for row in range(num_rows)}
    spans = dict.fromkeys(range(num_rows), num_fed // num_rows)
    times = {"began": finished - 2, "launched": finished - 1, "finished": finished}
    return SimpleNamespace(**times, drafts=proposals, scheduled=spans, num_kept=num_rows)


def test_only_steps_of_the_whole_batch_count():
    records = [
        record(10, 2, 0, 40),  # prompts
        record(13, 2, 4, 10),
        record(17, 2, 2, 6),  # fewer drafts at an end
        record(18, 1, 4, 5),  # one row left
        record(23, 2, 4, 10),
    ]
    found = list(whole_steps(records, 2, 4))
    assert [step.seconds for step in found] == [3, 5]
    assert [step.launch_seconds for step in found] == [1, 1]


def timed_pass(batch: int, span: int, seconds: float) -> dict:
    time = {"median": seconds, "p20": seconds, "p80": seconds}
    step = f"verify{batch}x{span - 1}" if span > 1 else f"decode{batch}"
    row = {"step": step, "batch": batch, "span": span, "context": 600, "time": time}
    return row | {"floor": 0.8 * seconds, "share_of_floor": 0.8}


def engine_times(k: int, milliseconds: float, speed: float) -> dict:
    case = Case(True, 1, k)
    row = case.blank | {"drafts": k, "step_ms": [milliseconds] * 3, "launch_ms": 0.5}
    return row | {"tokens_per_second": speed, "floor_ms": 3.5, "tokens_per_pass": 1.0}


def measured_document() -> dict:
    """Two rows and two passes of the 8B model, by hand."""
    document = {"model": "8b", "dtype": "bf16", "dry": False, "alpha": 0.5}
    document |= {"ceiling": {"matmul_rate": 8e14}, "compiled_after_warm_up": 0}
    document["rows"] = [engine_times(0, 5.0, 200.0), engine_times(1, 6.0, 250.0)]
    document["passes"] = [timed_pass(1, 1, 4e-3), timed_pass(1, 2, 5e-3)]
    times = {"p20": 80.0, "p50": 90.0, "p80": 95.0, "p99": 99.0}
    answer = {"name": "graphs/answer/k 0", "graphs": True, "k": 0, "problem": None}
    document["answers"] = [answer | {"seconds_ms": times, "ttft_ms": times}]
    document["linears"] = [{"part": "qkv", "rows": 2048, "problem": None, "tflop_s": 480.0}]
    return document


def test_what_follows_from_several_rows():
    document = measured_document()
    derive(document)
    plain, drafting = document["rows"]
    assert plain["waits"] == pytest.approx(0.2)
    assert drafting["forward_ms"] == pytest.approx(5.0)
    assert drafting["step_over_plain"] == pytest.approx(1.2)
    assert drafting["speedup"] == pytest.approx(1.25)
    assert drafting["predicted_speedup"] == pytest.approx(1.5 / 1.25)


def test_a_missing_control_leaves_ratios_out():
    document = measured_document()
    document["rows"][0] = Case(True, 1, 0).blank | {"left_out": "out of time"}
    document["passes"][0] = {"batch": 1, "span": 1, "problem": "RuntimeError"}
    derive(document)
    assert "speedup" not in document["rows"][1]
    assert "predicted_speedup" not in document["rows"][1]
    assert document["rows"][1]["waits"] == pytest.approx(1 / 6)


def test_figures_say_how_they_were_got_and_what_they_are_judged_by():
    document = measured_document()
    derive(document)
    figures = {figure.name: figure for figure in figures_of(document)}
    step = "real_sizes/8b-bf16/graphs/batch 1"
    assert figures[f"{step}/k 0/of floor"].target == 80
    assert figures[f"{step}/k 0/of floor"].value == pytest.approx(70)
    assert figures[f"{step}/k 0/speed"].how == "measured"
    assert figures[f"{step}/k 1/speed"].how == "synthetic"
    assert figures[f"{step}/k 1/predicted speed-up"].how == "predicted"
    assert figures["real_sizes/8b-bf16/graphs/answer/k 0/p50"].is_met
    assert figures["real_sizes/8b-bf16/linear qkv at 2048 rows/of matmul rate"].is_met
