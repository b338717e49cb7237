"""The forward pass against transformers in fp32, on the CPU path and on interpreted kernels."""

from __future__ import annotations

import pytest
import torch

from pagedraft.kernels.dispatch import INTERPRETED, use_implementation
from pagedraft.model.batch import Span, build_step_batch
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer
from pagedraft.tests.model.tiny import TINY, save_tiny

BLOCK_SIZE = 8
TOKENS = [5, 9, 33, 7, 60, 61, 5, 9, 33, 8, 20, 90, 14]
# How a context of 13 tokens may be fed: span lengths.
FEEDS = {
    "at once": [13],
    "one by one": [1] * 13,
    "chunks over block edges": [5, 5, 3],
    "prompt and verify": [9, 4],
}


def feed(model: Transformer, spans: list[int], num_logits: int | None = None) -> torch.Tensor:
    """Logits of TOKENS fed in ``spans``, of all tokens or a span's last ``num_logits``."""
    cache = KVCache(model.config, 6, BLOCK_SIZE, model.activation_dtype, model.device)
    for tensor in (*cache.k, *cache.v):
        tensor.fill_(torch.nan)
    start, logits = 0, []
    for length in spans:
        wanted = length if num_logits is None else min(num_logits, length)
        span = Span(TOKENS[start : start + length], start, [4, 2], wanted)
        batch = build_step_batch(
            [span], block_size=BLOCK_SIZE, device=model.device, row_multiple=model.row_multiple
        )
        logits.append(model.forward(batch, cache))
        start += length
    return torch.cat(logits)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of all tiny models and transformers' logits for TOKENS."""
    root = tmp_path_factory.mktemp("models")
    result = {}
    for name in TINY:
        reference = save_tiny(root / name, name)
        with torch.inference_mode():
            result[name] = root / name, reference(torch.tensor([TOKENS])).logits[0]
    return result


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("feeding", FEEDS)
@pytest.mark.parametrize("name", TINY)
def test_cpu_path_equals_transformers(saved, name, feeding):
    folder, expected = saved[name]
    logits = feed(Transformer.from_folder(folder), FEEDS[feeding])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "llama-tied"])
def test_triton_kernels_equal_transformers(saved, name, device):
    folder, expected = saved[name]
    model = Transformer.from_folder(folder, device=device)
    logits = feed(model, FEEDS["prompt and verify"]).cpu()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("feeding", list(FEEDS)[1:])
def test_bits_do_not_depend_on_the_feeding(saved, dtype, feeding):
    model = Transformer.from_folder(saved["llama"][0], dtype=dtype)
    assert torch.equal(feed(model, FEEDS["at once"]), feed(model, FEEDS[feeding]))


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("num_logits", [1, 2, 3])
@pytest.mark.parametrize("span", [1, 2, 3, 4, 6])
def test_logits_are_those_of_the_last_tokens(saved, span, num_logits, monkeypatch):
    """Also where padding, which not every processor asks for, makes them as many as the tokens."""
    monkeypatch.setattr(Transformer, "row_multiple", 4)
    model = Transformer.from_folder(saved["llama"][0], dtype=torch.bfloat16)
    expected = feed(model, [span])[-num_logits:]
    assert torch.equal(feed(model, [span], num_logits), expected)


@pytest.mark.skipif(not INTERPRETED, reason="bits on a GPU are bench/gpu_check.py's matter")
def test_bits_on_interpreted_kernels(saved):
    model = Transformer.from_folder(saved["llama"][0], dtype=torch.float16)
    assert torch.equal(feed(model, [9, 4]), feed(model, [9, 1, 1, 1, 1]))


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_first_layers_are_a_model(tmp_path, name):
    """That of transformers with the other layers taken out."""
    reference = save_tiny(tmp_path, name, num_hidden_layers=3)
    reference.model.layers = reference.model.layers[:2]
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    model = Transformer.from_folder(tmp_path)
    logits = feed(model.first_layers(2), FEEDS["prompt and verify"])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5)
    assert len(model.layers) == model.config.num_layers == 3
    assert not torch.allclose(feed(model, [13]), expected, rtol=1e-2)


@pytest.mark.usefixtures("cpu_path")
def test_first_layers_write_what_the_model_writes(saved):
    model = Transformer.from_folder(saved["llama"][0], dtype=torch.bfloat16)
    batch = build_step_batch(
        [Span(TOKENS, 0, [1, 2], 1)],
        block_size=BLOCK_SIZE,
        device=model.device,
        row_multiple=model.row_multiple,
    )
    pools = []
    for part in (model, model.first_layers(1)):
        cache = KVCache(model.config, 3, BLOCK_SIZE, model.activation_dtype, model.device)
        for tensor in cache.tensors:
            tensor.zero_()
        part.forward(batch, cache)
        pools.append(cache.tensors)
    whole, first = pools
    assert torch.equal(whole[0], first[0])
    assert torch.equal(whole[2], first[2])
    assert whole[1].any()
    assert not first[1].any()


@pytest.mark.parametrize("num_layers", [0, 3])
def test_first_layers_are_refused(saved, num_layers):
    with pytest.raises(ValueError, match=f"num_layers: expected 1 to 2, got {num_layers}"):
        Transformer.from_folder(saved["llama"][0]).first_layers(num_layers)


@pytest.mark.usefixtures("cpu_path")
def test_prompt_chunks_without_logits_cost_no_head(saved):
    model = Transformer.from_folder(saved["llama"][0])
    cache = KVCache(model.config, 6, BLOCK_SIZE, model.activation_dtype, model.device)
    batch = build_step_batch(
        [Span(TOKENS, 0, [1, 2], 0)], block_size=BLOCK_SIZE, device=model.device
    )
    assert model.forward(batch, cache).shape == (0, 97)


def test_one_op_can_be_swapped_to_its_reference(saved):
    """With every op's reference the same weights give the same numbers, up to rounding."""
    with use_implementation("cpu"):
        model = Transformer.from_folder(saved["qwen3"][0])
        expected = feed(model, [13])
    with use_implementation("ref"):
        logits = feed(model, [13])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5)
