"""An op that is slowed, deleted or broken on purpose is caught, through the real kernel bench."""

from __future__ import annotations

import json
import time

import pytest

from pagedraft.bench import compare, kernels
from pagedraft.bench.ceiling import Ceiling
from pagedraft.bench.changes import FAILURES
from pagedraft.kernels import gated_mlp, rms_norm

PREFIX = "kernels/tiny-fp32/decode1"


@pytest.fixture
def measured(tmp_path, monkeypatch, cpu_path):
    """A function that runs the kernel bench at a tiny size and returns its document's path."""
    monkeypatch.setattr(kernels, "measure_ceiling", lambda *_: Ceiling(1e9, 1e9))
    options = ["--model", "tiny", "--dtype", "fp32", "--device", "cpu", "--steps", "decode1"]

    def run(name: str, ops: str) -> str:
        out = tmp_path / name
        kernels.main([*options, "--op", ops, "--budget", "0.02", "--out", str(out)])
        return str(out / "kernels-tiny-fp32.json")

    return run


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def failures(capsys) -> dict[str, str]:
    changes = last_line(capsys)["changes"]
    return {change["name"]: change["mark"] for change in changes if change["mark"] in FAILURES}


def test_an_op_that_was_slowed_is_caught(measured, monkeypatch, capsys):
    before = measured("before", "gated_mlp")
    honest = gated_mlp.gated_mlp_cpu

    def slow(*args):
        time.sleep(0.002)
        return honest(*args)

    monkeypatch.setattr(gated_mlp, "gated_mlp_cpu", slow)
    after = measured("after", "gated_mlp")
    capsys.readouterr()
    assert compare.main([before, after]) == 1
    assert failures(capsys)[f"{PREFIX}/gated_mlp act/us"] == "worse"
    assert compare.main([after, before]) == 0


def test_an_op_that_is_deleted_is_caught(measured, capsys):
    before = measured("before", "rms_norm,gated_mlp")
    after = measured("after", "rms_norm")
    capsys.readouterr()
    assert compare.main([before, after, "--margin", "9"]) == 1
    found = failures(capsys)
    assert set(found.values()) == {"gone"}
    assert f"{PREFIX}/gated_mlp act/us" in found
    assert not any("rms_norm" in name for name in found)


def test_an_op_whose_numbers_are_wrong_is_caught(measured, monkeypatch, capsys):
    """It gets no time, so its figures are gone."""
    before = measured("before", "rms_norm,gated_mlp")
    honest = rms_norm.rms_norm_cpu
    monkeypatch.setattr(rms_norm, "rms_norm_cpu", lambda *args: honest(*args) * 1.5)
    after = measured("after", "rms_norm,gated_mlp")
    capsys.readouterr()
    assert compare.main([before, after, "--margin", "9"]) == 1
    found = failures(capsys)
    assert f"{PREFIX}/rms_norm norm/us" in found
    assert not any("gated_mlp" in name for name in found)


def test_a_run_against_itself_is_no_failure(measured, capsys):
    path = measured("before", "rms_norm,gated_mlp")
    capsys.readouterr()
    assert compare.main([path, path]) == 0
    assert last_line(capsys)["changes"] == []
