"""Linear layers with quantised weights: values against fp64, row invariance bit by bit, teeth."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import numpy as np
import pytest
import torch

from pagedraft.kernels.linear import linear, linear_ref, pack_linear
from pagedraft.kernels.linear_quant import quant_stages, quant_tile
from pagedraft.kernels.linear_quant_triton import SPLIT_BYTES
from pagedraft.kernels.weight_quant import (
    ZERO_STEPS,
    QuantWeight,
    dequantize_weight,
    quantize_weight,
)
from pagedraft.tests.compare import assert_no_worse, assert_same_bits
from pagedraft.tests.inputs import CPU, Guarded, randn

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = {"fp16": FP16, "bf16": BF16, "fp32": FP32}

# name: (format, group or None, I): whole iterations for int8_grouped and int4_64, else not
FORMATS: dict[str, tuple[Any, int | None, int]] = {
    "int8": ("int8", None, 203),
    "int8_grouped": ("int8", 64, 256),
    "fp8": ("fp8", None, 203),
    "fp8_blocks": ("fp8", 128, 384),
    "int4_32": ("int4", 32, 352),
    "int4_64": ("int4", 64, 512),
    "int4_128": ("int4", 128, 640),
}
# name: (T, O, bias, residual, dtype, out dtype)
CALLS: dict[str, tuple[Any, ...]] = {
    "one_row": (1, 33, False, False, BF16, BF16),
    "wide_tiles": (65, 33, True, True, BF16, BF16),
    "fp16": (17, 37, True, True, FP16, FP16),
    "fp32_sums_come_out": (9, 37, False, True, BF16, FP32),
    "fp32": (17, 34, True, False, FP32, FP32),
    "no_rows": (0, 16, True, True, FP16, FP16),
    "one_output": (3, 1, False, True, FP16, FP16),
}


def weight_of(
    format: Any, group: int | None, num_in: int, num_out: int, device: torch.device
) -> QuantWeight:
    weight_OI = randn(num_out, num_in, seed=2, scale=num_in**-0.5)
    weight_OI[0] += 0.1  # zero points differ
    return to_device(quantize_weight(weight_OI, format, group), device)


def to_device(weight: QuantWeight, device: torch.device) -> QuantWeight:
    values = vars(weight).items()
    return QuantWeight(**{k: v.to(device) if torch.is_tensor(v) else v for k, v in values})


def operands(case: tuple[Any, ...], num_in: int, device: torch.device) -> tuple[Any, ...]:
    """Return (x, bias or None, residual or None) of a row of CALLS."""
    num_rows, num_out, has_bias, has_residual, dtype, _ = case
    kwargs = {"dtype": dtype, "device": device}
    x_TI = randn(num_rows, num_in, seed=1, **kwargs)
    bias_O = randn(num_out, seed=3, **kwargs) if has_bias else None
    residual_TO = randn(num_rows, num_out, seed=4, **kwargs) if has_residual else None
    return x_TI, bias_O, residual_TO


def exact_linear(
    x_TI: torch.Tensor,
    weight: QuantWeight,
    bias_O: torch.Tensor | None,
    residual_TO: torch.Tensor | None,
) -> torch.Tensor:
    """y in fp64."""
    y_TO = x_TI.double() @ dequantize_weight(weight).double().T
    y_TO = y_TO if bias_O is None else y_TO + bias_O.double()
    return y_TO if residual_TO is None else y_TO + residual_TO.double()


def assert_right(out_TO: torch.Tensor, weight: QuantWeight, *terms: Any) -> None:
    """Compare with fp64; terms: x, bias, residual."""
    x_TI, bias_O, residual_TO = terms
    weight_OI = dequantize_weight(weight)
    same_dtype = linear_ref(x_TI, weight_OI, bias_O, residual_TO, out_TO.dtype)
    exact = exact_linear(x_TI, weight, bias_O, residual_TO)
    assert_no_worse(out_TO, exact=exact, same_dtype=same_dtype)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_kernel_is_no_worse_than_pytorch(
    form: tuple[Any, ...], call: tuple[Any, ...], device: torch.device
) -> None:
    weight = weight_of(*form, call[1], device)
    x_TI, bias_O, residual_TO = operands(call, weight.num_in, device)
    packed = pack_linear(weight, bias_O, dtype=x_TI.dtype)
    out_TO = linear(x_TI, packed, residual_TO=residual_TO, out_dtype=call[-1])
    assert_right(out_TO, weight, x_TI, bias_O, residual_TO)


def wrong_zero(weight: QuantWeight) -> QuantWeight:
    assert weight.zero_CO is not None
    zero_CO = weight.zero_CO.clone()
    zero_CO[-1, -1] ^= 1
    return dataclasses.replace(weight, zero_CO=zero_CO)


def swapped_halves(weight: QuantWeight) -> QuantWeight:
    return dataclasses.replace(weight, codes=weight.codes << 4 | weight.codes >> 4)


def shifted_scale(weight: QuantWeight) -> QuantWeight:
    return dataclasses.replace(weight, scale_CO=weight.scale_CO.roll(1, 0))


def one_code(weight: QuantWeight) -> QuantWeight:
    codes = weight.codes.clone()
    codes.view(torch.uint8)[-1, -1] ^= 0x30
    return dataclasses.replace(weight, codes=codes)


# name: (what is broken, formats)
BROKEN: dict[str, tuple[Any, str]] = {
    "zero_point": (wrong_zero, "int4_32"),
    "halves": (swapped_halves, "int4_128"),
    "group_of_factor": (shifted_scale, "int4_64"),
    "block_of_factor": (shifted_scale, "fp8_blocks"),
    "last_code": (one_code, "int8"),
    "last_half": (one_code, "int4_64"),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_comparator_has_teeth(broken: tuple[Any, str], device: torch.device) -> None:
    spoil, form = broken
    weight = weight_of(*FORMATS[form], 33, device)
    x_TI = randn(5, weight.num_in, dtype=FP16, device=device)
    out_TO = linear(x_TI, pack_linear(spoil(weight), dtype=FP16))
    with pytest.raises(AssertionError, match="error"):
        assert_right(out_TO, weight, x_TI, None, None)


@pytest.fixture
def _uniform_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in fp64, rounded to fp32: the interpreter's BLAS adds in another order for another
    tile, which an MMA does not. Sums across steps stay in fp32."""

    def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)

    monkeypatch.setattr(np, "matmul", matmul)


