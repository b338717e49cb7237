"""Padding of steps: what it lays out, and that it changes no bit, on the CPU and in kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedraft.kernels.dispatch import INTERPRETED, use_implementation
from pagedraft.model.batch import Span, StepBatch, build_step_batch
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.padding import (
    PackedSizes,
    StepShape,
    empty_batch,
    fill_padded,
    packed_batch,
    pad_batch,
    shape_of_batch,
)
from pagedraft.model.transformer import Transformer
from pagedraft.tests.compare import assert_same_bits
from pagedraft.tests.model.steps import all_logits, blocks_of, filled_cache, random_spans, step
from pagedraft.tests.model.tiny import save_tiny

CPU = torch.device("cpu")
BLOCK_SIZE = 8
SPANS = [
    Span([10, 11, 12], start=6, block_ids=[4, 2], num_logits=0),
    Span([20], start=0, block_ids=[7], num_logits=1),
]
VERIFY = all_logits(SPANS)


def batch_of(spans: list[Span]) -> StepBatch:
    return build_step_batch(spans, block_size=BLOCK_SIZE, device=CPU)


def test_layout():
    padded = pad_batch(batch_of(SPANS), 4, 6, 3, num_columns=3, max_query_len=5, max_kv_len=20)
    assert padded.tokens_T.tolist() == [10, 11, 12, 20, 0, 0]
    assert padded.positions_T.tolist() == [6, 7, 8, 0, 0, 0]
    assert padded.slots_T.tolist() == [38, 39, 16, 56, 0, 0]
    assert padded.query_starts_R1.tolist() == [0, 3, 4, 4, 4]
    assert padded.kv_lens_R.tolist() == [9, 1, 0, 0]
    assert padded.block_table_RM.tolist() == [[4, 2, 0], [7, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert padded.logit_rows_Q.tolist() == [3, 0, 0]
    assert (padded.num_tokens, padded.num_logits) == (4, 1)
    assert (padded.max_query_len, padded.max_kv_len) == (5, 20)


def test_logits_of_all_tokens_stay_those_of_all_tokens():
    padded = pad_batch(batch_of(VERIFY), 2, 7)
    assert padded.logit_rows_Q.tolist() == [0, 1, 2, 3, 0, 0, 0]
    assert (padded.num_tokens, padded.num_logits) == (4, 4)


def test_padding_by_nothing_is_the_step():
    batch = batch_of(SPANS)
    padded = pad_batch(batch, 2, 4)
    assert shape_of_batch(padded) == shape_of_batch(batch)
    assert padded.block_table_RM.tolist() == batch.block_table_RM.tolist()


def test_a_step_that_is_padded_already():
    batch = build_step_batch(SPANS, block_size=BLOCK_SIZE, device=CPU, row_multiple=16)
    assert pad_batch(batch, 2, 6).tokens_T.tolist() == [10, 11, 12, 20, 0, 0]


def test_dtypes_and_alignment():
    padded, batch = pad_batch(batch_of(SPANS), 5, 9, 3), batch_of(SPANS)
    names = [name for name, value in vars(batch).items() if isinstance(value, torch.Tensor)]
    assert {n: getattr(padded, n).dtype for n in names} == {
        n: getattr(batch, n).dtype for n in names
    }
    first = padded.tokens_T.data_ptr()
    assert all((getattr(padded, name).data_ptr() - first) % 16 == 0 for name in names)


TOO_SMALL: dict[str, tuple[tuple[int, ...], dict[str, int], str]] = {
    "rows": ((1, 4), {}, "num_rows: expected at least 2, got 1"),
    "tokens": ((2, 3), {}, "num_tokens: expected at least 4, got 3"),
    "logits": ((2, 4, 0), {}, "num_logits: expected at least 1, got 0"),
    "columns": ((2, 4), {"num_columns": 1}, "num_columns: expected at least 2, got 1"),
    "spans": ((2, 4), {"max_query_len": 2}, "max_query_len: expected at least 3, got 2"),
    "contexts": ((2, 4), {"max_kv_len": 8}, "max_kv_len: expected at least 9, got 8"),
}


@pytest.mark.parametrize("name", TOO_SMALL)
def test_sizes_that_do_not_hold_the_step(name):
    sizes, options, message = TOO_SMALL[name]
    with pytest.raises(ValueError, match=message):
        pad_batch(batch_of(SPANS), *sizes, **options)


def test_logits_of_all_tokens_need_as_many_as_tokens():
    with pytest.raises(ValueError, match="num_logits: expected 6, for every token, got 5"):
        pad_batch(batch_of(VERIFY), 2, 6, 5)


def test_filling_again_leaves_nothing_of_the_step_before():
    sizes = PackedSizes(StepShape(6, 4, 5, 20), 6, 3)
    memory_x = torch.full((sizes.num_bytes,), 255, dtype=torch.uint8)
    padded = packed_batch(memory_x, sizes)
    big = random_spans(0, 3, 2, block_size=BLOCK_SIZE, context=20)
    fill_padded(padded, batch_of(big))
    fill_padded(padded, batch_of(SPANS))
    expected = pad_batch(batch_of(SPANS), 4, 6, 6, num_columns=3)
    for name in ("tokens_T", "slots_T", "query_starts_R1", "kv_lens_R", "block_table_RM"):
        assert getattr(padded, name).tolist() == getattr(expected, name).tolist()


def test_a_shape_holds_what_is_smaller_in_all():
    shape = StepShape(8, 4, 2, 256)
    assert shape.holds(StepShape(8, 4, 2, 256))
    assert not any(
        shape.holds(StepShape(*sizes))
        for sizes in [(9, 1, 1, 1), (1, 5, 1, 1), (1, 1, 3, 1), (1, 1, 1, 257)]
    )


# name: (rows, longest span, T, R, bounds)
PADDINGS: dict[str, tuple[int, int, int, int, dict[str, int]]] = {
    "tokens": (3, 1, 8, 3, {}),
    "rows": (3, 3, 9, 8, {}),
    "over_a_tile_of_rows": (2, 3, 33, 2, {}),
    "spans": (2, 1, 8, 4, {"max_query_len": 9}),
    "contexts": (2, 3, 8, 4, {"max_kv_len": 3000}),
    "columns": (2, 3, 8, 4, {"num_columns": 40}),
    "kernels": (2, 3, 17, 4, {"max_query_len": 8, "max_kv_len": 600, "num_columns": 80}),
    "all": (5, 4, 64, 16, {"max_query_len": 20, "max_kv_len": 600, "num_columns": 80}),
}
MODELS: dict[str, tuple[str, torch.dtype, torch.dtype | None]] = {
    "fp32": ("llama", torch.float32, None),
    "bf16": ("qwen3", torch.bfloat16, None),
    "int8": ("llama-bias", torch.float32, torch.int8),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in {name for name, *_ in MODELS.values()}:
        save_tiny(root / name, name)
    return root


def logits_and_pools(
    model: Transformer, cache: KVCache, batch: StepBatch
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What a step returns and what it leaves in the pool, which is then as before."""
    saved = [tensor.clone() for tensor in cache.tensors]
    logits_QV = model.forward(batch, cache).clone()
    after = [tensor.clone() for tensor in cache.tensors]
    for tensor, before in zip(cache.tensors, saved, strict=True):
        tensor.copy_(before)
    return logits_QV, after


