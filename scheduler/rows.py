"""The running requests as rows of a step: who is in which row, and what a step feeds.

A request keeps its row while it runs (``Request.row``), so the block table is updated in place and
a step costs the host what its tokens cost, whatever the contexts. A row that a plan leaves out has
an empty span.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import torch

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.kernels.paged_attention_config import SEGMENT
from pagedraft.model.batch import StepBatch, lay_out
from pagedraft.model.row_table import RowTable
from pagedraft.model.shared_prefix import Run, runs_of
from pagedraft.scheduler.request import Request

NOTHING = Proposal([])


class Step(NamedTuple):
    """What one forward pass takes, and whose logits it returns: ``sampled`` in order, with drafts.

    unfinished: requests whose prompt goes on, and tokens fed of it.
    """

    batch: StepBatch
    sampled: list[Request]
    proposals: list[Proposal]
    unfinished: list[tuple[Request, int]]


class _Spans(NamedTuple):
    """What the rows of a step feed: see ``lay_out`` and ``Step``."""

    tokens: list[int]
    lengths_R: np.ndarray
    starts_R: np.ndarray
    num_logits_R: np.ndarray
    sampled: list[Request]
    proposals: list[Proposal]
    unfinished: list[tuple[Request, int]]


def _spans(
    requests: Seq[Request],
    scheduled: Mapping[Request, int],
    proposals: Mapping[Request, Proposal],
) -> _Spans:
    """Row by row: so many tokens, and if these reach its last one its drafts, too."""
    tokens, lengths, starts, num_logits = [], [], [], []
    sampled, drafts, unfinished = [], [], []
    for request in requests:
        sequence, length = request.sequence, scheduled.get(request, 0)
        token_ids, start = sequence.token_ids, sequence.num_written
        pending, count = len(token_ids) - start, 0
        if length >= pending:
            proposal = proposals.get(request, NOTHING)
            if pending == 1:
                tokens.append(token_ids[start])
            else:
                tokens += token_ids[start:]
            tokens += proposal.tokens
            count = 1 + len(proposal.tokens)
            length = pending + count - 1
            sampled.append(request)
            drafts.append(proposal)
        elif length:
            tokens += token_ids[start : start + length]
            unfinished.append((request, length))
        else:
            start = 0
        lengths.append(length)
        starts.append(start)
        num_logits.append(count)
    return _Spans(
        tokens,
        np.array(lengths),
        np.array(starts),
        np.array(num_logits),
        sampled,
        drafts,
        unfinished,
    )


def _decoding_spans(
    requests: Seq[Request],
    scheduled: Mapping[Request, int],
    proposals: Mapping[Request, Proposal],
) -> _Spans | None:
    """The same where every row feeds its last token alone, without a loop; None elsewhere."""
    num_rows = len(requests)
    if proposals or len(scheduled) != num_rows or sum(scheduled.values()) != num_rows:
        return None
    sequences = [request.sequence for request in requests]
    starts_R = np.array([sequence.num_written for sequence in sequences])
    num_tokens_R = np.array([len(sequence.token_ids) for sequence in sequences])
    if (num_tokens_R - starts_R).max() > 1:
        return None
    tokens = [sequence.token_ids[-1] for sequence in sequences]
    ones_R = np.ones(num_rows, np.int64)
    return _Spans(tokens, ones_R, starts_R, ones_R, [*requests], [NOTHING] * num_rows, [])


class Rows:
    """Lays out steps of the running requests.

    max_blocks: most blocks of one request. row_multiple: see ``lay_out``.
    device: where a step's tensors are, but the block table, which is on the device it began with.
    """

    def __init__(
        self,
        max_rows: int,
        max_blocks: int,
        *,
        block_size: int,
        device: torch.device,
        row_multiple: int,
    ) -> None:
        self.max_rows = max_rows
        self._table = RowTable(max_rows, max_blocks, device)
        self._requests: list[Request] = []
        self._layout: dict[str, Any] = {"block_size": block_size, "row_multiple": row_multiple}
        self.device = device
        self._block_size = block_size
        self._common_R: np.ndarray | None = None  # keys that a row shares with the one before it
        self._runs: list[Run] | None = None  # of rows whose prompts are written

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def table_RM(self) -> torch.Tensor:
        """The whole block table on the device; steps bring views of it."""
        return self._table.device_RM

    def holds(self, request: Request) -> bool:
        """Whether a request has a row here."""
        return 0 <= request.row < len(self._requests) and self._requests[request.row] is request

    def join(self, request: Request) -> None:
        """Give a request a row."""
        request.row = self._table.join()
        self._requests.append(request)
        self._common_R = self._runs = None

    def leave(self, request: Request) -> None:
        """Take the row of a request that no longer runs; a no-op without one."""
        if request.row < 0:
            return
        self._table.leave(request.row)
        last = self._requests.pop()
        if last is not request:
            self._requests[request.row] = last
            last.row = request.row
        request.row = -1
        self._common_R = self._runs = None

    def lay_out(
        self, scheduled: Mapping[Request, int], proposals: Mapping[Request, Proposal]
    ) -> Step:
        """The step of a plan: the pending tokens it schedules of each request, then its drafts."""
        table_RM = self._updated_table(scheduled)
        spans = _decoding_spans(self._requests, scheduled, proposals)
        if spans is None:
            spans = _spans(self._requests, scheduled, proposals)
        batch = lay_out(
            spans.tokens,
            spans.lengths_R,
            spans.starts_R,
            spans.num_logits_R,
            self._table.host_RM[: len(self._requests)],
            runs=self._shared_runs(spans.starts_R),
            device_table_RM=table_RM,
            device=self.device,
            **self._layout,
        )
        return Step(batch, spans.sampled, spans.proposals, spans.unfinished)

    def _updated_table(self, scheduled: Mapping[Request, int]) -> torch.Tensor:
        """The block table on the device with the blocks of the rows that run."""
        table, requests = self._table, self._requests
        num_blocks = [len(request.sequence.block_ids) for request in requests]
        if num_blocks != table.num_set[: len(requests)]:
            for row, request in enumerate(requests):
                if num_blocks[row] != table.num_set[row] and request in scheduled:
                    if not table.num_set[row]:  # what it shares is known from its first step on
                        self._common_R = self._runs = None
                    table.extend(row, request.sequence.block_ids)
        return table.on_device(max(num_blocks))

    def _shared_runs(self, num_cached_R: np.ndarray) -> list[Run]:
        """Runs of neighbouring rows that begin with the same blocks.

        What two rows share is settled when the later one joins, so it is found once for a set of
        rows, and runs only change with it or while prompts are written.
        """
        if self._common_R is None:
            self._common_R = self._find_common()
        if not self._common_R.any():
            return []
        if self._runs is not None:
            return self._runs
        runs = runs_of(num_cached_R.tolist(), self._common_R.tolist())
        if (num_cached_R >= self._common_R.max()).all():
            self._runs = runs
        return runs

    def _find_common(self) -> np.ndarray:
        table_RM = self._table.host_RM[: len(self._requests)]
        common_R = np.zeros(len(self._requests), dtype=np.int64)
        for row in np.flatnonzero(table_RM[1:, 0] == table_RM[:-1, 0]) + 1:
            count = min(self._table.num_set[row - 1 : row + 1])
            differs = np.flatnonzero(table_RM[row, :count] != table_RM[row - 1, :count])
            count = int(differs[0]) if len(differs) else count
            common_R[row] = count * self._block_size // SEGMENT * SEGMENT
        return common_R
