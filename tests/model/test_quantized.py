"""Quantised checkpoints: each layout loads as the weights it stands for; the others are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pagedraft.kernels.dispatch import use_implementation
from pagedraft.kernels.linear import dense_weight
from pagedraft.kernels.weight_quant import QuantWeight, dequantize_weight, quantize_weight
from pagedraft.model import quantized
from pagedraft.model.batch import Span, build_step_batch
from pagedraft.model.config import ModelConfig
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.quant_scheme import parse_scheme
from pagedraft.model.transformer import Transformer
from pagedraft.model.weight_files import SINGLE
from pagedraft.model.weights import load_weights
from pagedraft.tests.model.packers import edit_config, save, save_packed
from pagedraft.tests.model.quant_cases import AWQ, CASES, gptq

TOKENS = [5, 9, 33, 7, 60, 61, 5, 9, 33, 8, 20, 90, 14]
LINEAR = ("qkv", "o", "gate_up", "down", "head")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[str], tuple[Path, Path]]:
    """A function that saves a case once: (quantised folder, folder of the values)."""
    folders: dict[str, tuple[Path, Path]] = {}

    def get(name: str) -> tuple[Path, Path]:
        if name not in folders:
            case = CASES[name]
            folder = tmp_path_factory.mktemp("case")
            folders[name] = save_packed(folder, case.packer, case.config, case.plain)
        return folders[name]

    return get


def load(folder: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    return load_weights(folder, ModelConfig.from_folder(folder), device=device)


def values(weight: torch.Tensor | QuantWeight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else dequantize_weight(weight)


def same(loaded: Mapping[str, Any], dense: Mapping[str, torch.Tensor]) -> bool:
    return loaded.keys() == dense.keys() and all(
        torch.equal(values(loaded[name]), dense[name]) for name in dense
    )


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_file(name, saved):
    case, (stored, dense) = CASES[name], saved(name)
    loaded = load(stored)
    assert same(loaded, load(dense))
    quants = {key: w for key, w in loaded.items() if isinstance(w, QuantWeight)}
    assert {w.format for w in quants.values()} == {case.format}
    assert {w.group for w in quants.values() if w.num_in == 128} == {case.group}
    ordered = {key for key, w in quants.items() if w.order_I is not None}
    assert ordered == (set(quants) if "ordered" in name else set())


FULL = ("gptq", "awq", "fp8 blocks", "compressed fp8 channel")


@pytest.mark.parametrize("name", FULL)
def test_all_linear_layers_but_the_head_are_quantised(name, saved):
    loaded = load(saved(name)[0])
    quants = {key for key, weight in loaded.items() if isinstance(weight, QuantWeight)}
    assert quants == {f"layers.{i}.{layer}" for i in range(2) for layer in LINEAR[:4]}


def test_a_quantised_head(saved):
    assert load(saved("compressed int4 with zeros, head too")[0])["head"].format == "int4"


def test_wrong_order_of_outputs_is_seen(saved, monkeypatch):
    """Teeth: the comparison must notice outputs that change places."""
    monkeypatch.setattr(quantized, "AWQ_ORDER", tuple(range(8)))
    stored, dense = saved("awq")
    assert not same(load(stored), load(dense))


def logits(model: Transformer, num_tokens: int = 13) -> torch.Tensor:
    """Of the first TOKENS."""
    cache = KVCache(model.config, 4, 8, model.activation_dtype, model.device)
    batch = build_step_batch(
        [Span(TOKENS[:num_tokens], 0, [3, 1], num_tokens)],
        block_size=8,
        device=model.device,
        row_multiple=model.row_multiple,
    )
    return model.forward(batch, cache).cpu()


# How far weights and logits of the CPU path may be from those of the file, as a share of the
# largest one: int4 keeps factors and rows in bf16, int8 rows in 16 bits.
TOLERANCE = {"int4": (2**-8, 2**-5), "int8": (2**-20, 2**-10), "fp8": (2**-20, 2**-12)}


def is_close(a: torch.Tensor, b: torch.Tensor, share: float) -> bool:
    return float((a - b).abs().max()) <= share * float(b.abs().max())


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("name", CASES)
def test_model_on_the_cpu_path(name, saved):
    quant, plain = (Transformer.from_folder(folder) for folder in saved(name))
    share, share_of_logits = TOLERANCE[CASES[name].format]
    layers, dense = quant.layers[1], plain.layers[1]
    assert is_close(dense_weight(layers.qkv), dense_weight(dense.qkv), share)
    assert is_close(dense_weight(layers.down), dense_weight(dense.down), share)
    assert is_close(logits(quant), logits(plain), share_of_logits)
    assert quant.weight_bytes < plain.weight_bytes


def test_another_weight_is_not_close(saved):
    """Teeth: one step of one code is more than the tolerance."""
    weight = load(saved("gptq")[0])["layers.1.down"]
    codes = weight.codes.clone()
    codes[0, 0] ^= 1
    changed = dequantize_weight(replace(weight, codes=codes))
    assert not is_close(changed, dequantize_weight(weight), TOLERANCE["int4"][0])


KERNELS = ("gptq ordered by activation", "awq", "fp8 blocks", "compressed fp8 channel")


@pytest.mark.parametrize("name", KERNELS)
def test_model_on_triton_kernels(name, saved, device):
    """One layer; the interpreter is slow."""
    stored, dense = saved(name)
    config = replace(ModelConfig.from_folder(stored), num_layers=1)
    with use_implementation("ref"):
        plain = Transformer(config, load(dense))
        expected = logits(plain, num_tokens=3)
    model = Transformer(config, load(stored, device))
    assert torch.equal(dense_weight(model.layers[0].qkv).cpu(), load(dense)["layers.0.qkv"])
    assert is_close(logits(model, num_tokens=3), expected, 1e-4)


Q = "model.layers.1.self_attn.q_proj"


def edit(folder: Path, **changes: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """Change (or with None remove) tensors of layer 1's q_proj."""
    tensors = load_file(folder / SINGLE)
    for part, change in changes.items():
        tensor = tensors.pop(f"{Q}.{part}", torch.zeros(128))
        if change is not None:
            tensors[f"{Q}.{part}"] = change(tensor)
    save(folder, tensors)


