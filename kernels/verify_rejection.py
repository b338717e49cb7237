"""Verify by the rejection rule: each draft is accepted with probability min(1, p(x) / q(x)).

The token after the first rejected draft comes from the residual max(0, p - q), normalised; after
full acceptance from p. The emitted tokens have the target's distribution whatever q is, and a draft
is accepted with probability 1 minus the total variation distance of p and q. They are not the
tokens that plain decoding would draw, except where a row has no drafts.

**Shapes.** logits_QV fp32, the target's processed logits (divided by temperature, -inf for what may
not be drawn; a greedy row keeps its argmax only), unit stride in V: row r has k + 1 of them from
starts[r] + r on, before each draft and after the last. drafts: see ``Drafts``. logits_QV, tokens_K
and q_KV may hold more rows than that; nothing past the last row is read.

**Returns** Verified(num_accepted_R int32, next_token_R int64). Which drafts count, what a broken
distribution does and where the noise comes from: verify_drafts.py. A row's outcome depends on its
own inputs only.

**Units.** starts, num_accepted and position count tokens.

**Cost.** Q*V*4 bytes of logits for the sums, K*V*4 of q, once more R*V*4 of each for the draws,
which a cache of tens of MB holds; noise only for the R rows of the draws. No [rows, V] result is
written. Memory-bound, two launches.

**Grid.** Sums: (Q, splits), a program owns SPLIT_COLUMNS of a row. Draws: (R, shares), a program
judges its row anew from the sums, then scores its DRAW_COLUMNS; see verify_triton.py.

**Source.** Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
"""

from __future__ import annotations

import math

import torch

from pagedraft.kernels.cost import Cost
from pagedraft.kernels.verify import Verified
from pagedraft.kernels.verify_drafts import (
    Drafts,
    Judgement,
    Row,
    judge_rows,
)
from pagedraft.kernels.verify_launch import run_rule


def judge_tokens(row: Row) -> Judgement:
    """Accept drafts one by one, up to the first that is rejected or not usable."""
    for place in range(len(row.tokens)):
        log_ratio = row.log_ratio(place)
        if math.isnan(log_ratio):
            return Judgement(place, scale=None)
        if row.exponentials[place] < -log_ratio:
            return Judgement(place, scale=1.0)
    return Judgement(len(row.tokens), scale=None)


def verify_rejection_ref(logits_QV: torch.Tensor, drafts: Drafts) -> Verified:
    """Judge row by row and draw with dense noise: the oracle."""
    return judge_rows(judge_tokens, logits_QV, drafts)


def verify_rejection(logits_QV: torch.Tensor, drafts: Drafts) -> Verified:
    """Return accepted counts and next tokens; see the module docstring.

    Raises ValueError or TypeError for shapes, dtypes or devices that do not fit; the values of
    starts_R1 are not checked.
    """
    return run_rule(judge_tokens, logits_QV, drafts, is_block=False)


def verify_rejection_cost(
    num_rows: int, num_drafts: int, vocab_size: int, *, has_q: bool = False
) -> Cost:
    """Bytes and operations of one call with ``num_drafts`` drafts over all rows.

    Each row of logits and of q is read once; operations: four a logit for the sum of exponentials,
    one a q, and 260 a logit that is drawn from.
    """
    num_logit_rows = num_drafts + num_rows
    num_q_rows = num_drafts if has_q else 0
    num_bytes = 4 * vocab_size * (num_logit_rows + num_q_rows)
    num_bytes += 8 * num_drafts + 4 * (num_rows + 1) + (16 + 12) * num_rows
    flops = vocab_size * (4 * num_logit_rows + num_q_rows + 260 * num_rows)
    return Cost(bytes=num_bytes, flops=flops)
