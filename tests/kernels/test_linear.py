"""Linear layers: values against fp64, row invariance bit by bit, errors, cost."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from pagedraft.kernels.dispatch import use_implementation, use_reference
from pagedraft.kernels.linear import (
    PackedLinear,
    dense_weight,
    linear,
    linear_cost,
    linear_ref,
    pack_linear,
)
from pagedraft.kernels.linear_config import linear_config
from pagedraft.kernels.normed import SQUARE_COLUMNS
from pagedraft.tests.compare import assert_no_worse, assert_same_bits
from pagedraft.tests.inputs import Guarded, randn
from pagedraft.tests.kernels.linear_inputs import MOST_ROWS, ROW_COUNTS, use_uniform_dot

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

# name: (T, O, I, dtype, bias, residual)
CASES = {
    "one_row": (1, 64, 64, FP16, False, False),
    "odd_sizes_mask_every_axis": (3, 37, 75, FP16, True, True),
    "rows_past_one_tile": (17, 33, 64, FP16, True, False),
    "rows_past_two_tiles": (40, 40, 65, FP16, False, True),
    "many_rows_grouped": (130, 136, 64, FP16, True, True),
    "inputs_below_one_step": (3, 16, 5, FP16, False, True),
    "one_output": (3, 1, 128, FP16, True, True),
    "no_rows": (0, 48, 64, FP16, True, True),
    "fp32_keeps_fp32": (3, 37, 75, FP32, True, True),
    "fp32_many_rows": (40, 40, 65, FP32, False, True),
    "bf16": (17, 37, 75, BF16, True, True),
}


def operands(case: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """Return (x, weight, bias or None, residual or None) of a row of CASES."""
    num_rows, num_out, num_in, dtype, has_bias, has_residual = case
    kwargs = {"dtype": dtype, "device": device}
    x_TI = randn(num_rows, num_in, seed=1, **kwargs)
    weight_OI = randn(num_out, num_in, seed=2, scale=num_in**-0.5, **kwargs)
    bias_O = randn(num_out, seed=3, **kwargs) if has_bias else None
    residual_TO = randn(num_rows, num_out, seed=4, **kwargs) if has_residual else None
    return x_TI, weight_OI, bias_O, residual_TO


def exact_linear(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    residual_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """y in fp64."""
    x_TI, weight_OI = x_TI.double(), weight_OI.double()
    y_TO = x_TI @ weight_OI.T
    y_TO = y_TO if bias_O is None else y_TO + bias_O
    return y_TO if residual_TO is None else y_TO + residual_TO


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_is_no_worse_than_pytorch(case: tuple[Any, ...], device: torch.device) -> None:
    x_TI, weight_OI, bias_O, residual_TO = operands(case, device)
    out_TO = linear(x_TI, pack_linear(weight_OI, bias_O), residual_TO=residual_TO)
    arguments = (x_TI, weight_OI, bias_O, residual_TO)
    assert_no_worse(out_TO, exact=exact_linear(*arguments), same_dtype=linear_ref(*arguments))


@pytest.mark.parametrize("wrong", ["weight_row", "bias", "residual"])
def test_comparator_has_teeth(wrong: str, device: torch.device) -> None:
    x_TI, weight_OI, bias_O, residual_TO = operands(CASES["odd_sizes_mask_every_axis"], device)
    arguments = (x_TI, weight_OI, bias_O, residual_TO)
    exact, same_dtype = exact_linear(*arguments), linear_ref(*arguments)
    if wrong == "weight_row":
        weight_OI = weight_OI.clone()
        weight_OI[-1, -1] = 0
    bias_O = None if wrong == "bias" else bias_O
    residual_TO = None if wrong == "residual" else residual_TO
    out_TO = linear(x_TI, pack_linear(weight_OI, bias_O), residual_TO=residual_TO)
    with pytest.raises(AssertionError, match="error"):
        assert_no_worse(out_TO, exact=exact, same_dtype=same_dtype)


@pytest.fixture(params=["fp16", "fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The weight dtypes that a kernel takes."""
    return {"fp16": FP16, "fp32": FP32, "bf16": BF16}[request.param]


@pytest.fixture
def _uniform_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    use_uniform_dot(monkeypatch)


@cache
def many_rows(
    dtype: torch.dtype, device: torch.device
) -> tuple[PackedLinear, torch.Tensor, torch.Tensor]:
    """Return (weight, x, y) of the most rows, for tests with ``_uniform_dot``."""
    packed = pack_linear(randn(40, 256, dtype=dtype, device=device, seed=1))
    x_TI = randn(MOST_ROWS, 256, dtype=dtype, device=device, seed=2)
    return packed, x_TI, linear(x_TI, packed)


