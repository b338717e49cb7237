"""The points of the attention sweep: what they cover, cost and hold, and what they are set against.

Costs are counted one (query, key) pair at a time; baselines run on tiny points against the
reference. FlashInfer and FlashAttention, which need a GPU, are stood in for by modules that compute
the same from the arguments they get.
"""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from pagedraft.bench import attention_baselines
from pagedraft.bench.attention_baselines import BASELINES, TITLES, flash_sdpa, packed_sdpa
from pagedraft.bench.attention_cases import (
    AXES,
    AXIS_STEPS,
    CONTEXTS,
    FULL,
    SELECTIONS,
    SHORT,
    STEPS,
    TRIAL,
    AttentionPoint,
    dtype_name,
    launched_split,
    num_units,
    point_cost,
    point_inputs,
    prepare_attention,
    scratch_bytes,
)
from pagedraft.bench.gate import gate
from pagedraft.kernels.dispatch import implementation
from pagedraft.kernels.paged_attention import paged_attention_ref

CPU = torch.device("cpu")
MIXED = replace(TRIAL[0], step="mixed", query_lens=(9, 5, 5, 1), kv_lens=(37, 20, 20, 50))


def mixed(**changes) -> AttentionPoint:
    """A tiny point with rows of different spans and lengths."""
    return replace(MIXED, **changes)


POINTS = {
    "spans of different lengths": mixed(),
    "one head a KV head": mixed(group=1),
    "window shorter than most rows": mixed(window=17),
    "window longer than some rows": mixed(window=30),
    "int8 cache": mixed(cache="int8"),
    "fp8 cache with a window": mixed(cache="fp8", window=17),
    "single queries": replace(TRIAL[0], query_lens=(1, 1)),
    "whole prompt": mixed(query_lens=(33,), kv_lens=(33,)),
}


def test_sweep_covers_contexts():
    seen = {(point.step, point.context) for point in FULL if not point.axes}
    assert seen >= {(step, context) for step in STEPS for context in CONTEXTS}


@pytest.mark.parametrize("axis", AXES)
def test_sweep_covers_axis(axis):
    seen = {(point.step, point.axes[axis]) for point in FULL if list(point.axes) == [axis]}
    assert seen == {(step, value) for step in AXIS_STEPS for value in AXES[axis]}


NAMED_AXES = {
    "queries of a verify": ({p.query_lens[0] for p in FULL if "verify" in p.step}, {2, 5, 9}),
    "contexts": ({p.context for p in FULL}, {512, 2048, 8192, 32768, 65536}),
    "groups": ({p.group for p in FULL}, {1, 4, 7}),
    "head dims": ({p.head_dim for p in FULL}, {64, 96, 128}),
    "block sizes": ({p.block_size for p in FULL}, {16, 64}),
    "caches": ({p.cache for p in FULL}, {"bf16", "int8", "fp8"}),
    "steps": ({p.step for p in FULL}, {*STEPS, "prompt"}),
}


@pytest.mark.parametrize("name", NAMED_AXES)
def test_sweep_has_the_named_values(name):
    found, wanted = NAMED_AXES[name]
    assert found == wanted


@pytest.mark.parametrize("select", SELECTIONS)
def test_point_names_are_unique(select):
    names = [point.name for point in SELECTIONS[select]]
    assert len(set(names)) == len(names)


def test_short_points_are_among_the_full_ones():
    assert set(SHORT) <= set(FULL)


def counted(point: AttentionPoint) -> tuple[int, int]:
    """Bytes and flops of a point by looking at each query and key."""
    pairs = {
        (row, query, key)
        for row, (span, kv_len) in enumerate(zip(point.query_lens, point.kv_lens, strict=True))
        for query in range(kv_len - span, kv_len)
        for key in range(query + 1)
        if point.window is None or query - key < point.window
    }
    keys = {(row, key) for row, _, key in pairs}
    key_bytes = point.head_dim + 4 if point.is_quantized else point.head_dim * 4
    q_bytes = point.num_tokens * point.num_heads * point.head_dim * 4
    kv_bytes = 2 * len(keys) * point.num_kv_heads * key_bytes
    return 2 * q_bytes + kv_bytes, 4 * len(pairs) * point.num_heads * point.head_dim


@pytest.mark.parametrize("name", POINTS)
def test_cost_counts_each_pair(name):
    assert tuple(point_cost(POINTS[name])) == counted(POINTS[name])


UNIT_CASES = {
    "whole units": (mixed(kv_lens=(64,) * 4), 16, 4),
    "a part of the last": (mixed(kv_lens=(65,) * 4), 16, 5),
    "a window cuts two": (mixed(query_lens=(1,) * 4, kv_lens=(64,) * 4, window=16), 16, 2),
}


@pytest.mark.parametrize("name", UNIT_CASES)
def test_number_of_units(name):
    point, unit, expected = UNIT_CASES[name]
    assert num_units(point, unit) == expected


def test_scratch_is_what_a_launch_would_hold_twice():
    point = mixed()
    acc = torch.empty(point.num_tokens, point.num_heads, 3, point.head_dim)
    stats = torch.empty(point.num_tokens, point.num_heads, 3, 2)
    assert scratch_bytes(point, 3) == 2 * (acc.nbytes + stats.nbytes)


def test_launched_split_of_a_short_and_a_long_context():
    short, long = mixed(), mixed(kv_lens=(9, 5, 5, 65536))
    assert launched_split(short, True).num_units == 0
    split = launched_split(long, True)
    assert split.num_units == num_units(long, split.unit)


