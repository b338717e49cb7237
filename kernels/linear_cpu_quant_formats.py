"""How the CPU libraries multiply fp32 rows by quantised weights.

* ``int8_2x8``, ``int8_3x7``: FBGEMM's int8 product. A row of x is written as 2 digits of 8 bits, or
  3 of 7, of its largest value; each digit is a row of the product, and the sums are put together in
  fp32. Integer sums are exact: bits depend on no row count. x is rounded at 2**-15, or 2**-21, of
  its row's largest value. Processors without VNNI add pairs of products in 16 bits, which 8-bit
  digits overflow: the self-test sees it.
  Measured on one AVX512 core (576 to 3072 outputs, time over that of fp16 weights): 0.7 to 1.2 for
  1 row, 0.8 to 1.2 for 2 to 16, 0.7 to 0.9 for 64 and more; 3 digits 0.7 to 1.2, 1.0 to 1.4 for 4
  to 64, then up to 2.4.
* ``int4_bf16``: PyTorch's int4 weight-only product, which has fast code for bf16 only: x, a group's
  factors and y are rounded to bf16, sums are fp32. A factor of 5 significant bits and its
  product with an integer zero point are bf16 numbers: then codes stand for the same weights.
  Measured as above: 0.6 to 0.7 for 1 row, 0.7 to 0.8 for 4, 0.9 to 1.1 for 8, 1.3 to 1.4 from 64
  on (each 4 rows unpack the codes again). fp32 and fp16 rows take 15 to 20 times as long.
* ``fp16_codes``: codes as an fp16 weight (``kernels/linear_cpu.py``), y times the factor.
* ``dense``: the weights that the codes stand for, mostly fp32.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from pagedraft.kernels import linear_cpu
from pagedraft.kernels.weight_quant import (
    ZERO_STEPS,
    QuantWeight,
    dequantize_weight,
    unpack_int4,
)

TOP = 64.0  # a row's largest value is this many units of the first digit; a power of two is exact
SMALLEST = 1e-30  # rows are scaled by at least this: keeps a row of zeros finite
OUTPUT_BLOCK = 64  # outputs of the int4 kernel's fast path
FAST_INT4 = ("AVX2", "AVX512")


class QuantFormat(NamedTuple):
    """How one library packs and multiplies a quantised weight; bias and order_I are left out.

    refuse: weight -> why it cannot hold it, "" if it can.
    pack: weight -> handle. run: (x [T, I] fp32, handle) -> y [T, O] fp32.
    unpack: handle -> fp32 weight [O, I].
    num_dense: row counts that the self-test tries one by one; 0: it tests itself.
    tolerance: largest error of y, as a part of the sum of |x| |w|.
    """

    refuse: Callable[[QuantWeight], str]
    pack: Callable[[QuantWeight], Any]
    run: Callable[[torch.Tensor, Any], torch.Tensor]
    unpack: Callable[[Any], torch.Tensor]
    num_dense: int
    tolerance: float


def _refuse_groups(weight: QuantWeight) -> str:
    return "" if weight.group == weight.num_in else f"groups of {weight.group} inputs"


class Digits(NamedTuple):
    """How a row of x is written: each digit counts ``radix`` times the next.

    units_J11: what a row's largest value is in units of each digit.
    zero: what a digit of 0 is stored as, in uint8.
    """

    units_J11: torch.Tensor
    radix: int
    zero: int


def _digits(count: int, radix: int, zero: int) -> Digits:
    units_J = torch.tensor([TOP * radix**index for index in range(count)])
    return Digits(units_J.view(count, 1, 1), radix, zero)


DIGITS_2X8 = _digits(2, 254, 128)  # lower digits in -127..127
DIGITS_3X7 = _digits(3, 128, 64)  # in -64..64


def _digits_pack(weight: QuantWeight) -> Any:
    scale_O = weight.scale_CO[0].float() / TOP
    zero_O = torch.zeros(weight.num_out, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensors of a quantised dtype are on their way out
        quantised_OI = torch._make_per_channel_quantized_tensor(
            weight.codes.contiguous(), scale_O.double(), zero_O, 0
        )
        return torch.ops.quantized.linear_prepack(quantised_OI, None)


@lru_cache(maxsize=1)
def _digits_op() -> Callable[..., torch.Tensor]:
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default


def _digits_run(x_TI: torch.Tensor, handle: Any, digits: Digits) -> torch.Tensor:
    largest_T1 = torch.linalg.vector_norm(x_TI, math.inf, 1, keepdim=True).clamp_min_(SMALLEST)
    x_JTI = (x_TI * (digits.units_J11 / largest_T1)).round_()
    parts_TI = x_JTI.unbind(0)
    for index in range(
        len(parts_TI) - 1, 0, -1
    ):  # leaves whole numbers: the op need not round them
        parts_TI[index].sub_(parts_TI[index - 1], alpha=digits.radix)
    with torch._C.DisableTorchFunctionSubclass():  # as in linear_cpu
        y_XO = _digits_op()(x_JTI.flatten(0, 1), 1.0, digits.zero, handle)
    y_TO, *lower_TO = y_XO.chunk(len(parts_TI))
    for index, digit_TO in enumerate(lower_TO, start=1):
        y_TO.add_(digit_TO, alpha=float(digits.radix) ** -index)
    return y_TO.mul_(largest_T1)


def _digits_unpack(handle: Any) -> torch.Tensor:
    quantised_OI = torch.ops.quantized.linear_unpack(handle)[0]
    scale_O1 = quantised_OI.q_per_channel_scales().float()[:, None] * TOP
    return quantised_OI.int_repr().float() * scale_O1


class Int4Handle(NamedTuple):
    """codes: packed, outputs padded to OUTPUT_BLOCK.

    factors_CO2: bf16 (scale, (8 - zero) scale).
    """

    codes: torch.Tensor
    factors_CO2: torch.Tensor
    group: int
    num_out: int


def _refuse_int4(weight: QuantWeight) -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    return "" if capability in FAST_INT4 else f"no fast code for {capability} processors"


def _int4_pack(weight: QuantWeight) -> Int4Handle:
    assert weight.zero_CO is not None
    padding = -weight.num_out % OUTPUT_BLOCK
    codes_OI = unpack_int4(weight.codes, weight.group).flatten(1).int()
    scale_CO = weight.scale_CO.float()
    zero_CO = (8 - weight.zero_CO.float() / ZERO_STEPS) * scale_CO
    factors_CO2 = torch.stack([scale_CO, zero_CO], dim=-1).to(torch.bfloat16)
    return Int4Handle(
        torch.ops.aten._convert_weight_to_int4pack_for_cpu(F.pad(codes_OI, (0, 0, 0, padding)), 1),
        F.pad(factors_CO2, (0, 0, 0, padding)),
        weight.group,
        weight.num_out,
    )


@lru_cache(maxsize=1)
def _int4_op() -> Callable[..., torch.Tensor]:
    return torch.ops.aten._weight_int4pack_mm_for_cpu.default


def _int4_run(x_TI: torch.Tensor, handle: Int4Handle) -> torch.Tensor:
    x_TI = x_TI.contiguous().bfloat16()
    y_TO = _int4_op()(x_TI, handle.codes, handle.group, handle.factors_CO2)
    if y_TO.shape[1] != handle.num_out:
        y_TO = y_TO[:, : handle.num_out]
    return y_TO.float()


def _int4_unpack(handle: Int4Handle) -> torch.Tensor:
    """The product of unit rows and factors (1, 0) is the codes less 8."""
    num_groups = handle.factors_CO2.shape[0]
    unit_II = torch.eye(num_groups * handle.group)
    plain = torch.zeros_like(handle.factors_CO2)
    plain[..., 0] = 1
    codes_OI = _int4_run(unit_II, handle._replace(factors_CO2=plain)).T
    scale_CO, zero_CO = handle.factors_CO2[:, : handle.num_out].float().unbind(-1)
    values_OCK = codes_OI.unflatten(1, (num_groups, -1)) * scale_CO.T[..., None]
    return (values_OCK + zero_CO.T[..., None]).flatten(1)


class CodesHandle(NamedTuple):
    """codes: packed as fp16 values. scale_O: fp32."""

    codes: linear_cpu.CpuWeight
    scale_O: torch.Tensor


def _codes_pack(weight: QuantWeight) -> CodesHandle:
    codes = linear_cpu.pack(weight.codes.half(), None)
    return CodesHandle(codes, weight.scale_CO[0].float().contiguous())


def _codes_run(x_TI: torch.Tensor, handle: CodesHandle) -> torch.Tensor:
    return linear_cpu.run(x_TI, handle.codes, None).mul_(handle.scale_O)


def _codes_unpack(handle: CodesHandle) -> torch.Tensor:
    return linear_cpu.unpack(handle.codes) * handle.scale_O[:, None]


def _dense_pack(weight: QuantWeight) -> linear_cpu.CpuWeight:
    return linear_cpu.pack(dequantize_weight(weight), None)


def _dense_run(x_TI: torch.Tensor, handle: linear_cpu.CpuWeight) -> torch.Tensor:
    return linear_cpu.run(x_TI, handle, None)


def _fits(weight: QuantWeight) -> str:
    return ""


def _digits_format(digits: Digits, tolerance: float) -> QuantFormat:
    run = partial(_digits_run, digits=digits)
    return QuantFormat(_refuse_groups, _digits_pack, run, _digits_unpack, 12, tolerance)


FORMATS = {
    "int8_2x8": _digits_format(DIGITS_2X8, 1e-4),
    "int8_3x7": _digits_format(DIGITS_3X7, 1e-6),
    "int4_bf16": QuantFormat(_refuse_int4, _int4_pack, _int4_run, _int4_unpack, 24, 2**-7),
    "fp16_codes": QuantFormat(_refuse_groups, _codes_pack, _codes_run, _codes_unpack, 0, 0.0),
    "dense": QuantFormat(_fits, _dense_pack, _dense_run, linear_cpu.unpack, 0, 0.0),
}
