"""The forward pass against the committed baseline: no new spills, no overflow, no more launches."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import triton

from pagedraft.bench.inspect_diff import ADVICE, BASELINES, baseline_path, regressions
from pagedraft.bench.inspect_document import read_document
from pagedraft.bench.static_checks import SHARED_LIMITS

STEPS = ("decode1@1024", "verify8x4@8192")
TARGETS = ("sm_80", "sm_90")


def run_inspector(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the inspector in a process of its own (an interpreted kernel cannot be compiled)."""
    command = [sys.executable, "-m", "pagedraft.bench.static", "forward", *arguments]
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def baseline() -> dict:
    path = baseline_path()
    if not path.exists():
        pytest.skip(
            f"no baseline for triton {triton.__version__}: `make static-baseline` makes one"
        )
    return read_document(path)


def test_baseline_covers_what_is_checked(baseline):
    assert set(STEPS) <= set(baseline["steps"])
    assert set(baseline["targets"]) == set(SHARED_LIMITS)


def test_baseline_is_of_the_version_in_its_name():
    found = {path.name: read_document(path)["triton"] for path in BASELINES.glob("forward-*.json")}
    assert found == {f"forward-{version}.json": version for version in found.values()}


@pytest.mark.parametrize("step", STEPS)
def test_a_layer_takes_at_most_seven_launches(baseline, step):
    counts = {
        vendor: found["layer"]["launches"] for vendor, found in baseline["steps"][step].items()
    }
    assert max(counts.values()) <= 7, counts


def test_forward_pass_is_not_worse_than_the_baseline(baseline, tmp_path):
    path = tmp_path / "fresh.json"
    chosen = ("--steps", ",".join(STEPS), "--targets", ",".join(TARGETS))
    done = run_inspector("--check", *chosen, "--json", str(path))
    assert path.exists(), done.stdout[-2000:] + done.stderr[-3000:]
    worse = regressions(baseline, read_document(path))
    assert not worse, "\n".join([*worse, ADVICE])
    assert done.returncode == 0, done.stdout[-3000:]
