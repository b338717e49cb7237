"""The input builders build what they say."""

from __future__ import annotations

import pytest
import torch

from pagedraft.tests.inputs import Guarded, paged_case, poisoned, randn, shuffled_block_table


def test_randn_is_the_same_in_every_dtype():
    assert torch.equal(randn(3, 4, dtype=torch.bfloat16), randn(3, 4).bfloat16())
    assert not torch.equal(randn(3, 4), randn(3, 4, seed=1))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str
)
def test_poison_is_nan(dtype):
    assert bool(poisoned(3, 5, dtype=dtype).float().isnan().all())


def test_poison_of_integers_is_minus_one():
    assert bool((poisoned(4, dtype=torch.int64) == -1).all())


@pytest.mark.parametrize(("offset", "where"), [(-1, "before"), (12, "after")])
def test_guard_sees_writes_around_the_tensor(offset, where):
    guarded = Guarded(3, 4)
    guarded.tensor.fill_(1.0)
    guarded.assert_untouched()
    start = guarded.tensor.storage_offset() + offset
    guarded.tensor.as_strided((1,), (1,), start).zero_()
    with pytest.raises(AssertionError, match=where):
        guarded.assert_untouched()


def test_block_table_is_shuffled_with_gaps_and_without_the_null_block():
    table_RM, num_blocks = shuffled_block_table([64, 0, 33], 16, spare_blocks=3)
    used = torch.cat([table_RM[0], table_RM[2, :3]])
    assert table_RM.shape == (3, 4)
    assert len(used.unique()) == 7
    assert num_blocks == 11
    assert used.min() >= 1
    assert used.tolist() != sorted(used.tolist())
    assert table_RM[1].tolist() == [0, 0, 0, 0]


def test_paged_case_poisons_what_no_row_owns():
    case = paged_case([1, 0, 3], [20, 0, 33], dtype=torch.bfloat16, padding_tokens=2)
    assert case.q_THD.shape == (6, 4, 32)
    assert bool(case.q_THD[4:].isnan().all())
    assert case.query_starts_R1.tolist() == [0, 1, 1, 4]
    assert (case.max_query_len, case.max_kv_len) == (3, 33)
    assert int((~case.k_cache_NGBD[:, 0, :, 0].isnan()).sum()) == 53
    assert torch.equal(case.row_kv(2)[0], randn(33, 2, 32, dtype=torch.bfloat16, seed=5))
    case.assert_guards()


def test_planted_key_takes_half_of_the_mass():
    case = paged_case([2], [512], block_size=64)
    case.plant_key(0, 511, token=1, head=3)
    k_SGD, _ = case.row_kv(0)
    scores_S = k_SGD[:, 1] @ case.q_THD[1, 3] / 32**0.5
    assert 0.3 < scores_S.softmax(0)[511] < 0.7
