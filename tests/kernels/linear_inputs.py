"""What tests of the linear kernels share: row counts of every tile, products in one order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedraft.kernels.normed import SQUARE_COLUMNS, Normed, row_sums
from pagedraft.tests.inputs import CPU, randn

# Every tile and its edges: the row counts whose rows must have the same bits.
ROW_COUNTS = (*range(1, 18), 32, 64, 65, 128, 700)
MOST_ROWS = 700
EPS = 1e-5


def use_uniform_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in fp64, rounded to fp32: the interpreter's BLAS adds in another order for another
    tile, which an MMA does not. Sums across steps stay in fp32."""

    def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)

    monkeypatch.setattr(np, "matmul", matmul)


def squares_of(sum_TE: torch.Tensor) -> torch.Tensor:
    """Return the fp32 sums of squares [T, P] of a step's rows, added as a kernel adds them."""
    num_rows, num_columns = sum_TE.shape
    num_parts = -(-num_columns // SQUARE_COLUMNS)
    missing = num_parts * SQUARE_COLUMNS - num_columns
    wide_TE = torch.nn.functional.pad(sum_TE.float(), (0, missing))
    return row_sums(wide_TE.square().view(-1, SQUARE_COLUMNS)).view(num_rows, num_parts)


def normed_rows(
    num_rows: int,
    num_columns: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = CPU,
    seed: int = 0,
) -> Normed:
    """Return seeded rows before their factor; rows differ in scale, so that factors differ."""
    scale_T1 = torch.linspace(0.5, 4.0, max(num_rows, 1), device=device)[:num_rows, None]
    sum_TE = (randn(num_rows, num_columns, device=device, seed=seed) * scale_T1).to(dtype)
    weight_E = 1.0 + randn(num_columns, device=device, seed=seed + 1, scale=0.2)
    return Normed((sum_TE.float() * weight_E).to(dtype), squares_of(sum_TE), EPS)


def last_rows(normed: Normed, count: int) -> Normed:
    """Return the last ``count`` rows."""
    return Normed(normed.rows_TE[-count:], normed.squares_TP[-count:], normed.eps)
