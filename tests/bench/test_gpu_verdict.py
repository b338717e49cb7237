"""The verdict on a folder of results: met, missed by how much, not measured and why."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pagedraft.bench.figures import Figure, as_json
from pagedraft.bench.gpu_verdict import (
    ATTENTION,
    KERNELS,
    REAL_1B,
    REAL_8B,
    TARGETS,
    judge,
    main,
    report,
    summary,
)

STEP = "real_sizes/8b-bf16/graphs/batch 1/k 0"
CEILING = {"copy_rate": 4e12, "matmul_rate": 8e14}


def figure(name: str, value: float, unit: str, better: str) -> Figure:
    return Figure(name, value, unit, better, "measured")


def real_8b() -> dict:
    """A run of the 8B model that misses its step's share and the stretch target."""
    figures = [
        figure("real_sizes/8b-bf16/graphs/answer/k 0/p50", 90.0, "ms", "lower"),
        figure(f"{STEP}/step", 4.3, "ms", "lower"),
        figure(f"{STEP}/of floor", 72.0, "%", "higher"),
    ]
    linears = [
        {"part": part, "rows": 2048, "problem": None, "tflop_s": rate}
        for part, rate in (("qkv", 480.0), ("o_norm", 320.0))
    ]
    document = {"device": "NVIDIA H200", "ceiling": CEILING, "figures": as_json(figures)}
    return document | {"dry": False, "problems": [], "rows": [], "linears": linears}


def kernels() -> dict:
    """One row of each linear op; one of them is wrong and has no time."""

    def row(part: str, step: str, share: float) -> dict:
        return {"part": part, "step": step, "bytes": 4e9 * share, "time": {"median": 1e-3}}

    wrong = {"part": "down_norm", "step": "decode1", "bytes": 1, "problem": "error"}
    other = [row("gate_up_int4", "decode1", 0.1), row("qkv", "prefill", 0.1)]
    rows = [row("qkv", "decode1", 0.95), row("o_norm", "verify1", 0.91), wrong, *other]
    return {"device": "NVIDIA H200", "ceiling": CEILING, "rows": rows}


def attention() -> dict:
    """Decode and verify at 8k for eight rows; no prefill."""

    def row(step: str, seconds: float) -> dict:
        sizes = {"rows": 8, "context": 8192, "axes": {}, "kv_bytes": 1e8, "bytes": 1.1e8}
        return sizes | {"point": f"{step} 8x8192", "step": step, "time": {"median": seconds}}

    rows = [row("decode", 30e-6), row("verify9", 36e-6)]
    return {"device": "NVIDIA H200", "measured": True, "ceiling": CEILING, "rows": rows}


@pytest.fixture
def folder(tmp_path) -> Path:
    """What a run left whose 1B part did not come to an answer."""
    left_out = {"name": "graphs/answer/k 0", "left_out": "out of time"}
    documents = {REAL_8B: real_8b(), KERNELS: kernels(), ATTENTION: attention()}
    documents[REAL_1B] = {"figures": [], "rows": [], "answers": [left_out], "dry": False}
    for name, document in documents.items():
        (tmp_path / name).write_text(json.dumps(document))
    return tmp_path


EXPECTED = {
    "8B short answer, p50": "met     8B short answer, p50: 90 ms (<= 100 ms)",
    "8B short answer, stretch": "MISSED  8B short answer, stretch: 90 ms (<= 75 ms), missed by 20%",
    "8B decode step, of its floor": (
        "MISSED  8B decode step, of its floor: 72 % (>= 80 %), missed by 10%"
    ),
    "1B short answer, p99": (
        "open    1B short answer, p99: not measured (<= 50 ms): left out: out of time"
    ),
    "linear ops of 1 to 16 rows, of copy bandwidth": (
        "met     linear ops of 1 to 16 rows, of copy bandwidth: 91 % (>= 90 %), worst of 2 rows, "
        "1 more without a time"
    ),
    "exact linear ops of 2048 rows, of matmul rate": (
        "MISSED  exact linear ops of 2048 rows, of matmul rate: 40 % (>= 50 %), worst of 2 rows, "
        "missed by 20%"
    ),
    "attention, of copy bandwidth": (
        "MISSED  attention, of copy bandwidth: 76.39 % (>= 85 %), worst of 2 points, missed by 10%"
    ),
    "attention, verify / decode": (
        "MISSED  attention, verify / decode: 1.2 x (<= 1.1 x), worst of 1 points, missed by 9%"
    ),
    "prefill attention at 8k, of matmul rate": (
        "open    prefill attention at 8k, of matmul rate: not measured (>= 60 %): none of 0 points "
        "that are judged has a time"
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_line(folder, name):
    [line] = [one.text() for one in judge(folder) if one.target.name == name]
    assert line == EXPECTED[name]


def test_summary_counts_all_targets(folder):
    assert summary(judge(folder)) == "targets: 3 met, 5 missed, 2 not measured"


def broken(folder: Path, text: str) -> None:
    (folder / REAL_8B).write_text(text)


UNREADABLE = {
    "missing": (lambda folder: (folder / REAL_8B).unlink(), "is missing: its part left nothing"),
    "cut off": (lambda folder: broken(folder, '{"figures": [{"na'), "cannot be read"),
    "a list": (lambda folder: broken(folder, "[]"), "expected a JSON object, got list"),
    "no figures": (lambda folder: broken(folder, "{}"), "expected a list 'figures'"),
    "a dry run": (lambda folder: broken(folder, '{"dry": true}'), "is of a dry run"),
    "no room": (
        lambda folder: broken(folder, '{"figures": [], "unavailable": "no room for it"}'),
        "no room for it",
    ),
    "wrong tokens": (
        lambda folder: broken(folder, '{"figures": [], "problems": ["token 3 differs"]}'),
        "wrong, so it has no time: token 3 differs",
    ),
    "an earlier run": (
        lambda folder: os.utime(folder / REAL_8B, (0, 0)),
        "is of an earlier run, this one wrote none",
    ),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_judged_says_why(folder, name):
    change, reason = UNREADABLE[name]
    change(folder)
    judged = judge(folder, since=1.0)
    found = [one for one in judged if one.target.file == REAL_8B and one.target.better == "lower"]
    assert [one.word for one in found] == ["open"] * 3
    assert all(reason in one.reason for one in found)
    assert [one.word for one in judged if one.target.file == KERNELS] == ["met"]


def test_rows_of_another_form_are_no_crash(folder):
    (folder / KERNELS).write_text('{"rows": [{"step": "decode1"}]}')
    [one] = [one for one in judge(folder) if one.target.file == KERNELS]
    assert "expected another form (KeyError" in one.reason


def test_nothing_measured_at_all(tmp_path):
    judged = judge(tmp_path)
    assert len(judged) == len(TARGETS)
    assert summary(judged) == f"targets: 0 met, 0 missed, {len(TARGETS)} not measured"


def test_another_gpu_is_named(folder, capsys):
    assert "targets are for an H200, not NVIDIA L4" in report(judge(folder), "NVIDIA L4")[0]
    assert main([str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("met ")
    assert lines[-1] == "targets: 3 met, 5 missed, 2 not measured"


def test_values_are_figures_of_the_check(folder):
    figures = [one.figure() for one in judge(folder) if one.value is not None]
    assert len(as_json(figures)) == 8
    assert [figure.is_met for figure in figures].count(True) == 3
