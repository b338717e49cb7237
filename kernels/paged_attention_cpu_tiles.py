"""Row counts at which the CPU path's products give a row the same bits, whatever is beside it.

BLAS libraries have kernels of their own for many shapes. Some add in another order, for other row
counts and even for other rows of one product, and threads may share one matrix and not the next.
The products of attention have fixed depths and widths (TILE keys, the head dim) and are left with
two sizes: rows of a matrix and matrices of a batch. A self-test finds the row counts that agree.

Found with MKL 2024.2 (D 64): from 4 rows on all counts agree with AVX512 kernels; with AVX2 kernels
8, 20, 32, 44 and 56 rows do not, from 8 rows on all agree with SSE4.2 kernels. Batches of any size
agree on one thread; on two, AVX2 kernels share a lone matrix in another way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)

TILE = 64  # keys of a matrix of scores
# (positions below, tiles of a segment): the values of a segment are one matrix. Longer ones take
# fewer calls; zeros fill the last one.
SEGMENTS = ((TILE, 1), (1024, 2), (2**62, 4))
# Even counts keep every matrix on 64-byte boundaries; 1 row is the last resort.
ROW_COUNTS = (1, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 192)


class RowCounts(NamedTuple):
    """What the self-test found.

    sizes: row counts that agree, ascending.
    min_threaded: smaller batches run on one thread.
    """

    sizes: tuple[int, ...]
    min_threaded: int


class Operands(NamedTuple):
    """Random operands of the products, for up to X matrices: one row of each left operand."""

    q_X1D: torch.Tensor
    k_XTD: torch.Tensor
    probs_X1W: torch.Tensor
    v_XWD: torch.Tensor


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let torch use ``count`` threads inside the ``with`` block."""
    saved = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(saved)


@lru_cache(maxsize=32)
def find_row_counts(head_dim: int, num_threads: int) -> RowCounts:
    """Run the self-test for this head dim and this number of threads."""
    counts = sorted({1, 2, 5, max(1, num_threads - 1), num_threads, 2 * num_threads})
    operands = _operands(counts[-1], head_dim)
    with use_threads(1):
        alike: dict[bytes, list[int]] = {}
        for num_rows in ROW_COUNTS:
            rows_XR = one_row(operands, num_rows, counts)
            if rows_XR is not None:
                alike.setdefault(rows_XR.numpy().tobytes(), []).append(num_rows)
        sizes = max(alike.values(), key=len, default=[1])
        expected_XR = one_row(operands, sizes[0], counts[-1:])
    if sizes == [1]:
        logger.warning("attention, head dim %d: no row counts agree; one row a product", head_dim)
    min_threaded = counts[-1] + 1
    with use_threads(num_threads):
        for count in reversed(counts if expected_XR is not None else []):
            rows = [one_row(operands, num_rows, [count]) for num_rows in sizes]
            if any(r_XR is None or not torch.equal(r_XR, expected_XR[:count]) for r_XR in rows):
                break
            min_threaded = count
    return RowCounts(tuple(sizes), min_threaded)


def one_row(operands: Operands, num_rows: int, counts: list[int]) -> torch.Tensor | None:
    """Bits of a row in products of ``num_rows`` copies of it, for each of the largest batch.

    None if they depend on its place among them, or on the number of matrices (``counts``).
    """
    rows_XR = None
    for count in reversed(counts):
        products_XPR = products(operands, num_rows, count)
        if rows_XR is None:
            rows_XR = products_XPR[:, 0].clone()
        if not torch.equal(products_XPR, rows_XR[:count, None].expand_as(products_XPR)):
            return None
    return rows_XR


def products(operands: Operands, num_rows: int, count: int) -> torch.Tensor:
    """Scores and outputs [count, num_rows, TILE + 3 D] of copied rows, called as attention does.

    The outputs of each length of segment add two segments; the rows of their left operand are two
    or more segments apart.
    """
    q_XPD = operands.q_X1D[:count].repeat(1, num_rows, 1)
    scores_XPT = q_XPD.new_empty(count, num_rows, TILE)
    scores_XPT.baddbmm_(q_XPD, operands.k_XTD[:count].transpose(1, 2), beta=0, alpha=0.125)
    results = [scores_XPT]
    for _, num_tiles in SEGMENTS:
        width = num_tiles * TILE
        probs_XPW = operands.probs_X1W[:count, :, :width].repeat(1, num_rows, 2 + count % 3)
        v_XWD = operands.v_XWD[:count, :width]
        out_XPD = torch.empty_like(q_XPD)
        out_XPD.baddbmm_(probs_XPW[:, :, :width], v_XWD, beta=0)
        out_XPD.baddbmm_(probs_XPW[:, :, width : 2 * width], v_XWD)
        results.append(out_XPD)
    return torch.cat(results, 2)


def _operands(num_matrices: int, head_dim: int) -> Operands:
    generator = torch.Generator().manual_seed(0)
    width = TILE * SEGMENTS[-1][1]

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(num_matrices, *shape, generator=generator)

    return Operands(
        q_X1D=randn(1, head_dim),
        k_XTD=randn(TILE, head_dim),
        probs_X1W=randn(1, width).softmax(-1),
        v_XWD=randn(width, head_dim),
    )