def check_padding(
    model: Transformer, stored: torch.dtype | None, name: str, spans: list[Span]
) -> None:
    """Logits and pools of a step and of the padded step have the same bits."""
    *_, num_tokens, padded_rows, options = PADDINGS[name]
    cache = filled_cache(model, blocks_of(spans), BLOCK_SIZE, stored)
    batch = step(model, spans, BLOCK_SIZE)
    padded = pad_batch(batch, padded_rows, num_tokens, **options)
    expected, pools = logits_and_pools(model, cache, batch)
    result, padded_pools = logits_and_pools(model, cache, padded)
    assert_same_bits(result, expected)
    for pool, padded_pool in zip(pools, padded_pools, strict=True):
        assert_same_bits(padded_pool, pool)


def spans_of(name: str, seed: int, vocab: int = 90) -> list[Span]:
    num_rows, longest, *_ = PADDINGS[name]
    sizes = {"block_size": BLOCK_SIZE, "context": 60, "vocab": vocab}
    return random_spans(seed, num_rows, longest, **sizes)


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("logits", ["some", "all"])
@pytest.mark.parametrize("name", PADDINGS)
@pytest.mark.parametrize("kind", MODELS)
def test_padding_changes_no_bit(kind, name, logits, folders):
    model_name, dtype, stored = MODELS[kind]
    model = Transformer.from_folder(folders / model_name, dtype=dtype)
    spans = spans_of(name, seed=len(name))
    check_padding(model, stored, name, spans if logits == "some" else all_logits(spans))


