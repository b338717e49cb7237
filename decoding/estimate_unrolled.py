"""Agreement by the place of a draft in its pass, where later drafts rest on guesses.

A feature head reads the target's states for the first draft of a pass and its own for those after
it, so how often it is right depends on the place, and being teacher-forced at the first tells
nothing of the others. A draft counts only where all before it became part of the text, so along the
text every pass that could begin is drafted: from each of its positions, place by place, with the
text's tokens and the head's own states.

**Cost**: as many passes of the head over each position as there are places.
"""

from __future__ import annotations

import torch

from pagedraft.decoding.estimate_forced import Agreement, add_rows, compare, readable
from pagedraft.decoding.estimate_text import BLOCK_SIZE, LOGIT_ROWS, Reader, Text
from pagedraft.kernels.copy_blocks import copy_blocks
from pagedraft.model.batch import Span, build_step_batch
from pagedraft.model.feature_head import FeatureHead


@torch.inference_mode()
def compare_places(target: Reader, draft: Reader, text: Text, num_places: int) -> Agreement:
    """As ``compare``; of a feature head also at places after the first, ``num_places`` in all."""
    if not isinstance(draft.model, FeatureHead):
        return compare(target, draft, text)
    places = [Agreement([], [], [], []) for _ in range(num_places)]
    num_prompt, token_ids = len(text.prompt_ids), text.token_ids
    end = readable(draft, token_ids)
    for place in range(1, num_places):  # no pass begins before the output
        _add_nothing(places[place], min(place, max(0, end - num_prompt)))
    if end > num_prompt:
        for reader in (target, draft):
            reader.skip(token_ids[: num_prompt - 1])
    for first in range(num_prompt, end, LOGIT_ROWS):
        last = min(first + LOGIT_ROWS, end)
        until = min(last + num_places - 1, end)
        p_logits_QV = target.read(token_ids[first - 1 : until - 1], first - 1)
        drafting = _Unrolled(draft, token_ids, first, last)
        for place, agreement in enumerate(places):
            q_logits_QV = drafting.next_place(min(last + place, end) - place)
            start = first + place
            drawn = token_ids[start : start + len(q_logits_QV)]
            if drawn:
                p_QV = p_logits_QV[place : place + len(drawn)].clone()
                sequence = text.sequence(start - num_prompt)
                add_rows(agreement, p_QV, q_logits_QV, sequence, drawn)
    places[0].later.extend(places[1:])
    return places[0]


class _Unrolled:
    """The passes that begin at tokens ``first`` to ``last - 1`` of a text, all at once.

    Each writes KV of guesses into blocks of its own, behind what the head read before it.
    """

    def __init__(self, draft: Reader, token_ids: list[int], first: int, last: int) -> None:
        self._draft = draft
        self._token_ids = token_ids
        self._starts = range(first, last)
        self._place = 0
        self._states_QE: torch.Tensor | None = None
        self._tables: list[list[int]] = []

    def next_place(self, end: int) -> torch.Tensor:
        """fp32 logits [passes, V] of the next place, of the passes that begin before ``end``."""
        starts = self._starts[: max(0, end - self._starts.start)]
        if self._states_QE is None:
            fed = self._token_ids[starts.start - 1 : starts.stop - 1]
            logits_QV = self._draft.read(fed, starts.start - 1)
            self._states_QE = self._draft.states_QE
        elif not starts:
            return self._states_QE.new_empty(0, self._draft.model.config.vocab_size)
        else:
            logits_QV = self._guess(starts)
        self._place += 1
        return logits_QV

    def _guess(self, starts: range) -> torch.Tensor:
        draft, before = self._draft, self._place - 1
        assert isinstance(draft.model, FeatureHead)
        assert self._states_QE is not None
        if not self._tables:
            self._tables = self._own_tables()
        spans = [
            Span([self._token_ids[start + before]], start + before, table, 1)
            for start, table in zip(starts, self._tables, strict=False)
        ]
        batch = build_step_batch(
            spans,
            block_size=BLOCK_SIZE,
            device=draft.model.device,
            row_multiple=draft.model.row_multiple,
        )
        missing = batch.tokens_T.shape[0] - len(spans)
        before_TE = torch.nn.functional.pad(self._states_QE[: len(spans)], (0, 0, 0, missing))
        logits_QV, self._states_QE = draft.model.forward(batch, draft.cache, before_TE)
        return logits_QV

    def _own_tables(self) -> list[list[int]]:
        """Each pass's blocks: those before it are shared, the one it begins in is copied."""
        draft, tables, copies = self._draft, [], []
        each = len(draft.scratch_ids) // LOGIT_ROWS
        for row, start in enumerate(self._starts):
            shared = draft.block_ids[: start // BLOCK_SIZE]
            own = draft.scratch_ids[row * each : (row + 1) * each]
            if start % BLOCK_SIZE:
                copies.append((draft.block_ids[start // BLOCK_SIZE], own[0]))
            tables.append([*shared, *own])
        if copies:
            copy_blocks(draft.cache.tensors, torch.tensor(copies))
        return tables


def _add_nothing(agreement: Agreement, count: int) -> None:
    agreement.equal_n.extend([False] * count)
    agreement.greedy_n.extend([False] * count)
    agreement.alpha_n.extend([0.0] * count)
    agreement.accept_n.extend([0.0] * count)