def test_tables_are_shuffled_and_share_no_block():
    t = point_inputs(mixed(kv_lens=(200, 200, 200, 50)), CPU)
    used = [t["table"][row, :count] for row, count in enumerate((13, 13, 13, 4))]
    blocks = torch.cat(used)
    assert len(blocks.unique()) == len(blocks) == len(t["k"]) - 1
    assert int(blocks.min()) == 1
    assert not torch.equal(blocks, blocks.sort().values)


@pytest.mark.parametrize("cache", ["int8", "fp8"])
def test_gate_takes_a_quantized_cache(cache):
    point = mixed(cache=cache)
    assert gate(prepare_attention(point), point_inputs(point, CPU)) is None


def test_gate_sees_a_lost_factor():
    point = mixed(cache="int8")

    def prepare(t):
        is_exact = implementation("paged_attention", CPU, has_cpu=True) == "ref"
        scale = t["k_scale"] if is_exact else torch.full_like(t["k_scale"], 0.01)
        return prepare_attention(point)({**t, "k_scale": scale})

    assert "error" in gate(prepare, point_inputs(point, CPU))


def expected_out(point: AttentionPoint, t: dict[str, torch.Tensor]) -> torch.Tensor:
    args = (t["q"], t["k"], t["v"], t["table"], t["starts"], t["lens"])
    scales = {f"{x}_scale_NGB": t.get(f"{x}_scale") for x in ("k", "v")}
    return paged_attention_ref(*args, window=point.window, **scales)


def laid_out(outputs, like: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.reshape(-1, *like.shape[1:]) for part in outputs])


@pytest.mark.parametrize("name", POINTS)
@pytest.mark.parametrize("baseline", ["sdpa", "gather_sdpa"])
def test_sdpa_baseline_is_attention(baseline, name):
    point = POINTS[name]
    t = point_inputs(point, CPU)
    expected = expected_out(point, t)
    out = laid_out(BASELINES[baseline](point, t)(), expected)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attend", [flash_sdpa, packed_sdpa])
def test_both_ways_to_call_sdpa_agree(attend, monkeypatch):
    monkeypatch.setattr(attention_baselines, "_sdpa", attend)
    point = mixed()
    t = point_inputs(point, CPU)
    expected = expected_out(point, t)
    out = laid_out(BASELINES["sdpa"](point, t)(), expected)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", POINTS)
def test_flex_baseline_is_attention(name):
    point = POINTS[name]
    t = point_inputs(point, CPU)
    expected = expected_out(point, t)
    out = laid_out(attention_baselines.flex(point, t, attend=flex_attention)(), expected)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


class PagedWrapper:
    """A FlashInfer wrapper that attends by the reference from what it was planned with."""

    def __init__(self, workspace, kv_layout, use_tensor_cores=False):
        assert kv_layout == "HND"

    def plan(self, *layout, causal=True, q_data_type, kv_data_type, window_left=-1):
        *query_starts, page_starts, pages, last_lens, num_heads, _, head_dim, page_size = layout
        num_rows = len(last_lens)
        self.starts = query_starts[0] if query_starts else torch.arange(num_rows + 1).int()
        counts = page_starts.diff()
        self.lens = ((counts - 1) * page_size + last_lens).int()
        self.table = torch.zeros(num_rows, int(counts.max()), dtype=torch.int32)
        for row, ids in enumerate(pages.split(counts.tolist())):
            self.table[row, : len(ids)] = ids
        self.window = None if window_left < 0 else window_left + 1

    def run(self, q_THD, paged_kv_cache):
        args = (q_THD, *paged_kv_cache, self.table, self.starts, self.lens)
        return paged_attention_ref(*args, window=self.window)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, *, cache_seqlens, block_table, causal, window_size
):
    """FlashAttention's entry point by the reference."""
    num_rows, span = q.shape[:2]
    assert k_cache.shape[1] % 256 == 0
    caches = (cache.transpose(1, 2).contiguous() for cache in (k_cache, v_cache))
    starts = torch.arange(num_rows + 1).int() * span
    window = None if window_size[0] < 0 else window_size[0] + 1
    args = (q.flatten(0, 1), *caches, block_table, starts, cache_seqlens)
    return paged_attention_ref(*args, window=window).unflatten(0, (num_rows, span))


@pytest.fixture
def libraries(monkeypatch):
    """Stand-ins for the two libraries."""
    wrappers = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
    flashinfer = types.ModuleType("flashinfer")
    flashinfer.__dict__.update(dict.fromkeys(wrappers, PagedWrapper))
    flash_attn = types.ModuleType("flash_attn")
    flash_attn.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", [name for name in POINTS if "cache" not in name])
@pytest.mark.parametrize("baseline", ["flashinfer", "flash_attn"])
def test_library_gets_the_same_problem(baseline, name):
    point = POINTS[name]
    t = point_inputs(point, CPU)
    expected = expected_out(point, t)
    out = laid_out(BASELINES[baseline](point, t)(), expected)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("baseline", ["flashinfer", "flash_attn"])
def test_library_refuses_factors_a_token(baseline):
    point = mixed(cache="int8")
    with pytest.raises(ValueError, match="expected fp32, got int8"):
        BASELINES[baseline](point, point_inputs(point, CPU))


def test_every_baseline_has_a_title():
    assert set(TITLES) == set(BASELINES)


def test_dtype_name():
    assert [dtype_name(d) for d in (torch.int8, torch.bfloat16)] == ["int8", "bf16"]
