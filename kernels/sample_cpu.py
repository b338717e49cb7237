"""CPU path of the sample op: one pass over the logits, noise only where it can decide the draw.

It works on the chunks of the noise (philox.py). The largest logits of the chunks give the greedy
token. In a sampled row two kinds of tokens get their scores first: that of the largest logit, which
wins peaked rows, and those that hold the smallest E of their chunk, which win flat rows. Any token
of chunk c scores at most ``largest logit of c / temperature - log(smallest E of c)``, so chunks and
then tokens that stay below the best first score, or beyond the row's cut, are dropped; the rest,
tens of tokens a row, are drawn in one flat call over all rows. The result equals ``sample_ref`` in
every case. All but the pass over the logits runs in NumPy, where a small array costs a quarter of
the time, and finding the place of a maximum in 256 logits a fifteenth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagedraft.kernels.logit_edits_cpu import edit_logits_cpu
from pagedraft.kernels.philox import (
    NOISE_CHUNK,
    SAMPLE,
    SAMPLE_CHUNK,
    exponential,
    gumbel,
    philox4x32,
)
from pagedraft.kernels.sample_batch import INVALID_TOKEN, SampleBatch
from pagedraft.kernels.truncate import is_sampled
from pagedraft.kernels.truncate_cpu import truncate_cpu

# Added to bounds: far above the rounding of the noise, which need not be monotone in its last bit.
_SLACK = 1e-3


def largest_of_chunks(logits_QV: torch.Tensor) -> torch.Tensor:
    """Largest logit of every NOISE_CHUNK columns, [Q, chunks]; NaN where a chunk holds one."""
    num_whole = logits_QV.shape[1] // NOISE_CHUNK * NOISE_CHUNK
    largest_QC = logits_QV[:, :num_whole].unflatten(1, (-1, NOISE_CHUNK)).amax(-1)
    if num_whole == logits_QV.shape[1]:
        return largest_QC
    return torch.cat([largest_QC, logits_QV[:, num_whole:].amax(-1, keepdim=True)], dim=1)


def chunk_logits(logits_QV: np.ndarray, row_n: np.ndarray, chunk_n: np.ndarray) -> np.ndarray:
    """Copies of n chunks, [n, NOISE_CHUNK], with -inf past the vocabulary."""
    num_rows, vocab_size = logits_QV.shape
    num_whole, rest = divmod(vocab_size, NOISE_CHUNK)
    whole_QV = logits_QV[:, : num_whole * NOISE_CHUNK]
    whole_QCL = whole_QV.reshape(num_rows, num_whole, NOISE_CHUNK)
    if rest == 0:
        return whole_QCL[row_n, chunk_n]
    is_whole_n = chunk_n < num_whole
    copy_nL = np.full((len(row_n), NOISE_CHUNK), -np.inf, logits_QV.dtype)
    copy_nL[is_whole_n] = whole_QCL[row_n[is_whole_n], chunk_n[is_whole_n]]
    copy_nL[~is_whole_n, :rest] = logits_QV[row_n[~is_whole_n], -rest:]
    return copy_nL


def first_largest(logits_QV: np.ndarray, largest_QC: np.ndarray) -> np.ndarray:
    """Lowest id of each row's largest logit, [Q]; of its first NaN if there is one."""
    chunk_Q = largest_QC.argmax(axis=1)
    rows_Q = np.arange(logits_QV.shape[0])
    return chunk_Q * NOISE_CHUNK + chunk_logits(logits_QV, rows_Q, chunk_Q).argmax(axis=1)


@dataclass(frozen=True)
class Rows:
    """The sampled rows: their place, 1 / temperature, and the words that select their noise.

    top_S, cut_S: their largest x and their cuts (truncate.py); None: all keep every token.
    """

    row_S: np.ndarray
    inverse_S: np.ndarray
    position_S: np.ndarray
    seed_S: np.ndarray
    index_S: np.ndarray
    top_S: np.ndarray | None = None
    cut_S: np.ndarray | None = None

    def scaled(self, logits_n: np.ndarray, row_n: np.ndarray) -> np.ndarray:
        """x of logits whose sampled rows are ``row_n`` (broadcast); -inf beyond the cut."""
        x_n = logits_n * self.inverse_S[row_n]
        if self.cut_S is not None:
            x_n[self.top_S[row_n] - x_n > self.cut_S[row_n]] = -np.inf
        return x_n

    def words(
        self, row_n: np.ndarray, counter_n: np.ndarray, purpose_n: np.ndarray | int
    ) -> tuple[np.ndarray, ...]:
        """Philox words of n (sampled row, vocabulary id or chunk, purpose) triples."""
        seed_n = self.seed_S[row_n]
        counter = (counter_n, self.position_S[row_n], purpose_n, self.index_S[row_n])
        return philox4x32(counter, (seed_n, seed_n >> 32))


