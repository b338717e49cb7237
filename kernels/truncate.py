"""Truncate: min-p, top-k and top-p of a row as one number, found by bisection instead of a sort.

A row's scaled logits are x = logit / temperature (fp32, as ``logit * (1 / temperature)``), and a
token's *distance* is d = max(x) - x, fp32: its probability relative to the largest is exp(-d).
Every rule keeps the tokens up to some distance, so all three together are the smallest of three
cuts: token v is kept unless d_v > cut. Tokens of equal distance are kept or dropped together.

- min_p keeps d <= -log(min_p).
- top_k keeps d <= the k-th smallest distance: k tokens, more where the k-th is tied.
- top_p, over what these two left: the smallest cut whose tokens hold at least top_p of the mass.

The mass of a token is an integer, ``mass(d)`` = floor(2^30 * exp(-d)) up to a relative error of
3e-7: sums do not depend on their order, and all implementations find the same cut, bit for bit. V
tokens lose at most V * 2^-30 of the largest one's mass together; top_p counts in steps of 2^-24.

**Shapes.** logits_QV fp32, fp16 or bf16, unit stride in V; parameters: sample_batch.py.

**Returns** (top_Q, cut_Q) fp32: the largest x and the cut of each row. Greedy rows, rows that keep
everything and rows that hold NaN or whose largest x is not finite have a cut of +inf; top_Q of a
row that no rule concerns is any finite number.

**Cost.** One reading of the logits of a row with a rule, the rest comes from caches; see
truncate_triton.py.

**Source.** Bisection in place of sorting: FlashInfer's dual-pivot sampling and Qrita
(arXiv 2602.01518).
"""

from __future__ import annotations

import math

import torch

from pagedraft.kernels.cost import Cost
from pagedraft.kernels.philox import gumbel
from pagedraft.kernels.sample_batch import SampleBatch

# Below it a row is greedy: noise would move a logit by at most 3e-4, and 1 / temperature overflow.
MIN_TEMPERATURE = 1e-5
# Up to it min_p keeps everything; the logarithm below needs normal numbers.
MIN_MIN_P = 2.0**-126

# 2^30 * 2^-r on [0, 1), relative error 3e-7 in fp32; lowest power first.
MASS_POLYNOMIAL = (
    1073741760.0,
    -744255808.0,
    257882928.0,
    -59356148.0,
    9866193.0,
    -1008014.75,
)
LOG2_E = 1.4426950216293335  # the nearest fp32 number
MAX_HALVINGS = 31.0  # 2^30 * 2^-31 is 0
SHARE_BITS = 24


def is_sampled(batch: SampleBatch) -> torch.Tensor:
    """Which rows draw; the others take their largest logit."""
    return batch.temperature_Q >= MIN_TEMPERATURE


def mass_ref(distance: torch.Tensor) -> torch.Tensor:
    """Integer mass (int64) of fp32 distances >= 0: 2^30 for 0, 0 from 21 on."""
    halvings = (distance * LOG2_E).clamp(max=MAX_HALVINGS)
    whole = halvings.to(torch.int32)
    rest = halvings - whole.float()
    total = rest * MASS_POLYNOMIAL[-1]
    for coefficient in MASS_POLYNOMIAL[-2:0:-1]:
        total = (total + coefficient) * rest
    return ((total + MASS_POLYNOMIAL[0]).to(torch.int32) >> whole).long()


def mass_wanted(mass: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The least mass that is at least top_p of ``mass`` (int64), and at least 1."""
    share = (top_p.clamp(min=0.0) * 2.0**SHARE_BITS).long()
    low = mass & (2**SHARE_BITS - 1)
    rounded_up = (share * low + (2**SHARE_BITS - 1)) >> SHARE_BITS
    return (share * (mass >> SHARE_BITS) + rounded_up).clamp(min=1)


def min_p_cut(min_p: torch.Tensor) -> torch.Tensor:
    """The distance up to which min_p keeps tokens: -log(min_p), in the bits of ``gumbel``."""
    cut = gumbel(min_p.clamp(min=MIN_MIN_P)).clamp(min=0.0)
    return torch.where(min_p > MIN_MIN_P, cut, math.inf)


def truncate_ref(x_QV: torch.Tensor, batch: SampleBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Find (top_Q, cut_Q) of scaled logits (no padding columns) with a sort: the oracle."""
    top_Q = x_QV.amax(-1)
    sorted_QV = (top_Q[:, None] - x_QV).sort(-1).values
    cut_Q = torch.full_like(top_Q, math.inf)
    if batch.min_p_Q is not None:
        cut_Q = min_p_cut(batch.min_p_Q)
    if batch.top_k_Q is not None:
        k_Q = batch.top_k_Q.long()
        kth_Q = sorted_QV.gather(1, (k_Q - 1).clamp(0, x_QV.shape[1] - 1)[:, None])[:, 0]
        is_limited_Q = (k_Q >= 1) & (k_Q < x_QV.shape[1])
        cut_Q = torch.where(is_limited_Q, torch.minimum(cut_Q, kth_Q), cut_Q)
    if batch.top_p_Q is not None:
        mass_QV = mass_ref(sorted_QV) * (sorted_QV <= cut_Q[:, None])
        sums_QV = mass_QV.cumsum(-1)
        wanted_Q = mass_wanted(sums_QV[:, -1], batch.top_p_Q)
        place_Q = (sums_QV < wanted_Q[:, None]).sum(-1).clamp(max=x_QV.shape[1] - 1)
        last_Q = sorted_QV.gather(1, place_Q[:, None])[:, 0]
        cut_Q = torch.where(batch.top_p_Q < 1.0, last_Q, cut_Q)
    is_cut_Q = is_sampled(batch) & top_Q.isfinite()
    return top_Q, torch.where(is_cut_Q, cut_Q, math.inf)


def truncate_cost(num_cut_rows: int, vocab_size: int, itemsize: int) -> Cost:
    """Bytes of one call, each logit of a row with a rule read once; operations as if 16 times."""
    return Cost(bytes=num_cut_rows * vocab_size * itemsize, flops=64 * num_cut_rows * vocab_size)
