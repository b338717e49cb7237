"""gated_linear and linear_add_norm: a row's bits do not depend on how many rows run beside it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from pagedraft.kernels.gated_mlp import gated_mlp_ref
from pagedraft.kernels.linear import PackedLinear, linear, pack_linear
from pagedraft.kernels.linear_fused import gated_linear, linear_add_norm
from pagedraft.kernels.normed import Normed
from pagedraft.tests.compare import assert_no_worse, assert_same_bits
from pagedraft.tests.inputs import randn
from pagedraft.tests.kernels.linear_inputs import (
    EPS,
    MOST_ROWS,
    ROW_COUNTS,
    last_rows,
    normed_rows,
    use_uniform_dot,
)

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
CUDA = torch.device("cuda")


@pytest.fixture
def _uniform_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    use_uniform_dot(monkeypatch)


@cache
def many_gated(
    dtype: torch.dtype, sizes: tuple[int, int], device: torch.device
) -> tuple[PackedLinear, Normed, torch.Tensor]:
    """Return (weight, rows, result) of the most rows, for tests with ``_uniform_dot``."""
    packed = pack_linear(randn(*sizes, dtype=dtype, device=device, scale=0.1, seed=1))
    normed = normed_rows(MOST_ROWS, sizes[1], dtype=dtype, device=device, seed=2)
    return packed, normed, gated_linear(normed, packed)


@pytest.mark.usefixtures("_uniform_dot")
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("num_rows", ROW_COUNTS)
def test_gated_row_bits_do_not_depend_on_the_row_count(num_rows, dtype, device) -> None:
    packed, normed, out_TF = many_gated(dtype, (44, 256), device)
    assert_same_bits(gated_linear(last_rows(normed, num_rows), packed), out_TF[-num_rows:])


@pytest.mark.cuda
@pytest.mark.parametrize("num_rows", ROW_COUNTS)
def test_cuda_gated_row_bits_at_model_sizes(num_rows) -> None:
    packed, normed, out_TF = many_gated(BF16, (28672, 4096), CUDA)
    assert_same_bits(gated_linear(last_rows(normed, num_rows), packed), out_TF[-num_rows:])


@cache
def many_normed(sizes: tuple[int, int], device: torch.device) -> tuple[Any, ...]:
    """Return (weight, x, residual, norm weight, result) of the most rows."""
    num_out, num_in = sizes
    kwargs = {"dtype": BF16, "device": device}
    packed = pack_linear(randn(*sizes, scale=num_in**-0.5, seed=1, **kwargs))
    x_TI, residual_TE = randn(MOST_ROWS, num_in, **kwargs), randn(MOST_ROWS, num_out, **kwargs)
    norm_weight_E = randn(num_out, seed=3, **kwargs)
    whole = linear_add_norm(x_TI, packed, residual_TE, norm_weight_E, EPS)
    return packed, x_TI, residual_TE, norm_weight_E, *whole


def check_add_norm_rows(num_rows: int, sizes: tuple[int, int], device: torch.device) -> None:
    """Compare the last rows alone with the same rows among the most."""
    packed, x_TI, residual_TE, norm_weight_E, all_normed, all_sum_TE = many_normed(sizes, device)
    last = slice(MOST_ROWS - num_rows, None)
    normed, sum_TE = linear_add_norm(x_TI[last], packed, residual_TE[last], norm_weight_E, EPS)
    assert_same_bits(sum_TE, all_sum_TE[last])
    assert_same_bits(normed.rows_TE, all_normed.rows_TE[last])
    assert_same_bits(normed.squares_TP, all_normed.squares_TP[last])


@pytest.mark.usefixtures("_uniform_dot")
@pytest.mark.parametrize("num_rows", ROW_COUNTS)
def test_add_norm_row_bits_do_not_depend_on_the_row_count(num_rows, device) -> None:
    check_add_norm_rows(num_rows, (72, 256), device)


@pytest.mark.cuda
@pytest.mark.parametrize("sizes", [(4096, 4096), (4096, 14336)])
@pytest.mark.parametrize("num_rows", ROW_COUNTS)
def test_cuda_add_norm_row_bits_at_model_sizes(num_rows, sizes) -> None:
    check_add_norm_rows(num_rows, sizes, CUDA)


@pytest.mark.cuda
def test_cuda_gated_linear_is_the_separate_ops_in_one_launch() -> None:
    packed = pack_linear(randn(2048, 1024, dtype=BF16, device=CUDA, scale=0.03))
    x_TI = randn(9, 1024, dtype=BF16, device=CUDA, seed=1)
    wide_TO = linear(x_TI, packed, out_dtype=FP32)
    assert_no_worse(
        gated_linear(x_TI, packed),
        exact=gated_mlp_ref(wide_TO.double()),
        same_dtype=gated_mlp_ref(wide_TO).to(BF16),
    )
