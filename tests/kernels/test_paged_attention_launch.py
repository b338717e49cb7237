"""How paged_attention is launched: tiles, splits, cost, and one launch where a unit is enough."""

from __future__ import annotations

import pytest

from pagedraft.kernels.dispatch import INTERPRETED
from pagedraft.kernels.paged_attention import paged_attention_cost
from pagedraft.kernels.paged_attention_config import (
    SECTION,
    SEGMENT,
    WALK,
    WAVE,
    Split,
    attention_config,
    split_of,
)
from pagedraft.tests.inputs import paged_case
from pagedraft.tests.kernels.attention import attend


@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 32, 71])
@pytest.mark.parametrize("element_size", [2, 4])
def test_config_reduces_alike_for_every_span(group, element_size):
    spans = (1, 5, 9, 512)
    configs = [attention_config(group, 128, element_size, span, False, False) for span in spans]
    assert len({config.block_n for config in configs}) == 1
    assert all(group <= config.block_m for config in configs)
    assert all(config.block_m < 64 or config.num_warps < 4 for config in configs), "HGMMA"


@pytest.mark.parametrize(("group", "span", "block_m"), [(4, 1, 16), (4, 8, 32), (4, 9, 64)])
def test_wide_tiles_are_for_more_than_32_rows(group, span, block_m):
    assert attention_config(group, 128, 2, span, False, True).block_m == block_m


# name: (row tiles x KV heads, packed rows, longest span, longest context, window, split)
SPLITS = {
    "context_of_a_segment": (8, 4, 1, 256, None, WALK),
    "one_short_row": (8, 4, 1, 1000, None, Split(SEGMENT, 4)),
    "one_long_row": (8, 4, 1, 65536, None, Split(SECTION, 32)),
    "several_rows": (64, 4, 1, 8192, None, Split(SECTION, 4)),
    "one_section_fills_the_device": (264, 4, 1, 2048, None, WALK),
    "walks_fill_a_wave": (WAVE, 64, 512, 8192, None, WALK),
    "walks_fill_most_of_a_wave": (WAVE - 8, 64, 512, 8192, None, WALK),
    "walks_begin_another_wave": (WAVE + 8, 64, 512, 8192, None, Split(SECTION, 4)),
    "many_walks": (20 * WAVE + 8, 64, 512, 8192, None, WALK),
    "few_rows_have_cheap_partial_results": (3 * WAVE + 50, 4, 1, 8192, None, Split(SECTION, 4)),
    "window_bounds_the_units": (8, 4, 1, 65536, 512, Split(SEGMENT, 3)),
    "window_of_a_key": (8, 4, 1, 65536, 1, Split(SEGMENT, 2)),
    "window_over_the_context": (8, 4, 1, 1000, 5000, Split(SEGMENT, 4)),
    "span_widens_the_window": (8, 64, 300, 65536, 512, Split(SEGMENT, 5)),
}


@pytest.mark.parametrize("name", SPLITS)
def test_split(name):
    *sizes, expected = SPLITS[name]
    assert split_of(*sizes) == expected


@pytest.mark.skipif(not INTERPRETED, reason="counts interpreted launches")
@pytest.mark.parametrize(
    ("context", "kernels"),
    [(256, ["paged_attention_kernel"]), (257, ["paged_units_kernel", "combine_kernel"])],
)
def test_one_launch_less_where_a_row_fits_one_unit(context, kernels):
    from pagedraft.tests.sanitizer import sanitize

    case = paged_case([1], [context], block_size=64)
    with sanitize() as launches:
        attend(case)
    assert [launch.name for launch in launches] == kernels


# name: (query lens, context lens, options, keys read, pairs seen)
COSTS = {
    "two_queries": ([2], [4], {}, 4, 3 + 4),
    "rows": ([2, 1], [4, 9], {}, 13, 3 + 4 + 9),
    "no_queries": ([0, 1], [4, 9], {}, 9, 9),
    "window": ([2], [9], {"window": 3}, 4, 3 + 3),
    "window_still_filling": ([4], [4], {"window": 3}, 4, 1 + 2 + 3 + 3),
    "window_of_one": ([3], [9], {"window": 1}, 3, 3),
}


@pytest.mark.parametrize("name", COSTS)
def test_cost(name):
    spans, contexts, options, keys, pairs = COSTS[name]
    cost = paged_attention_cost(spans, contexts, 4, 2, 8, 2, **options)
    assert cost == ((2 * sum(spans) * 4 + 2 * keys * 2) * 8 * 2, 4 * 4 * 8 * pairs)


def test_cost_of_a_quantised_pool():
    cost = paged_attention_cost([1], [4], 4, 2, 8, 2, kv_itemsize=1, scale_itemsize=4)
    assert cost.bytes == 2 * 4 * 8 * 2 + 2 * 4 * 2 * (8 + 4)
