"""logprobs: chosen and top-n log-probabilities without a written softmax."""

from __future__ import annotations

import pytest
import torch

from pagedraft.kernels.dispatch import use_implementation
from pagedraft.kernels.logprobs import (
    MAX_TOP_N,
    SPLIT_COLUMNS,
    Logprobs,
    logprobs,
    logprobs_cost,
    logprobs_ref,
)
from pagedraft.kernels.sample import process_logits, sample
from pagedraft.tests.compare import assert_no_worse, assert_same_bits
from pagedraft.tests.inputs import poisoned, randn
from pagedraft.tests.kernels.sample_inputs import Row, plain_probabilities, sample_batch

NAN, INF = float("nan"), float("inf")
IMPLEMENTATIONS = ["triton", "cpu"]

# name: (rows, vocabulary, logit scale, top_n, dtype)
CASES = {
    "chosen_only": (3, 50, 2.0, 0, torch.float32),
    "top_1": (3, 50, 2.0, 1, torch.float32),
    "top_20": (2, 700, 3.0, MAX_TOP_N, torch.float32),
    "vocabulary_smaller_than_top_n": (2, 5, 1.0, MAX_TOP_N, torch.float32),
    "several_splits": (2, 2 * SPLIT_COLUMNS + 300, 3.0, 3, torch.float32),
    "last_split_has_one_column": (1, SPLIT_COLUMNS + 1, 1.0, 4, torch.float32),
    "large_logits": (2, 300, 1e4, 3, torch.float32),
    "half_precision": (2, 300, 2.0, 5, torch.float16),
    "bfloat16": (2, 300, 2.0, 5, torch.bfloat16),
}


def _inputs(name: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int]:
    num_rows, vocab_size, scale, top_n, dtype = CASES[name]
    logits_QV = randn(num_rows, vocab_size, scale=scale, dtype=dtype, device=device)
    tokens_Q = torch.arange(num_rows, device=device) * (vocab_size - 1) // max(1, num_rows - 1)
    return logits_QV, tokens_Q, top_n


def _assert_close(out: Logprobs, logits_QV: torch.Tensor, tokens_Q: torch.Tensor, n: int) -> None:
    exact, same = (logprobs_ref(x, tokens_Q, n) for x in (logits_QV.double(), logits_QV.float()))
    assert torch.equal(out.top_ids_Qn, exact.top_ids_Qn)
    assert_no_worse(out.chosen_Q, exact=exact.chosen_Q, same_dtype=same.chosen_Q)
    assert_no_worse(
        out.top_logprobs_Qn, exact=exact.top_logprobs_Qn, same_dtype=same.top_logprobs_Qn
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name: str, implementation: str, device: torch.device) -> None:
    logits_QV, tokens_Q, top_n = _inputs(name, device)
    with use_implementation(implementation):
        out = logprobs(logits_QV, tokens_Q, top_n)
    _assert_close(out, logits_QV, tokens_Q, top_n)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "ref"])
def test_ties_are_ordered_by_id(implementation: str, device: torch.device) -> None:
    """Equal logits in one chunk, in two chunks and in two splits."""
    logits_QV = torch.zeros(1, SPLIT_COLUMNS + 10, device=device)
    logits_QV[0, [7, 300, 5, SPLIT_COLUMNS + 3]] = 2.0
    logits_QV[0, [SPLIT_COLUMNS + 4, 1000]] = 3.0
    with use_implementation(implementation):
        out = logprobs(logits_QV, torch.zeros(1, dtype=torch.int64, device=device), 8)
    expected = [1000, SPLIT_COLUMNS + 4, 5, 7, 300, SPLIT_COLUMNS + 3, 0, 1]
    assert out.top_ids_Qn.tolist() == [expected]


# name: (row, chosen token, chosen log-probability, top 2 ids, their log-probabilities)
SPECIAL_ROWS = {
    "nan": ([0.0, NAN, 1.0], 0, NAN, [-1, -1], [NAN, NAN]),
    "infinity": ([0.0, INF, 1.0], 1, NAN, [-1, -1], [NAN, NAN]),
    "only_minus_infinity": ([-INF, -INF, -INF], 0, NAN, [-1, -1], [NAN, NAN]),
    "one_finite": ([-INF, -7.0, -INF], 1, 0.0, [1, 0], [0.0, -INF]),
    "chosen_is_impossible": ([-INF, 2.0, -INF], 2, -INF, [1, 0], [0.0, -INF]),
    "chosen_is_invalid": ([-INF, 2.0, -INF], -1, NAN, [1, 0], [0.0, -INF]),
    "chosen_is_past_the_end": ([-INF, 2.0, -INF], 3, NAN, [1, 0], [0.0, -INF]),
}


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "ref"])
@pytest.mark.parametrize("name", SPECIAL_ROWS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_special_rows(name: str, implementation: str, device: torch.device) -> None:
    values, token, chosen, top_ids, top_logprobs = SPECIAL_ROWS[name]
    logits_QV = torch.tensor([values], device=device)
    with use_implementation(implementation):
        out = logprobs(logits_QV, torch.tensor([token], device=device), 2)
    assert out.chosen_Q.tolist() == pytest.approx([chosen], nan_ok=True)
    assert out.top_ids_Qn.tolist() == [top_ids]
    assert out.top_logprobs_Qn[0].tolist() == pytest.approx(top_logprobs, nan_ok=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_does_not_depend_on_the_others(implementation: str, device: torch.device) -> None:
    logits_QV = randn(4, 1300, scale=3.0, device=device)
    tokens_Q = torch.arange(4, device=device)
    with use_implementation(implementation):
        whole = logprobs(logits_QV, tokens_Q, 3)
        alone = logprobs(logits_QV[2:3], tokens_Q[2:3], 3)
    assert_same_bits(alone.chosen_Q, whole.chosen_Q[2:3])
    assert_same_bits(alone.top_logprobs_Qn, whole.top_logprobs_Qn[2:3])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_row_stride(implementation: str, device: torch.device) -> None:
    logits_QV = poisoned(3, 400, device=device)[:, :300]
    logits_QV[:] = randn(3, 300, device=device)
    tokens_Q = torch.arange(3, device=device)
    with use_implementation(implementation):
        out = logprobs(logits_QV, tokens_Q, 4)
    _assert_close(out, logits_QV, tokens_Q, 4)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "ref"])
