"""Verify by the block rule: a row's drafts are judged together; accepts at least as many.

With prefixes X^i of the drafts, p_0 = 1 and p_i = min(1, p_(i-1) * p(x_i) / q(x_i)), the first i
drafts are accepted with probability h_i, independently for each i, and the longest accepted prefix
counts:

    h_i = s_i / (s_i + 1 - p_i),  s_i = sum over the vocabulary of max(0, p_i * p - q) after X^i
    h_k = p_k for all k drafts

The token after i < k accepted drafts comes from the residual max(0, p_i * p - q), normalised; after
full acceptance from p. The emitted tokens have the target's distribution whatever q is. The
expected number of accepted drafts is never below the rejection rule's; for one draft, and for
deterministic drafters, it is the same.

**Shapes, Returns, Units.** As verify_rejection.py. Sampling drafters must draw with the seeds of
``proposal_seed``.

**Cost.** As the rejection rule, and once more K*V*4 bytes of logits and of q for the sums s where q
is dense: three launches, two where no row has a q.

**Grid.** As verify_rejection.py; the launch between: (K, splits), a program owns SPLIT_COLUMNS of a
draft's s.

**Source.** Sun et al., "Block verification accelerates speculative decoding", arXiv 2403.10444,
Algorithm 2.
"""

from __future__ import annotations

import math
from itertools import takewhile

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
from pagedraft.kernels.verify_rejection import verify_rejection_cost


def judge_block(row: Row) -> Judgement:
    """Accept the longest prefix of the usable drafts whose own test succeeds."""
    log_ratios = map(row.log_ratio, range(len(row.tokens)))
    usable = list(takewhile(lambda ratio: not math.isnan(ratio), log_ratios))
    longest = Judgement(0, scale=1.0)
    log_p = 0.0
    for num, (log_ratio, e) in enumerate(zip(usable, row.exponentials, strict=False), start=1):
        log_p = min(log_p + log_ratio, 0.0)
        p = math.exp(log_p)
        if num == len(usable):
            is_accepted = e >= -log_p
        else:
            s = float(row.residual_V(num, p).sum())
            is_accepted = math.exp(-e) * (s + 1 - p) <= s
        if is_accepted:
            longest = Judgement(num, scale=p)
    if longest.num_accepted == len(usable):
        return Judgement(len(usable), scale=None)
    return longest


def verify_block_ref(logits_QV: torch.Tensor, drafts: Drafts) -> Verified:
    """Judge row by row and draw with dense noise: the oracle."""
    return judge_rows(judge_block, logits_QV, drafts)


def verify_block(logits_QV: torch.Tensor, drafts: Drafts) -> Verified:
    """Return accepted counts and next tokens; see the module docstring.

    Raises ValueError or TypeError for shapes, dtypes or devices that do not fit; the values of
    starts_R1 are not checked.
    """
    return run_rule(judge_block, logits_QV, drafts, is_block=True)


def verify_block_cost(
    num_rows: int, num_drafts: int, vocab_size: int, *, has_q: bool = False
) -> Cost:
    """As ``verify_rejection_cost``, plus the sums s: five operations a logit of a dense draft."""
    num_sums = num_drafts if has_q else 0
    more = Cost(bytes=8 * vocab_size * num_sums, flops=5 * vocab_size * num_sums)
    return verify_rejection_cost(num_rows, num_drafts, vocab_size, has_q=has_q) + more