def sample_cpu(logits_QV: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """Draw as ``sample_ref`` does, reading the logits about once and pruning the noise."""
    edited_QV = _edited(logits_QV, batch)
    largest_QC = largest_of_chunks(edited_QV).numpy()
    logits = edited_QV.numpy()
    top_Q = largest_QC.max(axis=1)
    first_Q = first_largest(logits, largest_QC)
    tokens_Q = np.where(top_Q > -np.inf, first_Q, INVALID_TOKEN)
    is_sampled_Q = is_sampled(batch).numpy()
    if is_sampled_Q.any():
        with np.errstate(over="ignore", invalid="ignore"):  # a quotient may overflow: infinite
            _take_infinite(tokens_Q, logits, is_sampled_Q & (top_Q == np.inf), batch)
            row_S = (is_sampled_Q & np.isfinite(top_Q)).nonzero()[0]
            if len(row_S) > 0:
                rows = _sampled_rows(edited_QV, batch, row_S, largest_QC)
                drawn_S, score_S = draw(logits, largest_QC[row_S], first_Q[row_S], rows)
                tokens_Q[row_S] = np.where(score_S == -np.inf, INVALID_TOKEN, drawn_S)
    return torch.from_numpy(tokens_Q)


def _take_infinite(
    tokens_Q: np.ndarray, logits_QV: np.ndarray, is_infinite_Q: np.ndarray, batch: SampleBatch
) -> None:
    """Give sampled rows with +inf the lowest id whose x is +inf, be it by overflow."""
    row_P = is_infinite_Q.nonzero()[0]
    if len(row_P) > 0:
        x_PV = logits_QV[row_P] * (np.float32(1.0) / batch.temperature_Q.numpy()[row_P, None])
        tokens_Q[row_P] = x_PV.argmax(axis=1)


def _edited(logits_QV: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """Logits in fp32 without padding columns, edited in place where the batch asks for it."""
    logits_QV = logits_QV.detach()[:, : batch.num_tokens(logits_QV.shape[1])].float()
    if batch.has_edits:
        edit_logits_cpu(logits_QV, batch)
    return logits_QV


def _sampled_rows(
    logits_QV: torch.Tensor, batch: SampleBatch, row_S: np.ndarray, largest_QC: np.ndarray
) -> Rows:
    index_Q = batch.sample_index_Q
    inverse_S = np.float32(1.0) / batch.temperature_Q.numpy()[row_S]
    words = [vector.numpy()[row_S] for vector in (batch.position_Q, batch.seed_Q)]
    words.append(np.zeros_like(row_S) if index_Q is None else index_Q.numpy()[row_S])
    cuts = (None, None)
    if batch.has_cut:
        cuts = truncate_cpu(logits_QV, batch, row_S, inverse_S, largest_QC[row_S])
    return Rows(row_S, inverse_S, *words, *cuts)


def process_logits_cpu(logits_QV: torch.Tensor, batch: SampleBatch) -> None:
    """Process fp32 logits in place, as ``process_logits_ref`` does."""
    edited_QV = _edited(logits_QV, batch)
    x_QV, out_QV = edited_QV.numpy(), logits_QV.detach().numpy()
    largest_QC = largest_of_chunks(edited_QV).numpy()
    top_Q = largest_QC.max(axis=1)
    is_sampled_Q = is_sampled(batch).numpy()
    point_P = (~is_sampled_Q).nonzero()[0]
    token_P = first_largest(x_QV, largest_QC)[point_P]
    row_S = (is_sampled_Q & (top_Q > -np.inf)).nonzero()[0]
    with np.errstate(over="ignore", invalid="ignore"):
        rows = _sampled_rows(edited_QV, batch, row_S, largest_QC)
        _scale_rows(x_QV, rows)
        top_Q[row_S] *= rows.inverse_S
    out_QV[:, x_QV.shape[1] :] = -np.inf
    infinite_I = (is_sampled_Q & (top_Q == np.inf)).nonzero()[0]
    if len(infinite_I) > 0:
        point_P = np.concatenate([point_P, infinite_I])
        token_P = np.concatenate([token_P, x_QV[infinite_I].argmax(axis=1)])
    out_QV[point_P] = -np.inf
    out_QV[point_P, token_P] = 0.0
    out_QV[~(top_Q > -np.inf)] = np.nan


def _scale_rows(x_QV: np.ndarray, rows: Rows) -> None:
    """Turn the sampled rows' logits into x, in place; -inf beyond the cut."""
    distance_V = np.empty(x_QV.shape[1], np.float32)
    for s, row in enumerate(rows.row_S):
        x_V = x_QV[row]
        x_V *= rows.inverse_S[s]
        if rows.cut_S is not None and rows.top_S is not None:
            np.subtract(rows.top_S[s], x_V, out=distance_V)
            np.putmask(x_V, distance_V > rows.cut_S[s], np.float32(-np.inf))


def draw(
    logits_QV: np.ndarray, largest_SC: np.ndarray, first_S: np.ndarray, rows: Rows
) -> tuple[np.ndarray, np.ndarray]:
    """Draw a token for each sampled row; its largest logit must be finite.

    largest_SC: ``largest_of_chunks``; first_S: ``first_largest``.
    Returns (tokens_S int64, their scores fp32).
    """
    scaled_SC = rows.scaled(largest_SC, np.arange(len(first_S))[:, None])
    smallest_SC, slot_SC, own_S = _first_draws(largest_SC, first_S, rows)
    first = (np.arange(len(first_S)), first_S // NOISE_CHUNK)
    own_S[slot_SC[first] == first_S % NOISE_CHUNK] = 0.0
    first_E_S1 = (smallest_SC[first] + own_S)[:, None]
    gumbel_SC1 = gumbel(np.concatenate([smallest_SC, first_E_S1], axis=1))
    gumbel_SC = gumbel_SC1[:, :-1]
    first_score_S = scaled_SC[first] + gumbel_SC1[:, -1]
    floor_S = np.maximum(first_score_S, _best_slot_score(logits_QV, slot_SC, gumbel_SC, rows))

    bound_SC = gumbel_SC + np.float32(_SLACK)
    pair = (scaled_SC + bound_SC >= floor_S[:, None]).nonzero()
    row_n, chunk_n = pair
    copy_nL = chunk_logits(logits_QV, rows.row_S[row_n], chunk_n)
    scaled_nL = rows.scaled(copy_nL, row_n[:, None])
    pick = (scaled_nL + bound_SC[pair][:, None] >= floor_S[row_n, None]).nonzero()
    pair_m, lane_m = pick
    row_m, chunk_m = row_n[pair_m], chunk_n[pair_m]
    token_m = chunk_m * NOISE_CHUNK + lane_m
    own_m = exponential(rows.words(row_m, token_m, SAMPLE)[0])
    own_m[slot_SC[row_m, chunk_m] == lane_m] = 0.0
    score_m = scaled_nL[pick] + gumbel(smallest_SC[row_m, chunk_m] + own_m)

    best_S = np.full_like(floor_S, -np.inf)
    np.maximum.at(best_S, row_m, score_m)
    token_S = np.full_like(first_S, logits_QV.shape[1])
    is_best_m = score_m == best_S[row_m]
    np.minimum.at(token_S, row_m[is_best_m], token_m[is_best_m])
    return token_S, best_S


def _first_draws(
    largest_SC: np.ndarray, first_S: np.ndarray, rows: Rows
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Smallest E and its place in every chunk, and the first tokens' own E, in one call."""
    num_rows, num_chunks = largest_SC.shape
    counter_SC1 = np.tile(np.arange(num_chunks + 1), (num_rows, 1))
    counter_SC1[:, -1] = first_S
    purpose_C1 = np.full(num_chunks + 1, SAMPLE_CHUNK)
    purpose_C1[-1] = SAMPLE
    words = rows.words(np.arange(num_rows)[:, None], counter_SC1, purpose_C1)
    e_SC1 = exponential(words[0])
    slot_SC = words[1][:, :-1] & (NOISE_CHUNK - 1)
    return e_SC1[:, :-1] * np.float32(1.0 / NOISE_CHUNK), slot_SC, e_SC1[:, -1]


def _best_slot_score(
    logits_QV: np.ndarray, slot_SC: np.ndarray, gumbel_SC: np.ndarray, rows: Rows
) -> np.ndarray:
    """The best score among the tokens that hold the smallest E of their chunk."""
    vocab_size = logits_QV.shape[1]
    token_SC = slot_SC + np.arange(slot_SC.shape[1]) * NOISE_CHUNK
    logits_SC = logits_QV[rows.row_S[:, None], np.minimum(token_SC, vocab_size - 1)]
    score_SC = rows.scaled(logits_SC, np.arange(len(logits_SC))[:, None]) + gumbel_SC
    score_SC[token_SC >= vocab_size] = -np.inf
    return score_SC.max(axis=1)
