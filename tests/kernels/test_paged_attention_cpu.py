"""The CPU path of paged attention: values against the reference, what it reads, what it plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedraft.kernels import paged_attention_cpu_plan as plans
from pagedraft.kernels.paged_attention_cpu import AttentionPlan, fp8_as_fp16
from pagedraft.tests.compare import assert_same_bits
from pagedraft.tests.inputs import POISON, PagedCase, paged_case
from pagedraft.tests.kernels.attention import attend, check, factors, reference, sinks

FP16, BF16, INT8, FP8 = torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
CPU = torch.device("cpu")
ONE_HEAD = {"num_heads": 3, "num_kv_heads": 1}

# name: (query spans, context lengths, other sizes)
CASES: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "one_key": ([1], [1], {}),
    "context_fills_a_tile": ([1], [64], {"block_size": 64}),
    "newest_key_opens_a_tile": ([1], [65], {"block_size": 64}),
    "last_segment_is_half_empty": ([1], [190], {"block_size": 64}),
    "last_segment_has_one_key": ([2], [1025], {"block_size": 128, **ONE_HEAD}),
    "two_tiles_in_a_block": ([2], [131], {"block_size": 128}),
    "blocks_of_8": ([1], [71], {"block_size": 8}),
    "span_over_the_first_limit": ([9], [68], {"block_size": 32}),
    "span_over_the_second_limit": ([9], [1030], {"block_size": 64, **ONE_HEAD}),
    "group_of_1": ([2], [20], {"num_heads": 2}),
    "group_of_5": ([4], [20], {"num_heads": 10}),
    "group_over_a_piece": ([2], [20], {"num_heads": 200, "num_kv_heads": 1, "head_dim": 8}),
    "head_dim_40": ([3], [70], {"head_dim": 40}),
    "head_dim_256": ([1], [70], {"head_dim": 256, "block_size": 64}),
    "head_dim_8": ([1], [5], {"head_dim": 8}),
    "prompt": ([130], [130], {}),
    "chunk_of_a_prompt": ([120], [290], {"block_size": 64}),
    "spans_mixed": ([1, 5, 11, 1], [300, 70, 11, 1], ONE_HEAD),
    "contexts_mixed": ([1] * 5, [700, 20, 400, 1, 130], {"block_size": 64}),
    "row_without_queries": ([2, 0, 1], [5, 9, 3], {}),
    "row_without_context": ([2, 1, 20], [5, 0, 0], {}),
    "tokens_of_no_row": ([20, 1], [20, 3], {"padding_tokens": 9}),
    "fp16_takes_the_reference": ([3, 1], [70, 5], {"dtype": FP16}),
    "bf16_takes_the_reference": ([3, 1], [70, 5], {"dtype": BF16, "block_size": 64}),
    "int8": ([3, 1], [70, 300], {"kv_dtype": INT8}),
    "int8_blocks_of_8": ([3, 1], [70, 9], {"kv_dtype": INT8, "block_size": 8}),
    "fp8": ([3, 1], [70, 300], {"kv_dtype": FP8, "block_size": 64}),
    "fp8_blocks_of_128": ([40], [150], {"kv_dtype": FP8, "block_size": 128}),
}
# name: (query spans, context lengths, other sizes, rules; sinks: True stands for a sinks_H)
RULES: dict[str, tuple[list[int], list[int], dict[str, Any], dict[str, Any]]] = {
    "window_of_1": ([3, 1], [70, 9], {}, {"window": 1}),
    "window_in_a_tile": ([1], [70], {"block_size": 64}, {"window": 5}),
    "window_begins_a_tile": ([1], [160], {"block_size": 64}, {"window": 32}),
    "window_begins_before_a_tile": ([1], [160], {"block_size": 64}, {"window": 33}),
    "window_begins_in_the_second_tile": ([1], [200], {"block_size": 64}, {"window": 100}),
    "window_over_segments": ([3, 1], [700, 300], ONE_HEAD, {"window": 400}),
    "window_over_long_segments": ([3, 1], [1500, 1100], ONE_HEAD, {"window": 600}),
    "window_over_the_context": ([3, 1], [70, 9], {}, {"window": 1000}),
    "window_moves_through_a_prompt": ([250], [290], {"block_size": 16}, {"window": 70}),
    "window_moves_over_a_tile": ([5], [131], {"block_size": 64}, {"window": 64}),
    "window_with_small_blocks": ([2], [100], {"block_size": 8}, {"window": 30}),
    "window_in_half_a_block": ([2], [250], {"block_size": 128}, {"window": 40}),
    "soft_cap": ([3, 1], [70, 9], {}, {"soft_cap": 1.5}),
    "soft_cap_far_above_the_scores": ([3, 1], [70, 9], {}, {"soft_cap": 500.0}),
    "soft_cap_far_below_the_scores": ([3, 1], [70, 9], {}, {"soft_cap": 0.5, "scale": 100.0}),
    "scale_of_a_power_of_two": ([3, 1], [70, 9], {}, {"scale": 0.125}),
    "sinks": ([3, 1], [70, 300], {}, {"sinks": True}),
    "sinks_of_a_row_without_context": ([3, 1], [70, 0], {}, {"sinks": True}),
    "sinks_and_window": ([3, 40], [70, 300], {}, {"sinks": True, "window": 20}),
    "all_rules_int8": (
        *([5, 1, 70], [200, 90, 300], {"kv_dtype": INT8, "block_size": 64}),
        {"window": 60, "soft_cap": 3.0, "sinks": True},
    ),
    "all_rules_fp8": (
        *([5, 1], [130, 90], {"kv_dtype": FP8, "block_size": 8}),
        {"window": 100, "soft_cap": 3.0, "sinks": True},
    ),
}
CPU_PATH = pytest.mark.usefixtures("cpu_path")
# With AVX2 kernels MKL's products of few rows are 1.5 times as wrong as its larger ones (root mean
# square), and the largest error of a few queries is a matter of luck.
FACTOR = 4.0


def rules_case(name: str) -> tuple[PagedCase, dict[str, Any]]:
    spans, kv_lens, sizes, rules = RULES[name]
    case = paged_case(spans, kv_lens, **sizes)
    rules = dict(rules)
    if rules.pop("sinks", False):
        rules["sinks_H"] = sinks(case.q_THD.shape[1], CPU)
    return case, rules


def forget(case: PagedCase, window: int) -> PagedCase:
    """Poison the blocks wholly left of each row's window, and what the table says of them."""
    block_size = case.k_cache_NGBD.shape[2]
    spans = case.query_starts_R1.diff()
    first_R = (case.kv_lens_R - spans - window + 1).clamp(min=0) // block_size
    is_gone_RM = torch.arange(case.block_table_RM.shape[1]) < first_R[:, None]
    gone = case.block_table_RM[is_gone_RM].long()
    for pool in (case.k_cache_NGBD, case.v_cache_NGBD, *factors(case).values()):
        if pool is not None:
            pool.view(torch.uint8)[gone] = POISON
    table_RM = case.block_table_RM.masked_fill(is_gone_RM, 2**31 - 1)
    return PagedCase(**{**vars(case), "block_table_RM": table_RM})


