"""Sample: draw one token a row from logits, greedily or by Gumbel-max with counter-based noise.

What happens to a row, in this order, each step only where its parameter asks for it:

1. edits (logit_edits.py): allowed tokens, bias, bans, penalties;
2. temperature: x = logit / temperature, in fp32; a row below MIN_TEMPERATURE takes its largest
   logit here;
3. cuts (truncate.py): min-p, then top-k, then top-p over what these left;
4. the token with the largest ``x + noise`` among those left.

**Shapes.** logits_QV fp32, fp16 or bf16, unit stride in V; fp32 where there are edits. The rest:
sample_batch.py.

**Returns** tokens_Q int64. What overflows in fp32 counts as infinite. Equal values: the lowest id.
Tokens at -inf are never drawn; +inf wins over everything finite, the lowest id of several first. A
row that holds NaN (in a column that is neither padding nor banned), or nothing above -inf, yields
INVALID_TOKEN.

**In place.** With edits ``logits_QV`` is scratch: its contents are unspecified afterwards. Without,
it is only read. ``process_logits`` always writes. Raw log-probabilities are taken before.

A row's token depends on its own logits and parameters only: not on the other rows, not on how the
vocabulary is split, not on the device. The noise is a function of (seed, position, sample index,
token id), see philox.py; thresholds are exact, see truncate.py.

**Units.** position counts tokens: the index that the drawn token takes in its context.

**Cost.** Q*V*itemsize bytes read, once, and once more where there are cuts; 8*Q written.
Memory-bound; noise adds about 150 integer and 100 floating-point operations a logit of a sampled
row, none to greedy rows.

**Grid.** sample_triton.py: two launches, one more for edits, one more for cuts.

**Source.** Gumbel-max: Maddison et al., "A* Sampling" (NeurIPS 2014).
"""

from __future__ import annotations

import torch

from pagedraft.kernels.check import check_dtype
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.dispatch import implementation
from pagedraft.kernels.logit_edits import edit_logits_cost, edit_logits_ref
from pagedraft.kernels.philox import gumbel_noise_ref
from pagedraft.kernels.sample_batch import (
    INVALID_TOKEN,
    BannedIds,
    DraftPrefix,
    LogitBias,
    Penalties,
    SampleBatch,
    check_batch,
)
from pagedraft.kernels.sample_cpu import process_logits_cpu, sample_cpu
from pagedraft.kernels.sample_triton import process_logits_triton, sample_triton
from pagedraft.kernels.truncate import MIN_TEMPERATURE, is_sampled, truncate_cost, truncate_ref

__all__ = [
    "INVALID_TOKEN",
    "MIN_TEMPERATURE",
    "BannedIds",
    "DraftPrefix",
    "LogitBias",
    "Penalties",
    "SampleBatch",
    "process_logits",
    "process_logits_ref",
    "sample",
    "sample_cost",
    "sample_ref",
]


def _kept_ref(logits_QV: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """x of the tokens that a row may draw, -inf elsewhere; logits of greedy rows; no padding."""
    logits_QV = logits_QV[:, : batch.num_tokens(logits_QV.shape[1])].float()
    if batch.has_edits:
        logits_QV = edit_logits_ref(logits_QV, batch)
    inverse_Q = torch.where(is_sampled(batch), 1.0 / batch.temperature_Q, 1.0)
    x_QV = logits_QV * inverse_Q[:, None]
    if batch.has_cut:
        top_Q, cut_Q = truncate_ref(x_QV, batch)
        x_QV = x_QV.masked_fill(top_Q[:, None] - x_QV > cut_Q[:, None], float("-inf"))
    return x_QV


def _largest_ref(scores_QV: torch.Tensor) -> torch.Tensor:
    is_valid_Q = scores_QV.amax(-1) > float("-inf")
    return scores_QV.argmax(-1).masked_fill(~is_valid_Q, INVALID_TOKEN)


def sample_ref(logits_QV: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """Draw with sorted rows and dense noise: the oracle."""
    x_QV = _kept_ref(logits_QV, batch)
    index_Q = batch.sample_index_Q
    noise_QV = gumbel_noise_ref(
        x_QV.shape[1], batch.position_Q, batch.seed_Q, 0 if index_Q is None else index_Q
    )
    return _largest_ref(torch.where(is_sampled(batch)[:, None], x_QV + noise_QV, x_QV))


def process_logits_ref(logits_QV: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """Return processed logits; the oracle of ``process_logits``."""
    x_QV = _kept_ref(logits_QV, batch)
    token_Q = _largest_ref(x_QV)
    is_point_Q = ~is_sampled(batch) | (x_QV.amax(-1) == float("inf"))
    point_QV = torch.full_like(x_QV, float("-inf"))
    point_QV.scatter_(1, token_Q.clamp(min=0)[:, None], 0.0)
    x_QV = torch.where(is_point_Q[:, None], point_QV, x_QV)
    out_QV = torch.full_like(logits_QV, float("-inf"))
    out_QV[:, : x_QV.shape[1]] = x_QV
    return out_QV.masked_fill((token_Q == INVALID_TOKEN)[:, None], float("nan"))


def sample(logits_QV: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """Draw a token for each row; see the module docstring.

    Raises ValueError or TypeError for shapes, dtypes or devices that do not fit.
    """
    check_batch(logits_QV, batch)
    choice = implementation("sample", logits_QV.device, has_cpu=True)
    if choice == "cpu":
        return sample_cpu(logits_QV, batch)
    if choice == "ref":
        return sample_ref(logits_QV, batch)
    return sample_triton(logits_QV, batch)


def process_logits(logits_QV: torch.Tensor, batch: SampleBatch) -> None:
    """Replace fp32 logits by what the rows draw from: ``softmax`` of it is their distribution.

    A sampled row holds x of the tokens that it may draw and -inf elsewhere, padding included. A
    greedy row, and one with +inf among its x, holds 0 at its token and -inf elsewhere. A row
    without a token (see ``sample``) holds NaN everywhere.
    Raises ValueError or TypeError for shapes, dtypes or devices that do not fit.
    """
    check_dtype("logits_QV", logits_QV, torch.float32)
    check_batch(logits_QV, batch)
    choice = implementation("sample", logits_QV.device, has_cpu=True)
    if choice == "cpu":
        process_logits_cpu(logits_QV, batch)
    elif choice == "ref":
        logits_QV.copy_(process_logits_ref(logits_QV, batch))
    else:
        process_logits_triton(logits_QV, batch)


def sample_cost(
    num_rows: int,
    vocab_size: int,
    itemsize: int,
    num_sampled: int = 0,
    *,
    num_cut: int = 0,
    num_edits: int = 0,
    has_allowed: bool = False,
) -> Cost:
    """Bytes of one call; operations a logit: a comparison, and 250 for noise in a sampled row.

    num_cut: rows with a cut. num_edits: entries of all rows' lists together.
    """
    edits = edit_logits_cost(num_rows, vocab_size, num_entries=num_edits, has_allowed=has_allowed)
    num_bytes = num_rows * (vocab_size * itemsize + 28)
    draw = Cost(bytes=num_bytes, flops=vocab_size * (num_rows + 250 * num_sampled))
    return edits + truncate_cost(num_cut, vocab_size, itemsize) + draw