def test_no_rows(implementation: str, device: torch.device) -> None:
    with use_implementation(implementation):
        out = logprobs(torch.zeros(0, 30, device=device), torch.zeros(0, device=device).long(), 4)
    assert [tuple(part.shape) for part in out] == [(0,), (0, 4), (0, 4)]


def test_a_softmax_of_half_precision_logits_in_half_precision_is_refused() -> None:
    """Teeth: sums kept in the logits' dtype fail the comparison."""
    logits_QV = randn(2, 300, scale=2.0, dtype=torch.float16)
    tokens_Q = torch.tensor([0, 299])
    half = logprobs_ref(logits_QV, tokens_Q, 3)
    rounded = half._replace(chosen_Q=logits_QV.log_softmax(-1).gather(1, tokens_Q[:, None])[:, 0])
    with pytest.raises(AssertionError):
        _assert_close(rounded._replace(chosen_Q=rounded.chosen_Q.float()), logits_QV, tokens_Q, 3)


# Rows to sample with: a cut that leaves fewer than top_n tokens, edits, greedy, no token at all.
SAMPLED_ROWS = [
    Row(top_k=3, temperature=0.5),
    Row(presence=1.5, output=(1, 2), bias={4: 2.0}, top_p=0.9),
    Row(temperature=0.0, banned=(3,)),
    Row(allowed=()),
]


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "ref"])
def test_raw_logits_before_sampling(implementation: str, device: torch.device) -> None:
    """A copy made before the draw tells the raw log-probabilities of what is drawn."""
    logits_QV = randn(4, 40, scale=2.0, device=device)
    raw_QV = logits_QV.clone()
    with use_implementation(implementation):
        tokens_Q = sample(logits_QV, sample_batch(SAMPLED_ROWS, 40, device))
        out = logprobs(raw_QV, tokens_Q, 5)
    expected_QV = raw_QV.double().log_softmax(-1)
    chosen_Q = expected_QV.gather(1, tokens_Q.clamp(min=0)[:, None])[:, 0].float()
    chosen_Q[3] = NAN  # drew no token
    torch.testing.assert_close(out.chosen_Q, chosen_Q, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert torch.equal(out.top_ids_Qn, expected_QV.topk(5).indices)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "ref"])
@pytest.mark.parametrize("top_n", [5, MAX_TOP_N])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_processed_logits(top_n: int, implementation: str, device: torch.device) -> None:
    """Tokens that may not be drawn come last, at -inf; a row without a token has none."""
    logits_QV = randn(4, 40, scale=2.0, device=device)
    probs_QV = torch.stack(
        [plain_probabilities(x, row) for x, row in zip(logits_QV.cpu(), SAMPLED_ROWS, strict=True)]
    )
    sorted_QV = probs_QV.sort(dim=-1, descending=True, stable=True)
    batch = sample_batch(SAMPLED_ROWS, 40, device)
    with use_implementation(implementation):
        process_logits(logits_QV, batch)
        tokens_Q = sample(logits_QV, sample_batch([Row()] * 4, 40, device))
        out = logprobs(logits_QV, tokens_Q, top_n)
    expected_Qn = sorted_QV.values[:, :top_n].log().float()
    expected_Qn[3], sorted_QV.indices[3] = NAN, -1
    assert out.top_ids_Qn.tolist() == sorted_QV.indices[:, :top_n].tolist()
    torch.testing.assert_close(
        out.top_logprobs_Qn.cpu(), expected_Qn, rtol=1e-5, atol=1e-6, equal_nan=True
    )
    assert out.chosen_Q[:3].isfinite().all()
    assert out.chosen_Q[2:].tolist() == pytest.approx([0.0, NAN], nan_ok=True)


ERRORS = {
    "logits_dtype": ((torch.zeros(2, 4).double(), None, 0), TypeError, "logits_QV: expected dtype"),
    "logits_stride": ((torch.zeros(4, 2).T, None, 0), ValueError, "logits_QV: expected at least"),
    "tokens_dtype": ((None, torch.zeros(2).int(), 0), TypeError, "tokens_Q: expected dtype int64"),
    "tokens_rows": ((None, torch.zeros(3).long(), 0), ValueError, "tokens_Q: expected shape"),
    "negative_top_n": ((None, None, -1), ValueError, "top_n: expected 0..20, got -1"),
    "large_top_n": ((None, None, 21), ValueError, "top_n: expected 0..20, got 21"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str) -> None:
    (logits_QV, tokens_Q, top_n), error, message = ERRORS[name]
    logits_QV = torch.zeros(2, 4) if logits_QV is None else logits_QV
    tokens_Q = torch.zeros(2, dtype=torch.int64) if tokens_Q is None else tokens_Q
    with pytest.raises(error, match=message):
        logprobs(logits_QV, tokens_Q, top_n)


def test_cost_reads_the_logits_once() -> None:
    assert logprobs_cost(2, 100, 2, top_n=3).bytes == 2 * (200 + 12 + 36)
