"""The script for a CUDA machine, tried without one; its checks fail where they must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagedraft.bench import gpu_check
from pagedraft.bench.gpu_check import GRACE, Part, run_part, run_stage, stages
from pagedraft.bench.row_checks import (
    ATTENTION_VARIANTS,
    AttentionVariant,
    attention_rows,
    linear_rows,
)
from pagedraft.bench.shapes import TINY
from pagedraft.kernels.linear import linear
from pagedraft.kernels.paged_attention import paged_attention
from pagedraft.kernels.weight_quant import WEIGHT_FORMATS

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
PARTS = ("tiny", "bench", "attention", "tests", "rows", "engine", "warm")


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """Run the whole script with DRY=1, as ``make gpu-check`` would on a GPU."""
    folder = tmp_path_factory.mktemp("gpu_check")
    env = {**os.environ, "OUT": str(folder), "PYTHON": sys.executable}
    command = ["bash", str(ROOT / "bench" / "gpu_check.sh"), "--dry"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    return folder, done


def test_dry_run_ends_well(dry_run):
    _, done = dry_run
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert done.stdout.splitlines()[-1] == "VERDICT: ok; a dry run measures nothing"


def test_dry_run_judges_no_target(dry_run):
    folder, done = dry_run
    document = json.loads((folder / "gpu_check.json").read_text())
    assert document["dry"]
    assert document["figures"] == []
    assert {text.split()[0] for text in document["targets"]} == {"open"}
    assert all(text in done.stdout for text in document["targets"])


@pytest.mark.parametrize("name", PARTS)
def test_part_leaves_a_log_and_a_verdict(dry_run, name):
    folder, _ = dry_run
    document = json.loads((folder / "gpu_check.json").read_text())
    verdicts = {part["name"]: part["verdict"] for part in document["parts"]}
    assert verdicts[name] == "ok"
    assert (folder / f"gpu_check-{name}.log").stat().st_size > 0


def test_engine_table_leaves_json_that_says_it_is_dry(dry_run):
    folder, _ = dry_run
    document = json.loads((folder / "real_sizes-tiny-dry.json").read_text())
    rows = [row for name in ("rows", "passes", "answers", "linears") for row in document[name]]
    assert document["dry"]
    assert document["problems"] == []
    assert not any(row["problem"] or "left_out" in row for row in document["rows"])
    assert len(rows) > len(document["rows"]) > 0


def test_bench_leaves_json(dry_run):
    folder, _ = dry_run
    document = json.loads((folder / "kernels-tiny-fp32.json").read_text())
    assert {"device", "git", "ceiling", "rows"} <= set(document)
    assert all(row["problem"] is None for row in document["rows"])


def test_sweep_of_attention_leaves_json(dry_run):
    folder, _ = dry_run
    document = json.loads((folder / "attention-trial.json").read_text())
    assert document["measured"]
    assert all("time" in row and row["problem"] is None for row in document["rows"])


LINEAR_JOBS = ("linear", "linear with its neighbours", *(f"linear, {f}" for f in WEIGHT_FORMATS))


def test_every_kind_of_row_is_compared(dry_run):
    folder, _ = dry_run
    log = (folder / "gpu_check-rows.log").read_text()
    jobs = [*(f"attention, {name}" for name in ATTENTION_VARIANTS), *LINEAR_JOBS]
    missing = [job for job in jobs if f"\n{job}: 0 differences" not in log]
    assert not missing


@pytest.fixture
def cuda_stages(tmp_path, monkeypatch) -> list[list[Part]]:
    """The stages of a run on a GPU."""
    monkeypatch.setattr(gpu_check, "DRY", False)
    return stages(tmp_path)


def test_limits_leave_time_to_copy_the_results(cuda_stages):
    """Eight minutes, also where every part runs out of time."""
    assert sum(max(part.limit for part in stage) + GRACE for stage in cuda_stages) < 475


def test_what_is_timed_runs_alone(cuda_stages):
    names = [[part.name for part in stage] for stage in cuda_stages]
    assert names[:-1] == [["compile"], ["8b"], ["1b"], ["bench"], ["attention"]]
    assert names[-1] == ["tests", "rows", "engine", "warm"]


LIMITED = ("8b", "1b", "attention")


@pytest.mark.parametrize("name", LIMITED)
def test_a_part_ends_by_itself_before_it_is_ended(cuda_stages, name):
    [part] = [part for stage in cuda_stages for part in stage if part.name == name]
    limit = float(part.command[part.command.index("--limit") + 1])
    assert 10 <= part.limit - limit <= 20  # what it takes to start, and its last row


PART_CASES = {
    "a part that works": ("print('fine')", 30, "ok"),
    "a part that fails": ("raise SystemExit(3)", 30, "FAILED"),
    "a part that hangs": ("import time; time.sleep(60)", 1, "OUT OF TIME"),
    "a part that does not listen": (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)",
        *(2, "OUT OF TIME"),
    ),
}


@pytest.mark.parametrize("name", PART_CASES)
def test_part_verdict(tmp_path, name):
    code, limit, expected = PART_CASES[name]
    outcome = run_part(Part("x", [sys.executable, "-c", code], limit), tmp_path)
    assert outcome.verdict == expected


PATIENT = """
import time
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("what was found")
"""


def test_a_part_that_runs_out_of_time_says_what_it_found(tmp_path, monkeypatch):
    """It has time to start and to end on a busy machine, too."""
    monkeypatch.setattr(gpu_check, "GRACE", 60)
    outcome = run_part(Part("x", [sys.executable, "-c", PATIENT], 8), tmp_path)
    assert (outcome.verdict, outcome.note) == ("OUT OF TIME", "what was found")


def test_parts_of_a_stage_run_at_once(tmp_path):
    """Each waits for the other's file."""
    code = (
        "import pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.05)\n"
    )
    ours, theirs = str(tmp_path / "a"), str(tmp_path / "b")
    pairs = {"one": [ours, theirs], "other": [theirs, ours]}
    parts = [Part(name, [sys.executable, "-c", code, *pair], 30) for name, pair in pairs.items()]
    assert [outcome.verdict for outcome in run_stage(parts, tmp_path)] == ["ok", "ok"]


