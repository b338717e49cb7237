"""``linear`` with a quantised weight on a GPU."""

from __future__ import annotations

import torch

from pagedraft.kernels import linear_triton
from pagedraft.kernels.weight_quant import QuantWeight, dequantize_weight


def launch(
    x_TI: torch.Tensor,
    weight: QuantWeight,
    bias_O: torch.Tensor | None,
    residual_TO: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return y [T, O] = x Wt (+ bias) (+ residual) in ``out_dtype``."""
    weight_OI = dequantize_weight(weight).to(x_TI.dtype)
    return linear_triton.launch(x_TI, weight_OI, bias_O, residual_TO, out_dtype)
