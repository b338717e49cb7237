"""Drawing tokens: the one place where a sequence's parameters and position meet a kernel.

Under the match rule draft and target draw with the noise of the position, so they agree as often as
the two models do. Under the other rules a draft has noise of its own, and says what it was drawn
from.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from pagedraft.decoding.logit_rules import LogitRules
from pagedraft.decoding.processors import run_processors
from pagedraft.decoding.sequence import Sequence
from pagedraft.decoding.span_draws import SpanDraws, changes_logits
from pagedraft.kernels.sample import process_logits, sample
from pagedraft.kernels.sample_batch import (
    BannedIds,
    DraftPrefix,
    LogitBias,
    Penalties,
    SampleBatch,
)
from pagedraft.kernels.verify_drafts import proposal_seed


def draw(
    logits_QV: torch.Tensor,
    sequences: Seq[Sequence],
    positions: Seq[int],
    prefixes: Seq[Seq[int]] | None = None,
) -> torch.Tensor:
    """Draw one token a row of logits: int64 [Q], -1 for a row without a finite maximum.

    sequences: whose row it is, one entry a row; positions: index of the drawn token in its context;
    prefixes: the drafts between the sequence's committed context and that position, None for none.
    Rows of sequences for which ``changes_logits`` holds are changed in place.
    """
    run_processors(logits_QV, sequences, positions, prefixes)
    return sample(logits_QV, sample_batch(logits_QV.device, sequences, positions, prefixes))


def draw_spans(
    logits_QV: torch.Tensor,
    sequences: Seq[Sequence],
    drafts: Seq[Seq[int]],
    known: SpanDraws | None = None,
) -> torch.Tensor:
    """Draw at every position of each row's span: ``len(drafts[r]) + 1`` rows of logits each.

    What ``draw`` returns for these rows, without lists of the length of Q where nothing reads them.
    known: keeps what does not change from step to step.
    """
    known = known or SpanDraws()
    if known.is_edited(sequences):
        return draw(logits_QV, *rows_of_logits(sequences, drafts))
    lengths_R = np.array([len(tokens) + 1 for tokens in drafts]) if any(drafts) else None
    return sample(logits_QV, known.batch(logits_QV.device, sequences, lengths_R))


def process(
    logits_QV: torch.Tensor,
    sequences: Seq[Sequence],
    positions: Seq[int],
    prefixes: Seq[Seq[int]] | None = None,
) -> None:
    """Replace fp32 logits by those that the rows draw from: softmax is their distribution.

    Arguments as in ``draw``. A greedy row keeps its token alone; a row without a token is NaN.
    """
    run_processors(logits_QV, sequences, positions, prefixes)
    with torch.inference_mode():  # the logits of a forward pass may be changed in it alone
        batch = sample_batch(logits_QV.device, sequences, positions, prefixes)
        process_logits(logits_QV, batch)


def draw_drafts(
    logits_QV: torch.Tensor,
    sequences: Seq[Sequence],
    prefixes: Seq[Seq[int]],
    *,
    vocab_size: int | None = None,
) -> tuple[list[int], torch.Tensor | None]:
    """Draw one draft a sequence from a draft model's logits: tokens and what they were drawn from.

    prefixes: what this round has drafted for each sequence; the draft follows it. vocab_size: of
    the target; tokens that only one of the two models knows are never drawn. None: it is that of
    the logits.

    Returns (tokens, q_QV): -1 for a row without a finite maximum; q_QV fp32 [Q, vocab_size], for
    rows whose drafts are judged against it: those of the match rule are unspecified there, and it
    is None where all rows are. Rows of sequences that ``changes_logits`` are changed in place.
    """
    positions = [s.num_tokens + len(prefix) for s, prefix in zip(sequences, prefixes, strict=True)]
    if vocab_size is not None and logits_QV.shape[1] != vocab_size:
        missing = vocab_size - logits_QV.shape[1]
        logits_QV = torch.nn.functional.pad(logits_QV, (0, missing), value=-torch.inf)
    judged = [row for row, sequence in enumerate(sequences) if sequence.accept != "match"]
    if not judged:
        return draw(logits_QV, sequences, positions, prefixes).tolist(), None
    if len(judged) == len(sequences):
        tokens_Q, q_QV = _draw_judged(logits_QV, sequences, positions, prefixes)
        return tokens_Q.tolist(), q_QV
    matched = [row for row, sequence in enumerate(sequences) if sequence.accept == "match"]
    q_QV = torch.empty_like(logits_QV)
    tokens_Q = q_QV.new_empty(len(sequences), dtype=torch.int64)

    def picked(rows: list[int]) -> tuple[Any, ...]:
        return tuple([values[row] for row in rows] for values in (sequences, positions, prefixes))

    tokens_Q[matched] = draw(logits_QV[matched], *picked(matched))
    tokens_Q[judged], q_QV[judged] = _draw_judged(logits_QV[judged], *picked(judged))
    return tokens_Q.tolist(), q_QV


def _draw_judged(
    logits_QV: torch.Tensor,
    sequences: Seq[Sequence],
    positions: Seq[int],
    prefixes: Seq[Seq[int]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw rows from their softmax, with the noise of their round; both are returned."""
    process(logits_QV, sequences, positions, prefixes)
    device = logits_QV.device
    round_Q = torch.tensor([s.num_tokens for s in sequences], device=device)
    index_Q = torch.tensor([s.sample_index for s in sequences], device=device)
    batch = SampleBatch(
        temperature_Q=torch.ones(len(sequences), device=device),
        seed_Q=proposal_seed(seeds(device, sequences), round_Q, index_Q),
        position_Q=torch.tensor(positions, device=device),
        sample_index_Q=index_Q,
    )
    return sample(logits_QV, batch), logits_QV.softmax(-1)


def seeds(device: torch.device, sequences: Seq[Sequence]) -> torch.Tensor:
    """Their seeds, int64 [len(sequences)]: the 64 bits of each as a signed integer."""
    return torch.tensor([sequence.signed_seed for sequence in sequences], device=device)


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
    if any(sequence.sample_index for sequence in sequences):
        optional["sample_index_Q"] = tensor([s.sample_index for s in sequences], torch.int64)
    return SampleBatch(
        temperature_Q=tensor([s.temperature for s in sequences], torch.float32),
        seed_Q=seeds(device, sequences),
        position_Q=tensor(positions, torch.int64),
        **optional,
    )


def rows_of_logits(
    sequences: Seq[Sequence], drafts: Seq[Seq[int]]
) -> tuple[list[Sequence], list[int], list[Seq[int]] | None]:
    """Sequence, position and draft prefix of every row of logits; None: nothing reads them."""
    pairs = list(zip(sequences, drafts, strict=True))
    row_sequences = [s for s, tokens in pairs for _ in range(len(tokens) + 1)]
    positions = [s.num_tokens + i for s, tokens in pairs for i in range(len(tokens) + 1)]
    if not any(map(changes_logits, sequences)):
        return row_sequences, positions, None
    prefixes = [tokens[:i] for tokens in drafts for i in range(len(tokens) + 1)]
    return row_sequences, positions, prefixes


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
