"""StepBatch: positions, slots and logit rows of mixed spans; padding; errors."""

from __future__ import annotations

import pytest
import torch

from pagedraft.model.batch import Span, build_step_batch

CPU = torch.device("cpu")
MIXED = [
    Span([10, 11, 12], start=6, block_ids=[4, 2], num_logits=0),  # a chunk over a block edge
    Span([20], start=0, block_ids=[7], num_logits=1),
    Span([30, 31, 32], start=8, block_ids=[1, 5], num_logits=3),  # a token and two drafts
]


def test_a_mixed_step():
    batch = build_step_batch(MIXED, block_size=8, device=CPU)
    assert batch.tokens_T.tolist() == [10, 11, 12, 20, 30, 31, 32]
    assert batch.positions_T.tolist() == [6, 7, 8, 0, 8, 9, 10]
    assert batch.slots_T.tolist() == [38, 39, 16, 56, 40, 41, 42]
    assert batch.query_starts_R1.tolist() == [0, 3, 4, 7]
    assert batch.kv_lens_R.tolist() == [9, 1, 11]
    assert batch.block_table_RM.tolist() == [[4, 2], [7, 0], [1, 5]]
    assert batch.logit_rows_Q.tolist() == [3, 4, 5, 6]
    assert (batch.num_tokens, batch.num_logits) == (7, 4)
    assert (batch.max_query_len, batch.max_kv_len) == (3, 11)


def test_padding_goes_to_the_null_block_after_the_last_row():
    batch = build_step_batch(MIXED, block_size=8, device=CPU, row_multiple=6)
    assert batch.tokens_T.tolist()[7:] == [0] * 5
    assert batch.slots_T.tolist()[7:] == [0] * 5
    assert batch.query_starts_R1.tolist() == [0, 3, 4, 7]
    assert batch.logit_rows_Q.tolist() == [3, 4, 5, 6, 0, 0]
    assert batch.num_logits == 4


def test_all_rows_in_order_when_every_token_needs_logits():
    spans = [Span([3], 4, [1], 1), Span([5, 6], 2, [2], 2)]
    batch = build_step_batch(spans, block_size=8, device=CPU, row_multiple=4)
    assert batch.logit_rows_Q.tolist() == [0, 1, 2, 3]
    assert batch.num_logits == 3


def test_blocks_past_the_span_are_left_out_of_the_table():
    batch = build_step_batch([Span([3], 0, [5, 6, 7], 1)], block_size=8, device=CPU)
    assert batch.block_table_RM.tolist() == [[5]]


BAD = {
    "no spans": ([], "spans: expected at least one"),
    "empty span": ([Span([], 0, [1], 0)], r"spans\[0\]: expected at least one token"),
    "many logits": ([Span([1], 0, [1], 2)], "num_logits: expected 0 to 1, got 2"),
    "few blocks": ([Span([1], 8, [1], 1)], "tokens 8 to 9 do not fit the 1 blocks"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    spans, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        build_step_batch(spans, block_size=8, device=CPU)
