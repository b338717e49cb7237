"""Quantised weights under the engine: the same output with and without speculation, for target and
draft alike, and errors that name the option."""

from __future__ import annotations

import weakref

import pytest
import torch

from pagedraft.kernels.weight_quant import dequantize_weight
from pagedraft.model import quantized
from pagedraft.model.config import ModelConfig
from pagedraft.model.transformer import Transformer
from pagedraft.model.weight_files import OpenFile
from pagedraft.model.weights import load_weights
from pagedraft.scheduler.cli import main
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.model.packers import SIZES, gptq, save_packed
from pagedraft.tests.model.quant_cases import gptq as gptq_config
from pagedraft.tests.model.tiny import save_tiny
from pagedraft.tests.scheduler.runs import (
    mixed_params,
    random_prompts,
    run_alone,
    run_preempted,
    run_together,
)

LENGTHS = (1, 7, 12, 23, 40)
PROMPTS, PARAMS = random_prompts(97, LENGTHS), mixed_params(len(LENGTHS), 12)
FORMATS = ("int8", "int4", "fp8")
RUNS = {"together": run_together, "preempted": run_preempted}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    save_tiny(root / "target", "llama-tied", seed=0, **SIZES)
    save_tiny(root / "other", "llama", seed=1, **SIZES)
    stored, _ = save_packed(root / "gptq", gptq(32), gptq_config())
    return {"target": root / "target", "other": root / "other", "gptq": stored}


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("weights", FORMATS)
def test_speculation_changes_nothing(folders, weights, run):
    plain = LLM(folders["target"], weights=weights, speculate="off", kv_tokens=256)
    expected = run_alone(plain, PROMPTS, PARAMS)
    llm = LLM(
        folders["target"], folders["other"], weights=weights, k=3, block_size=8, kv_tokens=1024
    )
    outcome = RUNS[run](llm, PROMPTS, PARAMS)
    assert outcome.token_ids == expected.token_ids
    assert outcome.num_drafted > 0


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("weights", FORMATS)
def test_target_and_draft_are_quantised(folders, weights):
    plain = LLM(folders["target"], folders["other"], kv_tokens=64)
    llm = LLM(folders["target"], folders["other"], weights=weights, kv_tokens=64)
    draft = llm.engine.speculation.drafters["draft"].model
    assert llm.target.weight_bytes < plain.target.weight_bytes
    assert draft.weight_bytes < plain.engine.speculation.drafters["draft"].model.weight_bytes
    assert (
        draft.layers[0].qkv.format
        != plain.engine.speculation.drafters["draft"].model.layers[0].qkv.format
    )


@pytest.mark.usefixtures("cpu_path")
def test_a_checkpoint_that_is_quantised(folders):
    llm = LLM(folders["gptq"], weights="int4", k=3, block_size=8, kv_tokens=512)
    plain = LLM(folders["gptq"], speculate="off", kv_tokens=512)
    assert (
        run_together(llm, PROMPTS, PARAMS).token_ids == run_alone(plain, PROMPTS, PARAMS).token_ids
    )


def load(folder, weights, **options):
    return load_weights(folder, ModelConfig.from_folder(folder), weights=weights, **options)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("name", ["target", "other"])
def test_what_is_rounded(folders, name, weights):
    """Linear weights and the head, a tied one as a copy of its own; nothing else."""
    plain, rounded = load(folders[name], "auto"), load(folders[name], weights)
    linear = {key for key, weight in rounded.items() if not isinstance(weight, torch.Tensor)}
    in_layers = {f"layers.{i}.{part}" for i in (0, 1) for part in ("qkv", "o", "gate_up", "down")}
    assert linear == in_layers | {"head"}
    assert {rounded[key].format for key in in_layers} == {weights}
    assert rounded["head"].format == ("int8" if weights == "int4" else weights)
    kept = rounded.keys() - linear
    assert all(torch.equal(rounded[key], plain[key]) for key in kept)
    head = plain.get("head", plain["embed"])
    error = (dequantize_weight(rounded["head"]) - head).abs().max() / head.abs().max()
    assert 0 < float(error) < 0.1


ERRORS = {
    "unknown": ("target", "int3", "weights: expected one of .*auto.*int8.*got 'int3'"),
    "another than what is stored": (
        "gptq",
        "int8",
        'weights: expected "auto" or "int4", which the checkpoint stores .*gptq.*got \'int8\'',
    ),
}


@pytest.mark.parametrize(("name", "weights", "message"), ERRORS.values(), ids=ERRORS)
def test_bad_option_is_named(folders, name, weights, message):
    with pytest.raises(ValueError, match=message):
        LLM(folders[name], weights=weights)


def test_inputs_that_int4_cannot_group(tmp_path):
    save_tiny(tmp_path / "tiny", "llama")
    with pytest.raises(ValueError, match=r"model\.safetensors: .*q_proj\.weight: .*80 inputs"):
        LLM(tmp_path / "tiny", weights="int4")


REFUSED = {"the option": ("target", "fp8"), "a checkpoint": ("gptq", "auto")}


@pytest.mark.parametrize(("name", "weights"), REFUSED.values(), ids=REFUSED)
def test_a_format_that_the_device_lacks(folders, monkeypatch, name, weights):
    def refuse(format, device):
        raise ValueError(f"{device} has no {format}")

    monkeypatch.setattr("pagedraft.model.weights.check_weight_format", refuse)
    with pytest.raises(ValueError, match="cpu has no (fp8|int4)"):
        LLM(folders[name], weights=weights, device="cpu")


@pytest.mark.usefixtures("cpu_path")
def test_command_line(folders, capsys):
    arguments = ["generate", "hi", "--model", str(folders["target"]), "--weights"]
    assert main([*arguments, "int3"]) == 2
    assert "weights: expected one of" in capsys.readouterr().err
    assert main([*arguments, "int8"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_one_tensor_of_the_file_at_a_time(folders, monkeypatch):
    """While one is rounded no other one that was read is alive."""
    read: list[weakref.ref[torch.Tensor]] = []
    num_alive: list[int] = []

    def reading(file, name):
        tensor = honest_read(file, name)
        read.append(weakref.ref(tensor))
        return tensor

    def rounding(weight_OI, *rest):
        num_alive.append(sum(tensor() is not None for tensor in read))
        return honest_round(weight_OI, *rest)

    honest_read, honest_round = OpenFile.read, quantized.quantize_weight
    monkeypatch.setattr(OpenFile, "read", reading)
    monkeypatch.setattr(quantized, "quantize_weight", rounding)
    load(folders["other"], "int8")
    assert num_alive == [1] * (2 * 7 + 1)


def test_models_in_memory_keep_their_weights(folders):
    model = Transformer.from_folder(folders["target"])
    assert LLM(model, weights="int8", kv_tokens=64).target is model
