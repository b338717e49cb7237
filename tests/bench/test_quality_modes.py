"""The modes of the quality bench: which can run, which are left out, and what is said of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pagedraft.bench import quality_modes
from pagedraft.bench.quality_modes import CONTROL, MODES, Mode, Source, choose
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.kernels.weight_quant import quantize_weight
from pagedraft.tests.bench import toy_quality as toy

pytestmark = pytest.mark.usefixtures("cpu_path")
CPU = torch.device("cpu")
BY_NAME = {mode.name: mode for mode in MODES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modes") / "model"
    toy.save(folder)
    return folder


@pytest.fixture(scope="module")
def source(folder) -> Source:
    with use_implementation("cpu"):
        return Source.read(folder, torch.float32, CPU)


def test_fast_runs_on_a_gpu_where_products_differ(source):
    on_gpu = replace(source, device=torch.device("cuda"))
    assert on_gpu.why_not(BY_NAME["fast"]) == ""
    rounded = {
        name: quantize_weight(weight, "int8") if quality_modes._is_layer(name) else weight
        for name, weight in source.weights.items()
    }
    assert "quantised weights" in replace(on_gpu, weights=rounded).why_not(BY_NAME["fast"])


WHY_NOT = {
    "groups that divide": (BY_NAME["int4-groups-64"], torch.float32, ""),
    "groups that do not": (Mode("x", "int4", 96), torch.float32, "groups of 96 do not divide"),
    "another dtype": (BY_NAME["fp32"], torch.bfloat16, ""),
    "the same dtype": (BY_NAME["fp32"], torch.float32, "the control's dtype"),
    "fp8 KV on a CPU": (BY_NAME["kv-fp8"], torch.float32, ""),
}


@pytest.mark.parametrize(("mode", "dtype", "reason"), WHY_NOT.values(), ids=WHY_NOT)
def test_why_a_mode_is_left_out(source, mode, dtype, reason):
    found = replace(source, dtype=dtype).why_not(mode)
    assert reason in found
    assert bool(found) == bool(reason)


@pytest.mark.parametrize("name", ["fp32", "int8", "int4-int4-head"])
def test_quantised_checkpoint_is_not_rounded_again(source, name):
    scheme = SimpleNamespace(format="int4", method="gptq")
    config = replace(source.config, quantization=scheme)
    found = replace(source, config=config, dtype=torch.bfloat16).why_not(BY_NAME[name])
    assert found == "the checkpoint stores int4 weights"


def test_fp32_of_a_bf16_checkpoint_says_that_the_values_are_the_same(tmp_path):
    toy.save(tmp_path / "model", torch.bfloat16)
    source = Source.read(tmp_path / "model", torch.bfloat16, CPU)
    model, note = source.model(BY_NAME["fp32"])
    assert model.dtype == torch.float32
    assert note == f"weights of exact's values, layers by {model.layers[0].qkv.format}"
    assert "values" not in source.model(BY_NAME["int8"])[1]


def test_fp32_of_an_fp32_checkpoint_is_more_than_bf16(folder):
    source = Source.read(folder, torch.bfloat16, CPU)
    assert "values" not in source.model(BY_NAME["fp32"])[1]


def test_weights_of_the_source_stay(source):
    before = {name: weight.clone() for name, weight in source.weights.items()}
    model, _ = source.model(BY_NAME["int4-int4-head"])
    assert model.head.format == "int4"
    assert source.weights.keys() == before.keys()
    assert all(torch.equal(source.weights[name], before[name]) for name in before)


def test_modes():
    assert MODES[0] == Mode(CONTROL)
    assert len(BY_NAME) == len(MODES)
    assert {mode.name: mode.target for mode in MODES if mode.target} == {"int8": 1.01, "int4": 1.08}
    assert [mode.name for mode in choose(["int4", "int8"])] == [CONTROL, "int8", "int4"]
    with pytest.raises(ValueError, match=r"modes: expected some of .*, got \['int5'\]"):
        choose(["int8", "int5"])
