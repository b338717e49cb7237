"""Verification: how many drafts of each row count, and the token after them.

Match rule: a draft counts if it equals the target's own draw at its position with that position's
noise, so the output is the plain output whatever was drafted. Rejection and block rule: drafts are
judged by their probabilities, and the output has the distribution of plain decoding; see
kernels/verify_rejection.py and verify_block.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from itertools import accumulate

import torch

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.draw import changes_logits, draw, process, seeds
from pagedraft.decoding.sequence import Sequence
from pagedraft.kernels.check import check_dtype, check_shape
from pagedraft.kernels.verify import Verified, verify
from pagedraft.kernels.verify_block import verify_block
from pagedraft.kernels.verify_drafts import Drafts
from pagedraft.kernels.verify_rejection import verify_rejection

Judge = Callable[[torch.Tensor, Drafts], Verified]


def verify_rows(
    logits_QV: torch.Tensor, sequences: Seq[Sequence], proposals: Seq[Proposal]
) -> list[list[int]]:
    """Return each row's accepted drafts followed by one more token; a row goes by its ``accept``.

    logits_QV: ``len(proposals[r].tokens) + 1`` rows for each sequence, one sequence after another:
        the logits after its last committed token, then after each draft; fp32, [Q, V].
    The last token of a row is -1 where there is none at a position that plain decoding would reach:
    the logits hold NaN, or a logits processor failed (``Sequence.failures``). A row without drafts
    draws plainly under every rule.
    Logits of sequences for which ``changes_logits`` holds, and of those that are not of the match
    rule, are scratch: their values are unspecified afterwards.

    Raises ValueError or TypeError for logits or a q of another shape or dtype.
    """
    starts = [0, *accumulate(len(proposal.tokens) + 1 for proposal in proposals)]
    if starts[-1] != logits_QV.shape[0]:
        raise ValueError(f"logits_QV: expected {starts[-1]} rows, got {logits_QV.shape[0]}")
    rules = [s.accept if p.tokens else "match" for s, p in zip(sequences, proposals, strict=True)]
    verified: list[list[int]] = [[]] * len(rules)
    for rule in dict.fromkeys(rules):
        rows = [row for row, other in enumerate(rules) if other == rule]
        own_QV = logits_QV
        if len(rows) < len(rules):
            places = [place for row in rows for place in range(starts[row], starts[row + 1])]
            own_QV = logits_QV[torch.tensor(places, device=logits_QV.device)]
        own = _RULES[rule](own_QV, [sequences[row] for row in rows], [proposals[r] for r in rows])
        for row, tokens in zip(rows, own, strict=True):
            verified[row] = tokens
    return verified


def _match(
    logits_QV: torch.Tensor, sequences: Seq[Sequence], proposals: Seq[Proposal]
) -> list[list[int]]:
    """Draw at every position and compare."""
    drawn_Q = draw(logits_QV, *_rows_of_logits(sequences, proposals))
    if len(drawn_Q) == len(sequences):  # no drafts: nothing to compare
        return [[token] for token in drawn_Q.tolist()]
    return _tokens(proposals, verify(*_tokens_and_starts(proposals, logits_QV.device), drawn_Q))


def _judged(
    judge: Judge, logits_QV: torch.Tensor, sequences: Seq[Sequence], proposals: Seq[Proposal]
) -> list[list[int]]:
    """Make each row's logits those of its distribution and judge the drafts by them."""
    process(logits_QV, *_rows_of_logits(sequences, proposals))
    return _tokens(proposals, judge(logits_QV, _drafts(logits_QV, sequences, proposals)))


_RULES: Mapping[str, Callable[..., list[list[int]]]] = {
    "match": _match,
    "rejection": partial(_judged, verify_rejection),
    "block": partial(_judged, verify_block),
}


def _rows_of_logits(
    sequences: Seq[Sequence], proposals: Seq[Proposal]
) -> tuple[list[Sequence], list[int], list[list[int]] | None]:
    """Sequence, position and draft prefix of every row of logits; None: nothing reads them."""
    lengths = [len(proposal.tokens) + 1 for proposal in proposals]
    row_sequences = [s for s, n in zip(sequences, lengths, strict=True) for _ in range(n)]
    positions = [
        s.num_tokens + i for s, n in zip(sequences, lengths, strict=True) for i in range(n)
    ]
    if not any(map(changes_logits, sequences)):
        return row_sequences, positions, None
    prefixes = [p.tokens[:i] for p in proposals for i in range(len(p.tokens) + 1)]
    return row_sequences, positions, prefixes


def _tokens_and_starts(
    proposals: Seq[Proposal], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """All drafts, int64 [K], and where each row's begin, int32 [R + 1]."""
    tokens = [token for proposal in proposals for token in proposal.tokens]
    starts = [0, *accumulate(len(proposal.tokens) for proposal in proposals)]
    return (
        torch.tensor(tokens, dtype=torch.int64, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
    )


def _tokens(proposals: Seq[Proposal], verified: Verified) -> list[list[int]]:
    """The accepted drafts of each row and the token after them."""
    counts, next_tokens = (result.tolist() for result in verified)
    return [
        [*proposal.tokens[:count], token]
        for proposal, count, token in zip(proposals, counts, next_tokens, strict=True)
    ]


def _drafts(logits_QV: torch.Tensor, sequences: Seq[Sequence], proposals: Seq[Proposal]) -> Drafts:
    """What the rejection and the block rule are told about the drafts."""
    device = logits_QV.device
    tokens_K, starts_R1 = _tokens_and_starts(proposals, device)
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
