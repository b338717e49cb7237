"""paged_attention: values against the reference, bits against every other way to launch it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedraft.kernels.dispatch import use_implementation
from pagedraft.kernels.paged_attention import paged_attention, paged_attention_ref
from pagedraft.tests.compare import assert_same_bits
from pagedraft.tests.inputs import PagedCase, paged_case, poisoned
from pagedraft.tests.kernels.attention import arguments, attend, check, reference, sinks

# NumPy warns where the interpreter meets NaN: a tile read keys that nobody wrote. A row of nothing
# but NaN is left to the comparison, whose message is better.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning", "ignore:All-NaN")
FP16, BF16 = torch.float16, torch.bfloat16

# name: (query spans, context lengths, other sizes)
CASES: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "one_key": ([1], [1], {}),
    "newest_key_opens_a_block": ([1], [65], {"block_size": 64}),
    "context_fills_its_blocks": ([1], [128], {"block_size": 64}),
    "newest_key_opens_a_segment": ([1], [257], {"block_size": 64}),
    "context_fills_a_segment": ([3], [256], {"block_size": 64}),
    "two_tiles_in_a_block": ([2], [131], {"block_size": 128}),
    "blocks_of_8": ([1], [71], {"block_size": 8}),
    "blocks_of_32": ([2], [65], {"block_size": 32}),
    "verify_crosses_a_block": ([5], [66], {"block_size": 64}),
    "verify_crosses_a_segment": ([5], [258], {"block_size": 64}),
    "group_of_1": ([2], [20], {"num_heads": 2}),
    "group_of_3": ([7], [20], {"num_heads": 6}),
    "group_of_5": ([4], [20], {"num_heads": 10}),
    "group_of_7": ([5], [20], {"num_heads": 14}),
    "group_of_12": ([3], [20], {"num_heads": 12, "num_kv_heads": 1}),
    "group_of_16": ([2], [20], {"num_heads": 16, "num_kv_heads": 1}),
    "group_over_a_tile": ([2], [20], {"num_heads": 40, "num_kv_heads": 1}),
    "head_dim_40": ([3], [70], {"head_dim": 40}),
    "head_dim_96": ([1], [70], {"head_dim": 96, "block_size": 64}),
    "head_dim_8": ([1], [5], {"head_dim": 8}),
    "head_dim_16": ([2], [20], {"head_dim": 16}),
    "head_dim_72": ([1], [20], {"head_dim": 72}),
    "head_dim_80": ([3], [70], {"head_dim": 80, "block_size": 64, "dtype": FP16}),
    "head_dim_112": ([1], [20], {"head_dim": 112}),
    "head_dim_200": ([1], [20], {"head_dim": 200, "num_kv_heads": 1}),
    "head_dim_256": ([2], [20], {"head_dim": 256, "num_kv_heads": 1}),
    "prompt": ([40], [40], {}),
    "chunk_of_a_prompt": ([20], [90], {"block_size": 64}),
    "spans_mixed": ([1, 5, 11, 1], [300, 70, 11, 1], {"num_kv_heads": 1, "num_heads": 3}),
    "row_without_queries": ([2, 0, 1], [5, 9, 3], {}),
    "row_without_context": ([2, 1, 20], [5, 0, 0], {}),
    "tokens_of_no_row": ([1, 1], [5, 3], {"padding_tokens": 41}),
    "tokens_of_no_row_behind_a_prompt": ([20, 1], [20, 3], {"padding_tokens": 9}),
    "fp16": ([3, 1], [70, 5], {"dtype": FP16}),
    "fp16_prompt": ([20], [70], {"dtype": FP16, "block_size": 64, "head_dim": 64}),
    "bf16": ([3, 1], [70, 5], {"dtype": BF16, "block_size": 64}),
}
INT8, FP8 = torch.int8, torch.float8_e4m3fn
ONE_HEAD = {"num_heads": 2, "num_kv_heads": 1}
# name: (query spans, context lengths, other sizes, rules; sinks: True stands for a sinks_H)
RULES: dict[str, tuple[list[int], list[int], dict[str, Any], dict[str, Any]]] = {
    "window_of_1": ([3, 1], [70, 9], {}, {"window": 1}),
    "window_in_a_tile": ([1], [70], {"block_size": 64}, {"window": 5}),
    "window_begins_a_tile": ([1], [96], {"block_size": 64}, {"window": 32}),
    "window_begins_before_a_tile": ([1], [96], {"block_size": 64}, {"window": 33}),
    "window_over_segments": ([3, 1], [700, 300], ONE_HEAD, {"window": 400}),
    "window_over_the_context": ([3, 1], [70, 9], {}, {"window": 1000}),
    "window_moves_through_a_prompt": ([40], [70], {"block_size": 16}, {"window": 20}),
    "window_of_a_wide_tile": ([40], [300], {"dtype": FP16, **ONE_HEAD}, {"window": 50}),
    "window_with_small_blocks": ([2], [100], {"block_size": 8}, {"window": 30}),
    "soft_cap": ([3, 1], [70, 9], {}, {"soft_cap": 1.5}),
    "soft_cap_far_above_the_scores": ([3, 1], [70, 9], {}, {"soft_cap": 500.0}),
    "soft_cap_far_below_the_scores": ([3, 1], [70, 9], {}, {"soft_cap": 0.5, "scale": 100.0}),
    "soft_cap_bf16": ([3, 1], [70, 9], {"dtype": BF16}, {"soft_cap": 30.0}),
    "sinks": ([3, 1], [70, 9], {}, {"sinks": True}),
    "sinks_of_a_row_without_context": ([3, 1], [70, 0], {}, {"sinks": True}),
    "sinks_of_segments": ([3], [600], ONE_HEAD, {"sinks": True}),
    "sinks_fp16": ([3, 1], [70, 9], {"dtype": FP16, "num_heads": 6}, {"sinks": True}),
    "int8": ([3, 1], [70, 9], {"kv_dtype": INT8}, {}),
    "int8_fp16": ([3, 20], [70, 30], {"kv_dtype": INT8, "dtype": FP16, "block_size": 64}, {}),
    "int8_bf16": ([3, 1], [70, 9], {"kv_dtype": INT8, "dtype": BF16, "head_dim": 40}, {}),
    "int8_small_blocks": ([3], [70], {"kv_dtype": INT8, "block_size": 8}, {}),
    "fp8": ([3, 1], [70, 9], {"kv_dtype": FP8}, {}),
    "fp8_bf16": ([3, 1], [70, 9], {"kv_dtype": FP8, "dtype": BF16, "block_size": 64}, {}),
    "all": (
        *([5, 1], [600, 9], {"kv_dtype": INT8, "dtype": FP16, **ONE_HEAD}),
        {"window": 300, "soft_cap": 2.0, "sinks": True},
    ),
}


def with_sinks(rules: dict[str, Any], num_heads: int, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of paged_attention."""
    others = {name: value for name, value in rules.items() if name != "sinks"}
    return others | ({"sinks_H": sinks(num_heads, device)} if "sinks" in rules else {})