@CPU_PATH
@pytest.mark.parametrize("name", CASES)
def test_values(name):
    spans, kv_lens, sizes = CASES[name]
    case = paged_case(spans, kv_lens, **sizes)
    check(case, attend(case), FACTOR)


@CPU_PATH
@pytest.mark.parametrize("name", RULES)
def test_rules(name):
    case, rules = rules_case(name)
    check(case, attend(case, **rules), FACTOR, **rules)


@CPU_PATH
@pytest.mark.parametrize("name", [name for name in RULES if "window" in RULES[name][3]])
def test_blocks_left_of_the_window_are_not_read(name):
    case, rules = rules_case(name)
    expected = attend(case, **rules)
    assert_same_bits(attend(forget(case, rules["window"]), **rules), expected)


def test_teeth_blocks_left_of_the_window_are_poisoned():
    case, rules = rules_case("window_over_segments")
    expected = reference(case, torch.float64, **rules)
    forgotten = forget(case, rules["window"] - 256)
    with pytest.raises(IndexError):
        check(forgotten, expected.float(), FACTOR, **rules)


# name: (a case of RULES, rules that are a little wrong)
FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a_key_too_few": ("window_over_long_segments", {"window": 599}),
    "a_key_too_many": ("window_over_long_segments", {"window": 601}),
    "no_window": ("window_moves_over_a_tile", {"window": None}),
    "no_cap": ("soft_cap", {"soft_cap": None}),
    "sinks_of_the_next_head": ("sinks", {"sinks_H": sinks(4, CPU).roll(1)}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_teeth(name):
    case, rules = rules_case(FAULTS[name][0])
    broken = reference(case, torch.float64, **{**rules, **FAULTS[name][1]}).float()
    with pytest.raises(AssertionError, match="allowed"):
        check(case, broken, FACTOR, **rules)


# The rounding of one score decides the error, so PyTorch's is a single lucky draw.
SPOTLIGHT_FACTOR = 5.0
# name: (span, context, planted position); 64 keys a tile, 128 a segment, 256 behind 1024
SPOTLIGHTS = {
    "newest_key": (1, 70, 69),
    "newest_key_in_a_new_tile": (1, 65, 64),
    "last_key_of_a_tile": (1, 70, 63),
    "first_key_of_a_segment": (1, 300, 256),
    "last_key_of_a_segment": (1, 300, 255),
    "last_key_of_a_long_segment": (1, 1300, 1279),
    "first_key": (1, 300, 0),
    "first_of_five_queries": (5, 258, 253),
    "third_of_five_queries": (5, 258, 255),
    "fourth_of_five_queries": (5, 258, 256),
    "last_of_five_queries": (5, 258, 257),
}


@CPU_PATH
@pytest.mark.parametrize("name", SPOTLIGHTS)
def test_spotlight(name):
    span, context, position = SPOTLIGHTS[name]
    case = paged_case([span], [context], block_size=64)
    case.plant_key(0, position, token=max(0, position - (context - span)), head=3)
    check(case, attend(case), SPOTLIGHT_FACTOR)


@CPU_PATH
def test_nan_scale_is_not_lost():
    case = paged_case([2], [70], kv_dtype=FP8)
    block, offset = divmod(int(case.slots(0)[30]), 16)
    case.k_scale_NGB[block, 1, offset] = float("nan")
    is_nan_TH = attend(case).isnan().any(-1)
    assert is_nan_TH.tolist() == [[False, False, True, True]] * 2


def test_every_fp8_code():
    codes = torch.arange(256, dtype=torch.uint8).view(4, 8, 8)
    codes = codes.where(codes & 0x7F != 0x7F, 0)
    result = fp8_as_fp16(codes.view(torch.int8), torch.empty(4, 8, 8, dtype=torch.int16))
    assert_same_bits(result.float() * 256, codes.view(FP8).float())


@CPU_PATH
def test_a_plan_serves_layers_of_several_windows():
    case, plan = paged_case([3, 1, 70], [200, 90, 70], kv_dtype=INT8), AttentionPlan()
    sinks_H = sinks(4, CPU)
    layers = [{"window": 20}, {}, {"window": 20, "sinks_H": sinks_H}, {"sinks_H": sinks_H}]
    layers += [{"window": 20}, {}]
    results = [attend(case, plan=plan, **rules) for rules in layers]
    expected = [attend(case, **rules) for rules in layers]
    assert_same_bits(torch.stack(results), torch.stack(expected))
    filled = [plan.has(window, case.q_THD, case.k_cache_NGBD) for window in (20, None, 21)]
    assert filled == [True, True, False]


@CPU_PATH
def test_a_plan_keeps_nothing_of_the_layer_before():
    case, other = (paged_case([3, 1], [200, 90], seed=seed) for seed in (0, 0))
    other.k_cache_NGBD.fill_(float("nan"))
    other.v_cache_NGBD.fill_(float("nan"))
    plan, expected = AttentionPlan(), attend(case)
    assert attend(other, plan=plan).isnan().all()
    assert_same_bits(attend(case, plan=plan), expected)


@CPU_PATH
def test_queries_may_be_a_view():
    case = paged_case([3, 1], [40, 5], padding_tokens=1)
    transposed = case.q_THD.transpose(1, 2).contiguous().transpose(1, 2)
    view = PagedCase(**{**vars(case), "q_THD": transposed})
    assert_same_bits(attend(view), attend(case))


def test_groups_gather_no_segment_for_another_row():
    geometry = plans.Geometry(3, 3, num_kv_heads=1, head_dim=64, block_size=64)
    kv_lens, starts = [8000, 800, *[100] * 14], [0, 2000, *range(2001, 2016)]
    pieces = plans.cut_pieces(starts, kv_lens, None, geometry, (4, 192))
    groups = plans.group_pieces(pieces, 1)
    runs = [run for group in groups for run in plans.cut_runs(group, None, geometry)]
    num_gathered = sum((run.end - run.first) * run.num_pieces for run in runs)
    assert num_gathered == sum(
        -(-piece.num_tiles // piece.shape.segment) * piece.shape.segment for piece in pieces
    )
    assert len(groups) < len(pieces)


@pytest.mark.usefixtures("cpu_path")
def test_a_plan_is_filled_anew_for_another_layout():
    case = paged_case([3], [9])
    wide_TXD = torch.cat((case.q_THD, torch.full_like(case.q_THD, torch.nan)), 1)
    view = PagedCase(**{**vars(case), "q_THD": wide_TXD[:, : case.q_THD.shape[1]]})
    plan = AttentionPlan()
    expected = attend(case, plan=plan)
    assert_same_bits(attend(view, plan=plan), expected)
    assert_same_bits(attend(case, plan=plan), expected)
