"""Quantised weights of a linear layer on the CPU: pack once, then y = x Wt with row-invariant bits.

A weight takes the first format of its kind (``kernels/linear_cpu_quant_formats.py``) that its
library has, that multiplies right on this processor, and that keeps a row's bits at some multiple
of rows. The order is fixed: which is fastest was measured once, not at load, where another answer
would mean other bits.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from pagedraft.kernels import linear_cpu_rows as rows
from pagedraft.kernels.linear_cpu_quant_formats import FORMATS, CodesHandle, QuantFormat
from pagedraft.kernels.weight_quant import (
    ZERO_STEPS,
    QuantWeight,
    WeightFormat,
    dequantize_weight,
    pack_int4,
)

logger = logging.getLogger(__name__)

ORDER: dict[WeightFormat, tuple[str, ...]] = {
    "int8": ("int8_2x8", "int8_3x7", "fp16_codes", "dense"),
    "int4": ("int4_bf16", "dense"),
    "fp8": ("fp16_codes", "dense"),
}


@dataclass(frozen=True)
class CpuQuantWeight:
    """A packed quantised weight and what its self-test found.

    handle: what the format's ``run`` takes. bias_O: fp32.
    order_I: None, or which input each column of the handle multiplies.
    row_multiple: row counts that are multiples of it need no padding.
    reason: why earlier formats were not taken; empty if the first was.
    """

    format: str
    handle: Any
    num_out: int
    bias_O: torch.Tensor | None
    order_I: torch.Tensor | None
    row_multiple: int
    reason: str


def pack(weight: QuantWeight, bias_O: torch.Tensor | None) -> CpuQuantWeight:
    """Pack ``weight`` in the fastest format that multiplies right and keeps its rows' bits."""
    sizes = weight.num_out, weight.num_in, weight.group
    reasons = []
    for name in ORDER[weight.format]:
        form = FORMATS[name]
        reason, multiple = form.refuse(weight), 1
        if not reason and form.num_dense:
            multiple, reason = find_row_multiple(name, weight.format, *sizes, _num_threads())
        if not reason:
            break
        reasons.append(f"{name}: {reason}")
    if reasons:
        _tell(name, "; ".join(reasons))
    handle = form.pack(weight)
    if not form.num_dense:
        inner = handle.codes if isinstance(handle, CodesHandle) else handle
        multiple = inner.row_multiple
    bias_O = None if bias_O is None else bias_O.detach().float()
    order_I = weight.order_I
    return CpuQuantWeight(
        name, handle, weight.num_out, bias_O, order_I, multiple, "; ".join(reasons)
    )


def run(
    x_TI: torch.Tensor, weight: CpuQuantWeight, residual_TO: torch.Tensor | None
) -> torch.Tensor:
    """Return y = x Wt (+ bias) (+ residual), [T, O] fp32; pads x where the format asks for it."""
    num_rows = x_TI.shape[0]
    if num_rows == 0:
        return x_TI.new_empty(0, weight.num_out)
    if weight.order_I is not None:
        x_TI = x_TI.index_select(1, weight.order_I)
    form = FORMATS[weight.format]
    if form.num_dense == 0 or rows.runs_whole(num_rows, weight.row_multiple):
        y_TO = form.run(x_TI, weight.handle)  # the usual case
    else:
        call = partial(form.run, handle=weight.handle)
        y_TO = rows.run_in_multiples(call, x_TI, weight.row_multiple)
    for term in (weight.bias_O, residual_TO):
        if term is not None:
            y_TO.add_(term)
    return y_TO


def unpack(weight: CpuQuantWeight) -> torch.Tensor:
    """Return the fp32 weight [O, I] that is multiplied, inputs in their natural order."""
    values_OI = FORMATS[weight.format].unpack(weight.handle)
    if weight.order_I is None:
        return values_OI
    natural_OI = torch.empty_like(values_OI)
    natural_OI[:, weight.order_I] = values_OI
    return natural_OI