@pytest.mark.parametrize("name", RULES)
def test_rules(name, device):
    spans, kv_lens, sizes, rules = RULES[name]
    case = paged_case(spans, kv_lens, **sizes, device=device)
    rules = with_sinks(rules, case.q_THD.shape[1], device)
    check(case, attend(case, **rules), **rules)


@pytest.mark.parametrize("name", CASES)
def test_values(name, device):
    spans, kv_lens, sizes = CASES[name]
    case = paged_case(spans, kv_lens, **sizes, device=device)
    check(case, attend(case))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [FP16, BF16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("span", [1, 5, 9, 300])
def test_values_at_size(span, head_dim, dtype, device):
    sizes = {"num_heads": 12, "num_kv_heads": 3, "head_dim": head_dim, "block_size": 64}
    case = paged_case([span, 1], [2000, 900], **sizes, dtype=dtype, device=device)
    check(case, attend(case))


# name: (span, context, planted position); 64 tokens a block, 256 a segment
# The rounding of one score decides the error, so PyTorch's is a single lucky draw.
SPOTLIGHT_FACTOR = 5.0
SPOTLIGHTS = {
    "newest_key": (1, 70, 69),
    "newest_key_in_a_new_block": (1, 65, 64),
    "last_key_of_a_block": (1, 70, 63),
    "first_key_of_a_block": (1, 70, 64),
    "first_key_of_a_segment": (1, 300, 256),
    "last_key_of_a_segment": (1, 300, 255),
    "first_key": (1, 300, 0),
    "first_of_five_queries": (5, 258, 253),
    "second_of_five_queries": (5, 258, 254),
    "third_of_five_queries": (5, 258, 255),
    "fourth_of_five_queries": (5, 258, 256),
    "last_of_five_queries": (5, 258, 257),
}


def spotlight(name: str, device: torch.device) -> PagedCase:
    """The query at the planted position, or the only one, looks at the planted key."""
    span, context, position = SPOTLIGHTS[name]
    case = paged_case([span], [context], block_size=64, device=device)
    case.plant_key(0, position, token=max(0, position - (context - span)), head=3)
    return case


@pytest.mark.parametrize("name", SPOTLIGHTS)
def test_spotlight(name, device):
    case = spotlight(name, device)
    check(case, attend(case), SPOTLIGHT_FACTOR)


# name: (span, context, planted position, window), seen by the query at ``query``
WINDOW_SPOTLIGHTS = {
    "oldest_key_in_a_tile": (1, 70, 50, 20, 69),
    "oldest_key_opens_a_block": (1, 127, 64, 63, 126),
    "oldest_key_closes_a_block": (1, 127, 63, 64, 126),
    "oldest_key_of_the_second_query": (3, 300, 249, 50, 298),
    "oldest_key_of_another_segment": (1, 300, 200, 100, 299),
}


def window_spotlight(name: str, device: torch.device, *, shift: int = 0) -> PagedCase:
    """A planted key at the left end of a query's window, or ``shift`` keys to the right of it."""
    span, context, position, _, query = WINDOW_SPOTLIGHTS[name]
    case = paged_case([span], [context], block_size=64, device=device)
    case.plant_key(0, position + shift, token=query - (context - span), head=3)
    return case


@pytest.mark.parametrize("shift", [0, -1], ids=["seen", "just_left_of_it"])
@pytest.mark.parametrize("name", WINDOW_SPOTLIGHTS)
def test_window_spotlight(name, shift, device):
    case = window_spotlight(name, device, shift=shift)
    window = WINDOW_SPOTLIGHTS[name][3]
    check(case, attend(case, window=window), SPOTLIGHT_FACTOR, window=window)


@pytest.mark.parametrize("off", [1, -1])
def test_teeth_window_off_by_one(off):
    name = "oldest_key_of_the_second_query"
    case, window = (
        window_spotlight(name, torch.device("cpu"), shift=min(0, -off)),
        WINDOW_SPOTLIGHTS[name][3],
    )
    broken = paged_attention_ref(*arguments(case), window=window + off)
    with pytest.raises(AssertionError, match="allowed"):
        check(case, broken, SPOTLIGHT_FACTOR, window=window)


def test_window_reads_nothing_left_of_it(device):
    case = paged_case([3], [300], block_size=16, device=device)
    table_RM = case.block_table_RM.clone()
    blocks = table_RM[0, : (300 - 3 - 100 + 1) // 16].long()
    table_RM[0, : len(blocks)] = 2**31 - 1
    freed = PagedCase(**{**vars(case), "block_table_RM": table_RM})
    expected = attend(case, window=100)
    case.k_cache_NGBD[blocks] = case.v_cache_NGBD[blocks] = torch.nan
    assert_same_bits(attend(freed, window=100), expected)


def test_teeth_of_the_rules():
    case = paged_case([3, 1], [70, 9])
    sinks_H = sinks(4, torch.device("cpu"))
    for_all = {"window": 60, "soft_cap": 1.5, "sinks_H": sinks_H}
    check(case, paged_attention_ref(*arguments(case), **for_all), **for_all)
    with pytest.raises(AssertionError, match="allowed"):
        check(case, paged_attention_ref(*arguments(case)), **for_all)


def test_teeth_without_the_newest_key():
    case = spotlight("newest_key", torch.device("cpu"))
    broken = paged_attention_ref(*arguments(case)[:-1], case.kv_lens_R - 1)
    with pytest.raises(AssertionError, match="allowed"):
        check(case, broken, SPOTLIGHT_FACTOR)


def test_teeth_keys_of_later_queries_are_seen():
    case = spotlight("last_of_five_queries", torch.device("cpu"))
    starts, kv_lens = torch.arange(6).int(), case.kv_lens_R.expand(5)
    broken = paged_attention_ref(
        *arguments(case)[:3], case.block_table_RM.expand(5, -1), starts, kv_lens
    )
    with pytest.raises(AssertionError, match="allowed"):
        check(case, broken, SPOTLIGHT_FACTOR)


@pytest.mark.parametrize("implementation", ["triton", "cpu"])
def test_table_may_be_wider_and_hold_anything(implementation, device):
    if implementation == "cpu" and device.type != "cpu":
        pytest.skip("the CPU path takes CPU tensors")
    case = paged_case([3, 1], [40, 5], device=device)
    wide_RM = torch.full((2, 9), 2**31 - 1, dtype=torch.int32, device=device)
    wide_RM[0, :3] = case.block_table_RM[0]
    wide_RM[1, :1] = case.block_table_RM[1, :1]
    wider = PagedCase(**{**vars(case), "block_table_RM": wide_RM[:, :7]})
    with use_implementation(implementation):
        assert_same_bits(attend(wider), attend(case))


@pytest.mark.parametrize("implementation", ["triton", "cpu"])
@pytest.mark.parametrize("num_columns", [6, 4])
def test_queries_may_be_a_view(num_columns, implementation):
    case = paged_case([3, 1], [40, 5], padding_tokens=1)
    wide = poisoned(5, num_columns, 34 if num_columns == 4 else 32)
    wide[:, :4, :32] = case.q_THD
    view = PagedCase(**{**vars(case), "q_THD": wide[:, :4, :32]})
    with use_implementation(implementation):
        assert_same_bits(attend(view), attend(case))


@pytest.mark.parametrize("implementation", ["triton", "cpu", "ref"])
def test_scale(implementation):
    case = paged_case([2], [9])
    with use_implementation(implementation):
        out_THD = attend(case, scale=0.5)
    torch.testing.assert_close(out_THD, paged_attention_ref(*arguments(case), 0.5))


@pytest.mark.parametrize("implementation", ["triton", "cpu"])
def test_no_tokens_and_no_rows(implementation):
    case = paged_case([], [], padding_tokens=3)
    none = paged_case([], [])
    with use_implementation(implementation):
        assert_same_bits(attend(case), torch.zeros_like(case.q_THD))
        assert attend(none).shape == none.q_THD.shape


def test_launcher_reads_no_device_value(monkeypatch, device):
    case = paged_case([3, 1], [70, 9], device=device)
    expected = attend(case)
    monkeypatch.setattr(torch.Tensor, "item", None)
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    monkeypatch.setattr(torch.Tensor, "__bool__", None)
    bounds = {"max_query_len": 3, "max_kv_len": 70}
    out_THD = paged_attention(*arguments(case), **bounds)
    monkeypatch.undo()
    assert_same_bits(out_THD, expected)


BAD_ARGUMENTS: dict[str, tuple[int, Any, str]] = {
    "query_dtype": (0, lambda q: q.double(), "q_THD: expected dtype"),
    "cache_dtype": (1, lambda k: k.half(), "k_cache_NGBD: expected dtype float32"),
    "cache_shapes": (2, lambda v: v[:, :1].contiguous(), "v_cache_NGBD: expected"),
    "strided_cache": (1, lambda k: k.transpose(1, 2), "k_cache_NGBD"),
    "head_dim": (0, lambda q: q[..., :12].contiguous(), "q_THD: expected a head dim"),
    "heads": (0, lambda q: q[:, :3].contiguous(), "q_THD: expected a multiple of 2 heads, got 3"),
    "queries_2d": (0, lambda q: q[0], "q_THD: expected shape"),
    "starts": (4, lambda s: s[:-1], r"query_starts_R1: expected shape \(3\), got \(2,\)"),
    "int64_lengths": (5, lambda n: n.long(), "kv_lens_R: expected dtype int32"),
    "table": (3, lambda t: t[:1], "block_table_RM: expected shape"),
    "int8_without_scales": (1, lambda k: k.to(torch.int8), "v_cache_NGBD: expected dtype int8"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments(name):
    index, spoil, error = BAD_ARGUMENTS[name]
    args = list(arguments(paged_case([4, 4], [20, 5])))
    args[index] = spoil(args[index])
    with pytest.raises((ValueError, TypeError), match=error):
        paged_attention(*args, max_query_len=4, max_kv_len=20)


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "window": ({"window": 0}, r"window: expected 1 to 2\^30 tokens or None, got 0"),
    "soft_cap": ({"soft_cap": -1.0}, "soft_cap: expected a positive number or None, got -1.0"),
    "scale": ({"scale": 0.0}, "scale: expected a positive number, got 0.0"),
    "sinks": ({"sinks_H": torch.zeros(3)}, r"sinks_H: expected shape \(4\), got \(3,\)"),
    "window_type": ({"window": 4.0}, "window: expected 1 to"),
    "bound": ({"max_query_len": -1}, "max_query_len: expected a bound of at least 0, got -1"),
    "sinks_dtype": ({"sinks_H": torch.zeros(4).half()}, "sinks_H: expected dtype float32"),
    "scales": ({"k_scale_NGB": torch.zeros(1)}, "k_scale_NGB: expected None with a torch.float32"),
    "out": ({"out": torch.zeros(8, 4, 16)}, "out: expected"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options(name):
    options, error = BAD_OPTIONS[name]
    case = paged_case([4, 4], [20, 5])
    with pytest.raises((ValueError, TypeError), match=error):
        paged_attention(*arguments(case), **{"max_query_len": 4, "max_kv_len": 20, **options})


def test_quantised_pool_needs_its_factors():
    case = paged_case([4], [20], kv_dtype=INT8)
    with pytest.raises(ValueError, match="v_scale_NGB: expected a tensor with a torch.int8 cache"):
        attend(case, v_scale_NGB=None)


@pytest.mark.parametrize("kv_dtype", [INT8, FP8], ids=["int8", "fp8"])
def test_small_values_of_a_quantised_pool_survive_fp16(kv_dtype, device):
    """Against fp64 alone: in fp16 the reference itself loses factors among the subnormals."""
    case = paged_case([2], [130], dtype=FP16, kv_dtype=kv_dtype, block_size=64, device=device)
    case.v_scale_NGB.mul_(1e-4)
    exact_THD = reference(case, torch.float64)
    error = (attend(case).double() - exact_THD).abs().max() / exact_THD.abs().max()
    assert error < 5e-3


STRIDED: dict[str, tuple[int, Any, str]] = {
    "lengths": (5, lambda n: n.repeat_interleave(2)[::2], "kv_lens_R: expected a contiguous"),
    "starts": (4, lambda s: s.repeat_interleave(2)[::2], "query_starts_R1: expected a contiguous"),
    "table": (3, lambda t: t.repeat_interleave(2, 1)[:, ::2], "block_table_RM: expected rows"),
    "no_heads": (1, lambda k: k[:, :0], "k_cache_NGBD: expected blocks and heads"),
    "flat_cache": (1, lambda k: k[0], "k_cache_NGBD: expected blocks and heads"),
    "scalar_length": (5, lambda n: n[0], r"kv_lens_R: expected shape \(\*\), got \(\)"),
}


@pytest.mark.parametrize("name", STRIDED)
def test_bad_layouts(name):
    index, spoil, error = STRIDED[name]
    args = list(arguments(paged_case([4, 4], [20, 25])))
    args[index] = spoil(args[index])
    with pytest.raises((ValueError, TypeError), match=error):
        paged_attention(*args, max_query_len=4, max_kv_len=25)


def test_programs_past_the_last_row_read_no_table(device):
    case = paged_case([5], [64], padding_tokens=100, block_size=64, dtype=FP16, device=device)
    check(case, attend(case, window=64), window=64)
