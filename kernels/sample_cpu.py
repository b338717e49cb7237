"""CPU path of the sample op: one pass over the logits, noise only where it can decide the draw.

It works on the chunks of the noise (philox.py). The largest logits of the chunks give the greedy
token. In a sampled row two kinds of tokens get their scores first: that of the largest logit, which
wins peaked rows, and those that hold the smallest E of their chunk, which win flat rows. Any token
of chunk c scores at most ``largest logit of c / temperature - log(smallest E of c)``, so chunks and
then tokens that stay below the best first score are dropped; the rest, tens of tokens a row, are
drawn in one flat call over all rows. The result equals ``sample_ref`` in every case.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedraft.kernels.philox import (
    NOISE_CHUNK,
    SAMPLE,
    SAMPLE_CHUNK,
    Words,
    exponential,
    gumbel,
    philox4x32,
)

# Added to bounds: far above the rounding of the noise, which need not be monotone in its last bit.
_SLACK = 1e-3


def largest_of_chunks(logits_QV: torch.Tensor) -> torch.Tensor:
    """Largest logit of every NOISE_CHUNK columns, [Q, chunks]; NaN where a chunk holds one."""
    num_whole = logits_QV.shape[1] // NOISE_CHUNK * NOISE_CHUNK
    largest_QC = logits_QV[:, :num_whole].unflatten(1, (-1, NOISE_CHUNK)).amax(-1)
    if num_whole == logits_QV.shape[1]:
        return largest_QC
    return torch.cat([largest_QC, logits_QV[:, num_whole:].amax(-1, keepdim=True)], dim=1)


def chunk_logits(
    logits_QV: torch.Tensor, row_n: torch.Tensor, chunk_n: torch.Tensor
) -> torch.Tensor:
    """Copies of n chunks, [n, NOISE_CHUNK], with -inf past the vocabulary."""
    vocab_size = logits_QV.shape[1]
    if vocab_size % NOISE_CHUNK == 0:
        return logits_QV.unflatten(1, (-1, NOISE_CHUNK))[row_n, chunk_n]
    token_nL = chunk_n[:, None] * NOISE_CHUNK + torch.arange(NOISE_CHUNK)
    copy_nL = logits_QV[row_n[:, None], token_nL.clamp(max=vocab_size - 1)]
    return copy_nL.masked_fill_(token_nL >= vocab_size, float("-inf"))


def first_largest(logits_QV: torch.Tensor, largest_QC: torch.Tensor) -> torch.Tensor:
    """Lowest id of each row's largest logit, [Q]; of its first NaN if there is one."""
    chunk_Q = largest_QC.argmax(-1)
    rows_Q = torch.arange(logits_QV.shape[0])
    return chunk_Q * NOISE_CHUNK + chunk_logits(logits_QV, rows_Q, chunk_Q).argmax(-1)


@dataclass(frozen=True)
class Rows:
    """What the sampled rows draw with: 1 / temperature, and the words that select their noise."""

    inverse_S: torch.Tensor
    position_S: torch.Tensor
    seed_S: torch.Tensor
    index_S: torch.Tensor

    def words(
        self, row_n: torch.Tensor, counter_n: torch.Tensor, purpose_n: torch.Tensor | int
    ) -> Words:
        """Philox words of n (row, vocabulary id or chunk, purpose) triples."""
        seed_n = self.seed_S[row_n]
        counter = (counter_n, self.position_S[row_n], purpose_n, self.index_S[row_n])
        return philox4x32(counter, (seed_n, seed_n >> 32))


def draw(
    logits_SV: torch.Tensor, largest_SC: torch.Tensor, first_S: torch.Tensor, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row; its largest logit must be finite.

    largest_SC: ``largest_of_chunks``; first_S: ``first_largest``.
    Returns (tokens_S int64, their scores fp32).
    """
    smallest_SC, slot_SC, own_S = _first_draws(largest_SC, first_S, rows)
    gumbel_SC = gumbel(smallest_SC)
    scaled_SC = largest_SC * rows.inverse_S[:, None]
    first = (torch.arange(first_S.shape[0]), first_S // NOISE_CHUNK)
    own_S = own_S.masked_fill(slot_SC[first] == first_S % NOISE_CHUNK, 0.0)
    first_score_S = scaled_SC[first] + gumbel(smallest_SC[first] + own_S)
    floor_S = torch.maximum(first_score_S, _best_slot_score(logits_SV, slot_SC, gumbel_SC, rows))

    bound_SC = gumbel_SC + _SLACK
    pair = (scaled_SC + bound_SC >= floor_S[:, None]).nonzero(as_tuple=True)
    row_n, chunk_n = pair
    scaled_nL = chunk_logits(logits_SV, row_n, chunk_n) * rows.inverse_S[row_n, None]
    pick = (scaled_nL >= (floor_S[row_n] - bound_SC[pair])[:, None]).nonzero(as_tuple=True)
    pair_m, lane_m = pick
    row_m, chunk_m = row_n[pair_m], chunk_n[pair_m]
    token_m = chunk_m * NOISE_CHUNK + lane_m
    own_m = exponential(rows.words(row_m, token_m, SAMPLE)[0])
    own_m.masked_fill_(slot_SC[row_m, chunk_m] == lane_m, 0.0)
    score_m = scaled_nL[pick] + gumbel(smallest_SC[row_m, chunk_m] + own_m)

    best_S = floor_S.scatter_reduce(0, row_m, score_m, "amax")
    past_end = logits_SV.shape[1]
    token_m.masked_fill_(score_m < best_S[row_m], past_end)
    token_S = torch.full_like(first_S, past_end).scatter_reduce(0, row_m, token_m, "amin")
    return token_S, best_S


def _first_draws(
    largest_SC: torch.Tensor, first_S: torch.Tensor, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Smallest E and its place in every chunk, and the first tokens' own E, in one call."""
    num_rows, num_chunks = largest_SC.shape
    row_n = torch.arange(num_rows).repeat_interleave(num_chunks + 1)
    counter_SC1 = torch.arange(num_chunks + 1).repeat(num_rows, 1)
    counter_SC1[:, -1] = first_S
    purpose_SC1 = torch.full_like(counter_SC1, SAMPLE_CHUNK)
    purpose_SC1[:, -1] = SAMPLE
    words = rows.words(row_n, counter_SC1.flatten(), purpose_SC1.flatten())
    e_SC1 = exponential(words[0]).view(num_rows, -1)
    slot_SC = words[1].view(num_rows, -1)[:, :-1] & (NOISE_CHUNK - 1)
    return e_SC1[:, :-1] * (1.0 / NOISE_CHUNK), slot_SC, e_SC1[:, -1]


def _best_slot_score(
    logits_SV: torch.Tensor, slot_SC: torch.Tensor, gumbel_SC: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """The best score among the tokens that hold the smallest E of their chunk."""
    num_chunks, vocab_size = slot_SC.shape[1], logits_SV.shape[1]
    token_SC = slot_SC + torch.arange(num_chunks) * NOISE_CHUNK
    is_past_SC = token_SC >= vocab_size
    scaled_SC = logits_SV.gather(1, token_SC.clamp_(max=vocab_size - 1)) * rows.inverse_S[:, None]
    return (scaled_SC + gumbel_SC).masked_fill_(is_past_SC, float("-inf")).amax(-1)
