"""The CPU path of paged attention: values against the reference, bits against other batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedraft.kernels.dispatch import use_implementation
from pagedraft.kernels.paged_attention import paged_attention, paged_attention_ref
from pagedraft.kernels.paged_attention_plan import Geometry, cut_pieces, cut_runs, group_pieces
from pagedraft.tests.compare import assert_no_worse, assert_same_bits
from pagedraft.tests.inputs import PagedCase, paged_case, poisoned

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


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("name", CASES)
def test_cpu_values(name):
    spans, kv_lens, sizes = CASES[name]
    case = paged_case(spans, kv_lens, **sizes)
    check(case, attend(case))


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("name", SPOTLIGHTS)
def test_cpu_spotlight(name):
    case = spotlight(name, torch.device("cpu"))
    check(case, attend(case), SPOTLIGHT_FACTOR)


# name: sizes of the CPU sweep
CPU_SIZES: dict[str, dict[str, int]] = {
    "demo_model": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "group_of_1": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 32},
    "group_of_4": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128},
    "group_of_7": {"num_heads": 7, "num_kv_heads": 1, "head_dim": 40},
}
CPU_CONTEXT = 700


@pytest.fixture(scope="module", params=CPU_SIZES)
def cpu_whole(request) -> tuple[dict[str, int], torch.Tensor]:
    """Sizes, and all queries of the context in one call."""
    sizes, spans = CPU_SIZES[request.param], [CPU_CONTEXT]
    with use_implementation("cpu"):
        return sizes, attend(prefix_case(spans, spans, CPU_CONTEXT, block_size=64, **sizes)[0])


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("block_size", [8, 16, 64, 128])
@pytest.mark.parametrize("span", [*range(1, 20), 31, 64, 65, 300])
def test_cpu_bits_do_not_depend_on_the_span(span, block_size, cpu_whole):
    sizes, expected = cpu_whole
    spans, ends = [span] * 3, [CPU_CONTEXT, 301, 320 + span]
    case, position_T = prefix_case(spans, ends, CPU_CONTEXT, block_size=block_size, **sizes)
    assert_same_bits(attend(case), expected[position_T])


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("seed", range(12))
def test_cpu_bits_do_not_depend_on_the_batch(seed, cpu_whole):
    sizes, expected = cpu_whole
    generator = torch.Generator().manual_seed(seed)
    num_rows = [1, 2, 3, 5, 8, 16][seed % 6]
    ends = torch.randint(1, CPU_CONTEXT + 1, (num_rows,), generator=generator).tolist()
    widest = torch.tensor([1, 1, 1, 2, 9, 70])[torch.randint(6, (num_rows,), generator=generator)]
    spans = [min(end, span) for end, span in zip(ends, widest.tolist(), strict=True)]
    case, position_T = prefix_case(spans, ends, CPU_CONTEXT, block_size=16, **sizes)
    assert_same_bits(attend(case), expected[position_T])


def test_groups_gather_no_tile_for_another_row():
    geometry = Geometry(num_heads=3, query_stride=3, num_kv_heads=1, head_dim=64, block_size=64)
    kv_lens, starts = [8000, 800, *[100] * 14], [0, 2000, *range(2001, 2016)]
    pieces = cut_pieces(starts, kv_lens, None, geometry, (4, 192))
    runs = [
        run
        for group in group_pieces(pieces, 1)
        for run in cut_runs([piece.num_tiles for piece in group], 16)
    ]
    num_gathered = sum((run.end - run.first) * run.num_pieces for run in runs)
    assert num_gathered == sum(piece.num_tiles for piece in pieces)
