"""The inspector records the real forward pass, and sees one kernel too many and one that spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """What ``toy_inspect.py`` prints, in a process whose kernels can be compiled."""
    cache = tmp_path_factory.mktemp("inspect") / "cache"
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "pagedraft.tests.bench.toy_inspect"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_recording_an_8b_model_takes_seconds_and_no_memory(found):
    assert found["recording"]["seconds"] < 60  # a few, on a machine that does nothing else
    assert found["recording"]["grown_bytes"] < 500e6  # the weights are 3 GB


def test_recording_leaves_nothing_behind(found):
    assert found["recording"]["is_restored"]


def test_a_layer_is_what_one_more_layer_adds(found):
    assert found["recording"]["a_layer"] == found["recording"]["a_layer_more"] > 0


def test_the_whole_model_does_not_depend_on_the_cut(found):
    of_two, of_three = found["recording"]["models"]
    assert of_two == pytest.approx(of_three)


def test_every_kernel_has_a_cost(found):
    assert found["recording"]["unpriced"] == []


# What another setup changes: its words -> a kernel that only it launches.
SETUPS = {"int4": "qkv/", "all": "sample/_edit_kernel"}


@pytest.mark.parametrize("name", SETUPS)
def test_other_setups_run_their_own_kernels(found, name):
    others = set(found["other_setups"]) - {name}
    here, elsewhere = found["other_setups"][name], [found["other_setups"][o] for o in others]
    own = [kernel for kernel in here if not any(kernel in kernels for kernels in elsewhere)]
    assert any(kernel.startswith(SETUPS[name]) for kernel in own)


def test_equal_runs_do_not_differ(found):
    assert found["is_equal"]


def test_a_kernel_too_many_is_found(found):
    assert found["new"] == ["product_kernel"]
    layer = "; ".join(found["steps"]["decode1@1024 cuda layer"])
    assert "(worse)" in layer
    assert "gate_up/product_kernel gate_up/clone" in layer
    expected = [line for line in found["regressions"] if "layer: " in line]
    assert all("gate_up/product_kernel gate_up/clone" in line for line in expected)
    assert len(expected) == 2  # a layer inside and the last one


def test_a_kernel_that_spills_is_found(found):
    assert any(
        "product_kernel on sm_90" in line and "spills" in line for line in found["regressions"]
    )


def test_machine_code_is_reported(found):
    kernels = [kernel for kernel in found["kernels"] if kernel["op"] == "linear"]
    figures = kernels[0]["targets"]["sm_90"]
    assert figures["registers"] > 0
    assert figures["stores"]
    assert figures["mma"]
    assert figures["address_products"] > 0
    assert all(number > 0 for number in figures["executed"].values())
    assert set(figures["executed"]) == set(kernels[0]["cases"])
