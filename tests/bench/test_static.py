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
from pagedraft.bench.static_attention_calls import FLOORS
from pagedraft.bench.static_checks import (
    FLOOR_TARGET,
    FLOOR_TRITON,
    SHARED_LIMITS,
    TRITON_VERSION,
)
from pagedraft.kernels.dispatch import INTERPRETED, OPS

HERE = Path(__file__).parent
TARGETS = ("sm_80", "sm_90", "gfx942")
OTHER_OPS = tuple(op for op in OPS if op != "paged_attention")
HAS_FLOORS = pytest.mark.skipif(TRITON_VERSION < FLOOR_TRITON, reason="floors need Triton 3.7")


def run_static(json_path: Path, *arguments: str) -> list[dict]:
    """Run the checker in a process of its own (an interpreted kernel cannot be compiled)."""
    command = [sys.executable, "-m", "pagedraft.bench.static", "--json", str(json_path), *arguments]
    env = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(json_path.parent / "cache"),
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert json_path.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    results = json.loads(json_path.read_text())["results"]
    assert done.returncode == int(any(r["problem"] for r in results))
    return results


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> list[dict]:
    path = tmp_path_factory.mktemp("static") / "static.json"
    ops = ",".join(OTHER_OPS)
    return run_static(path, "--quick", "--op", ops, "--targets", ",".join(TARGETS))


@pytest.fixture(scope="session")
def attention(tmp_path_factory) -> list[dict]:
    path = tmp_path_factory.mktemp("static") / "attention.json"
    return run_static(path, "--quick", "--op", "paged_attention")


@pytest.fixture(scope="session")
def toys(tmp_path_factory) -> dict[tuple[str, str], dict]:
    path = tmp_path_factory.mktemp("toys") / "toys.json"
    results = run_static(path, "--calls", str(HERE / "toy_kernels.py"), "--targets", "sm_90,gfx942")
    return {(case, r["target"]): r for r in results for case in r["cases"]}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", OTHER_OPS)
def test_op_compiles_without_problem(compiled, op, target):
    assert_no_problem([r for r in compiled if r["op"] == op], target)


@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_attention_compiles_without_problem(attention, target):
    assert_no_problem(attention, target)


def assert_no_problem(results: list[dict], target: str) -> None:
    here = [r for r in results if r["target"] in (target, "all")]
    problems = [f"{r['kernel']} {r['cases']}: {r['problem']}" for r in here if r["problem"]]
    assert here, f"no kernel was recorded for {target}"
    assert not problems, "\n".join(problems)


@HAS_FLOORS
@pytest.mark.parametrize("step", FLOORS)
def test_attention_reaches_its_floor_of_kv_bytes_an_instruction(attention, step):
    found = [
        value
        for result in attention
        if result["target"] == FLOOR_TARGET
        for case, value in result["kv_bytes_per_instruction"].items()
        if case == f"{step}-bf16"
    ]
    assert len(found) == 1, f"expected one kernel that reads keys, got {len(found)}"
    assert found[0] >= FLOORS[step]


# Each toy shows one verdict that the checker must reach.
TOY_CASES = {
    "break is accepted by the interpreter only": ("broken", "sm_90", "does not compile"),
    "break fails on AMD too": ("broken", "gfx942", "does not compile"),
    "tiles over the shared memory": ("wide", "sm_90", "shared memory"),
    "tiles over AMD's shared memory": ("wide", "gfx942", "shared memory"),
    "a hot kernel that spills": ("spills", "sm_90", "spills"),
    "a call that raises": ("raises", "all", "call failed"),
    "a call without a launch": ("nothing", "all", "launched no kernel"),
    "an option the target lacks": ("option", "sm_90", "does not compile"),
    "fp32 products in the default precision": ("tf32", "sm_90", "tf32"),
    "fp32 products in AMD's default precision": ("tf32", "gfx942", "tf32"),
    "keys in two-byte loads": ("attention narrow", "sm_90", "16-byte loads carry 0.00"),
    "keys in two-byte loads on AMD": ("attention narrow", "gfx942", "16-byte loads carry 0.00"),
    "a mask along D that always holds": ("attention masked", "sm_90", "mask that always holds"),
    "block times its size in 32 bits": ("attention address", "sm_90", "expected 64 bits"),
    "products without tensor cores": ("attention cores", "sm_90", "no tensor-core instruction"),
    "no loop to count": ("attention cores", "sm_90", "cannot be judged"),
    "attention that spills": ("attention spills", "sm_90", "in the loops over keys, expected none"),
    "a loop of two tiles": ("attention two tiles", "sm_90", "expected one tile an iteration"),
}


@pytest.mark.parametrize("name", TOY_CASES)
def test_bad_toy_is_reported(toys, name):
    case, target, expected = TOY_CASES[name]
    assert expected in (toys[case, target]["problem"] or "")


@HAS_FLOORS
def test_toy_under_its_floor_is_reported(toys):
    assert "expected 1000" in toys["slow", "sm_90"]["problem"]


def test_executed_instructions_of_a_kernel_without_loops_are_known(toys):
    result = toys["divisible", "sm_90"]
    assert 0 < result["executed"]["divisible"] <= 4 * result["code"]["instructions"]


def test_executed_instructions_of_an_unknown_loop_are_not(toys):
    assert toys["ieee", "sm_90"]["executed"] == {}


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_good_attention_toy_passes(toys, target):
    assert toys["attention", target]["problem"] is None


def test_good_toy_passes_with_its_machine_code(toys):
    result = toys["divisible", "sm_90"]
    assert result["problem"] is None
    assert result["code"]["registers"] > 0
    assert sum(result["code"]["loads"].values()) > 0


def test_specialisation_follows_the_arguments(toys):
    divisible, odd = toys["divisible", "sm_90"], toys["odd", "sm_90"]
    assert divisible["constexprs"]["stride"] == 1
    assert divisible["code"]["loads"] == {"128": 1}
    assert divisible["code"]["stores"] == {"128": 1}
    assert "128" not in odd["code"]["loads"]
    assert "128" not in odd["code"]["stores"]


def test_fp32_dot_in_full_precision_is_not_reported(toys):
    assert toys["ieee", "sm_90"]["problem"] is None


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
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module
