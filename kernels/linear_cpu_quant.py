"""CPU formats of a linear layer's quantised weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedraft.kernels import linear_cpu
from pagedraft.kernels.weight_quant import QuantWeight, dequantize_weight


@dataclass(frozen=True)
class CpuQuantWeight:
    """A packed quantised weight and what its self-test found."""

    format: str
    dense: linear_cpu.CpuWeight
    row_multiple: int


def pack(weight: QuantWeight, bias_O: torch.Tensor | None) -> CpuQuantWeight:
    """Pack ``weight`` in the fastest format that keeps its values and its rows' bits."""
    dense = linear_cpu.pack(dequantize_weight(weight), bias_O)
    return CpuQuantWeight(dense.format, dense, dense.row_multiple)


def run(
    x_TI: torch.Tensor, weight: CpuQuantWeight, residual_TO: torch.Tensor | None
) -> torch.Tensor:
    """Return y = x Wt (+ bias) (+ residual), [T, O] fp32."""
    return linear_cpu.run(x_TI, weight.dense, residual_TO)


def unpack(weight: CpuQuantWeight) -> torch.Tensor:
    """Return the fp32 weight [O, I] that the codes stand for."""
    return linear_cpu.unpack(weight.dense)
