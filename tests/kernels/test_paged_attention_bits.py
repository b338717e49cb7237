"""paged_attention: a query's bits do not depend on anything that a launch chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedraft.kernels.paged_attention_config import SECTION, SEGMENT, WALK, Split
from pagedraft.kernels.paged_attention_launch import wide_tiles
from pagedraft.tests.compare import assert_same_bits
from pagedraft.tests.inputs import paged_case
from pagedraft.tests.kernels.attention import (
    attend,
    attend_split,
    check,
    prefix_case,
    sinks,
)

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning", "ignore:All-NaN")
FP16, INT8 = torch.float16, torch.int8

FIRST, CONTEXT = 240, 270
SIZES = {"block_size": 64, "num_heads": 3, "num_kv_heads": 1}
# Launches whose queries are also in a launch of one row, FIRST to CONTEXT: (spans, contexts).
LAUNCHES = {
    "one_query": ([1], [270]),
    "one_query_before_a_segment": ([1], [256]),
    "two_queries": ([2], [257]),
    "three_queries": ([3], [243]),
    "four_queries": ([4], [258]),
    "five_queries": ([5], [259]),
    "six_queries": ([6], [262]),
    "seven_queries": ([7], [260]),
    "eight_queries": ([8], [256]),
    "nine_queries": ([9], [270]),
    "two_tiles_of_queries": ([13], [262]),
    "a_chunk": ([17], [257]),
    "rows_beside_it": ([1, 5, 2, 6], [270, 256, 258, 246]),
}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
    "fp16": ({"dtype": FP16}, {}),
    "fp16_rules": ({"dtype": FP16}, {"window": 100, "soft_cap": 3.0, "sinks": True}),
    "int8": ({"dtype": FP16, "kv_dtype": INT8}, {}),
}
FEW_LAUNCHES = ("one_query", "five_queries", "rows_beside_it")


def rules_of(kind: str, device: torch.device) -> dict[str, Any]:
    rules = dict(KINDS[kind][1])
    if rules.pop("sinks", False):
        rules["sinks_H"] = sinks(3, device)
    return rules


@pytest.fixture(scope="module", params=KINDS)
def whole(request, device) -> tuple[str, torch.Tensor]:
    """A kind, and the context's last queries in one launch that walks all keys."""
    sizes = {**SIZES, **KINDS[request.param][0]}
    case, _ = prefix_case([CONTEXT - FIRST], [CONTEXT], CONTEXT, **sizes, device=device)
    return request.param, attend_split(case, WALK, **rules_of(request.param, device))


@pytest.mark.parametrize("unit", [0, SEGMENT], ids=["walk", "segments"])
@pytest.mark.parametrize("name", LAUNCHES)
def test_bits_do_not_depend_on_the_launch(name, unit, whole, device):
    kind, expected = whole
    if kind not in ("fp32", "fp16") and name not in FEW_LAUNCHES:
        pytest.skip("kinds other than plain fp32 and fp16 run a few launches")
    sizes = {**SIZES, **KINDS[kind][0]}
    case, position_T = prefix_case(*LAUNCHES[name], CONTEXT, **sizes, device=device)
    out_THD = attend_split(case, Split(unit, 2 if unit else 0), **rules_of(kind, device))
    assert_same_bits(out_THD, expected[position_T - FIRST])


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("split", [WALK, Split(SEGMENT, 3)], ids=["walk", "segments"])
def test_bits_do_not_depend_on_the_tile(split, block_size, device):
    if device.type == "cuda" and not wide_tiles(device, FP16, 32):
        pytest.skip("wide tiles are not used on this device: no sm_90, or other sums")
    sizes = {**SIZES, "dtype": FP16, "block_size": block_size}
    case = paged_case([14, 1], [600, 65], **sizes, device=device)
    assert_same_bits(attend_split(case, split, is_wide=True), attend_split(case, split))


LONG = {"num_heads": 2, "num_kv_heads": 1, "block_size": 64, "head_dim": 16, "dtype": FP16}
# name: (spans, contexts, rules)
SPLITS: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "sections": ([1, 3, 2], [4300, 2049, 0], {}),
    "section_ends_with_the_context": ([2], [4096], {}),
    "window": ([3], [4300], {"window": 2100}),
    "window_in_a_section": ([3], [2500], {"window": 300}),
    "window_over_a_segment_edge": ([3], [2500], {"window": 453}),
    "span_over_a_section_edge": ([9], [2052], {}),
}


@pytest.mark.parametrize("name", SPLITS)
def test_bits_do_not_depend_on_the_split(name, device):
    spans, kv_lens, rules = SPLITS[name]
    case = paged_case(spans, kv_lens, **LONG, padding_tokens=2, device=device)
    walked = attend_split(case, WALK, **rules)
    check(case, walked, **rules)
    segments = attend_split(case, Split(SEGMENT, -(-max(kv_lens) // SEGMENT)), **rules)
    assert_same_bits(segments, walked)
    sections = attend_split(case, Split(SECTION, -(-max(kv_lens) // SECTION)), **rules)
    assert_same_bits(sections, walked)


def test_bits_do_not_depend_on_the_chunk(device):
    ends = [17, 64, 80, 129, 150]
    spans = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    sizes = {**SIZES, "dtype": FP16}
    whole_case, _ = prefix_case([150], [150], 150, **sizes, device=device)
    case, position_T = prefix_case(spans, ends, 150, **sizes, device=device)
    assert_same_bits(attend(case), attend(whole_case)[position_T])


@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
def test_bits_do_not_depend_on_the_block_size(block_size, device):
    spans, kv_lens = [3, 1], [300, 70]
    expected = attend(paged_case(spans, kv_lens, block_size=64, device=device))
    out_THD = attend(paged_case(spans, kv_lens, block_size=block_size, device=device))
    assert_same_bits(out_THD, expected)


def test_bits_do_not_depend_on_the_bounds(device):
    case = paged_case([3, 1], [70, 9], device=device)
    assert_same_bits(attend(case, max_query_len=64, max_kv_len=1000), attend(case))
