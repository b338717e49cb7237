"""The CPU path of paged attention: a query's bits depend on its position and keys only.

Run it with ``MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=avx2``, or ``SSE4_2`` and
``default``, to get the products and vector loops of other processors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedraft.kernels import paged_attention_cpu_tiles as tiles
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.tests.compare import assert_same_bits
from pagedraft.tests.inputs import num_threads, paged_case
from pagedraft.tests.kernels.attention import attend, check, prefix_case, sinks

INT8, FP8 = torch.int8, torch.float8_e4m3fn
CONTEXT = 700
DEMO = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
SMALL = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 32}
# name: (sizes, rules; sinks: True stands for a sinks_H)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "demo_model": (DEMO, {}),
    "group_of_1": ({"num_heads": 2, "num_kv_heads": 2, "head_dim": 32}, {}),
    "group_of_4": ({"num_heads": 8, "num_kv_heads": 2, "head_dim": 128}, {}),
    "group_of_7": ({"num_heads": 7, "num_kv_heads": 1, "head_dim": 40}, {}),
    "window": (DEMO, {"window": 100}),
    "small_window": (SMALL, {"window": 7}),
    "soft_cap": (SMALL, {"soft_cap": 3.0}),
    "sinks": (SMALL, {"sinks": True}),
    "int8": ({**SMALL, "kv_dtype": INT8}, {}),
    "fp8_all_rules": (
        {**SMALL, "kv_dtype": FP8},
        {"window": 200, "soft_cap": 3.0, "sinks": True},
    ),
}
pytestmark = pytest.mark.usefixtures("cpu_path")


def rules_of(kind: str) -> dict[str, Any]:
    sizes, rules = KINDS[kind]
    rules = dict(rules)
    if rules.pop("sinks", False):
        rules["sinks_H"] = sinks(sizes["num_heads"], torch.device("cpu"))
    return rules


@pytest.fixture(scope="module", params=KINDS)
def whole(request) -> tuple[dict[str, Any], dict[str, Any], torch.Tensor]:
    """Sizes, rules, and the outputs of all queries of the context in one call."""
    sizes, rules = KINDS[request.param][0], rules_of(request.param)
    case, _ = prefix_case([CONTEXT], [CONTEXT], CONTEXT, block_size=64, **sizes)
    with use_implementation("cpu"):
        return sizes, rules, attend(case, **rules)


# Each block size meets long and short spans of every residue.
SPANS = [*range(1, 20), 31, 64, 65, 300]


@pytest.mark.parametrize(
    ("span", "block_size"),
    [(span, (8, 16, 64, 128)[(span + turn) % 4]) for span in SPANS for turn in range(2)],
)
def test_bits_do_not_depend_on_span_or_block_size(span, block_size, whole):
    sizes, rules, expected = whole
    spans, ends = [span] * 4, [CONTEXT, 301, 320 + span, max(span, 66)]
    case, position_T = prefix_case(spans, ends, CONTEXT, block_size=block_size, **sizes)
    assert_same_bits(attend(case, **rules), expected[position_T])


@pytest.mark.parametrize("seed", range(12))
def test_bits_do_not_depend_on_the_batch(seed, whole):
    sizes, rules, expected = whole
    generator = torch.Generator().manual_seed(seed)
    num_rows = [1, 2, 3, 5, 8, 16][seed % 6]
    ends = torch.randint(1, CONTEXT + 1, (num_rows,), generator=generator).tolist()
    widest = torch.tensor([1, 1, 1, 2, 9, 70])[torch.randint(6, (num_rows,), generator=generator)]
    spans = [min(end, span) for end, span in zip(ends, widest.tolist(), strict=True)]
    case, position_T = prefix_case(spans, ends, CONTEXT, block_size=16, **sizes)
    assert_same_bits(attend(case, **rules), expected[position_T])


@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize("block_size", [8, 64])
def test_bits_of_long_segments(block_size, window):
    """Queries around position 1024, behind which segments are longer."""
    context, sizes = 1300, {**SMALL, "block_size": block_size}
    expected = attend(prefix_case([context], [context], context, **sizes)[0], window=window)
    spans, ends = [1, 9, 5, 1, 30, 2], [1300, 1030, 1024, 1025, 1100, 1281]
    case, position_T = prefix_case(spans, ends, context, **sizes)
    assert_same_bits(attend(case, window=window), expected[position_T])


@pytest.mark.parametrize("kind", ["demo_model", "group_of_7", "fp8_all_rules"])
def test_bits_do_not_depend_on_threads(kind):
    spans, ends = [1, 5, 9, 300, 1], [700, 301, 65, 300, 3]
    case, _ = prefix_case(spans, ends, CONTEXT, block_size=64, **KINDS[kind][0])
    results = []
    for count in (1, 2):
        with num_threads(count):
            results.append(attend(case, **rules_of(kind)))
    assert_same_bits(*results)


@pytest.mark.parametrize("sizes", [(1,), (12,), (6, 10)])
def test_bits_with_few_row_counts(sizes, monkeypatch):
    """What processors get on which the self-test lets less pass."""
    monkeypatch.setattr(tiles, "ROW_COUNTS", sizes)
    tiles.find_row_counts.cache_clear()
    whole_case, _ = prefix_case([300], [300], 300, **SMALL)
    case, position_T = prefix_case([1, 5, 70], [300, 120, 299], 300, **SMALL)
    expected, result = attend(whole_case), attend(case)
    tiles.find_row_counts.cache_clear()
    check(whole_case, expected, factor=4.0)
    assert_same_bits(result, expected[position_T])


def test_teeth_a_row_count_that_does_not_agree(monkeypatch):
    """Forced on attention, it must show in the bits; on MKL one row is such a count."""
    counts = tiles.find_row_counts(64, 1)
    if 1 in counts.sizes:
        pytest.skip("one row agrees with the other counts here")
    case = paged_case([1, 9], [300, 300], block_size=64, **DEMO)
    expected = attend(case)
    monkeypatch.setattr(tiles, "ROW_COUNTS", (1,))
    tiles.find_row_counts.cache_clear()
    result = attend(case)
    tiles.find_row_counts.cache_clear()
    with pytest.raises(AssertionError, match="bits differ"):
        assert_same_bits(result, expected)
