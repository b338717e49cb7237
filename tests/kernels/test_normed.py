"""Rows on their way through a norm: the oracle, its sums, and the linear layer that reads them."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from pagedraft.kernels.dispatch import use_reference
from pagedraft.kernels.linear import PackedLinear, linear, linear_ref, pack_linear
from pagedraft.kernels.normed import Normed, finish_norm, row_sums
from pagedraft.kernels.rms_norm import rms_norm_ref
from pagedraft.tests.compare import assert_no_worse, assert_same_bits
from pagedraft.tests.inputs import randn
from pagedraft.tests.kernels.linear_inputs import (
    EPS,
    MOST_ROWS,
    ROW_COUNTS,
    last_rows,
    normed_rows,
    squares_of,
    use_uniform_dot,
)

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize("num_columns", [1, 2, 3, 18, 32, 100])
def test_sums_halve(num_columns: int) -> None:
    x_TP = randn(5, num_columns)
    assert_no_worse(row_sums(x_TP), exact=x_TP.double().sum(1), same_dtype=x_TP.sum(1))
    assert_same_bits(row_sums(x_TP[2:3]), row_sums(x_TP)[2:3])


def test_sums_add_neighbours_first() -> None:
    half_ulp = 2.0**-24
    assert row_sums(torch.tensor([[1.0, half_ulp, half_ulp, 0.0]])).item() == 1.0
    assert row_sums(torch.tensor([[half_ulp, half_ulp, 1.0, 0.0]])).item() == 1.0 + 2 * half_ulp


@pytest.mark.parametrize("num_columns", [1, 40, 576])
def test_finished_rows_are_those_of_rms_norm(num_columns: int) -> None:
    sum_TE, weight_E = randn(3, num_columns, dtype=BF16), randn(num_columns, dtype=BF16, seed=1)
    rows_TE = (sum_TE.float() * weight_E.float()).to(BF16)
    assert_no_worse(
        finish_norm(Normed(rows_TE, squares_of(sum_TE), EPS)),
        exact=rms_norm_ref(sum_TE.double(), weight_E.double(), EPS),
        same_dtype=rms_norm_ref(sum_TE, weight_E, EPS),
        factor=4.0,  # rounded before the factor too
    )


# name: (T, O, I, dtype, bias, residual)
CASES = {
    "one_row": (1, 64, 64, BF16, False, False),
    "one_sum_a_row": (3, 33, 20, BF16, True, False),
    "odd_sizes": (17, 37, 75, BF16, True, True),
    "two_steps_a_trip": (5, 40, 256, BF16, False, False),
    "sums_in_pieces": (65, 33, 320, BF16, True, True),
    "few_sums_for_pieces": (70, 33, 128, BF16, False, False),
    "no_rows": (0, 33, 64, BF16, True, False),
    "fp16": (3, 37, 96, FP16, True, True),
    "fp32": (20, 37, 96, FP32, True, True),
}


def operands(case: tuple, device: torch.device) -> tuple:
    """Return (normed, weight, bias or None, residual or None) of a row of CASES."""
    num_rows, num_out, num_in, dtype, has_bias, has_residual = case
    kwargs = {"dtype": dtype, "device": device}
    normed = normed_rows(num_rows, num_in, seed=1, **kwargs)
    weight_OI = randn(num_out, num_in, seed=3, scale=num_in**-0.5, **kwargs)
    bias_O = randn(num_out, seed=4, **kwargs) if has_bias else None
    residual_TO = randn(num_rows, num_out, seed=5, **kwargs) if has_residual else None
    return normed, weight_OI, bias_O, residual_TO


def exact_normed_linear(normed: Normed, weight_OI, bias_O, residual_TO) -> torch.Tensor:
    """y in fp64."""
    mean_T1 = normed.squares_TP.double().sum(1, keepdim=True) / normed.rows_TE.shape[1]
    y_TO = normed.rows_TE.double() / (mean_T1 + normed.eps).sqrt() @ weight_OI.double().T
    return y_TO + sum(term.double() for term in (bias_O, residual_TO) if term is not None)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_linear_of_normed_is_no_worse_than_pytorch(case, device) -> None:
    normed, weight_OI, bias_O, residual_TO = operands(case, device)
    out_TO = linear(normed, pack_linear(weight_OI, bias_O), residual_TO=residual_TO)
    same_dtype = linear_ref(finish_norm(normed), weight_OI, bias_O, residual_TO)
    exact = exact_normed_linear(normed, weight_OI, bias_O, residual_TO)
    assert_no_worse(out_TO, exact=exact, same_dtype=same_dtype)


@pytest.mark.parametrize("wrong", ["rows", "last_sum", "eps", "bias_scaled"])
def test_comparator_has_teeth(wrong: str, device) -> None:
    normed, weight_OI, bias_O, residual_TO = operands(CASES["odd_sizes"], device)
    exact = exact_normed_linear(normed, weight_OI, bias_O, residual_TO)
    same_dtype = linear_ref(finish_norm(normed), weight_OI, bias_O, residual_TO)
    rows_TE, squares_TP, eps = normed.rows_TE, normed.squares_TP, normed.eps
    if wrong == "rows":
        squares_TP = squares_TP.roll(1, 0)
    if wrong == "last_sum":
        squares_TP = squares_TP[:, :-1].contiguous()
        rows_TE = rows_TE[:, :64]
        weight_OI = weight_OI[:, :64]
    eps = 0.1 if wrong == "eps" else eps
    bias_O = bias_O * 2 if wrong == "bias_scaled" else bias_O
    broken = Normed(rows_TE, squares_TP, eps)
    out_TO = linear(broken, pack_linear(weight_OI, bias_O), residual_TO=residual_TO)
    with pytest.raises(AssertionError, match="error"):
        assert_no_worse(out_TO, exact=exact, same_dtype=same_dtype)


@pytest.fixture
def _uniform_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    use_uniform_dot(monkeypatch)


@cache
def many_rows(num_in: int, device: torch.device) -> tuple[PackedLinear, Normed, torch.Tensor]:
    """Return (weight, rows, y) of the most rows, for tests with ``_uniform_dot``."""
    packed = pack_linear(randn(40, num_in, dtype=BF16, device=device, seed=1))
    normed = normed_rows(MOST_ROWS, num_in, device=device, seed=2)
    return packed, normed, linear(normed, packed)


@pytest.mark.usefixtures("_uniform_dot")
@pytest.mark.parametrize("num_in", [256, 288])  # 8 sums a row, and 9, padded to 16: in pieces
@pytest.mark.parametrize("num_rows", ROW_COUNTS)
def test_row_bits_do_not_depend_on_the_row_count(num_rows: int, num_in: int, device) -> None:
    packed, normed, out_TO = many_rows(num_in, device)
    assert_same_bits(linear(last_rows(normed, num_rows), packed), out_TO[-num_rows:])


@pytest.mark.cuda
@pytest.mark.parametrize("num_rows", ROW_COUNTS)
def test_cuda_row_bits_at_model_sizes(num_rows: int) -> None:
    packed, normed, out_TO = many_rows(4096, torch.device("cuda"))
    assert_same_bits(linear(last_rows(normed, num_rows), packed), out_TO[-num_rows:])


def test_strided_rows_and_sums(device) -> None:
    normed, weight_OI, _, _ = operands(CASES["odd_sizes"], device)
    packed = pack_linear(weight_OI)
    wide = Normed(
        torch.cat([normed.rows_TE] * 2, 1)[:, 75:],
        torch.cat([normed.squares_TP] * 2, 1)[:, 3:],
        normed.eps,
    )
    assert_same_bits(linear(wide, packed), linear(normed, packed))


@pytest.mark.parametrize("path", ["ref", "cpu"])
def test_other_paths_finish_the_norm_first(path: str, request) -> None:
    normed, weight_OI, bias_O, _ = operands(CASES["fp32"], torch.device("cpu"))
    if path == "cpu":
        request.getfixturevalue("cpu_path")
        packed = pack_linear(weight_OI, bias_O)
        assert_same_bits(linear(normed, packed), linear(finish_norm(normed), packed))
        return
    with use_reference("linear"):
        out_TO = linear(normed, pack_linear(weight_OI, bias_O))
    assert_same_bits(out_TO, linear_ref(finish_norm(normed), weight_OI, bias_O))


def test_errors_name_the_argument(device) -> None:
    packed = pack_linear(randn(4, 64, dtype=BF16, device=device))
    with pytest.raises(ValueError, match=r"x_TI: expected shape \(\*, 64\)"):
        linear(normed_rows(2, 63, device=device), packed)
    normed = normed_rows(2, 64, device=device)
    with pytest.raises(ValueError, match=r"squares_TP: expected shape \(2, 2\), got \(2, 1\)"):
        linear(Normed(normed.rows_TE, normed.squares_TP[:, :1], EPS), packed)
