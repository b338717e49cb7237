"""paged_attention: what interpreted launches read and write.

Every test of the op checks its launches for stray accesses and races between programs, and guards
pool, tables and scratch (tests/kernels/attention.py); here the traffic is counted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedraft.kernels.dispatch import INTERPRETED
from pagedraft.kernels.paged_attention import paged_attention
from pagedraft.kernels.paged_attention_config import SEGMENT, WALK, Split
from pagedraft.tests.compare import assert_same_bits
from pagedraft.tests.inputs import PagedCase, paged_case
from pagedraft.tests.kernels.attention import attend, attend_split

if INTERPRETED:
    from pagedraft.tests.sanitizer import sanitize
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="counts interpreted loads")
FP16, INT8 = torch.float16, torch.int8
SIZES = {"num_heads": 4, "num_kv_heads": 1, "block_size": 64, "dtype": FP16}
SLACK = 1.02

# name: (spans, contexts, sizes, rules, is_wide, keys that some query sees)
READS: dict[str, tuple[list[int], list[int], dict[str, Any], dict[str, Any], bool, int]] = {
    "decode": ([1, 1], [700, 65], {}, {}, False, 765),
    "verify_5": ([5], [700], {}, {}, False, 700),
    "verify_8": ([8], [700], {}, {}, False, 700),
    "verify_9_in_a_wide_tile": ([9], [700], {}, {}, True, 700),
    "group_of_7": ([4], [300], {"num_heads": 7}, {}, False, 300),
    "small_blocks": ([5], [300], {"block_size": 8}, {}, False, 300),
    "int8": ([5], [300], {"kv_dtype": INT8}, {}, False, 300),
    "window": ([5], [700], {}, {"window": 100}, False, 104),
    "window_small_blocks": ([1], [700], {"block_size": 16}, {"window": 100}, False, 100),
}


def bytes_read(case: PagedCase, launches: list, *, unique: bool = False) -> tuple[int, ...]:
    """Bytes of keys, of values, and of their factors that the launches read."""
    tensors = (case.k_cache_NGBD, case.v_cache_NGBD, case.k_scale_NGB, case.v_scale_NGB)
    return tuple(
        sum(launch.bytes_loaded(tensor, unique=unique) for launch in launches)
        for tensor in tensors
        if tensor is not None
    )


@pytest.mark.parametrize("split", [WALK, Split(SEGMENT, 3)], ids=["walk", "segments"])
@pytest.mark.parametrize("name", READS)
def test_keys_are_read_once(name, split):
    spans, kv_lens, sizes, rules, is_wide, num_keys = READS[name]
    case = paged_case(spans, kv_lens, **{**SIZES, **sizes})
    with sanitize() as launches:
        attend_split(case, split, is_wide, **rules)
    per_key = (32 * case.k_cache_NGBD.element_size(),) * 2 + (4,) * 2
    for got, size in zip(bytes_read(case, launches), per_key, strict=False):
        assert num_keys * size <= got <= SLACK * num_keys * size


def test_teeth_two_tiles_read_the_keys_twice():
    case = paged_case([9], [700], **SIZES)
    with sanitize() as launches:
        attend_split(case, WALK)
    assert bytes_read(case, launches)[0] > SLACK * 700 * 64


def test_offsets_pass_two_to_the_31():
    """Blocks behind 2^31 elements of a pool whose memory nobody else touches."""
    small = paged_case([2], [20], block_size=16, head_dim=64)
    num_blocks = 2**31 // (2 * 16 * 64) + 8
    far_RM = torch.tensor([[num_blocks - 3, num_blocks - 5]], dtype=torch.int32)
    pools = [torch.empty(num_blocks, 2, 16, 64) for _ in range(2)]
    for pool, cache in zip(pools, (small.k_cache_NGBD, small.v_cache_NGBD), strict=True):
        pool[far_RM[0].long()] = cache[small.block_table_RM[0].long()]
    rows = (far_RM, small.query_starts_R1, small.kv_lens_R)  # not under the sanitizer: 17 GB
    out_THD = paged_attention(small.q_THD, *pools, *rows, max_query_len=2, max_kv_len=20)
    assert_same_bits(out_THD, attend(small))
