"""Linear layers with their neighbours: an MLP's first projection with its activation, and an output
projection with the residual and the norm that follow it.

Without a GPU, in fp32 and fp16, and with ``exact=False`` these are the separate ops in a row.
"""

from __future__ import annotations

import torch

from pagedraft.kernels.gated_mlp import Activation, gated_mlp
from pagedraft.kernels.linear import PackedLinear, linear
from pagedraft.kernels.normed import Normed
from pagedraft.kernels.rms_norm import add_rms_norm

Rows = torch.Tensor | Normed


def gated_linear(
    x: Rows, packed: PackedLinear, activation: Activation = "silu", *, exact: bool = True
) -> torch.Tensor:
    """Return activation(gate) * up, [T, F]; ``packed`` [2F, I] holds gate rows, then up rows."""
    return gated_mlp(linear(x, packed, exact=exact), activation)


def linear_add_norm(
    x_TI: torch.Tensor,
    packed: PackedLinear,
    residual_TE: torch.Tensor,
    norm_weight_E: torch.Tensor,
    eps: float,
    *,
    exact: bool = True,
) -> tuple[Rows, torch.Tensor]:
    """Return (rms_norm(sum_TE), sum_TE) with sum_TE = x Wt (+ bias) + residual_TE."""
    y_TE = linear(x_TI, packed, exact=exact)
    return add_rms_norm(y_TE, residual_TE, norm_weight_E, eps)
