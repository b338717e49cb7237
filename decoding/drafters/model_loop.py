"""The loop of the drafters that run a model: pass after pass, batched over the sequences."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.draw import draw_drafts
from pagedraft.decoding.sequence import Sequence
from pagedraft.model.batch import Span, build_step_batch
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer


@dataclass
class DraftRow:
    """One sequence in the loop.

    start: how many of its tokens have KV in the drafting model's pool.
    feed: the tokens that the next pass takes, at ``start`` and after: at first what of the context
        is missing, then the newest draft.
    num_drafts: how many to draw; 0 writes KV only.
    """

    sequence: Sequence
    start: int
    feed: list[int]
    num_drafts: int
    tokens: list[int] = field(default_factory=list)
    q_V: list[torch.Tensor] = field(default_factory=list)

    @property
    def proposal(self) -> Proposal:
        """What has been drafted, with what it was drawn from if that will be asked for."""
        return Proposal(self.tokens, torch.stack(self.q_V) if self.q_V else None)

    def take(self, token: int, q_V: torch.Tensor | None, vocab_size: int) -> None:
        """Add a draft. A NaN row or a token that the model cannot read ends the row."""
        if token >= 0:
            self.tokens.append(token)
            self.feed = [token]
            if q_V is not None and self.sequence.accept != "match":
                self.q_V.append(q_V)
        if not 0 <= token < vocab_size:
            self.num_drafts = len(self.tokens)


# One pass over what the rows feed: fp32 logits [rows that draw, V], in order.
RunPass = Callable[[Seq[DraftRow]], torch.Tensor]


def draft_tokens(
    run_pass: RunPass, rows: Seq[DraftRow], vocab_size: int, target_vocab_size: int
) -> int:
    """Draft until every row has what it wants; return the number of passes, at most the most drafts
    of a row, or 1 where rows write KV only.

    The drafts, and how far each row's KV is written, are left in ``rows``. A row that has enough
    leaves the batch. vocab_size: of the drafting model.
    """
    num_rounds = 0
    active = list(rows)
    while active:
        logits_QV = run_pass(active)
        for row in active:
            row.start += len(row.feed)
        num_rounds += 1
        active = [row for row in active if row.num_drafts > 0]
        if not active:
            break
        tokens, q_QV = draw_drafts(
            logits_QV,
            [row.sequence for row in active],
            [row.tokens for row in active],
            vocab_size=target_vocab_size,
        )
        for index, (row, token) in enumerate(zip(active, tokens, strict=True)):
            q_V = None if q_QV is None else q_QV[index]
            row.take(token, q_V, vocab_size)
        active = [row for row in active if len(row.tokens) < row.num_drafts]
    return num_rounds


def spans_of(rows: Seq[DraftRow]) -> list[Span]:
    """What the rows feed; logits for those that draw."""
    return [
        Span(row.feed, row.start, row.sequence.block_ids, num_logits=int(row.num_drafts > 0))
        for row in rows
    ]


def run_model(model: Transformer, cache: KVCache, rows: Seq[DraftRow]) -> torch.Tensor:
    """The pass of a model that reads tokens alone."""
    batch = build_step_batch(
        spans_of(rows),
        block_size=cache.block_size,
        device=model.device,
        row_multiple=model.row_multiple,
    )
    return model.forward(batch, cache)
