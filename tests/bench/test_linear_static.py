"""Counts of dense linear kernels' machine code: what holds for the real tiles, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagedraft.bench.linear_static import FLOORS, weight_floor

TOYS = Path(__file__).parent / "toy_linear.py"


@pytest.fixture(scope="session")
def problems(tmp_path_factory) -> dict[str, str | None]:
    """What the compile check says of each toy on sm_90."""
    path = tmp_path_factory.mktemp("linear") / "linear.json"
    command = [sys.executable, "-m", "pagedraft.bench.static", "--targets", "sm_90"]
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(path.parent / "cache")}
    done = subprocess.run(
        [*command, "--calls", str(TOYS), "--json", str(path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert path.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    results = json.loads(path.read_text())["results"]
    return {case: result["problem"] for result in results for case in result["cases"]}


@pytest.mark.parametrize("case", ["one row", "32 rows", "64 rows", "few inputs", "odd rows"])
def test_tile_passes(problems, case):
    assert problems[case] is None


# name: what the check must say of it
REFUSED = {
    "one step a trip": "weight bytes a warp instruction, expected 3",
    "others' products": "expected products and loads of as many steps, got 4 and 2",
    "another class": "expected HMMA, whose sums all tiles share",
    "spills": "in the loop over inputs, expected none",
}


@pytest.mark.parametrize("case", REFUSED)
def test_tile_is_refused(problems, case):
    assert REFUSED[case] in (problems[case] or "")


def test_floor_is_that_of_the_newest_version_not_after():
    assert weight_floor((3, 7, 1)) == weight_floor((3, 9)) == FLOORS[3, 7]
    assert weight_floor((3, 6, 0)) == FLOORS[3, 6]
    assert weight_floor((3, 5)) is None
