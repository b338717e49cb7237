"""The states that a target's pool keeps, and the head that reads them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from pagedraft.kernels.normed import Normed, finish_norm
from pagedraft.kernels.rms_norm import rms_norm_ref
from pagedraft.model.batch import Span
from pagedraft.model.draft_folder import load_draft
from pagedraft.model.feature_head import FeatureHead, states_before
from pagedraft.model.kv_cache import KVCache, kv_bytes_per_token
from pagedraft.model.last_rows import LastRows
from pagedraft.model.transformer import Transformer
from pagedraft.tests.compare import assert_same_bits
from pagedraft.tests.inputs import randn
from pagedraft.tests.kernels.linear_inputs import EPS, squares_of
from pagedraft.tests.model.feature_heads import (
    BLOCK_SIZE,
    Definition,
    head_tensors,
    pool,
    save_head,
)
from pagedraft.tests.model.steps import random_spans, step
from pagedraft.tests.model.tiny import save_tiny

TOKENS = [5, 9, 33, 7, 60, 61, 5, 9, 33, 8, 20, 90, 14]
BLOCKS = [4, 2]
FEEDS = {"at once": [13], "one by one": [1] * 13, "chunks": [5, 5, 3], "a block": [8, 5]}
FAMILIES = ("llama", "llama-tied", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Targets by their families, and beside each its head "FAMILY-head"."""
    root = tmp_path_factory.mktemp("heads")
    for name in FAMILIES:
        save_tiny(root / name, name, dtype=torch.bfloat16)
        save_head(root / f"{name}-head", root / name)
    return root


def kept(cache: KVCache) -> torch.Tensor:
    """The states of TOKENS."""
    assert cache.features_NBE is not None
    return cache.features_NBE[BLOCKS].flatten(0, 1)[: len(TOKENS)]


def feed(model: Transformer, cache: KVCache, lengths: list[int], num_logits: int) -> torch.Tensor:
    """Logits of the last tokens of each of TOKENS' spans."""
    start, logits = 0, []
    for length in lengths:
        wanted = min(num_logits, length)
        span = Span(TOKENS[start : start + length], start, BLOCKS, wanted)
        batch = step(model, [span], BLOCK_SIZE, row_multiple=model.row_multiple)
        logits.append(model.forward(batch, cache))
        start += length
    return torch.cat(logits)


@pytest.mark.usefixtures("cpu_path")
class TestStates:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    @pytest.mark.parametrize("num_logits", [0, 1, 3, 99])
    @pytest.mark.parametrize("feeding", FEEDS)
    def test_logits_have_the_bits_that_they_have_without(self, folders, feeding, num_logits, dtype):
        model = Transformer.from_folder(folders / "llama", dtype=dtype)
        plain, keeping = pool(model, keeps_states=False), pool(model, keeps_states=True)
        expected = feed(model, plain, FEEDS[feeding], num_logits)
        assert_same_bits(feed(model, keeping, FEEDS[feeding], num_logits), expected)
        for one, other in zip(plain.k + plain.v, keeping.k + keeping.v, strict=True):
            assert_same_bits(one, other)

    @pytest.mark.parametrize("seed", range(6))
    def test_logits_of_batches(self, folders, seed):
        model = Transformer.from_folder(folders / "qwen3", dtype=torch.bfloat16)
        spans = random_spans(seed, 1 + seed, 5, block_size=BLOCK_SIZE, context=30)
        batch = step(model, spans, BLOCK_SIZE, row_multiple=model.row_multiple)
        found = []
        for keeps_states in (False, True):
            cache = pool(model, keeps_states=keeps_states, num_blocks=32)
            for tensor in cache.tensors:
                tensor.fill_(0.5)
            found.append(model.forward(batch, cache))
        assert_same_bits(*found)

    @pytest.mark.parametrize("name", FAMILIES)
    def test_they_are_what_the_head_reads(self, folders, name):
        model = Transformer.from_folder(folders / name)
        cache = pool(model, keeps_states=True)
        feed(model, cache, FEEDS["chunks"], 0)
        definition = Definition(name, folders / name, head_tensors(folders / name, 0, 0.5, 1.0))
        torch.testing.assert_close(kept(cache), definition.states(TOKENS), rtol=1e-4, atol=2e-5)

    def test_their_bits_do_not_depend_on_the_feeding(self, folders):
        model = Transformer.from_folder(folders / "llama", dtype=torch.bfloat16)
        caches = [pool(model, keeps_states=True) for _ in FEEDS]
        for cache, lengths in zip(caches, FEEDS.values(), strict=True):
            feed(model, cache, lengths, 1)
        for one, other in pairwise(caches):
            assert_same_bits(kept(one), kept(other))

    def test_nothing_else_is_written(self, folders, monkeypatch):
        """Padding goes to the null block."""
        monkeypatch.setattr(Transformer, "row_multiple", 4)
        model = Transformer.from_folder(folders / "llama")
        cache = pool(model, keeps_states=True)
        feed(model, cache, [5], 1)
        assert cache.features_NBE is not None
        states_SE = cache.features_NBE.flatten(0, 1)
        is_number_S = states_SE.isfinite().all(1)
        written = is_number_S.nonzero()[:, 0].tolist()
        assert written == [0, *range(BLOCKS[0] * BLOCK_SIZE, BLOCKS[0] * BLOCK_SIZE + 5)]

    def test_memory_is_counted(self, folders):
        model = Transformer.from_folder(folders / "llama")
        per_token = kv_bytes_per_token(model.config, torch.int8, torch.float32)
        cache = KVCache(
            *(model.config, 6, BLOCK_SIZE, torch.int8, model.device), features_dtype=torch.float32
        )
        assert cache.num_bytes == 6 * BLOCK_SIZE * per_token
        assert any(tensor is cache.features_NBE for tensor in cache.tensors)


