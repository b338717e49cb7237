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

**Cost.** One reading of the logits of a row with a rule, then a measurement for each step of a
search, which reads the tiles that have a token within the distance tried. A search takes at most 31
steps; each moves its bounds to distances that occur, which leaves about half of them. Rows without
a rule cost a few loads.

**Grid.** (Q,): a program does a row.

**Source.** Bisection in place of sorting: FlashInfer's dual-pivot sampling and Qrita
(arXiv 2602.01518).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from pagedraft.kernels.cost import Cost
from pagedraft.kernels.philox import gumbel, gumbel_jit
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

_TILE = 2048
_INF_KEY = 0x7F800000  # bits of +inf
_INF_KEY_JIT = tl.constexpr(_INF_KEY)
_MIN_TEMPERATURE_JIT = tl.constexpr(MIN_TEMPERATURE)
_MIN_MIN_P_JIT = tl.constexpr(MIN_MIN_P)
_M0, _M1, _M2, _M3, _M4, _M5 = (tl.constexpr(c) for c in MASS_POLYNOMIAL)
_LOG2_E_JIT = tl.constexpr(LOG2_E)
_MAX_HALVINGS_JIT = tl.constexpr(MAX_HALVINGS)


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


@triton.jit
def inverse_temperature_jit(temperature):
    """1 / temperature of a sampled row, 1 of a greedy one."""
    return tl.div_rn(1.0, tl.where(temperature >= _MIN_TEMPERATURE_JIT, temperature, 1.0))


@triton.jit
def _mass_jit(distance):
    halvings = tl.minimum(distance * _LOG2_E_JIT, _MAX_HALVINGS_JIT)
    whole = halvings.to(tl.int32)
    rest = halvings - whole.to(tl.float32)
    total = rest * _M5 + _M4
    total = total * rest + _M3
    total = total * rest + _M2
    total = total * rest + _M1
    total = total * rest + _M0
    return total.to(tl.int32) >> whole


@triton.jit
def _key(distance):
    """Bits of a distance >= 0, which order as the distances do."""
    return distance.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _load_scaled(row, tile, TILE: tl.constexpr):
    """A tile of x; ``row``: (logits, tile maxima, inverse temperature, vocabulary size)."""
    logits_ptr, _, inverse, vocab_size = row
    token = tile * TILE + tl.arange(0, TILE)
    logit = tl.load(logits_ptr + token, mask=token < vocab_size, other=float("-inf"))
    return logit.to(tl.float32) * inverse


@triton.jit
def _row_top(row, num_tiles, TILE: tl.constexpr):
    """Largest x, +inf if any is NaN; writes the maxima of the tiles."""
    _, tile_top_ptr, _, _ = row
    top = tl.full((), float("-inf"), tl.float32)
    for tile in range(num_tiles):
        x = _load_scaled(row, tile, TILE)
        tile_top = tl.max(tl.where(x == x, x, float("inf")), axis=0)
        tl.store(tile_top_ptr + tile, tile_top)
        top = tl.maximum(top, tile_top)
    tl.debug_barrier()  # all threads read the maxima
    return top


@triton.jit
def _measure(row, top, key, num_tiles, IS_MASS: tl.constexpr, TILE: tl.constexpr):
    """Number or mass of the tokens within ``key``, the farthest of them, the nearest beyond."""
    _, tile_top_ptr, _, _ = row
    total = tl.zeros((TILE,), tl.int64 if IS_MASS else tl.int32)
    inside = tl.full((TILE,), -1, tl.int32)
    outside = tl.full((TILE,), _INF_KEY_JIT, tl.int32)
    for tile in range(num_tiles):
        nearest = _key(top - tl.load(tile_top_ptr + tile))
        if nearest <= key:
            distance = top - _load_scaled(row, tile, TILE)
            own = _key(distance)
            is_in = own <= key
            if IS_MASS:
                total += tl.where(is_in, _mass_jit(distance), 0).to(tl.int64)
            else:
                total += is_in.to(tl.int32)
            inside = tl.maximum(inside, tl.where(is_in, own, -1))
            outside = tl.minimum(outside, tl.where(is_in, _INF_KEY_JIT, own))
        else:
            outside = tl.minimum(outside, nearest)
    return tl.sum(total, axis=0), tl.max(inside, axis=0), tl.min(outside, axis=0)


