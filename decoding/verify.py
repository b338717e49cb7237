"""Verification by the match rule: a draft counts if it equals the target's own draw.

Every token that leaves here is the target's own draw at its own position with that position's own
noise, so the output is the plain output whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate

import torch

from pagedraft.decoding.draw import draw
from pagedraft.decoding.sequence import Sequence
from pagedraft.kernels.verify import verify


def verify_rows(
    logits_QV: torch.Tensor, sequences: Seq[Sequence], drafts: Seq[Seq[int]]
) -> list[list[int]]:
    """Return each row's accepted drafts followed by one more token.

    logits_QV: ``len(drafts[r]) + 1`` rows for each sequence, one sequence after another: the logits
        after its last committed token, then after each draft.
    The last token of a row is -1 where the target's logits hold NaN at a position that plain
    decoding would reach. Logits of sequences with rules that change them are changed in place.
    """
    lengths = [len(row) + 1 for row in drafts]
    row_sequences = [s for s, n in zip(sequences, lengths, strict=True) for _ in range(n)]
    positions = [
        s.num_tokens + i for s, n in zip(sequences, lengths, strict=True) for i in range(n)
    ]
    if len(positions) != logits_QV.shape[0]:
        raise ValueError(f"logits_QV: expected {len(positions)} rows, got {logits_QV.shape[0]}")
    prefixes = None
    if any(sequence.rules.changes_logits for sequence in sequences):
        prefixes = [row[:i] for row in drafts for i in range(len(row) + 1)]
    drawn_Q = draw(logits_QV, row_sequences, positions, prefixes)
    if len(positions) == len(sequences):  # no drafts: nothing to compare
        return [[token] for token in drawn_Q.tolist()]
    device = logits_QV.device
    flat = [token for row in drafts for token in row]
    starts = [0, *accumulate(len(row) for row in drafts)]
    accepted_R, next_R = verify(
        torch.tensor(flat, dtype=torch.int64, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        drawn_Q,
    )
    return [
        [*row[:count], token]
        for row, count, token in zip(drafts, accepted_R.tolist(), next_R.tolist(), strict=True)
    ]
