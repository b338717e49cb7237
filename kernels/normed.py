"""A step's rows on their way through an RMSNorm: from the linear layer that made them to the next.

A norm as a launch of its own costs more than its arithmetic. So the layer that adds the residual
multiplies by the norm's weight and stores sums of squares, and the layer that reads the rows
multiplies its products by ``1 / sqrt(mean(x^2) + eps)``: a row's factor commutes with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SQUARE_COLUMNS = 32  # columns under one sum of squares, whatever tile made it


@dataclass(frozen=True)
class Normed:
    """Rows before their factor: the normed rows are ``rows_TE / sqrt(mean(x^2) + eps)``.

    rows_TE: x * norm weight, rounded to the activations' dtype.
    squares_TP: fp32 sums of x^2 over SQUARE_COLUMNS columns each, P = ceil(E / SQUARE_COLUMNS).
    eps: added to the mean of squares.
    """

    rows_TE: torch.Tensor
    squares_TP: torch.Tensor
    eps: float


def finish_norm(normed: Normed) -> torch.Tensor:
    """Return the normed rows [T, E] in the dtype of ``rows_TE``: the oracle."""
    mean_T1 = normed.squares_TP.sum(-1, keepdim=True) / normed.rows_TE.shape[1]
    scale_T1 = torch.rsqrt(mean_T1 + normed.eps)
    return (normed.rows_TE.float() * scale_T1).to(normed.rows_TE.dtype)