@triton.jit
def _search(row, top, cut, wanted, num_tiles, IS_MASS: tl.constexpr, TILE: tl.constexpr):
    """The smallest key below ``cut`` within which lies what is wanted; ``cut`` if none."""
    low = tl.full((), -1, tl.int32)  # too little lies within it
    high = cut
    while high - low > 1:
        middle = low + (high - low) // 2
        total, inside, outside = _measure(row, top, middle, num_tiles, IS_MASS, TILE)
        is_enough = total >= wanted
        low = tl.where(is_enough, low, tl.minimum(outside, high) - 1)
        high = tl.where(is_enough, inside, high)
    return high


@triton.jit
def _mass_wanted_jit(mass, top_p):
    share = (tl.maximum(top_p, 0.0) * 16777216.0).to(tl.int64)
    rounded_up = (share * (mass & 0xFFFFFF) + 0xFFFFFF) >> 24
    return tl.maximum(share * (mass >> 24) + rounded_up, 1)


@triton.jit
def _truncate_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    tile_top_ptr,
    top_ptr,
    cut_ptr,
    stride_q,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
):
    row_id = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row_id)
    row_ptr = logits_ptr + row_id.to(tl.int64) * stride_q
    inverse = inverse_temperature_jit(temperature)
    row = (row_ptr, tile_top_ptr + row_id * num_tiles, inverse, vocab_size)
    top_k = tl.zeros((), tl.int32)
    top_p = tl.full((), 1.0, tl.float32)
    min_p = tl.zeros((), tl.float32)
    if top_k_ptr is not None:
        top_k = tl.load(top_k_ptr + row_id)
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + row_id)
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + row_id)
    has_top_k = (top_k >= 1) & (top_k < vocab_size)
    has_min_p = min_p > _MIN_MIN_P_JIT
    has_rule = has_top_k | (top_p < 1.0) | has_min_p
    top = tl.zeros((), tl.float32)
    cut = tl.full((), _INF_KEY_JIT, tl.int32)
    if has_rule & (temperature >= _MIN_TEMPERATURE_JIT):
        row_top = _row_top(row, num_tiles, TILE)
        if (row_top > float("-inf")) & (row_top < float("inf")):
            top = row_top
            if has_min_p:
                cut = _key(tl.maximum(gumbel_jit(min_p), 0.0))
            if has_top_k:
                cut = _search(row, top, cut, top_k, num_tiles, False, TILE)
            if top_p < 1.0:
                mass, _, _ = _measure(row, top, cut, num_tiles, True, TILE)
                wanted = _mass_wanted_jit(mass, top_p)
                cut = _search(row, top, cut, wanted, num_tiles, True, TILE)
    tl.store(top_ptr + row_id, top)
    tl.store(cut_ptr + row_id, cut.to(tl.float32, bitcast=True))


def truncate_triton(
    logits_QV: torch.Tensor, batch: SampleBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find (top_Q, cut_Q) of checked logits, in one launch."""
    num_rows, num_columns = logits_QV.shape
    vocab_size = batch.num_tokens(num_columns)
    num_tiles = triton.cdiv(vocab_size, _TILE)
    tile_top_QT = torch.empty(num_rows, num_tiles, device=logits_QV.device)
    top_Q, cut_Q = torch.empty(2, num_rows, device=logits_QV.device).unbind(0)
    _truncate_kernel[(num_rows,)](
        logits_QV,
        batch.temperature_Q,
        batch.top_k_Q,
        batch.top_p_Q,
        batch.min_p_Q,
        tile_top_QT,
        top_Q,
        cut_Q,
        logits_QV.stride(0),
        vocab_size,
        num_tiles,
        TILE=_TILE,
        num_warps=8,
        enable_fp_fusion=False,  # the same bits everywhere
    )
    return top_Q, cut_Q


def truncate_cost(num_cut_rows: int, vocab_size: int, itemsize: int) -> Cost:
    """Bytes of one call, each logit of a row with a rule read once; operations as if 16 times."""
    return Cost(bytes=num_cut_rows * vocab_size * itemsize, flops=64 * num_cut_rows * vocab_size)
