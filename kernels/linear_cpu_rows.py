"""Row counts of a CPU library's linear: its kernels for other counts may add in another order.

A self-test looks for the smallest multiple of rows at which a row's bits depend on nothing but that
row; calls are padded to it, and cut at the longest run that the test saw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

ROW_MULTIPLES = (1, 2, 3, 4, 6, 8, 12, 14, 16, 24)
SPREAD = (1, 2, 3, 5, 11, 22, 40)
MAX_TEST_ROWS = 168
MAX_ROWS = 672  # of a call, a common multiple of ROW_MULTIPLES; more rows are cut
MAX_TEST_WEIGHTS = 2**20
THIN = 32  # outputs of the weight that is tried with many row counts

Run = Callable[[torch.Tensor], torch.Tensor]


def cancel_halves(weights_OI: torch.Tensor, x_TI: torch.Tensor) -> None:
    """Make every other row of x, from the fourth on, cancel but for 2**-16 of one input, in place.

    The second half of the weights' inputs repeats the first, and of those rows it is the negative.
    So the order of a sum shows in y even where y is rounded to bf16. Of bf16 products by oneDNN
    random rows showed in 1 of 1,000 outputs that one row's sums run in another order.
    """
    half = x_TI.shape[1] // 2
    weights_OI[:, half : 2 * half] = weights_OI[:, :half]
    cancelling = x_TI[3::2]
    cancelling[:, half : 2 * half] = -cancelling[:, :half]
    cancelling[:, -1] *= 2.0**-16
    if half:
        cancelling[:, half - 1] = 0.0


def num_test_outputs(num_out: int, num_in: int) -> int:
    """Return how many outputs of a weight the self-test needs: all, or as many as it may cost."""
    return min(num_out, max(THIN, MAX_TEST_WEIGHTS // max(num_in, 1)))


def find_multiple(full: Run, thin: Run, x_TI: torch.Tensor, num_dense: int) -> int:
    """Return the smallest row multiple that keeps a row's bits, 0 if there is none.

    full runs in a spread of row counts up to ``MAX_ROWS``; thin, a slice of its weight, in every
    count up to ``num_dense``. x_TI: MAX_TEST_ROWS rows to run on.
    """
    for multiple in ROW_MULTIPLES:
        spread = [n * multiple for n in SPREAD if n * multiple <= MAX_TEST_ROWS]
        if (
            rows_agree(thin, x_TI, multiple, range(multiple, num_dense + 1, multiple))
            and rows_agree(full, x_TI, multiple, spread)
            and _long_runs_agree(full, x_TI, multiple)
        ):
            return multiple
    return 0


def rows_agree(run: Run, x_TI: torch.Tensor, multiple: int, counts: Iterable[int]) -> bool:
    """Say whether rows have the bits of one big run, in any of ``counts`` rows, at any position."""
    x_TI = x_TI[: MAX_TEST_ROWS // multiple * multiple]
    wanted_TO = run(x_TI)
    for count in counts:
        first = (7 * count) % (x_TI.shape[0] - count + 1)
        rows = slice(first, first + count)
        if not torch.equal(run(x_TI[rows]), wanted_TO[rows]):
            return False
    return True


def _long_runs_agree(run: Run, x_TI: torch.Tensor, multiple: int) -> bool:
    """Say whether rows keep their bits in the longest run, and in one of half its length."""
    x_TI = x_TI[: MAX_TEST_ROWS // multiple * multiple]
    wanted_TO = run(x_TI)
    long_TI, long_TO = (t.repeat(-(-MAX_ROWS // len(t)), 1) for t in (x_TI, wanted_TO))
    return all(
        torch.equal(run(long_TI[:count]), long_TO[:count]) for count in (MAX_ROWS // 2, MAX_ROWS)
    )


def runs_whole(num_rows: int, multiple: int) -> bool:
    """Say whether ``num_rows`` rows need neither a cut nor padding."""
    return num_rows <= MAX_ROWS and num_rows % multiple == 0


def run_in_multiples(run: Run, x_TI: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return ``run(x_TI)``, called with multiples of ``multiple`` rows, at most MAX_ROWS."""
    num_rows = x_TI.shape[0]
    if num_rows > MAX_ROWS:
        return torch.cat([run_in_multiples(run, x, multiple) for x in x_TI.split(MAX_ROWS)])
    padding = -num_rows % multiple
    if padding == 0:
        return run(x_TI)
    return run(F.pad(x_TI, (0, 0, 0, padding)))[:num_rows]
