"""verify: the longest matching prefix and the target's own token after it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedraft.kernels.dispatch import use_implementation
from pagedraft.kernels.verify import verify, verify_cost, verify_ref

# name: rows of (drafts, draws, accepted, next token)
CASES = {
    "no_rows": [],
    "no_drafts": [([], [7], 0, 7)],
    "all_accepted": [([4, 5, 6], [4, 5, 6, 9], 3, 9)],
    "first_differs": [([4, 5], [3, 5, 6], 0, 3)],
    "match_after_a_mismatch_does_not_count": [([4, 5, 6], [4, 8, 6, 2], 1, 8)],
    "last_differs": [([1, 2], [1, 3, 4], 1, 3)],
    "invalid_draw_ends_the_prefix": [([4, 5], [4, -1, 6], 1, -1)],
    "invalid_draw_after_all_drafts": [([4], [4, -1], 1, -1)],
    "ragged": [
        ([1, 2], [1, 2, 3], 2, 3),
        ([], [9], 0, 9),
        ([5], [6, 7], 0, 6),
        ([], [0], 0, 0),
        ([8, 8, 8], [8, 8, 7, 8], 2, 7),
    ],
    "neighbours_would_match": [([1], [2, 1], 0, 2), ([1], [1, 5], 1, 5)],
    "longer_than_a_tile": [([3] * 37, [3] * 38, 37, 3), ([3] * 35, [3] * 33 + [2] * 3, 33, 2)],
    "mismatch_in_the_second_tile_then_again": [([3] * 40, [3] * 20 + [1] * 21, 20, 1)],
    "ids_above_32_bits": [([2**33], [0, 1], 0, 0)],
}
IMPLEMENTATIONS = ["triton", "cpu", "ref"]

Row = tuple[list[int], list[int], int, int]


def _tensors(rows: list[Row], device: torch.device) -> tuple[torch.Tensor, ...]:
    drafts = [token for row in rows for token in row[0]]
    draws = [token for row in rows for token in row[1]]
    lengths = torch.tensor([0, *(len(row[0]) for row in rows)])
    return (
        torch.tensor(drafts, dtype=torch.int64, device=device),
        lengths.cumsum(0).to(device, torch.int32),
        torch.tensor(draws, dtype=torch.int64, device=device),
    )


def _assert_result(result: tuple[torch.Tensor, torch.Tensor], rows: list[Row]) -> None:
    num_accepted_R, next_token_R = result
    assert (num_accepted_R.dtype, next_token_R.dtype) == (torch.int32, torch.int64)
    assert num_accepted_R.tolist() == [row[2] for row in rows]
    assert next_token_R.tolist() == [row[3] for row in rows]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_cases(name: str, implementation: str, device: torch.device) -> None:
    with use_implementation(implementation):
        _assert_result(verify(*_tensors(CASES[name], device)), CASES[name])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_past_the_last_row_is_read(implementation: str, device: torch.device) -> None:
    rows = CASES["ragged"]
    drafts_K, starts_R1, draws_Q = _tensors(rows, device)
    padding = torch.full((3,), 3, device=device)
    with use_implementation(implementation):
        result = verify(torch.cat([drafts_K, padding]), starts_R1, torch.cat([draws_Q, padding]))
    _assert_result(result, rows)


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 2)), max_size=4), max_size=5),
    st.integers(-1, 2),
)
def test_random_rows_agree_with_the_reference(
    pairs: list[list[tuple[int, int]]], final: int
) -> None:
    rows = [([d for d, _ in row], [t for _, t in row] + [final], 0, 0) for row in pairs]
    tensors = _tensors(rows, torch.device("cpu"))
    expected = verify_ref(*tensors)
    with use_implementation("cpu"):
        out = verify(*tensors)
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[1], expected[1])


def test_counting_matches_instead_of_the_prefix_fails_the_cases(device: torch.device) -> None:
    """Teeth: the comparator tells a prefix from a count."""
    rows = CASES["match_after_a_mismatch_does_not_count"]
    drafts_K, _, draws_Q = _tensors(rows, device)
    count = (drafts_K == draws_Q[:-1]).sum().int()[None]
    with pytest.raises(AssertionError):
        _assert_result((count, draws_Q[count.long()]), rows)


ERRORS = {
    "drafts_dtype": (0, lambda t: t.int(), TypeError, "draft_tokens_K: expected dtype int64"),
    "starts_dtype": (1, lambda t: t.long(), TypeError, "draft_starts_R1: expected dtype int32"),
    "starts_empty": (1, lambda t: t[:0], ValueError, "draft_starts_R1: expected R"),
    "draws_shape": (2, lambda t: t[None], ValueError, "target_tokens_Q: expected shape"),
    "too_few_draws": (2, lambda t: t[:2], ValueError, "target_tokens_Q: expected at least"),
    "strided_drafts": (0, lambda t: t[::2], ValueError, "draft_tokens_K: expected a contiguous"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str, device: torch.device) -> None:
    place, change, error, message = ERRORS[name]
    tensors = list(_tensors(CASES["ragged"], device))
    tensors[place] = change(tensors[place])
    with pytest.raises(error, match=message):
        verify(*tensors)


def test_cost_counts_each_operand_once() -> None:
    assert verify_cost(2, 3).bytes == 8 * 3 + 8 * 5 + 4 * 3 + 12 * 2