def test_logits_on_interpreted_kernels(folders, device):
    model = Transformer.from_folder(folders / "llama", dtype=torch.float16, device=device)
    plain, keeping = pool(model, keeps_states=False), pool(model, keeps_states=True)
    expected = feed(model, plain, [9, 4], 3)
    assert_same_bits(feed(model, keeping, [9, 4], 3), expected)
    assert bool(kept(keeping).isfinite().all())


def run_head(target: Transformer, head: FeatureHead, lengths: list[int]) -> torch.Tensor:
    """The head's states and logits at TOKENS, read in spans, [tokens, E + V]."""
    target_cache, cache = pool(target, keeps_states=True), pool(head, keeps_states=False)
    feed(target, target_cache, [13], 1)
    start, rows = 0, []
    for length in lengths:
        span = Span(TOKENS[start : start + length], start, BLOCKS, length)
        batch = step(head, [span], BLOCK_SIZE, row_multiple=head.row_multiple)
        before_TE = states_before(target_cache, [span], batch.tokens_T.shape[0])
        logits_QV, states_QE = head.forward(batch, cache, before_TE)
        assert len(states_QE) == length
        rows.append(torch.cat((states_QE, logits_QV), dim=1))
        start += length
    return torch.cat(rows)


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_is_its_definition(folders, name):
    target = Transformer.from_folder(folders / name)
    head = load_draft(folders / f"{name}-head", target)
    assert isinstance(head, FeatureHead)
    definition = Definition(name, folders / name, head_tensors(folders / name, 0, 0.5, 1.0))
    before_TE = torch.cat((torch.zeros(1, head.config.embed_dim), definition.states(TOKENS)[:-1]))
    states_TE = definition.guesses(TOKENS, before_TE)
    with torch.inference_mode():
        expected = torch.cat((states_TE, definition.target.lm_head(states_TE)), dim=1)
    found = run_head(target, head, [13])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=5e-5)
    assert_same_bits(run_head(target, head, [5, 1, 7]), found)


def test_a_head_on_interpreted_kernels(folders, device):
    target = Transformer.from_folder(folders / "llama", device=device)
    head = load_draft(folders / "llama-head", target)
    definition = Definition(
        "llama", folders / "llama", head_tensors(folders / "llama", 0, 0.5, 1.0)
    )
    before_TE = torch.cat((torch.zeros(1, 80), definition.states(TOKENS)[:-1]))
    found = run_head(target, head, [13])[:, :80].cpu()
    torch.testing.assert_close(found, definition.guesses(TOKENS, before_TE), rtol=1e-4, atol=5e-5)


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_rounded_weights(folders, weights):
    target = Transformer.from_folder(folders / "qwen3")
    plain = load_draft(folders / "qwen3-head", target)
    head = load_draft(folders / "qwen3-head", target, weights=weights)
    assert isinstance(head, FeatureHead)
    assert head.fuse.format == head.layers[0].qkv.format != plain.fuse.format
    assert head.weight_bytes < plain.weight_bytes
    assert bool(run_head(target, head, [13]).isfinite().all())


