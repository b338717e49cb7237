"""CPU path of truncation: the exact cuts of truncate.py from the chunks that can hold them.

It starts from the largest logit of every chunk (sample_cpu.py), that is the nearest distance in it.
The k-th smallest of these bounds the k-th smallest distance of the row, since k chunks have a token
at least as near: chunks beyond it are not read. Chunks beyond 21.5 have no mass. Top-p adds
masses in bins of 1/16 and sorts the one bin in which the wanted mass is reached. In most rows that
is near the top: there an estimate of the whole mass from plain exponentials, with its error, tells
the cut, and masses are made of the near tokens alone. Where it does not, of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagedraft.kernels.philox import NOISE_CHUNK
from pagedraft.kernels.sample_batch import SampleBatch
from pagedraft.kernels.truncate import (
    LOG2_E,
    MASS_POLYNOMIAL,
    MAX_HALVINGS,
    SHARE_BITS,
    min_p_cut,
)

_INF = np.float32(np.inf)
# From here on a token's mass is 0.
_MASS_RANGE = np.float32(MAX_HALVINGS / LOG2_E)
# Top-p looks up to these first, where at most 1 / _FEW of the tokens are as near: in most rows the
# wanted mass is near the top.
_NEAR = (np.float32(4.0), np.float32(8.0))
_FEW = 4
_UNIT = 2.0**30  # mass of the largest logit
# Relative error of a sum of exponentials, their masses included: far above fp32's rounding.
_ESTIMATE_ERROR = 1e-5
_BINS_PER_UNIT = np.float32(16.0)  # a power of two: products keep their order


class _Scratch:
    """Memory for one row at a time."""

    def __init__(self, vocab_size: int) -> None:
        self.distance_V, self.rest_V, self.whole_V, self.total_V = np.empty(
            (4, vocab_size), np.float32
        )
        self.mass_V, self.halvings_V = np.empty((2, vocab_size), np.int32)


@dataclass(frozen=True)
class _Row:
    """One row: its logits, 1 / temperature, largest x, and the nearest distance of each chunk."""

    logits_V: np.ndarray
    inverse: np.float32
    top: np.float32
    nearest_C: np.ndarray
    scratch: _Scratch

    def distances(self, limit: np.float32) -> np.ndarray:
        """Distances of at most ``limit`` in id order, and others between them; scratch."""
        chunk_n = (self.nearest_C <= limit).nonzero()[0]
        logits_n = self.logits_V
        if len(chunk_n) < len(self.nearest_C):
            logits_n = self._chunks(chunk_n)
        distance_n = self.scratch.distance_V[: len(logits_n)]
        np.multiply(logits_n, self.inverse, out=distance_n)
        return np.subtract(self.top, distance_n, out=distance_n)

    def _chunks(self, chunk_n: np.ndarray) -> np.ndarray:
        num_whole = len(self.logits_V) // NOISE_CHUNK
        whole_n = chunk_n[chunk_n < num_whole]
        chunks_CL = self.logits_V[: num_whole * NOISE_CHUNK].reshape(num_whole, NOISE_CHUNK)
        logits_n = chunks_CL[whole_n].ravel()
        if len(whole_n) == len(chunk_n):
            return logits_n
        return np.concatenate([logits_n, self.logits_V[num_whole * NOISE_CHUNK :]])


def truncate_cpu(
    logits_QV: torch.Tensor,
    batch: SampleBatch,
    row_S: np.ndarray,
    inverse_S: np.ndarray,
    largest_SC: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (top_S, cut_S) fp32 of the sampled rows ``row_S``.

    largest_SC: ``largest_of_chunks`` of these rows, without NaN.
    """
    scaled_SC = largest_SC * inverse_S[:, None]
    top_S = scaled_SC.max(axis=1)
    cut_S = np.full_like(top_S, _INF)
    if batch.min_p_Q is not None:
        cut_S = min_p_cut(batch.min_p_Q[row_S]).numpy()
    top_k_S = np.zeros(len(row_S), np.int32)
    top_p_S = np.ones(len(row_S), np.float32)
    if batch.top_k_Q is not None:
        top_k_S = batch.top_k_Q.numpy()[row_S]
    if batch.top_p_Q is not None:
        top_p_S = batch.top_p_Q.numpy()[row_S]
    scratch = _Scratch(logits_QV.shape[1])
    for s in range(len(row_S)):
        if not np.isfinite(top_S[s]):
            cut_S[s] = _INF
            continue
        logits_V = logits_QV[row_S[s]].numpy()
        row = _Row(logits_V, inverse_S[s], top_S[s], top_S[s] - scaled_SC[s], scratch)
        if 1 <= top_k_S[s] < len(logits_V):
            cut_S[s] = _top_k_cut(row, int(top_k_S[s]), cut_S[s])
        if top_p_S[s] < 1:
            cut_S[s] = _top_p_cut(row, float(top_p_S[s]), cut_S[s])
    return top_S, cut_S


