"""paged_attention: values against the reference, bits against every other way to launch it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedraft.kernels.dispatch import use_implementation
from pagedraft.kernels.paged_attention import (
    attention_config,
    launch,
    paged_attention,
    paged_attention_cost,
    paged_attention_ref,
)
from pagedraft.tests.compare import assert_no_worse, assert_same_bits
from pagedraft.tests.inputs import PagedCase, paged_case, poisoned

# NumPy warns where the interpreter meets NaN: a tile read keys that nobody wrote.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
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
    "group_over_a_tile": ([2], [20], {"num_heads": 40, "num_kv_heads": 1}),
    "head_dim_40": ([3], [70], {"head_dim": 40}),
    "head_dim_96": ([1], [70], {"head_dim": 96, "block_size": 64}),
    "head_dim_8": ([1], [5], {"head_dim": 8}),
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


def arguments(case: PagedCase) -> tuple[torch.Tensor, ...]:
    return (
        *(case.q_THD, case.k_cache_NGBD, case.v_cache_NGBD),
        *(case.block_table_RM, case.query_starts_R1, case.kv_lens_R),
    )


def attend(case: PagedCase, **options: Any) -> torch.Tensor:
    out = poisoned(*case.q_THD.shape, dtype=case.q_THD.dtype, device=case.q_THD.device)
    bounds = {"max_query_len": case.max_query_len, "max_kv_len": case.max_kv_len}
    result = paged_attention(*arguments(case), **{**bounds, "out": out, **options})
    case.assert_guards()
    return result


def attend_in_pieces(case: PagedCase, segments_per_program: int) -> torch.Tensor:
    out = poisoned(*case.q_THD.shape, dtype=case.q_THD.dtype, device=case.q_THD.device)
    bounds = (case.max_query_len, case.max_kv_len, case.q_THD.shape[-1] ** -0.5)
    return launch(*arguments(case), *bounds, out, segments_per_program)


def exact(case: PagedCase) -> torch.Tensor:
    wide = [t.double() if t.is_floating_point() else t for t in arguments(case)]
    return paged_attention_ref(*wide)


def check(case: PagedCase, out_THD: torch.Tensor, factor: float = 2.0) -> None:
    same_dtype = paged_attention_ref(*arguments(case))
    assert_no_worse(out_THD, exact=exact(case), same_dtype=same_dtype, factor=factor)


def prefix_case(
    spans: list[int], ends: list[int], context: int, **sizes: Any
) -> tuple[PagedCase, torch.Tensor]:
    """Rows whose contexts are prefixes of one context, and the positions of their queries."""
    whole = paged_case([context], [context], **sizes)
    device = whole.q_THD.device
    position_T = torch.cat(
        [torch.arange(end - span, end) for span, end in zip(spans, ends, strict=True)]
    ).to(device)
    case = PagedCase(
        q_THD=whole.q_THD[position_T],
        k_cache_NGBD=whole.k_cache_NGBD,
        v_cache_NGBD=whole.v_cache_NGBD,
        block_table_RM=whole.block_table_RM.expand(len(spans), -1),
        query_starts_R1=torch.tensor([0, *spans]).cumsum(0).int().to(device),
        kv_lens_R=torch.tensor(ends, dtype=torch.int32, device=device),
        max_query_len=max(spans),
        max_kv_len=max(ends),
        guards=whole.guards,
    )
    return case, position_T


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


# Launches whose queries are also in a launch of one row, 0 to 330: (spans, contexts).
LAUNCHES = {
    "one_query": ([1], [330]),
    "one_query_before_a_segment": ([1], [256]),
    "five_queries": ([5], [259]),
    "two_tiles_of_queries": ([11], [262]),
    "a_chunk": ([40], [300]),
    "rows_beside_it": ([1, 5, 2, 30], [330, 65, 258, 30]),
}
LAUNCH_CONTEXT = 330
LAUNCH_SIZES = {"block_size": 64, "num_heads": 4, "num_kv_heads": 1}


@pytest.fixture(scope="module")
def whole_out(device) -> torch.Tensor:
    """All queries of the context in one launch that walks all keys."""
    spans = [LAUNCH_CONTEXT]
    return attend_in_pieces(
        prefix_case(spans, spans, LAUNCH_CONTEXT, **LAUNCH_SIZES, device=device)[0], 2
    )


@pytest.mark.parametrize("segments_per_program", [1, 2])
@pytest.mark.parametrize("name", LAUNCHES)
def test_bits_do_not_depend_on_the_launch(name, segments_per_program, whole_out, device):
    case, position_T = prefix_case(*LAUNCHES[name], LAUNCH_CONTEXT, **LAUNCH_SIZES, device=device)
    assert_same_bits(attend_in_pieces(case, segments_per_program), whole_out[position_T])


@pytest.mark.parametrize("segments_per_program", [1, 2, 3])
@pytest.mark.parametrize("block_size", [16, 64])
def test_bits_do_not_depend_on_the_split(segments_per_program, block_size, device):
    sizes = {"num_heads": 2, "num_kv_heads": 1, "padding_tokens": 2, "device": device}
    case = paged_case([1, 3, 1], [700, 513, 0], block_size=block_size, **sizes)
    walked = attend_in_pieces(case, 1000)
    check(case, walked)
    assert_same_bits(attend_in_pieces(case, segments_per_program), walked)


@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
def test_bits_do_not_depend_on_the_block_size(block_size, device):
    spans, kv_lens = [3, 1], [300, 70]
    expected = attend(paged_case(spans, kv_lens, block_size=64, device=device))
    out_THD = attend(paged_case(spans, kv_lens, block_size=block_size, device=device))
    assert_same_bits(out_THD, expected)


def test_bits_do_not_depend_on_the_bounds(device):
    case = paged_case([3, 1], [70, 9], device=device)
    assert_same_bits(attend(case, max_query_len=64, max_kv_len=1000), attend(case))


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
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments(name):
    index, spoil, error = BAD_ARGUMENTS[name]
    args = list(arguments(paged_case([4, 4], [20, 5])))
    args[index] = spoil(args[index])
    with pytest.raises((ValueError, TypeError), match=error):
        paged_attention(*args, max_query_len=4, max_kv_len=20)


@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 32, 71])
@pytest.mark.parametrize("element_size", [2, 4])
def test_config_reduces_alike_for_every_span(group, element_size):
    configs = [attention_config(group, 128, element_size, span, False) for span in (1, 5, 9, 512)]
    assert len({config.block_n for config in configs}) == 1
    assert all(group <= config.block_m for config in configs)
    assert all(config.block_m < 64 or config.num_warps < 4 for config in configs), "HGMMA"


def test_cost():
    # 2 queries: 3 + 4 visible keys; 4 heads on 2, head dim 8, 2 bytes.
    cost = paged_attention_cost([2], [4], 4, 2, 8, 2)
    assert cost == ((2 * 2 * 4 + 2 * 4 * 2) * 8 * 2, 4 * 4 * 8 * 7)