@pytest.mark.usefixtures("cpu_path")
def test_bytes_of_a_pass(folders):
    target = Transformer.from_folder(folders / "llama", dtype=torch.bfloat16)
    own = load_file(folders / "llama-head" / "model.safetensors")
    num_bytes = sum(tensor.nbytes for tensor in own.values()) + target.head.num_bytes
    assert load_draft(folders / "llama-head", target).weight_bytes == num_bytes


@pytest.mark.usefixtures("cpu_path")
def test_a_position_without_logits_writes_kv(folders):
    target = Transformer.from_folder(folders / "llama")
    head = load_draft(folders / "llama-head", target)
    cache = pool(head, keeps_states=False)
    batch = step(head, [Span(TOKENS, 0, BLOCKS, 0)], BLOCK_SIZE, row_multiple=head.row_multiple)
    logits_QV, states_QE = head.forward(batch, cache, torch.zeros(batch.tokens_T.shape[0], 80))
    assert (logits_QV.shape, states_QE.shape) == ((0, 97), (0, 80))
    assert bool(cache.k[0][BLOCKS[0]].isfinite().all())


class TestStatesBefore:
    def test_rows_come_from_the_slot_before(self, folders):
        target = Transformer.from_folder(folders / "llama", dtype=torch.float32)
        cache = pool(target, keeps_states=True)
        assert cache.features_NBE is not None
        slots_S = torch.arange(6 * BLOCK_SIZE, dtype=cache.features_NBE.dtype)
        cache.features_NBE.copy_(slots_S.view(6, BLOCK_SIZE, 1).expand_as(cache.features_NBE))
        spans = [
            Span([1, 2, 3], 0, [5], 1),
            Span([1, 2, 3], 7, [3, 1], 1),
            Span([1], 8, [3, 1], 1),
            Span([1], 0, [2], 1),
        ]
        found = states_before(cache, spans, 10)[:8, 0].tolist()
        assert found == [0, 40, 41, 30, 31, 8, 31, 0]

    def test_a_pool_without_states_is_named(self, folders):
        target = Transformer.from_folder(folders / "llama")
        with pytest.raises(ValueError, match="the target's pool keeps none"):
            states_before(pool(target, keeps_states=False), [Span([1], 0, [1], 1)], 1)


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("sizes", [(1, 80), (13, 79)])
def test_states_of_another_shape(folders, sizes):
    head = load_draft(folders / "llama-head", Transformer.from_folder(folders / "llama"))
    batch = step(head, [Span(TOKENS, 0, BLOCKS, 1)], BLOCK_SIZE)
    with pytest.raises(ValueError, match="features_TE: expected torch.float32"):
        head.forward(batch, pool(head, keeps_states=False), torch.zeros(sizes))


def test_rows_of_a_norm_that_is_not_finished():
    """What a GPU's layers end in: picked rows are the same, states are those of the norm."""
    sum_TE, weight_E = randn(9, 80, dtype=torch.bfloat16), randn(80, dtype=torch.bfloat16, seed=1)
    rows_TE = (sum_TE.float() * weight_E.float()).bfloat16()
    rows = LastRows(Normed(rows_TE, squares_of(sum_TE), EPS), sum_TE)
    model = SimpleNamespace(device=torch.device("cpu"))
    spans = [Span([1, 2, 3, 4], 0, [1], 2), Span([5] * 5, 0, [2], 1)]
    picked = rows.with_logits(step(model, spans, BLOCK_SIZE))
    assert picked is not None
    assert isinstance(picked.normed, Normed)
    assert_same_bits(finish_norm(picked.normed), finish_norm(rows.normed)[[2, 3, 8]])
    assert_same_bits(picked.sum_TE, sum_TE[[2, 3, 8]])
    assert_same_bits(rows.states(weight_E, EPS), rms_norm_ref(sum_TE, weight_E, EPS))
