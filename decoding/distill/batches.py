"""Which taught texts make up a batch, and the batch itself: texts side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pagedraft.decoding.distill.taught import Taught


class Batch(NamedTuple):
    """Texts side by side: tokens_BL int64 [B, L], right-padded with 0, without their last tokens.

    places_N: where, in [B * L], each token that counts is predicted; states_NE fp32 and lse_N: the
    teacher's there. before_BLE: fp32, the teacher's states of the tokens before, zeros at the
    first; None without a feature head.
    """

    tokens_BL: torch.Tensor
    places_N: torch.Tensor
    states_NE: torch.Tensor
    lse_N: torch.Tensor
    before_BLE: torch.Tensor | None = None


def shift(states_BLE: torch.Tensor) -> torch.Tensor:
    """At each token the state of the one before it, zeros at the first."""
    return F.pad(states_BLE, (0, 0, 1, 0))[:, :-1]


def plan_batches(
    texts: Sequence[Taught], batch_tokens: int, seed: int, epoch: int, pool: int = 128
) -> list[list[int]]:
    """Indices of the texts of each batch of an epoch; every text once.

    Texts are shuffled and sorted by length within pools of ``pool``, so that little is padding;
    then batches are shuffled. A text longer than ``batch_tokens`` is a batch of its own.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(texts), generator=generator).tolist()
    batches: list[list[int]] = []
    for start in range(0, len(order), pool):
        batch: list[int] = []
        for index in sorted(order[start : start + pool], key=lambda i: len(texts[i].token_ids)):
            if batch and (len(batch) + 1) * len(texts[index].token_ids) > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(index)
        batches.append(batch)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def make_batch(
    texts: Sequence[Taught],
    device: torch.device,
    *,
    with_states: bool = False,
    with_prompts: bool = False,
) -> Batch:
    """Put texts side by side on ``device``.

    with_states: for a feature head. with_prompts: the prompts' tokens count, too, where the
    teacher's states are known at all.
    """
    length = max(len(text.token_ids) for text in texts) - 1
    tokens_BL = torch.zeros(len(texts), length, dtype=torch.int64)
    with_prompts = with_prompts and all(text.before is not None for text in texts)
    places, states, lse = [], [], []
    for row, text in enumerate(texts):
        num_tokens = len(text.token_ids) - 1
        tokens_BL[row, :num_tokens] = text.token_ids[:-1]
        first = 0 if with_prompts else text.num_prompt - 1
        places.append(torch.arange(row * length + first, row * length + num_tokens))
        if with_prompts and text.before is not None:
            states.append(text.before[0])
            lse.append(text.before[1])
        states.append(text.states_NE)
        lse.append(text.lse_N)
    return Batch(
        tokens_BL.to(device),
        torch.cat(places).to(device),
        torch.cat(states).to(device, torch.float32),
        torch.cat(lse).to(device),
        _states_before(texts, length).to(device) if with_states else None,
    )


def _states_before(texts: Sequence[Taught], length: int) -> torch.Tensor:
    """Of each token the teacher's state of the one before it, zeros at the first: fp32 [B, L, E]"""
    before_BLE = torch.zeros(len(texts), length, texts[0].states_NE.shape[1])
    for row, text in enumerate(texts):
        if text.before is None:
            raise ValueError(
                "texts: expected states of prompts, for a feature head to read, got none"
            )
        states_TE = torch.cat([text.before[0], text.states_NE])
        before_BLE[row, 1 : len(states_TE)] = states_TE[:-1]
    return before_BLE
