"""gated_linear and linear_add_norm: values against fp64, what is written, the other paths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from pagedraft.kernels.dispatch import use_reference
from pagedraft.kernels.gated_mlp import ACTIVATIONS, gated_mlp, gated_mlp_ref
from pagedraft.kernels.linear import linear, pack_linear
from pagedraft.kernels.linear_fused import (
    gated_linear,
    gated_linear_ref,
    linear_add_norm,
    linear_add_norm_ref,
)
from pagedraft.kernels.normed import Normed, finish_norm
from pagedraft.kernels.rms_norm import add_rms_norm
from pagedraft.tests.compare import assert_no_worse, assert_same_bits
from pagedraft.tests.inputs import Guarded, randn
from pagedraft.tests.kernels.linear_inputs import EPS, squares_of

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
CPU = torch.device("cpu")


class Case(NamedTuple):
    """Sizes of one call; width: F, or E."""

    rows: int
    width: int
    inputs: int
    dtype: torch.dtype = BF16
    has_bias: bool = False


CASES = {
    "one row": Case(1, 64, 64),
    "odd sizes": Case(17, 37, 75, has_bias=True),
    "two steps a trip": Case(5, 40, 256),
    "rows past two tiles": Case(40, 72, 64, has_bias=True),
    "many rows": Case(70, 136, 64),
    "one column": Case(3, 1, 64, has_bias=True),
    "no rows": Case(0, 40, 64, has_bias=True),
    "fp16": Case(17, 37, 75, FP16, has_bias=True),
    "fp32": Case(3, 37, 75, FP32),
}


class Operands(NamedTuple):
    """Tensors of one call of either op."""

    x_TI: torch.Tensor
    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None
    residual_TE: torch.Tensor
    norm_weight_E: torch.Tensor

    def wide(self) -> Operands:
        return Operands(*(None if tensor is None else tensor.double() for tensor in self))


def operands(case: Case, device: torch.device, rows_a_column: int = 1) -> Operands:
    """rows_a_column: rows of the weight, 2 for gate and up."""
    kwargs: dict[str, Any] = {"dtype": case.dtype, "device": device}
    num_out = rows_a_column * case.width
    return Operands(
        randn(case.rows, case.inputs, seed=1, **kwargs),
        randn(num_out, case.inputs, seed=2, scale=1.5 * case.inputs**-0.5, **kwargs),
        randn(num_out, seed=3, **kwargs) if case.has_bias else None,
        randn(case.rows, case.width, seed=4, **kwargs),
        (1.0 + randn(case.width, seed=5, scale=0.2)).to(**kwargs),
    )


def exact_linear(tensors: Operands) -> torch.Tensor:
    x_TI, weight_OI, bias_O, *_ = tensors.wide()
    y_TO = x_TI @ weight_OI.T
    return y_TO if bias_O is None else y_TO + bias_O


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gated_linear_is_no_worse_than_pytorch(case: Case, activation, device) -> None:
    tensors = operands(case, device, 2)
    x_TI, weight_OI, bias_O, *_ = tensors
    assert_no_worse(
        gated_linear(x_TI, pack_linear(weight_OI, bias_O), activation),
        exact=gated_mlp_ref(exact_linear(tensors), activation),
        same_dtype=gated_linear_ref(x_TI, weight_OI, bias_O, activation),
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_linear_add_norm_is_no_worse_than_pytorch(case: Case, device) -> None:
    tensors = operands(case, device)
    x_TI, weight_OI, bias_O, residual_TE, norm_weight_E = tensors
    packed = pack_linear(weight_OI, bias_O)
    out, sum_TE = linear_add_norm(x_TI, packed, residual_TE, norm_weight_E, EPS)
    same_TE, same_sum_TE = linear_add_norm_ref(*tensors, EPS)
    exact_sum_TE = exact_linear(tensors) + residual_TE.double()
    assert_no_worse(sum_TE, exact=exact_sum_TE, same_dtype=same_sum_TE)
    exact_TE = exact_sum_TE * (exact_sum_TE.square().mean(1, keepdim=True) + EPS).rsqrt()
    exact_TE = exact_TE * norm_weight_E.double()
    out_TE = finish_norm(out) if isinstance(out, Normed) else out
    # A normed row is rounded before its factor and after; a reader rounds after it only.
    assert_no_worse(out_TE, exact=exact_TE, same_dtype=same_TE, factor=4.0)


@pytest.mark.parametrize("case", ["odd sizes", "many rows", "one column"])
def test_normed_rows_and_squares_are_those_of_the_sum(case: str, device) -> None:
    x_TI, weight_OI, bias_O, residual_TE, norm_weight_E = operands(CASES[case], device)
    packed = pack_linear(weight_OI, bias_O)
    normed, sum_TE = linear_add_norm(x_TI, packed, residual_TE, norm_weight_E, EPS)
    assert isinstance(normed, Normed)
    assert_same_bits(normed.squares_TP, squares_of(sum_TE))
    assert_same_bits(normed.rows_TE, (sum_TE.float() * norm_weight_E.float()).to(BF16))


@pytest.mark.parametrize("wrong", ["halves", "activation", "last_input", "bias"])
def test_gated_comparator_has_teeth(wrong: str, device) -> None:
    tensors = operands(CASES["odd sizes"], device, 2)
    x_TI, weight_OI, bias_O, *_ = tensors
    exact = gated_mlp_ref(exact_linear(tensors), "silu")
    same_dtype = gated_linear_ref(x_TI, weight_OI, bias_O, "silu")
    if wrong == "halves":
        weight_OI = weight_OI.roll(37, 0)
    if wrong == "last_input":
        weight_OI = weight_OI.index_fill(1, torch.tensor(74, device=device), 0)
    bias_O = None if wrong == "bias" else bias_O
    activation = "gelu_tanh" if wrong == "activation" else "silu"
    out_TF = gated_linear(x_TI, pack_linear(weight_OI, bias_O), activation)
    with pytest.raises(AssertionError, match="error"):
        assert_no_worse(out_TF, exact=exact, same_dtype=same_dtype)


@pytest.mark.parametrize("wrong", ["residual", "norm_weight", "squares", "bias"])
def test_norm_comparator_has_teeth(wrong: str, device) -> None:
    tensors = operands(CASES["odd sizes"], device)
    x_TI, weight_OI, bias_O, residual_TE, norm_weight_E = tensors
    same_TE, _ = linear_add_norm_ref(*tensors, EPS)
    sum_TE = exact_linear(tensors) + residual_TE.double()
    exact_TE = sum_TE * (sum_TE.square().mean(1, keepdim=True) + EPS).rsqrt()
    exact_TE = exact_TE * norm_weight_E.double()
    residual_TE = residual_TE.roll(1, 0) if wrong == "residual" else residual_TE
    norm_weight_E = norm_weight_E.roll(1) if wrong == "norm_weight" else norm_weight_E
    packed = pack_linear(weight_OI, None if wrong == "bias" else bias_O)
    normed, _ = linear_add_norm(x_TI, packed, residual_TE, norm_weight_E, EPS)
    if wrong == "squares":
        normed = Normed(normed.rows_TE, normed.squares_TP.roll(1, 0), EPS)
    with pytest.raises(AssertionError, match="error"):
        assert_no_worse(finish_norm(normed), exact=exact_TE, same_dtype=same_TE, factor=4.0)


def guard_outputs(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, device: torch.device
) -> list[Guarded]:
    """Put every output of ``num_rows`` rows that is allocated from now on between guard regions."""
    guards: list[Guarded] = []
    stock = torch.Tensor.new_empty

    def new_empty(tensor: torch.Tensor, *size: int, **kwargs: Any) -> torch.Tensor:
        if size[0] != num_rows:
            return stock(tensor, *size, **kwargs)
        guards.append(Guarded(*size, dtype=kwargs.get("dtype", tensor.dtype), device=device))
        return guards[-1].tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    return guards


def assert_untouched(guards: list[Guarded], num_outputs: int) -> None:
    assert len(guards) == num_outputs
    for guard in guards:
        guard.assert_untouched()


def test_gated_kernel_writes_only_its_output_and_takes_strided_rows(monkeypatch, device) -> None:
    packed = pack_linear(operands(Case(19, 37, 75), device, 2).weight_OI)
    x_TI = randn(19, 200, dtype=BF16, device=device)[:, 3:78]
    guards = guard_outputs(monkeypatch, 19, device)
    out_TF = gated_linear(x_TI, packed)
    monkeypatch.undo()
    assert_untouched(guards, 1)
    assert_same_bits(out_TF, gated_linear(x_TI.contiguous(), packed))


def test_norm_kernel_writes_only_its_outputs_and_takes_strided_rows(monkeypatch, device) -> None:
    tensors = operands(Case(19, 37, 75), device)
    packed, norm = pack_linear(tensors.weight_OI), (tensors.norm_weight_E, EPS)
    wide_TC = randn(19, 200, dtype=BF16, device=device)
    x_TI, residual_TE = wide_TC[:, 3:78], wide_TC[:, 100:174:2]
    guards = guard_outputs(monkeypatch, 19, device)
    normed, sum_TE = linear_add_norm(x_TI, packed, residual_TE, *norm)
    monkeypatch.undo()
    assert_untouched(guards, 3)
    same, same_sum_TE = linear_add_norm(x_TI.contiguous(), packed, residual_TE.contiguous(), *norm)
    assert_same_bits(sum_TE, same_sum_TE)
    assert_same_bits(normed.rows_TE, same.rows_TE)
    assert_same_bits(normed.squares_TP, same.squares_TP)


@pytest.mark.parametrize("path", ["fp32", "fp16", "ref", "cpu"])
def test_other_paths_add_and_norm_in_ops_of_their_own(path: str, request) -> None:
    request.getfixturevalue(f"{path}_path")
    dtype = {"ref": BF16, "fp16": FP16}.get(path, FP32)
    x_TI, weight_EI, _, residual_TE, norm_weight_E = operands(Case(5, 40, 64, dtype), CPU)
    packed = pack_linear(weight_EI)
    out_TE, sum_TE = linear_add_norm(x_TI, packed, residual_TE, norm_weight_E, EPS)
    y_TE = linear(x_TI, packed)
    expected_TE, expected_sum_TE = add_rms_norm(y_TE, residual_TE, norm_weight_E, EPS)
    assert_same_bits(out_TE, expected_TE)
    assert_same_bits(sum_TE, expected_sum_TE)


@pytest.mark.parametrize("path", ["fp32", "ref", "cpu"])
def test_other_paths_gate_in_an_op_of_its_own(path: str, request) -> None:
    request.getfixturevalue(f"{path}_path")
    x_TI, weight_OI, *_ = operands(Case(5, 40, 64, BF16 if path == "ref" else FP32), CPU, 2)
    packed = pack_linear(weight_OI)
    assert_same_bits(gated_linear(x_TI, packed), gated_mlp(linear(x_TI, packed)))


@pytest.fixture
def ref_path() -> Iterator[None]:
    with use_reference():
        yield


@pytest.fixture
def fp32_path() -> None:
    """The kernels, in a dtype that they do not fuse."""


@pytest.fixture
def fp16_path() -> None:
    """The kernels, in a dtype of too small a range for rows before their factor."""


# name: (keyword arguments of the operands that are wrong, error, message)
ERRORS = {
    "x": ({"x_TI": (3, 63)}, ValueError, r"x_TI: expected shape \(\*, 64\)"),
    "residual": ({"residual_TE": (2, 40)}, ValueError, r"residual_TE: expected shape \(3, 40\)"),
    "norm": ({"norm_weight_E": (41,)}, ValueError, r"norm_weight_E: expected shape \(40\)"),
}


@pytest.mark.parametrize("case", ERRORS.values(), ids=ERRORS)
def test_norm_errors_name_the_argument(case, device) -> None:
    wrong, error, message = case
    wrong = {name: torch.zeros(shape, dtype=BF16, device=device) for name, shape in wrong.items()}
    tensors = operands(Case(3, 40, 64), device)._replace(**wrong)
    packed = pack_linear(tensors.weight_OI)
    with pytest.raises(error, match=message):
        linear_add_norm(tensors.x_TI, packed, tensors.residual_TE, tensors.norm_weight_E, EPS)


def test_gated_errors_name_the_argument(device) -> None:
    x_TI = randn(2, 64, dtype=BF16, device=device)
    with pytest.raises(ValueError, match="packed: expected an even number of rows, got 41"):
        gated_linear(x_TI, pack_linear(randn(41, 64, dtype=BF16, device=device)))
    packed = pack_linear(randn(40, 64, dtype=BF16, device=device))
    with pytest.raises(ValueError, match="activation: expected one of .*, got 'relu'"):
        gated_linear(x_TI, packed, "relu")
    with pytest.raises(TypeError, match="x_TI: expected dtype bfloat16, got float16"):
        gated_linear(x_TI.half(), packed)


def test_a_swapped_neighbour_runs_by_itself(device) -> None:
    """So that swapping an op to its reference shows what it does, inside a fused launch too."""
    x_TI, weight_OI = (randn(3, 64, dtype=BF16, device=device, seed=s) for s in (1, 2))
    norm_E = randn(3, dtype=BF16, device=device, seed=3)
    packed = pack_linear(weight_OI)
    residual_TE = torch.zeros(3, 3, dtype=BF16, device=device)
    with use_reference("rms_norm"):
        normed, sum_TE = linear_add_norm(x_TI, packed, residual_TE, norm_E, EPS)
    assert isinstance(normed, torch.Tensor)
    assert_same_bits(sum_TE, linear(x_TI, packed))
    pair = pack_linear(randn(4, 64, dtype=BF16, device=device, seed=4))
    with use_reference("gated_mlp"):
        y_TF = gated_linear(x_TI, pair)
    assert_same_bits(y_TF, gated_mlp_ref(linear(x_TI, pair)))


def test_a_norms_weight_may_be_fp32(device) -> None:
    """As ``one_plus`` makes it."""
    x_TI, weight_OI = (randn(5, 64, dtype=BF16, device=device, seed=s) for s in (1, 2))
    residual_TE, norm_E = randn(5, 5, dtype=BF16, device=device), 1 + randn(5, device=device) / 256
    normed, sum_TE = linear_add_norm(x_TI, pack_linear(weight_OI), residual_TE, norm_E, EPS)
    assert isinstance(normed, Normed)
    assert_same_bits(normed.rows_TE, (sum_TE.float() * norm_E).bfloat16())
