"""distill_loss: log-sum-exps and slopes of logits, against the reference and against autograd."""

from __future__ import annotations

import math

import pytest
import torch

from pagedraft.kernels.dispatch import use_implementation
from pagedraft.kernels.distill_loss import (
    BLOCK_COLUMNS,
    TERMS,
    DistillSums,
    RunningLse,
    distill_terms,
    distill_terms_cost,
    distill_terms_ref,
    update_lse,
    update_lse_cost,
    update_lse_ref,
)
from pagedraft.tests.compare import assert_no_worse
from pagedraft.tests.inputs import Guarded, poisoned, randn

NAN, INF = float("nan"), float("inf")
IMPLEMENTATIONS = ["triton", "cpu", "ref"]

# name: (rows, columns, student's scale, teacher's scale, what the teacher's log-sum-exp is above
# that of its columns)
CASES = {
    "one_block": (3, 50, 2.0, 2.0, 0.0),
    "several_blocks": (2, 2 * BLOCK_COLUMNS + 300, 3.0, 3.0, 0.0),
    "last_block_has_one_column": (2, BLOCK_COLUMNS + 1, 1.0, 2.0, 0.0),
    "one_row": (1, 700, 2.0, 1.0, 0.0),
    "one_column": (3, 1, 2.0, 1.0, 0.7),
    "cut_vocabulary": (3, 300, 2.0, 2.0, 0.5),
    "student_underflows": (2, 300, 60.0, 2.0, 0.0),
    "teacher_underflows": (2, 300, 2.0, 60.0, 0.1),
    "both_underflow": (2, 300, 80.0, 80.0, 0.0),
}


def _logits(name: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, float]:
    num_rows, num_columns, student_scale, teacher_scale, above = CASES[name]
    student_NV = randn(num_rows, num_columns, scale=student_scale, device=device)
    teacher_NV = randn(num_rows, num_columns, scale=teacher_scale, device=device, seed=1)
    return student_NV, teacher_NV, above


