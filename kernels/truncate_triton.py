"""Triton side of truncation (truncate.py): one program a row finds its cut, in one launch.

It searches the bits of distances, which order as the distances do. A measurement tells how many
tokens, or how much mass, lie within a distance, and the nearest distances on both sides that occur:
those become the search's bounds, so that it ends after about half of the 31 steps that halving
alone may take.

**Cost.** After the first reading of a row, every measurement reads, from caches, the groups of
tiles that have a token within the distance tried. Counted at V = 128256: top-k 50 takes 13
measurements that read 7.7 rows together; top-p 0.9 takes 8 that read 2.6 rows where probabilities
fall with the square of the rank, 22 that read 21 where logits are normal with deviation 2.5.
Rows without a rule cost a few loads.

**Grid.** (Q,): a program does a row. Threads share nothing through memory; sums are of integers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedraft.kernels.philox import gumbel_jit
from pagedraft.kernels.sample_batch import SampleBatch
from pagedraft.kernels.truncate import (
    LOG2_E,
    MASS_POLYNOMIAL,
    MAX_HALVINGS,
    MIN_MIN_P,
    MIN_TEMPERATURE,
)

_TILE = 2048
_NUM_GROUPS = tl.constexpr(64)  # of tiles: the bits of an int64
_INF_KEY = tl.constexpr(0x7F800000)  # bits of +inf
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_MIN_MIN_P = tl.constexpr(MIN_MIN_P)
_M0, _M1, _M2, _M3, _M4, _M5 = (tl.constexpr(c) for c in MASS_POLYNOMIAL)
_LOG2_E = tl.constexpr(LOG2_E)
_MAX_HALVINGS = tl.constexpr(MAX_HALVINGS)


@triton.jit
def inverse_temperature_jit(temperature):
    """1 / temperature of a sampled row, 1 of a greedy one."""
    return tl.div_rn(1.0, tl.where(temperature >= _MIN_TEMPERATURE, temperature, 1.0))


@triton.jit
def _mass_jit(distance):
    halvings = tl.minimum(distance * _LOG2_E, _MAX_HALVINGS)
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
    """A tile of x; ``row``: (logits, inverse temperature, vocabulary size, tiles, group size)."""
    logits_ptr, inverse, vocab_size, _, _ = row
    token = tile * TILE + tl.arange(0, TILE)
    logit = tl.load(logits_ptr + token, mask=token < vocab_size, other=float("-inf"))
    return logit.to(tl.float32) * inverse


@triton.jit
def _group_tops(row, TILE: tl.constexpr):
    """Largest x of each group of tiles, +inf where one is NaN, in registers."""
    _, _, _, num_tiles, tiles_a_group = row
    offs_g = tl.arange(0, _NUM_GROUPS)
    tops_g = tl.full((_NUM_GROUPS,), float("-inf"), tl.float32)
    for tile in range(num_tiles):
        x = _load_scaled(row, tile, TILE)
        tile_top = tl.max(tl.where(x == x, x, float("inf")), axis=0)
        is_better = (offs_g == tile // tiles_a_group) & (tile_top > tops_g)
        tops_g = tl.where(is_better, tile_top, tops_g)
    return tops_g


@triton.jit
def _fours(values):
    """Four neighbours a row, which one thread holds."""
    return tl.reshape(values, (values.shape[0] // 4, 4))


@triton.jit
def _measure(row, tops_g, top, key, IS_MASS: tl.constexpr, TILE: tl.constexpr):
    """Number or mass of the tokens within ``key``, the farthest of them, the nearest beyond."""
    _, _, _, num_tiles, tiles_a_group = row
    total = tl.zeros((TILE // 4,), tl.int64 if IS_MASS else tl.int32)
    inside = tl.full((TILE // 4,), -1, tl.int32)
    outside = tl.full((TILE // 4,), _INF_KEY, tl.int32)
    nearest_g = _key(top - tops_g)
    is_near_g = nearest_g <= key
    bit_g = tl.full((_NUM_GROUPS,), 1, tl.int64) << tl.arange(0, _NUM_GROUPS).to(tl.int64)
    near_groups = tl.sum(tl.where(is_near_g, bit_g, 0), axis=0)  # a bit a group
    for tile in range(num_tiles):
        if (near_groups >> (tile // tiles_a_group)) & 1 == 1:
            distance = top - _load_scaled(row, tile, TILE)
            own = _key(distance)
            is_in = own <= key
            if IS_MASS:
                mass = tl.where(is_in, _mass_jit(distance), 0).to(tl.int64)
                total += tl.sum(_fours(mass), axis=1)
            else:
                total += tl.sum(_fours(is_in.to(tl.int32)), axis=1)
            inside = tl.maximum(inside, tl.max(_fours(tl.where(is_in, own, -1)), axis=1))
            outside = tl.minimum(outside, tl.min(_fours(tl.where(is_in, _INF_KEY, own)), axis=1))
    beyond = tl.min(tl.where(is_near_g, _INF_KEY, nearest_g), axis=0)
    outside_key = tl.minimum(tl.min(outside, axis=0), beyond)
    return tl.sum(total, axis=0), tl.max(inside, axis=0), outside_key


@triton.jit
def _search(row, tops_g, top, cut, wanted, IS_MASS: tl.constexpr, TILE: tl.constexpr):
    """The smallest key below ``cut`` within which lies what is wanted; ``cut`` if none."""
    low = tl.full((), -1, tl.int32)  # too little lies within it
    high = cut
    while high - low > 1:
        middle = low + (high - low) // 2
        total, inside, outside = _measure(row, tops_g, top, middle, IS_MASS, TILE)
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
    top_ptr,
    cut_ptr,
    stride_q,
    vocab_size,
    num_tiles,
    tiles_a_group,
    TILE: tl.constexpr,
):
    row_id = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row_id)
    row_ptr = logits_ptr + row_id.to(tl.int64) * stride_q
    inverse = inverse_temperature_jit(temperature)
    row = (row_ptr, inverse, vocab_size, num_tiles, tiles_a_group)
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
    has_min_p = min_p > _MIN_MIN_P
    has_rule = has_top_k | (top_p < 1.0) | has_min_p
    top = tl.zeros((), tl.float32)
    cut = tl.full((), _INF_KEY, tl.int32)
    if has_rule & (temperature >= _MIN_TEMPERATURE):
        tops_g = _group_tops(row, TILE)
        row_top = tl.max(tops_g, axis=0)
        if (row_top > float("-inf")) & (row_top < float("inf")):
            top = row_top
            if has_min_p:
                cut = _key(tl.maximum(gumbel_jit(min_p), 0.0))
            if has_top_k:
                cut = _search(row, tops_g, top, cut, top_k, False, TILE)
            if top_p < 1.0:
                mass, _, _ = _measure(row, tops_g, top, cut, True, TILE)
                wanted = _mass_wanted_jit(mass, top_p)
                cut = _search(row, tops_g, top, cut, wanted, True, TILE)
    tl.store(top_ptr + row_id, top)
    tl.store(cut_ptr + row_id, cut.to(tl.float32, bitcast=True))


def truncate_triton(
    logits_QV: torch.Tensor, batch: SampleBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find (top_Q, cut_Q) of checked logits, in one launch."""
    num_rows, num_columns = logits_QV.shape
    vocab_size = batch.num_tokens(num_columns)
    num_tiles = triton.cdiv(vocab_size, _TILE)
    # Of their own: the second half of one tensor would often be less aligned, and compiled anew.
    top_Q, cut_Q = (torch.empty(num_rows, device=logits_QV.device) for _ in range(2))
    _truncate_kernel[(num_rows,)](
        logits_QV,
        batch.temperature_Q,
        batch.top_k_Q,
        batch.top_p_Q,
        batch.min_p_Q,
        top_Q,
        cut_Q,
        logits_QV.stride(0),
        vocab_size,
        num_tiles,
        triton.cdiv(num_tiles, _NUM_GROUPS.value),
        TILE=_TILE,
        num_warps=8,
        enable_fp_fusion=False,  # the same bits everywhere
    )
    return top_Q, cut_Q