@pytest.mark.skipif(not INTERPRETED, reason="bits on a GPU are bench/gpu_check.py's matter")
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_padding_changes_no_bit_in_kernels(kind, tmp_path):
    """The padded step runs other tiles of rows and splits its keys, which the step does not."""
    _, dtype, stored = MODELS[kind]
    small = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 24, "num_hidden_layers": 1}
    save_tiny(tmp_path, "llama", **small, num_attention_heads=2, head_dim=16)
    model = Transformer.from_folder(tmp_path, dtype=dtype)
    check_padding(model, stored, "kernels", all_logits(spans_of("kernels", seed=1, vocab=20)))


def test_shared_prefixes_are_padded(folders):
    """Two rows share 256 keys; kernels that read one copy: test_paged_attention_empty_rows.py."""
    with use_implementation("cpu"):
        model = Transformer.from_folder(folders / "llama")
        blocks = list(range(1, 33))
        spans = [Span([5], 258, [*blocks, 33], 1), Span([6, 7], 256, [*blocks, 34], 2)]
        cache = filled_cache(model, 35, BLOCK_SIZE)
        model.cos_PR, model.sin_PR = (  # the tiny model has 128 positions
            table.repeat(4, 1) for table in (model.cos_PR, model.sin_PR)
        )
        batch = step(model, spans, BLOCK_SIZE)
        padded = pad_batch(batch, 4, 8)
        assert batch.shared is not None
        assert padded.shared is not None
        assert padded.shared.num_keys_R.tolist() == [256, 256, 0, 0]
        assert padded.shared.query_starts_P1.tolist() == [0, 3, 3]
        expected, _ = logits_and_pools(model, cache, batch)
        result, _ = logits_and_pools(model, cache, padded)
        assert_same_bits(result, expected)


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("spans", [(), (1, 2), (3,)], ids=str)
def test_an_empty_step_runs_and_stores_nothing(spans, folders):
    model = Transformer.from_folder(folders / "llama")
    cache = filled_cache(model, 3, BLOCK_SIZE)
    before = [tensor.clone() for tensor in cache.tensors]
    batch = empty_batch(StepShape(6, 3, 4, 64), 6, 8, CPU, spans)
    assert model.forward(batch, cache).shape == (6, model.config.vocab_size)
    for tensor, saved in zip(cache.tensors, before, strict=True):
        assert_same_bits(tensor, saved)


@pytest.mark.usefixtures("cpu_path")
def test_teeth_padding_in_a_block_that_is_owned(folders: Any):
    """Tokens of padding that have slots outside the null block must show."""
    model = Transformer.from_folder(folders / "llama")
    spans = random_spans(3, 2, 2, block_size=BLOCK_SIZE, context=20)
    cache = filled_cache(model, blocks_of(spans), BLOCK_SIZE)
    batch = step(model, all_logits(spans), BLOCK_SIZE)
    padded = pad_batch(batch, 4, 8)
    padded.slots_T[batch.num_tokens :] = spans[0].block_ids[0] * BLOCK_SIZE
    _, pools = logits_and_pools(model, cache, batch)
    _, padded_pools = logits_and_pools(model, cache, padded)
    with pytest.raises(AssertionError, match="bits differ"):
        assert_same_bits(padded_pools[0], pools[0])
