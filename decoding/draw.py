"""Drawing tokens: the one place where a sequence's parameters and position meet a kernel.

Draft and target call the same function, so at one position they share the noise and agree as often
as the two models do.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from pagedraft.decoding.logit_rules import LogitRules
from pagedraft.decoding.sequence import Sequence
from pagedraft.kernels.sample import sample
from pagedraft.kernels.sample_batch import (
    BannedIds,
    DraftPrefix,
    LogitBias,
    Penalties,
    SampleBatch,
)

_INT64_SIGN = 2**63


def draw(
    logits_QV: torch.Tensor,
    sequences: Seq[Sequence],
    positions: Seq[int],
    prefixes: Seq[Seq[int]] | None = None,
) -> torch.Tensor:
    """Draw one token a row of logits: int64 [Q], -1 for a row without a finite maximum.

    sequences: whose row it is, one entry a row; positions: index of the drawn token in its context;
    prefixes: the drafts between the sequence's committed context and that position, None for none.
    Logits of rows whose sequence has rules that change them are changed in place.
    """
    return sample(logits_QV, sample_batch(logits_QV.device, sequences, positions, prefixes))


def sample_batch(
    device: torch.device,
    sequences: Seq[Sequence],
    positions: Seq[int],
    prefixes: Seq[Seq[int]] | None = None,
) -> SampleBatch:
    """Return what the rows of one step draw with; what is neutral for all rows is left out."""

    def tensor(values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype, device=device)

    optional: dict[str, Any] = {}
    rules = [sequence.rules for sequence in sequences]
    if any(row.has_cut for row in rules):
        optional["top_k_Q"] = tensor([row.top_k for row in rules], torch.int32)
        optional["top_p_Q"] = tensor([row.top_p for row in rules], torch.float32)
        optional["min_p_Q"] = tensor([row.min_p for row in rules], torch.float32)
    if any(row.changes_logits for row in rules):
        prefixes = prefixes or [()] * len(sequences)
        optional |= _edits(tensor, sequences, prefixes)
    return SampleBatch(
        temperature_Q=tensor([s.temperature for s in sequences], torch.float32),
        seed_Q=tensor([_signed(s.seed) for s in sequences], torch.int64),
        position_Q=tensor(positions, torch.int64),
        **optional,
    )


Tensor = Callable[[Any, torch.dtype], torch.Tensor]


def _edits(tensor: Tensor, sequences: Seq[Sequence], prefixes: Seq[Seq[int]]) -> dict[str, Any]:
    """The fields of SampleBatch that change logits; a request's lists are stored once."""
    requests = list(dict.fromkeys(sequences))
    index = {sequence: number for number, sequence in enumerate(requests)}
    edits: dict[str, Any] = {
        "request_Q": tensor([index[sequence] for sequence in sequences], torch.int32)
    }
    if any(sequence.rules.bias for sequence in requests):
        edits["bias"] = _bias(tensor, [sequence.rules for sequence in requests])
    banned = [
        _banned_ids(sequence, len(prefix))
        for sequence, prefix in zip(sequences, prefixes, strict=True)
    ]
    if any(banned):
        edits["banned"] = BannedIds(
            tensor(_starts(banned), torch.int32), tensor(_flat(banned), torch.int32)
        )
    if any(sequence.rules.has_penalties for sequence in requests):
        edits["penalties"] = _penalties(tensor, sequences, requests, prefixes)
    return edits


def _bias(tensor: Tensor, rules: Seq[LogitRules]) -> LogitBias:
    pairs = _flat([row.bias for row in rules])
    return LogitBias(
        tensor(_starts([row.bias for row in rules]), torch.int32),
        tensor([token for token, _ in pairs], torch.int32),
        tensor([value for _, value in pairs], torch.float32),
    )


def _banned_ids(sequence: Sequence, num_drafts: int) -> tuple[int, ...]:
    num_output = sequence.num_tokens - sequence.num_prompt + num_drafts
    return sequence.rules.stop_ids if num_output < sequence.rules.min_tokens else ()


def _penalties(
    tensor: Tensor,
    sequences: Seq[Sequence],
    requests: Seq[Sequence],
    prefixes: Seq[Seq[int]],
) -> Penalties:
    rules = [sequence.rules for sequence in sequences]
    counts = [s.counts() for s in requests if s.rules.has_penalties]
    lengths = iter([len(c.ids_n) for c in counts])
    sizes = [next(lengths) if s.rules.has_penalties else 0 for s in requests]
    return Penalties(
        repetition_Q=tensor([row.repetition_penalty for row in rules], torch.float32),
        presence_Q=tensor([row.presence_penalty for row in rules], torch.float32),
        frequency_Q=tensor([row.frequency_penalty for row in rules], torch.float32),
        starts_R1=tensor([0, *accumulate(sizes)], torch.int32),
        ids_n=tensor(np.concatenate([c.ids_n for c in counts]), torch.int32),
        counts_n=tensor(np.concatenate([c.counts_n for c in counts]), torch.int32),
        prefix=_prefix(tensor, prefixes),
    )


def _prefix(tensor: Tensor, prefixes: Seq[Seq[int]]) -> DraftPrefix | None:
    if not any(prefixes):
        return None
    return DraftPrefix(
        tensor(_flat(prefixes), torch.int64),
        tensor(_starts(prefixes)[:-1], torch.int32),
        tensor([len(prefix) for prefix in prefixes], torch.int32),
    )


def _flat(lists: Seq[Seq[Any]]) -> list[Any]:
    return [value for values in lists for value in values]


def _starts(lists: Seq[Seq[Any]]) -> list[int]:
    return [0, *accumulate(len(values) for values in lists)]


def _signed(seed: int) -> int:
    """The 64 bits of ``seed`` as a signed integer, which is what a tensor can hold."""
    return seed - 2 * _INT64_SIGN if seed >= _INT64_SIGN else seed
