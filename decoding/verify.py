"""Verification: how many drafts of each row count, and the token after them.

Match rule: a draft counts if it equals the target's own draw at its position with that position's
noise, so the output is the plain output whatever was drafted. Rejection and block rule: drafts are
judged by their probabilities, and the output has the distribution of plain decoding; see
kernels/verify_rejection.py and verify_block.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain

import numpy as np
import torch

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.draw import draw_spans, process, rows_of_logits, seeds
from pagedraft.decoding.sequence import Sequence
from pagedraft.decoding.span_draws import SpanDraws
from pagedraft.kernels.check import check_dtype, check_shape
from pagedraft.kernels.verify import Verified, verify
from pagedraft.kernels.verify_block import verify_block
from pagedraft.kernels.verify_drafts import Drafts
from pagedraft.kernels.verify_rejection import verify_rejection

Judge = Callable[[torch.Tensor, Drafts], Verified]


@dataclass(frozen=True)
class Verification:
    """A step's verified rows, still on the device; ``read`` is the one wait for them.

    counts_R: int32 or int64, accepted drafts of each row; None where nobody drafted.
    order: the row of each entry; None: in order.
    """

    drafts: list[list[int]]
    next_token_R: torch.Tensor
    counts_R: torch.Tensor | None = None
    order: list[int] | None = None

    def read(self) -> list[list[int]]:
        """Each row's accepted drafts and the token after them."""
        if self.counts_R is None:
            return [[token] for token in self.next_token_R.tolist()]
        numbers = torch.cat((self.next_token_R, self.counts_R.long())).tolist()
        num_rows = len(self.drafts)
        order = range(num_rows) if self.order is None else self.order
        rows: list[list[int]] = [[]] * num_rows
        for row, token, count in zip(order, numbers, numbers[num_rows:], strict=False):
            rows[row] = [*self.drafts[row][:count], token] if count else [token]
        return rows


def verify_rows(
    logits_QV: torch.Tensor, sequences: Seq[Sequence], proposals: Seq[Proposal]
) -> list[list[int]]:
    """``start_verification(...).read()``."""
    return start_verification(logits_QV, sequences, proposals).read()


def start_verification(
    logits_QV: torch.Tensor,
    sequences: Seq[Sequence],
    proposals: Seq[Proposal],
    known: SpanDraws | None = None,
) -> Verification:
    """Find each row's accepted drafts and one more token; a row goes by its ``accept``.

    logits_QV: ``len(proposals[r].tokens) + 1`` rows for each sequence, one sequence after another:
        the logits after its last committed token, then after each draft; fp32, [Q, V].
    The last token of a row is -1 where there is none at a position that plain decoding would reach:
    the logits hold NaN, or a logits processor failed (``Sequence.failures``). A row without drafts
    draws plainly under every rule.
    Logits of sequences for which ``changes_logits`` holds, and of those that are not of the match
    rule, are scratch: their values are unspecified afterwards.
    known: keeps what does not change from step to step.

    Raises ValueError or TypeError for logits or a q of another shape or dtype.
    """
    drafts = [proposal.tokens for proposal in proposals]
    num_rows = len(drafts) + sum(map(len, drafts))
    if num_rows != logits_QV.shape[0]:
        raise ValueError(f"logits_QV: expected {num_rows} rows, got {logits_QV.shape[0]}")
    if num_rows == len(drafts):  # no drafts: nothing to compare
        return Verification(drafts, draw_spans(logits_QV, sequences, drafts, known))
    rules = [s.accept if d else "match" for s, d in zip(sequences, drafts, strict=True)]
    kinds = dict.fromkeys(rules)
    if len(kinds) == 1:
        counts_R, next_token_R = _RULES[rules[0]](logits_QV, sequences, proposals, known)
        return Verification(drafts, next_token_R, counts_R)
    starts = [0, *accumulate(len(tokens) + 1 for tokens in drafts)]
    order: list[int] = []
    parts: list[Verified] = []
    for rule in kinds:
        rows = [row for row, other in enumerate(rules) if other == rule]
        places = [place for row in rows for place in range(starts[row], starts[row + 1])]
        own_QV = logits_QV[torch.tensor(places, device=logits_QV.device)]
        own = [sequences[row] for row in rows], [proposals[row] for row in rows]
        parts.append(_RULES[rule](own_QV, *own, None))
        order += rows
    counts_R, next_token_R = (torch.cat(part) for part in zip(*parts, strict=True))
    return Verification(drafts, next_token_R, counts_R, order)