@functools.cache
def rows_of(form: str, dtype: torch.dtype, num_rows: int) -> torch.Tensor:
    """The first ``num_rows`` rows of one product."""
    weight = weight_of(*FORMATS[form], 33, CPU)
    x_TI = randn(700, weight.num_in, dtype=dtype)[:num_rows]
    return linear(x_TI, pack_linear(weight, dtype=dtype), out_dtype=FP32)


@pytest.mark.usefixtures("_uniform_dot")
@pytest.mark.parametrize("num_rows", [*range(1, 18), 32, 64, 65, 128])
@pytest.mark.parametrize("form", FORMATS)
def test_row_bits_do_not_depend_on_the_row_count(form: str, num_rows: int) -> None:
    assert_same_bits(rows_of(form, BF16, num_rows), rows_of(form, BF16, 700)[:num_rows])


@pytest.mark.usefixtures("_uniform_dot")
@pytest.mark.parametrize("num_rows", [1, 9, 33, 65])
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("form", ["int8", "fp8_blocks", "int4_32", "int4_128"])
def test_row_bits_of_other_dtypes(form: str, dtype: torch.dtype, num_rows: int) -> None:
    assert_same_bits(rows_of(form, dtype, num_rows), rows_of(form, dtype, 70)[:num_rows])


@pytest.mark.cuda
@pytest.mark.parametrize("num_rows", [*range(1, 18), 32, 64, 65, 128])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_cuda_row_bits_at_model_sizes(
    form: tuple[Any, ...], dtype: torch.dtype, num_rows: int
) -> None:
    device = torch.device("cuda")
    packed = pack_linear(weight_of(form[0], form[1], 4096, 1024, device), dtype=dtype)
    x_TI = randn(700, 4096, dtype=dtype, device=device)
    out_TO = linear(x_TI, packed)
    assert_same_bits(linear(x_TI[:num_rows], packed), out_TO[:num_rows])
    assert_same_bits(linear(x_TI[-num_rows:], packed), out_TO[-num_rows:])


