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


Rows = torch.Tensor | Normed


def row_sums(x_TP: torch.Tensor) -> torch.Tensor:
    """Return the sums over the last axis [T] by halving: neighbours, then neighbouring sums.

    The kernels' order, which depends on nothing but P; a library's may depend on T.
    """
    num_columns = x_TP.shape[1]
    missing = (1 << (num_columns - 1).bit_length()) - num_columns
    x_TP = torch.nn.functional.pad(x_TP, (0, missing))
    while x_TP.shape[1] > 1:
        x_TP = x_TP[:, 0::2] + x_TP[:, 1::2]
    return x_TP[:, 0]


def finish_norm(normed: Normed) -> torch.Tensor:
    """Return the normed rows [T, E] in the dtype of ``rows_TE``: the oracle."""
    mean_T = row_sums(normed.squares_TP) / normed.rows_TE.shape[1]
    scale_T1 = torch.rsqrt(mean_T + normed.eps)[:, None]
    return (normed.rows_TE.float() * scale_T1).to(normed.rows_TE.dtype)
