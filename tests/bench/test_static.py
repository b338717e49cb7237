"""Every kernel compiles for every kind of target; the check itself fails where it must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagedraft.bench.fork_map import fork_map
from pagedraft.kernels.dispatch import INTERPRETED, OPS

HERE = Path(__file__).parent
TARGETS = ("sm_80", "sm_90", "gfx942")


def run_static(json_path: Path, *arguments: str) -> list[dict]:
    """Run the checker in a process of its own (an interpreted kernel cannot be compiled)."""
    command = [sys.executable, "-m", "pagedraft.bench.static", "--json", str(json_path), *arguments]
    env = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(json_path.parent / "cache"),
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert json_path.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    results = json.loads(json_path.read_text())["results"]
    assert done.returncode == int(any(r["problem"] for r in results))
    return results


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> list[dict]:
    path = tmp_path_factory.mktemp("static") / "static.json"
    return run_static(path, "--quick", "--targets", ",".join(TARGETS))


@pytest.fixture(scope="session")
def toys(tmp_path_factory) -> dict[tuple[str, str], dict]:
    path = tmp_path_factory.mktemp("toys") / "toys.json"
    results = run_static(path, "--calls", str(HERE / "toy_kernels.py"), "--targets", "sm_86,gfx942")
    return {(case, r["target"]): r for r in results for case in r["cases"]}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", OPS)
def test_op_compiles_without_problem(compiled, op, target):
    results = [r for r in compiled if r["op"] == op and r["target"] in (target, "all")]
    problems = [f"{r['kernel']} {r['cases']}: {r['problem']}" for r in results if r["problem"]]
    assert results, f"no kernel of {op} was recorded"
    assert not problems, "\n".join(problems)


def test_fp32_products_are_not_tf32(compiled):
    tf32 = [r["kernel"] for r in compiled if r["code"] and r["code"]["tf32"]]
    assert not tf32


# Each toy shows one verdict that the checker must reach.
TOY_CASES = {
    "break is accepted by the interpreter only": ("broken", "sm_86", "does not compile"),
    "break fails on AMD too": ("broken", "gfx942", "does not compile"),
    "tiles over the shared memory of a small GPU": ("wide", "sm_86", "shared memory"),
    "tiles over AMD's shared memory": ("wide", "gfx942", "shared memory"),
    "a hot kernel that spills": ("spills", "sm_86", "spills"),
    "a call that raises": ("raises", "all", "call failed"),
    "a call without a launch": ("nothing", "all", "launched no kernel"),
    "an option the target lacks": ("option", "sm_86", "does not compile"),
}


@pytest.mark.parametrize("name", TOY_CASES)
def test_bad_toy_is_reported(toys, name):
    case, target, expected = TOY_CASES[name]
    assert expected in (toys[case, target]["problem"] or "")


def test_good_toy_passes_with_its_machine_code(toys):
    result = toys["divisible", "sm_86"]
    assert result["problem"] is None
    assert result["code"]["registers"] > 0
    assert sum(result["code"]["loads"].values()) > 0


def test_specialisation_follows_the_arguments(toys):
    divisible, odd = toys["divisible", "sm_86"], toys["odd", "sm_86"]
    assert divisible["constexprs"]["stride"] == 1
    assert divisible["code"]["loads"] == {"128": 1}
    assert "128" not in odd["code"]["loads"]


def test_fp32_dot_with_the_default_precision_shows_as_tf32(toys):
    assert toys["tf32", "sm_86"]["code"]["tf32"]
    assert not toys["ieee", "sm_86"]["code"]["tf32"]


def test_fork_map_survives_a_process_that_dies():
    assert fork_map(lambda n: os._exit(9) if n == 1 else n * n, [0, 1, 2, 3], 2) == [0, None, 4, 9]


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
def test_interpreter_accepts_the_kernel_that_does_not_compile():
    module = load_toys()
    x = torch.arange(32.0)
    torch.testing.assert_close(module.broken(x), x + 1)


def load_toys():
    """Import ``toy_kernels.py`` in this process."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("toy_kernels", HERE / "toy_kernels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