# name -> (case, what is broken in its folder, the message)
BROKEN: Mapping[str, tuple[str, Callable[[Path], object], str]] = {
    "no zero points": (
        "gptq",
        lambda d: edit(d, qzeros=None),
        rf"missing 1 tensors: {Q}\.qzeros",
    ),
    "no order": (
        "gptq ordered by activation",
        lambda d: edit(d, g_idx=None),
        rf"missing 1 tensors: {Q}\.g_idx",
    ),
    "a plain weight besides": (
        "awq",
        lambda d: edit(d, weight=lambda _: torch.zeros(128, 128)),
        rf"left over 1 tensors: {Q}\.weight",
    ),
    "another group size": (
        "awq",
        lambda d: edit_config(d, quantization_config=AWQ | {"group_size": 32}),
        r"qzeros: expected shape \(4, 16\) \(from config\.json\), got \(2, 16\)",
    ),
    "awq as gptq": (
        "awq",
        lambda d: edit_config(d, quantization_config=gptq(64)),
        r"qweight: expected shape \(16, 128\) .* got \(128, 16\)",
    ),
    "codes of another kind": (
        "fp8 blocks",
        lambda d: edit(d, weight=lambda w: w.float()),
        rf"{Q}\.weight: expected dtype F8_E4M3, got F32",
    ),
    "factors of another kind": (
        "fbgemm",
        lambda d: edit(d, weight_scale=lambda s: s[:7]),
        rf"{Q}\.weight_scale: expected shape \(128, 1\) or .* got \(7, 1\)",
    ),
    "uneven groups": (
        "gptq ordered by activation",
        lambda d: edit(d, g_idx=lambda g: g.clamp(min=1)),
        rf"{Q}: g_idx: expected 32 inputs in each of 4 groups, got \[0, 64, 32, 32\]",
    ),
    "a group that is not there": (
        "gptq ordered by activation",
        lambda d: edit(d, g_idx=lambda g: g - 1),
        "g_idx: expected 32 inputs in each of 4 groups",
    ),
    "orders that differ": (
        "gptq ordered by activation",
        lambda d: edit(d, g_idx=lambda g: g.flip(0)),
        rf"{Q}, .*v_proj: expected equal orders of inputs \(g_idx\), got different ones",
    ),
    "one of q, k and v plain": (
        "gptq",
        lambda d: edit_config(d, quantization_config=gptq(modules_to_not_convert=["q_proj"])),
        r"expected all of .*q_proj.* to be quantised or none, got .*k_proj",
    ),
    "a bias": (
        "gptq",
        lambda d: edit(d, bias=lambda b: b + 0.5),
        rf"{Q}\.bias: expected zeros, the model has no bias there",
    ),
    "inputs that do not divide": (
        "gptq",
        lambda d: edit_config(d, quantization_config=gptq(96)),
        "/model: .*q_proj: 128 inputs do not divide into groups of 96",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoint(name, saved, tmp_path):
    case, damage, message = BROKEN[name]
    folder = shutil.copytree(saved(case)[0], tmp_path / "model")
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load(folder)


HARMLESS: Mapping[str, tuple[str, Callable[[Path], object]]] = {
    "a bias of zeros": ("gptq", lambda d: edit(d, bias=lambda b: b)),
    "no order where it is the natural one": ("gptq", lambda d: edit(d, g_idx=None)),
    "a factor for activations": (
        "fp8 tensor",
        lambda d: edit(d, input_scale=lambda _: torch.ones(1)),
    ),
    "a factor without axes": ("fp8 tensor", lambda d: edit(d, weight_scale=lambda s: s[0])),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_variant(name, saved, tmp_path):
    case, change = HARMLESS[name]
    stored, dense = saved(case)
    folder = shutil.copytree(stored, tmp_path / "model")
    change(folder)
    assert same(load(folder), load(dense))


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_slabs_are_the_whole(format, monkeypatch):
    weight_OI = torch.randn(37, 64, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(quantized, "SLAB_WEIGHTS", 10 * 64)
    whole, slabs = quantize_weight(weight_OI, format), quantized.quantize(weight_OI, format)
    assert slabs.codes.shape == whole.codes.shape
    assert torch.equal(dequantize_weight(slabs), dequantize_weight(whole))


def test_parts_that_group_inputs_differently():
    weights = [quantize_weight(torch.eye(128), "int4", group) for group in (32, 64)]
    with pytest.raises(ValueError, match=r"expected equal groups of inputs, got \[32, 64\]"):
        quantized.concatenate(weights)


def test_a_group_larger_than_the_inputs():
    """As packers write it: one group of all inputs."""
    [qweight, qzeros, *_] = quantized.headers(parse_scheme(gptq(256)), "up_proj", 16, 128)
    assert (qweight.source, qweight.shapes) == ("up_proj.qweight", ((16, 16),))
    assert (qzeros.source, qzeros.shapes) == ("up_proj.qzeros", ((1, 2),))