@pytest.mark.parametrize("form", ["int8", "int4_64"])
def test_kernel_writes_only_its_output_and_takes_strided_rows(
    form: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    weight = weight_of(*FORMATS[form], 37, device)
    packed = pack_linear(weight, dtype=FP16)
    wide_TC = randn(19, 600, dtype=FP16, device=device)
    x_TI, residual_TO = wide_TC[:, 3 : 3 + weight.num_in], wide_TC[:, 520:557]
    guarded = Guarded(19, 37, dtype=FP16, device=device)
    stock = torch.Tensor.new_empty

    def new_empty(tensor: torch.Tensor, *size: int, **kwargs: Any) -> torch.Tensor:
        return guarded.tensor if size == (19, 37) else stock(tensor, *size, **kwargs)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    out_TO = linear(x_TI, packed, residual_TO=residual_TO)
    monkeypatch.undo()
    guarded.assert_untouched()
    contiguous = linear(x_TI.contiguous(), packed, residual_TO=residual_TO.contiguous())
    assert_same_bits(out_TO, contiguous)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_kernel_reads_nothing_around_its_operands(
    form: tuple[Any, ...], device: torch.device
) -> None:
    weight = weight_of(*form, 33, device)
    x_TI = randn(5, weight.num_in, dtype=FP16, device=device)
    guard_x = Guarded(*x_TI.shape, dtype=FP16, device=device)
    guard_x.tensor.copy_(x_TI)  # NaN before and after
    guard_s = Guarded(*weight.scale_CO.shape, device=device)
    guard_s.tensor.copy_(weight.scale_CO)
    guarded = dataclasses.replace(weight, scale_CO=guard_s.tensor)
    out_TO = linear(guard_x.tensor, pack_linear(guarded, dtype=FP16))
    assert_same_bits(out_TO, linear(x_TI, pack_linear(weight, dtype=FP16)))


@pytest.mark.parametrize("form", ["int8_grouped", "int4_32"])
def test_order_gathers_the_columns_of_x(form: str, device: torch.device) -> None:
    weight = weight_of(*FORMATS[form], 33, device)
    order_I = torch.randperm(weight.num_in, generator=torch.Generator().manual_seed(5)).to(device)
    x_TI = randn(5, weight.num_in, dtype=FP16, device=device)
    ordered = dataclasses.replace(weight, order_I=order_I)
    out_TO = linear(x_TI, pack_linear(ordered, dtype=FP16))
    assert_right(out_TO, ordered, x_TI, None, None)
    assert_same_bits(out_TO, linear(x_TI[:, order_I], pack_linear(weight, dtype=FP16)))


def test_half_precision_factors(device: torch.device) -> None:
    weight = weight_of(*FORMATS["int4_64"], 33, device)
    weight = dataclasses.replace(weight, scale_CO=weight.scale_CO.half())
    x_TI = randn(5, weight.num_in, dtype=BF16, device=device)
    assert_right(linear(x_TI, pack_linear(weight)), weight, x_TI, None, None)


MAGIC = {"bf16": (0x43434343, BF16, 128.0), "fp16": (0x64646464, FP16, 1024.0)}


def run_ptx(text: str, words: torch.Tensor, magic: int) -> list[torch.Tensor]:
    """$0 to $3 after ``text``, a list of ``and``, shift and ``prmt`` instructions on int64."""
    registers = {"$4": words, "MAGIC": torch.full_like(words, magic)}
    for name, out, first, rest in re.findall(r"(and|shl|shr|prmt)\.b32 (\S+), (\S+), (.+);", text):
        value, *others = registers[first], *rest.split(", ")
        if name == "prmt":
            both = [x >> 8 * i & 255 for x in (value, registers[others[0]]) for i in range(4)]
            picked = [both[int(others[1], 0) >> 4 * place & 7] << 8 * place for place in range(4)]
            registers[out] = torch.stack(picked).sum(0)
        else:
            number = int(others[0], 0)
            results = {"and": value & number, "shl": value << number, "shr": value >> number}
            registers[out] = results[name] & 0xFFFFFFFF
    return [registers[f"${number}"] for number in range(4)]


@pytest.mark.parametrize("magic", MAGIC.values(), ids=MAGIC)
def test_ptx_splits_every_byte(magic: tuple[int, torch.dtype, float]) -> None:
    bytes_B4 = torch.stack([torch.arange(256), *(torch.randperm(256) for _ in range(3))], 1)
    words_B = (bytes_B4 << torch.arange(0, 32, 8)).sum(1)
    found_B4 = torch.stack(run_ptx(SPLIT_BYTES, words_B, magic[0]), 1)
    found_B8 = found_B4.to(torch.uint32).view(magic[1]).float() - magic[2]
    halves_B8 = torch.cat([bytes_B4 & 15, bytes_B4 >> 4], 1)
    torch.testing.assert_close(found_B8, (halves_B8 * ZERO_STEPS).float())


@pytest.mark.parametrize("num_rows", [1, 8, 9, 16, 17, 32, 33, 65, 4096])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_tiles_keep_one_order_and_fit(
    form: tuple[Any, ...], dtype: torch.dtype, num_rows: int
) -> None:
    weight = weight_of(*form, 8, CPU)
    tile = quant_tile(num_rows, weight, dtype.itemsize)
    is_int4 = weight.format == "int4"
    assert (tile.step, tile.group, tile.is_int4) == (256 if is_int4 else 128, form[1] or 0, is_int4)
    step_x = tile.step * tile.slice_groups * tile.block_t * dtype.itemsize
    step_bytes = tile.unroll * (step_x + 128 * tile.block_o)
    assert step_bytes * (quant_stages(tile, dtype.itemsize) - 1) <= 72 * 1024
