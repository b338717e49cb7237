"""paged_attention: rows of empty span, anywhere in the batch, change no bit of the others.

An engine keeps each request in a row of one wide block table; a row that is not scheduled has no
queries, and whatever its table and its length say is stale.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedraft.kernels.dispatch import use_implementation
from pagedraft.kernels.paged_attention_config import SECTION, SEGMENT, WALK, Split
from pagedraft.kernels.paged_attention_launch import SharedPrefixes
from pagedraft.tests.compare import assert_same_bits
from pagedraft.tests.inputs import PagedCase, paged_case
from pagedraft.tests.kernels.attention import attend, attend_split

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning", "ignore:All-NaN")
FP16, INT8 = torch.float16, torch.int8
STALE = 2**31 - 1
ONE_HEAD = {"num_heads": 3, "num_kv_heads": 1, "block_size": 32}
SPANS, CONTEXTS = [3, 1, 2], [40, 9, 70]

# name: for each row of the batch, the scheduled row that stands there or None
PLACES: dict[str, list[int | None]] = {
    "first": [None, 0, 1, 2],
    "last": [0, 1, 2, None],
    "between": [0, None, 1, None, None, 2],
    "around": [None, None, 0, 1, 2, None, None, None],
    "everywhere": [None, 0, None, None, 1, None, 2, None],
}
# name: (spans, contexts, sizes, rules)
KINDS: dict[str, tuple[list[int], list[int], dict[str, Any], dict[str, Any]]] = {
    "plain": (SPANS, CONTEXTS, ONE_HEAD, {}),
    "a_chunk_of_several_tiles": ([20, 1, 2], CONTEXTS, ONE_HEAD, {}),
    "window": (SPANS, CONTEXTS, ONE_HEAD, {"window": 50}),
    "int8": (SPANS, CONTEXTS, {**ONE_HEAD, "kv_dtype": INT8}, {}),
    "padding": (SPANS, CONTEXTS, {**ONE_HEAD, "padding_tokens": 5}, {}),
}


def with_empty_rows(case: PagedCase, places: list[int | None], stale_len: int = 0) -> PagedCase:
    """The same queries in rows of a wide table; other rows have no queries.

    stale_len: what kv_lens_R says of these.
    """
    device, width = case.q_THD.device, case.block_table_RM.shape[1]
    starts, lens = case.query_starts_R1.tolist(), case.kv_lens_R.tolist()
    whole_RM = torch.full((len(places) + 3, width + 5), STALE, dtype=torch.int32, device=device)
    block_size = case.k_cache_NGBD.shape[2]
    new_starts, new_lens = [0], []
    for row, place in enumerate(places):
        span = 0 if place is None else starts[place + 1] - starts[place]
        new_starts.append(new_starts[-1] + span)
        new_lens.append(stale_len if place is None else lens[place])
        if place is not None:
            used = -(-lens[place] // block_size)
            whole_RM[row, :used] = case.block_table_RM[place, :used]
    fields = {
        "block_table_RM": whole_RM[: len(places), : width + 2],
        "query_starts_R1": torch.tensor(new_starts, dtype=torch.int32, device=device),
        "kv_lens_R": torch.tensor(new_lens, dtype=torch.int32, device=device),
    }
    return PagedCase(**{**vars(case), **fields})


@pytest.mark.parametrize("stale_len", [0, 123], ids=["no_length", "stale_length"])
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["cpu", "ref"])
def test_empty_rows_change_nothing(implementation, kind, places, stale_len):
    spans, contexts, sizes, rules = KINDS[kind]
    case = paged_case(spans, contexts, **sizes)
    sparse = with_empty_rows(case, PLACES[places], stale_len)
    with use_implementation(implementation):
        assert_same_bits(attend(sparse, **rules), attend(case, **rules))


@pytest.mark.parametrize(
    ("kind", "places", "stale_len"),
    [
        *[("plain", places, 0) for places in PLACES],
        *[(kind, "everywhere", 123) for kind in KINDS],
    ],
)
def test_empty_rows_change_nothing_in_kernels(kind, places, stale_len, device):
    spans, contexts, sizes, rules = KINDS[kind]
    case = paged_case(spans, contexts, **sizes, device=device)
    sparse = with_empty_rows(case, PLACES[places], stale_len)
    assert_same_bits(attend(sparse, **rules), attend(case, **rules))


@pytest.mark.parametrize("is_wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("split", [WALK, Split(SEGMENT, 2), Split(SECTION, 1)], ids=str)
def test_empty_rows_in_every_launch(split, is_wide, device):
    if device.type == "cuda" and is_wide:
        pytest.skip("wide tiles: asked for by the launcher alone")
    case = paged_case([14, 1], [300, 65], **ONE_HEAD, dtype=FP16, device=device)
    sparse = with_empty_rows(case, [None, 0, None, 1, None], 700)
    assert_same_bits(attend_split(sparse, split, is_wide), attend_split(case, split, is_wide))


def test_empty_rows_beside_contexts_of_several_sections(device):
    sizes = {**ONE_HEAD, "head_dim": 16, "dtype": FP16}
    case = paged_case([1, 3], [2100, 9], **sizes, device=device)
    sparse = with_empty_rows(case, [None, 0, None, 1, None], 5000)
    expected = attend_split(case, WALK)
    assert_same_bits(attend_split(sparse, WALK), expected)
    assert_same_bits(attend_split(sparse, Split(SECTION, 2)), expected)


@pytest.mark.parametrize("implementation", ["triton", "cpu", "ref"])
@pytest.mark.parametrize("stale_len", [0, 123])
def test_only_empty_rows(stale_len, implementation):
    case = paged_case([1], [5], padding_tokens=2)
    empty = with_empty_rows(case, [None, None], stale_len)
    with use_implementation(implementation):
        assert_same_bits(attend(empty), torch.zeros_like(case.q_THD))


def test_empty_rows_beside_a_shared_prefix(device):
    """Runs of neighbouring rows with a prefix in common; an empty row is a run of its own."""
    case = paged_case([1, 2], [260, 270], **ONE_HEAD, dtype=FP16, device=device)
    table_RM = case.block_table_RM.clone()
    table_RM[1, :8] = table_RM[0, :8]  # the first 256 keys
    case = PagedCase(**{**vars(case), "block_table_RM": table_RM})
    sparse = with_empty_rows(case, [None, 0, 1, None], 99)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    shared = SharedPrefixes(
        query_starts_P1=ints(0, 0, 3, 3),
        num_keys_P=ints(0, 256, 0),
        num_keys_R=ints(0, 256, 256, 0),
        kv_lens_P=ints(0, 259, 0),
        block_table_PM=sparse.block_table_RM[[0, 1, 3]].contiguous(),
        max_query_len=3,
        max_keys=256,
        num_saved_keys=256,
    )
    split = Split(SEGMENT, 2)
    assert_same_bits(attend_split(sparse, split, shared=shared), attend_split(case, split))


def test_teeth_a_stale_row_with_a_query_is_seen():
    case = paged_case([1, 1], [20, 9])
    sparse = with_empty_rows(case, [0, None, 1], 5)
    starts = sparse.query_starts_R1.clone()
    starts[1:] = torch.tensor([0, 1, 2])  # the first query is the stale row's now
    stale = PagedCase(
        **{
            **vars(sparse),
            "query_starts_R1": starts,
            "block_table_RM": sparse.block_table_RM.clamp(max=1),
        }
    )
    with use_implementation("cpu"), pytest.raises(AssertionError, match="bits differ"):
        assert_same_bits(attend(stale), attend(case))