def _top_k_cut(row: _Row, top_k: int, cut: np.float32) -> np.float32:
    """The k-th smallest distance, or ``cut`` if that is less."""
    bound = cut
    if top_k <= len(row.nearest_C):
        bound = min(cut, np.partition(row.nearest_C, top_k - 1)[top_k - 1])
    distance_n = row.distances(bound)
    distance_n = distance_n[distance_n <= bound]
    if len(distance_n) < top_k:
        return cut
    return min(cut, np.partition(distance_n, top_k - 1)[top_k - 1])


def _top_p_cut(row: _Row, top_p: float, cut: np.float32) -> np.float32:
    """The smallest distance within which the wanted share of the mass within ``cut`` lies."""
    distance_n = row.distances(min(cut, _MASS_RANGE))
    if cut < _MASS_RANGE:
        distance_n = distance_n[distance_n <= cut]
    else:
        near_cut = _near_cut(distance_n, top_p, row.scratch)
        if near_cut is not None:
            return near_cut
    mass_n = _mass(distance_n, row.scratch)
    return _cut_at(distance_n, mass_n, _wanted(top_p, int(mass_n.sum(dtype=np.int64))))


def _near_cut(distance_n: np.ndarray, top_p: float, scratch: _Scratch) -> np.float32 | None:
    """The cut if it is near and an estimate of the whole mass decides it, else None; scratch."""
    near_n = (distance_n <= _NEAR[-1]).nonzero()[0]
    if len(near_n) > len(distance_n) // _FEW:
        return None
    power_n = np.negative(distance_n, out=scratch.rest_V[: len(distance_n)])
    np.exp(power_n, out=power_n)
    total = float(power_n.sum())
    distance_m, power_m = distance_n[near_n], power_n[near_n]
    wanted_power = top_p * total * (1 + _ESTIMATE_ERROR)
    if power_m.sum() < wanted_power:
        return None
    nearer_m = distance_m <= _NEAR[0]
    if power_m[nearer_m].sum() >= wanted_power:
        distance_m = distance_m[nearer_m]
    low = _wanted(top_p, int(_UNIT * total * (1 - _ESTIMATE_ERROR)) - len(distance_n))
    high = _wanted(top_p, int(_UNIT * total * (1 + _ESTIMATE_ERROR)) + 1)
    mass_m = _mass(distance_m, scratch)
    if mass_m.sum(dtype=np.int64) < high:
        return None
    cut = _cut_at(distance_m, mass_m, low)
    is_sure = mass_m[distance_m <= cut].sum(dtype=np.int64) >= high
    return cut if is_sure else None


def _wanted(top_p: float, mass: int) -> int:
    """``mass_wanted`` of one row."""
    share = int(max(top_p, 0.0) * 2.0**SHARE_BITS)
    return max(1, -(-share * mass >> SHARE_BITS))


def _cut_at(distance_n: np.ndarray, mass_n: np.ndarray, wanted: int) -> np.float32:
    """The smallest distance within which a mass of ``wanted`` lies."""
    bin_n = (np.minimum(distance_n, _MASS_RANGE) * _BINS_PER_UNIT).astype(np.int32)
    # Sums of integers below 2^53 are exact in fp64.
    reached_b = np.bincount(bin_n, weights=mass_n).cumsum()
    last = int(reached_b.searchsorted(wanted))
    missing = wanted - (int(reached_b[last - 1]) if last else 0)
    inside_n = (bin_n == last).nonzero()[0]
    inside_n = inside_n[distance_n[inside_n].argsort()]
    place = mass_n[inside_n].cumsum(dtype=np.int64).searchsorted(missing)
    return distance_n[inside_n[place]]


def _mass(distance_n: np.ndarray, scratch: _Scratch) -> np.ndarray:
    """``mass_ref`` as int32; scratch."""
    own = slice(len(distance_n))
    rest_n, whole_n, total_n = scratch.rest_V[own], scratch.whole_V[own], scratch.total_V[own]
    mass_n, halvings_n = scratch.mass_V[own], scratch.halvings_V[own]
    np.multiply(distance_n, np.float32(LOG2_E), out=rest_n)
    np.minimum(rest_n, np.float32(MAX_HALVINGS), out=rest_n)
    np.floor(rest_n, out=whole_n)
    rest_n -= whole_n
    np.multiply(rest_n, np.float32(MASS_POLYNOMIAL[-1]), out=total_n)
    for coefficient in MASS_POLYNOMIAL[-2:0:-1]:
        total_n += np.float32(coefficient)
        total_n *= rest_n
    total_n += np.float32(MASS_POLYNOMIAL[0])
    np.copyto(mass_n, total_n, casting="unsafe")  # rounds towards 0
    np.copyto(halvings_n, whole_n, casting="unsafe")
    mass_n >>= halvings_n
    return mass_n