def _match(
    logits_QV: torch.Tensor,
    sequences: Seq[Sequence],
    proposals: Seq[Proposal],
    known: SpanDraws | None,
) -> Verified:
    """Draw at every position and compare."""
    drafts = [proposal.tokens for proposal in proposals]
    drawn_Q = draw_spans(logits_QV, sequences, drafts, known)
    return verify(*_tokens_and_starts(drafts, logits_QV.device), drawn_Q)


def _judged(
    judge: Judge,
    logits_QV: torch.Tensor,
    sequences: Seq[Sequence],
    proposals: Seq[Proposal],
    known: SpanDraws | None,
) -> Verified:
    """Make each row's logits those of its distribution and judge the drafts by them."""
    process(logits_QV, *rows_of_logits(sequences, [proposal.tokens for proposal in proposals]))
    return judge(logits_QV, _drafts(logits_QV, sequences, proposals))


_RULES: Mapping[str, Callable[..., Verified]] = {
    "match": _match,
    "rejection": partial(_judged, verify_rejection),
    "block": partial(_judged, verify_block),
}


def _tokens_and_starts(
    drafts: Seq[Seq[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """All drafts, int64 [K], and where each row's begin, int32 [R + 1]."""
    starts_R1 = np.array([0, *accumulate(map(len, drafts))], np.int32)
    tokens_K = np.fromiter(chain.from_iterable(drafts), np.int64, int(starts_R1[-1]))
    tensors = torch.from_numpy(tokens_K), torch.from_numpy(starts_R1)
    if device.type == "cpu":
        return tensors
    return tensors[0].to(device, non_blocking=True), tensors[1].to(device, non_blocking=True)


def _drafts(logits_QV: torch.Tensor, sequences: Seq[Sequence], proposals: Seq[Proposal]) -> Drafts:
    """What the rejection and the block rule are told about the drafts."""
    device = logits_QV.device
    drafts = [proposal.tokens for proposal in proposals]
    tokens_K, starts_R1 = _tokens_and_starts(drafts, device)
    index_R = torch.tensor([sequence.sample_index for sequence in sequences], device=device)
    has_q = [proposal.q_KV is not None for proposal in proposals]
    return Drafts(
        tokens_K,
        starts_R1,
        seed_R=seeds(device, sequences),
        position_R=torch.tensor([sequence.num_tokens for sequence in sequences], device=device),
        sample_index_R=index_R,
        q_KV=_joined_q(logits_QV, proposals) if any(has_q) else None,
        has_q_R=None if all(has_q) or not any(has_q) else torch.tensor(has_q, device=device),
    )


def _joined_q(logits_QV: torch.Tensor, proposals: Seq[Proposal]) -> torch.Tensor:
    """The q of all drafts one after the other; of drafts without one whatever memory holds."""
    parts = []
    for row, proposal in enumerate(proposals):
        shape = (len(proposal.tokens), logits_QV.shape[1])
        q_KV = logits_QV.new_empty(shape) if proposal.q_KV is None else proposal.q_KV
        check_shape(f"proposals[{row}].q_KV", q_KV, shape)
        check_dtype(f"proposals[{row}].q_KV", q_KV, torch.float32)
        parts.append(q_KV.detach().to(logits_QV.device).contiguous())
    return parts[0] if len(parts) == 1 else torch.cat(parts)