def nudged_linear(x_TI, packed, **options):
    """A linear layer whose rows depend on how many there are."""
    return linear(x_TI, packed, **options) * (1.0 + (len(x_TI) > 1) * 2**-10)


def test_linear_row_check_has_teeth():
    assert linear_rows(TINY, torch.float16, CPU, (1, 3), run=nudged_linear)


def nudged_attention(*args, max_query_len, **options):
    """Attention that rounds spans otherwise than single queries."""
    out = paged_attention(*args, max_query_len=max_query_len, **options)
    return out * (1.0 + (max_query_len > 1) * 2**-10)


ATTENTION_SIZES = {"contexts": (33,), "spans": (1, 2), "num_rows": 2}


def test_attention_row_check_has_teeth():
    assert attention_rows(TINY, torch.float16, CPU, **ATTENTION_SIZES, run=nudged_attention)


def wider_for_spans(*args, window, max_query_len, **options):
    """Attention whose window is one key wider where a row has several queries."""
    window += max_query_len > 1
    return paged_attention(*args, window=window, max_query_len=max_query_len, **options)


def rounder_for_spans(*args, k_scale_NGB, max_query_len, **options):
    """Attention that rounds the factors of keys where a row has several queries."""
    scale = k_scale_NGB.half().float() if max_query_len > 1 else k_scale_NGB
    return paged_attention(*args, k_scale_NGB=scale, max_query_len=max_query_len, **options)


BROKEN_VARIANTS = {
    "window": (AttentionVariant(rules={"window": 20}), wider_for_spans),
    "int8 cache": (AttentionVariant(cache="int8"), rounder_for_spans),
}


@pytest.mark.parametrize("name", BROKEN_VARIANTS)
def test_variant_reaches_the_kernel(name):
    variant, run = BROKEN_VARIANTS[name]
    setting = (TINY, torch.float16, CPU)
    assert not attention_rows(*setting, **ATTENTION_SIZES, variant=variant)
    assert attention_rows(*setting, **ATTENTION_SIZES, variant=variant, run=run)