@pytest.mark.usefixtures("_uniform_dot")
@pytest.mark.parametrize("num_rows", ROW_COUNTS)
def test_kernel_row_bits_do_not_depend_on_the_row_count(
    num_rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    packed, x_TI, out_TO = many_rows(dtype, device)
    assert_same_bits(linear(x_TI[-num_rows:], packed), out_TO[-num_rows:])


@pytest.mark.usefixtures("_uniform_dot")
@pytest.mark.parametrize("num_in", [128, 136, 192])
@pytest.mark.parametrize("num_rows", [1, 17, 33])
def test_kernel_row_bits_with_masked_steps_and_single_ones(
    num_rows: int, num_in: int, dtype: torch.dtype, device: torch.device
) -> None:
    packed = pack_linear(randn(40, num_in, dtype=dtype, device=device, seed=1))
    x_TI = randn(70, num_in, dtype=dtype, device=device, seed=2)
    out_TO = linear(x_TI[-num_rows:], packed, out_dtype=FP32)
    assert_same_bits(out_TO, linear(x_TI, packed, out_dtype=FP32)[-num_rows:])


def test_out_dtype_is_what_accumulates(device: torch.device) -> None:
    x_TI, weight_OI, bias_O, _ = operands(CASES["bf16"], device)
    out_TO = linear(x_TI, pack_linear(weight_OI, bias_O), out_dtype=FP32)
    same_dtype = linear_ref(x_TI, weight_OI, bias_O, out_dtype=FP32)
    exact = exact_linear(x_TI, weight_OI, bias_O)
    assert_no_worse(out_TO, exact=exact, same_dtype=same_dtype)


def test_kernel_writes_only_its_output_and_takes_strided_rows(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    packed = pack_linear(randn(37, 75, device=device))
    wide_TC = randn(19, 200, device=device)
    guarded = Guarded(19, 37, device=device)
    stock = torch.Tensor.new_empty

    def new_empty(tensor: torch.Tensor, *size: int, **kwargs: Any) -> torch.Tensor:
        return guarded.tensor if size == (19, 37) else stock(tensor, *size, **kwargs)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    out_TO = linear(wide_TC[:, 3:78], packed, residual_TO=wide_TC[:, 100:137])
    monkeypatch.undo()
    guarded.assert_untouched()
    contiguous = wide_TC[:, 3:78].contiguous(), packed
    residual_TO = wide_TC[:, 100:137].contiguous()
    assert_same_bits(out_TO, linear(*contiguous, residual_TO=residual_TO))


@pytest.mark.parametrize("num_rows", [1, 16, 17, 32, 33, 64, 65, 4096])
@pytest.mark.parametrize("num_out", [1, 8192, 8193])
@pytest.mark.parametrize("num_in", [577, 576, 4096])
@pytest.mark.parametrize("element_size", [2, 4])
def test_config_keeps_one_step_and_one_mma_class(
    num_rows: int, num_out: int, num_in: int, element_size: int
) -> None:
    config = linear_config(num_rows, num_in, num_out, element_size)
    tile, alone = config.tile, linear_config(1, num_in, 1, element_size)
    assert tile.block_i == alone.tile.block_i
    num_steps = config.num_trips * tile.unroll
    assert num_steps == alone.num_trips * alone.tile.unroll == -(-num_in // tile.block_i)
    assert tile.block_t < 64 or config.num_warps % 4 != 0
    assert tile.group_t > 1 or num_rows <= tile.block_t
    assert tile.block_o % SQUARE_COLUMNS == 0
    stage = (tile.block_t + tile.block_o) * tile.block_i * tile.unroll * element_size
    assert stage * (config.num_stages - 1) <= 96 * 1024
    on_hip = linear_config(num_rows, num_in, num_out, element_size, is_hip=True)
    assert on_hip.tile == tile
    assert stage * (on_hip.num_stages - 1) <= 64 * 1024


@pytest.mark.parametrize("num_out", [4096, 28672])
@pytest.mark.parametrize("num_rows", [1, 16])
def test_config_keeps_enough_weight_bytes_under_way(num_rows: int, num_out: int) -> None:
    config = linear_config(num_rows, 4096, num_out, 2)
    tile = config.tile
    stage = tile.block_o * tile.block_i * tile.unroll * 2
    assert stage * (config.num_stages - 1) >= 32 * 1024
    assert tile.num_tiles_o >= 128


@pytest.mark.cuda
@pytest.mark.parametrize("num_rows", ROW_COUNTS)
def test_cuda_row_bits_at_model_sizes(num_rows: int, dtype: torch.dtype) -> None:
    packed = pack_linear(randn(4096, 4096, dtype=dtype, device=torch.device("cuda")))
    x_TI = randn(MOST_ROWS, 4096, dtype=dtype, device=torch.device("cuda"))
    assert_same_bits(linear(x_TI[:num_rows], packed), linear(x_TI, packed)[:num_rows])


@pytest.mark.cuda
def test_cuda_inexact_is_no_worse_than_pytorch() -> None:
    arguments = operands((40, 64, 576, BF16, True, True), torch.device("cuda"))
    x_TI, weight_OI, bias_O, residual_TO = arguments
    packed = pack_linear(weight_OI, bias_O)
    out_TO = linear(x_TI, packed, residual_TO=residual_TO, exact=False)
    same_dtype = linear_ref(*arguments)
    assert_no_worse(out_TO, exact=exact_linear(*arguments), same_dtype=same_dtype, factor=4.0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.usefixtures("cpu_path")
def test_cpu_path_is_no_worse_than_pytorch(case: tuple[Any, ...]) -> None:
    x_TI, weight_OI, bias_O, residual_TO = operands(case, torch.device("cpu"))
    x_TI = x_TI.float()
    residual_TO = None if residual_TO is None else residual_TO.float()
    packed = pack_linear(weight_OI, bias_O)
    assert packed.format != "plain"
    arguments = (x_TI, weight_OI, bias_O, residual_TO)
    out_TO = linear(x_TI, packed, residual_TO=residual_TO)
    assert_no_worse(out_TO, exact=exact_linear(*arguments), same_dtype=linear_ref(*arguments))
    assert_same_bits(dense_weight(packed), weight_OI)


@pytest.mark.usefixtures("cpu_path")
def test_packed_weight_serves_the_reference_too() -> None:
    weight_OI, bias_O = randn(40, 64, dtype=BF16), randn(40, dtype=BF16)
    packed = pack_linear(weight_OI, bias_O)
    x_TI = randn(5, 64, seed=3)
    with use_reference("linear"):
        assert_same_bits(linear(x_TI, packed), linear_ref(x_TI, weight_OI, bias_O))


# name: (weight shape, weight dtype, bias shape, x shape, x dtype, residual shape, error, message)
ERRORS = {
    "weight_rank": ((4,), FP32, None, (2, 4), FP32, None, ValueError, "weight_OI: expected shape"),
    "weight_dtype": ((3, 4), torch.int8, None, (2, 4), FP32, None, TypeError, "weight_OI: exp"),
    "bias_size": ((3, 4), FP32, (4,), (2, 4), FP32, None, ValueError, "bias_O: expected shape"),
    "x_width": ((3, 4), FP32, None, (2, 5), FP32, None, ValueError, r"x_TI: expected shape \(\*"),
    "x_rank": ((3, 4), FP32, None, (1, 2, 4), FP32, None, ValueError, "x_TI: expected shape"),
    "x_dtype": ((3, 4), FP16, None, (2, 4), BF16, None, TypeError, "x_TI: expected dtype"),
    "residual": ((3, 4), FP32, None, (2, 4), FP32, (2, 4), ValueError, r"expected shape \(2, 3\)"),
}


@pytest.mark.parametrize("choice", ["triton", "cpu"])
@pytest.mark.parametrize("case", ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument(case: tuple[Any, ...], choice: Any) -> None:
    weight_shape, weight_dtype, bias_shape, x_shape, x_dtype, residual_shape, error, message = case
    bias_O = None if bias_shape is None else torch.zeros(bias_shape)
    residual_TO = None if residual_shape is None else torch.zeros(residual_shape)
    weight_OI = torch.zeros(weight_shape, dtype=weight_dtype)
    x_TI = torch.zeros(x_shape, dtype=x_dtype)
    with use_implementation(choice, "linear"), pytest.raises(error, match=message):
        linear(x_TI, pack_linear(weight_OI, bias_O), residual_TO=residual_TO)


def test_cost_counts_each_operand_once() -> None:
    cost = linear_cost(3, 5, 7, 2, has_residual=True)
    assert cost == (2 * (5 * 7 + 3 * (5 + 2 * 7)), 2 * 3 * 5 * 7)
    assert linear_cost(1, 4, 4, 2, weight_size=1).bytes == 16 + 2 * 8