def _num_threads() -> int:
    return torch.get_num_threads()


@lru_cache(maxsize=16)
def _tell(name: str, reason: str) -> None:
    """Log once why a slower format is taken."""
    logger.warning("quantised linear: running %s (%s)", name, reason)


@lru_cache(maxsize=256)
def find_row_multiple(
    name: str, kind: WeightFormat, num_out: int, num_in: int, group: int, num_threads: int
) -> tuple[int, str]:
    """Return (smallest row multiple that keeps bits, ""), or (0, why there is none).

    Runs the format on random codes of this shape. ``num_threads`` is part of the key because
    libraries split work by it.
    """
    full_weight, thin_weight, x_TI = _test_operands(kind, num_out, num_in, group)
    form = FORMATS[name]
    try:
        full, thin = (
            partial(form.run, handle=form.pack(weight)) for weight in (full_weight, thin_weight)
        )
        reason = _find_fault(form, thin_weight, x_TI)
        multiple = 0 if reason else rows.find_multiple(full, thin, x_TI, form.num_dense)
    except (RuntimeError, AttributeError) as error:
        return 0, str(error).splitlines()[0]
    if multiple == 0 and not reason:
        reason = f"a row's bits depend on the row count (tried multiples {rows.ROW_MULTIPLES})"
    return multiple, reason


def _find_fault(form: QuantFormat, weight: QuantWeight, x_TI: torch.Tensor) -> str:
    """Say what is wrong with the weights that ``form`` keeps, or its products; "" if nothing."""
    handle, dense_OI = form.pack(weight), dequantize_weight(weight).double()
    error_OI = (form.unpack(handle) - dense_OI).abs()
    if bool((error_OI > form.tolerance * dense_OI.abs().amax(1, keepdim=True)).any()):
        return "packing changes weights"
    x_TI = x_TI.double()
    error_TO = (form.run(x_TI.float(), handle) - x_TI @ dense_OI.T).abs()
    if bool((error_TO > form.tolerance * (x_TI.abs() @ dense_OI.abs().T)).any()):
        return "products are wrong on this processor"
    return ""


def _test_operands(
    kind: WeightFormat, num_out: int, num_in: int, group: int
) -> tuple[QuantWeight, QuantWeight, torch.Tensor]:
    """Return (weight, its first outputs, x [MAX_TEST_ROWS, I]).

    The first rows of x meet the first weights at their largest, which finds sums that saturate.
    """
    generator = torch.Generator().manual_seed(0)
    num_out = rows.num_test_outputs(num_out, num_in)
    low, high = (-127, 127) if kind == "int8" else (0, 15)
    codes_OI = torch.randint(low, high + 1, (num_out, num_in), generator=generator)
    x_TI = torch.rand(rows.MAX_TEST_ROWS, num_in, generator=generator).sub_(0.5)
    x_TI[:2] = torch.tensor([[1.0], [-1.0]])
    rows.cancel_halves(codes_OI, x_TI)
    codes_OI[:2] = torch.tensor([[low], [high]])[:num_out]
    scale_O = torch.rand(num_out, generator=generator) + 0.5
    full = _test_weight(kind, codes_OI, scale_O, group)
    thin = _test_weight(kind, codes_OI[: rows.THIN], scale_O[: rows.THIN], group)
    return full, thin, x_TI


def _test_weight(
    kind: WeightFormat, codes_OI: torch.Tensor, scale_O: torch.Tensor, group: int
) -> QuantWeight:
    num_groups = codes_OI.shape[1] // group
    scale_CO = scale_O.repeat(num_groups, 1)
    if kind != "int4":
        return QuantWeight(kind, codes_OI.to(torch.int8), scale_CO, None, group)
    codes_OB = pack_int4(codes_OI.to(torch.uint8).unflatten(1, (num_groups, group)))
    zero_CO = torch.full_like(scale_CO, 7 * ZERO_STEPS, dtype=torch.uint8)
    return QuantWeight(kind, codes_OB, scale_CO, zero_CO, group)