def _divergence(
    terms: str, student_NV: torch.Tensor, teacher_NV: torch.Tensor, teacher_lse_N: torch.Tensor
) -> torch.Tensor:
    """The divergences as they are written in books, in fp64; [N]."""
    log_q_NV = student_NV.log_softmax(1)
    log_p_NV = teacher_NV - teacher_lse_N[:, None]
    q_NV, p_NV = log_q_NV.exp(), log_p_NV.exp()
    log_m_NV = torch.logaddexp(log_q_NV, log_p_NV) - math.log(2)
    values_NV = {
        "forward_kl": p_NV * (log_p_NV - log_q_NV),
        "reverse_kl": q_NV * (log_q_NV - log_p_NV),
        "jsd": (p_NV * (log_p_NV - log_m_NV) + q_NV * (log_q_NV - log_m_NV)) / 2,
        "overlap": -torch.minimum(p_NV, q_NV),
    }
    return values_NV[terms].sum(1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_log_sum_exp(name: str, implementation: str, device: torch.device) -> None:
    """In one chunk and in three, of which the first two are one column and a few."""
    logits_NV, _, _ = _logits(name, device)
    exact_N, same_N = logits_NV.double().logsumexp(1), logits_NV.logsumexp(1)
    cuts = sorted({0, min(1, logits_NV.shape[1] - 1), logits_NV.shape[1] // 3})
    ends = [*cuts[1:], logits_NV.shape[1]]
    for chunks in ([(0, logits_NV.shape[1])], list(zip(cuts, ends, strict=True))):
        state = RunningLse.start(len(logits_NV), device)
        with use_implementation(implementation):
            for first, end in chunks:
                update_lse(logits_NV[:, first:end], state, first)
        assert_no_worse(state.lse(), exact=exact_N, same_dtype=same_N)
        assert torch.equal(state.best_N, logits_NV.argmax(1))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_lowest_of_equal_ids_is_the_best(implementation: str, device: torch.device) -> None:
    """Ties in one block, in two blocks and in two chunks."""
    logits_NV = torch.zeros(3, BLOCK_COLUMNS + 40, device=device)
    logits_NV[0, [7, 300, BLOCK_COLUMNS + 3, BLOCK_COLUMNS + 30]] = 2.0
    logits_NV[1, [BLOCK_COLUMNS + 3, BLOCK_COLUMNS + 30]] = 2.0
    state = RunningLse.start(3, device)
    with use_implementation(implementation):
        update_lse(logits_NV[:, : BLOCK_COLUMNS + 20], state)
        update_lse(logits_NV[:, BLOCK_COLUMNS + 20 :], state, BLOCK_COLUMNS + 20)
    assert state.best_N.tolist() == [7, BLOCK_COLUMNS + 3, 0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_nan_logit_makes_its_row_undefined(implementation: str, device: torch.device) -> None:
    logits_NV = torch.zeros(3, 40, device=device)
    logits_NV[1, 5] = NAN
    state = RunningLse.start(3, device)
    with use_implementation(implementation):
        update_lse(logits_NV, state)
        update_lse(torch.zeros(3, 10, device=device), state, 40)
    assert state.lse().isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("name", CASES)
def test_gradient_is_that_of_autograd_in_fp64(
    name: str, terms: str, implementation: str, device: torch.device
) -> None:
    student_NV, teacher_NV, above = _logits(name, device)
    wide_NV, wide_teacher_NV = student_NV.double().requires_grad_(), teacher_NV.double()
    wide_lse_N = wide_teacher_NV.logsumexp(1) + above
    exact_N = _divergence(terms, wide_NV, wide_teacher_NV, wide_lse_N)
    (exact_NV,) = torch.autograd.grad(exact_N.sum(), wide_NV)

    lse_N = student_NV.logsumexp(1), wide_lse_N.float()
    same, q_NV, slope_NV = distill_terms_ref(student_NV, teacher_NV, *lse_N, terms)
    same_NV = slope_NV - q_NV * same.slope_N[:, None]
    sums = DistillSums.start(len(student_NV), device)
    with use_implementation(implementation):
        distill_terms(student_NV, teacher_NV, *lse_N, sums, terms=terms, write="gradient")
    exact_N = exact_N.detach()
    assert_no_worse(sums.divergence_N, exact=exact_N, same_dtype=same.divergence_N)
    assert_no_worse(student_NV, exact=exact_NV, same_dtype=same_NV)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("name", CASES)
def test_parts_are_those_of_the_reference(
    name: str, terms: str, implementation: str, device: torch.device
) -> None:
    """Chunk by chunk: q, q g and all sums, against the reference in fp64 over the whole row."""
    student_NV, teacher_NV, above = _logits(name, device)
    wide = student_NV.double(), teacher_NV.double()
    wide_lse_N = wide[0].logsumexp(1), wide[1].logsumexp(1) + above
    lse_N = tuple(lse.float() for lse in wide_lse_N)
    exact = distill_terms_ref(*wide, *wide_lse_N, terms)
    same = distill_terms_ref(student_NV, teacher_NV, *lse_N, terms)
    sums = DistillSums.start(len(student_NV), device)
    half = -(-student_NV.shape[1] // 2)
    with use_implementation(implementation):
        for student_nV, teacher_nV in zip(
            student_NV.split(half, 1), teacher_NV.split(half, 1), strict=True
        ):
            distill_terms(student_nV, teacher_nV, *lse_N, sums, terms=terms, write="parts")
    for out, exact_N, same_N in zip(sums, exact[0], same[0], strict=True):
        assert_no_worse(out, exact=exact_N, same_dtype=same_N)
    assert_no_worse(student_NV, exact=exact[1], same_dtype=same[1])
    assert_no_worse(teacher_NV, exact=exact[2], same_dtype=same[2])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("terms", TERMS)
def test_the_slope_of_equal_logits_is_zero(
    terms: str, implementation: str, device: torch.device
) -> None:
    student_NV = randn(3, 1100, scale=3.0, device=device)
    teacher_NV, lse_N = student_NV.clone(), student_NV.logsumexp(1)
    sums = DistillSums.start(3, device)
    with use_implementation(implementation):
        distill_terms(student_NV, teacher_NV, lse_N, lse_N, sums, terms=terms, write="gradient")
    expected_N = -sums.alpha_N if terms == "overlap" else torch.zeros(3, device=device)
    torch.testing.assert_close(sums.divergence_N, expected_N, rtol=0, atol=1e-6)
    torch.testing.assert_close(student_NV, torch.zeros_like(student_NV), rtol=0, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("write", ["nothing", "parts", "gradient"])
def test_neighbours_are_left_alone(write: str, implementation: str, device: torch.device) -> None:
    """Rows with a stride between guard regions: what lies around and between them stays."""
    guards = [Guarded(3, 400, device=device) for _ in range(2)]
    student_NV, teacher_NV = (guard.tensor[:, :300] for guard in guards)
    student_NV[:], teacher_NV[:] = randn(3, 300, device=device), randn(3, 300, device=device)
    lse_N = student_NV.logsumexp(1)
    with use_implementation(implementation):
        distill_terms(
            student_NV,
            teacher_NV,
            lse_N,
            lse_N,
            DistillSums.start(3, device),
            terms="jsd",
            write=write,
        )
    for guard in guards:
        guard.assert_untouched()
        between = guard.tensor[:, 300:].contiguous().view(torch.uint8)
        assert bool((between == poisoned(1).view(torch.uint8)[0].to(device)).all())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_rows(implementation: str, device: torch.device) -> None:
    empty_NV, empty_N = torch.empty(0, 8, device=device), torch.empty(0, device=device)
    with use_implementation(implementation):
        update_lse(empty_NV, RunningLse.start(0, device))
        sums = DistillSums.start(0, device)
        distill_terms(empty_NV, empty_NV, empty_N, empty_N, sums, terms="jsd", write="parts")
    assert [tuple(part.shape) for part in sums] == [(0,)] * 4


def test_the_references_leave_their_inputs(device: torch.device) -> None:
    student_NV, teacher_NV = randn(2, 30, device=device), randn(2, 30, device=device, seed=1)
    copies = student_NV.clone(), teacher_NV.clone()
    state = update_lse_ref(student_NV, RunningLse.start(2, device))
    for terms in TERMS:
        distill_terms_ref(student_NV, teacher_NV, state.lse(), state.lse(), terms)
    assert torch.equal(student_NV, copies[0])
    assert torch.equal(teacher_NV, copies[1])


def test_a_slope_that_is_not_centred_is_refused() -> None:
    """Teeth: q g without its mean fails the comparison with autograd."""
    student_NV, teacher_NV, _ = _logits("one_block", torch.device("cpu"))
    wide_NV = student_NV.double().requires_grad_()
    exact_N = _divergence("jsd", wide_NV, teacher_NV.double(), teacher_NV.double().logsumexp(1))
    (exact_NV,) = torch.autograd.grad(exact_N.sum(), wide_NV)
    lse_N = student_NV.logsumexp(1), teacher_NV.logsumexp(1)
    sums, q_NV, slope_NV = distill_terms_ref(student_NV, teacher_NV, *lse_N, "jsd")
    right_NV = slope_NV - q_NV * sums.slope_N[:, None]
    assert_no_worse(right_NV, exact=exact_NV, same_dtype=right_NV)
    with pytest.raises(AssertionError, match="error"):
        assert_no_worse(slope_NV, exact=exact_NV, same_dtype=right_NV)


# name: (changed arguments, error, message)
ERRORS = {
    "terms": ({"terms": "hellinger"}, ValueError, "terms: expected one of .*, got 'hellinger'"),
    "write": ({"write": "all"}, ValueError, "write: expected one of .*, got 'all'"),
    "dtype": ({"student_NV": torch.zeros(2, 4).half()}, TypeError, "student_NV: expected dtype"),
    "columns": (
        {"teacher_NV": torch.zeros(2, 5)},
        ValueError,
        r"teacher_NV: expected shape \(2, 4",
    ),
    "stride": ({"student_NV": torch.zeros(4, 2).T}, ValueError, "student_NV: expected at least"),
    "no_columns": ({"student_NV": torch.zeros(2, 0)}, ValueError, "student_NV: expected at least"),
    "lse": ({"teacher_lse_N": torch.zeros(3)}, ValueError, r"teacher_lse_N: expected shape \(2\)"),
    "sums": (
        {"sums": DistillSums.start(3, torch.device("cpu"))},
        ValueError,
        "divergence_N: expec",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str) -> None:
    changed, error, message = ERRORS[name]
    arguments = {
        "student_NV": torch.zeros(2, 4),
        "teacher_NV": torch.zeros(2, 4),
        "student_lse_N": torch.zeros(2),
        "teacher_lse_N": torch.zeros(2),
        "sums": DistillSums.start(2, torch.device("cpu")),
        "terms": "jsd",
    }
    with pytest.raises(error, match=message):
        distill_terms(**(arguments | changed))


def test_a_state_of_other_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_N: expected shape \(2\), got \(3,\)"):
        update_lse(torch.zeros(2, 4), RunningLse.start(3, torch.device("cpu")))


def test_cost_counts_what_is_read_and_written() -> None:
    assert update_lse_cost(2, 100).bytes == 2 * (400 + 32)
    bytes_of = {w: distill_terms_cost(2, 100, w).bytes for w in ("nothing", "gradient", "parts")}
    assert bytes_of == {"nothing": 1680, "gradient": 2480, "parts": 3280}
