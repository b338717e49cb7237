"""Rows to sample from, described one by one, and what plain PyTorch makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

import torch

from pagedraft.kernels.sample_batch import (
    BannedIds,
    DraftPrefix,
    LogitBias,
    Penalties,
    SampleBatch,
)
from pagedraft.tests.inputs import CPU

INF = float("inf")


@dataclass(frozen=True)
class Row:
    """One row of logits in words of the API; allowed: None allows all tokens."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    banned: tuple[int, ...] = ()
    allowed: tuple[int, ...] | None = None
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()
    seed: int = 0
    position: int = 0
    sample_index: int = 0


def numbered(rows: Sequence[Row]) -> list[Row]:
    """The rows with a seed and a position of their own each."""
    return [
        replace(row, seed=place * 2**35 - 77, position=1000 + place)
        for place, row in enumerate(rows)
    ]


def _csr(lists: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    starts = [0]
    for ids in lists:
        starts.append(starts[-1] + len(ids))
    flat = [value for ids in lists for value in ids]
    return torch.tensor(starts, dtype=torch.int32), torch.tensor(flat, dtype=torch.int32)


def _penalties(rows: Sequence[Row], requests: Sequence[Row]) -> Penalties:
    held = [sorted({*r.prompt, *r.output}) for r in requests]
    counts = [
        [Counter(r.output)[token] for token in ids] for r, ids in zip(requests, held, strict=True)
    ]
    prefix_starts, drafts = _csr([row.drafts for row in rows])
    prefix = DraftPrefix(drafts.long(), prefix_starts[:-1].clone(), prefix_starts.diff().int())
    vectors = (
        _vector(rows, name, torch.float32) for name in ("repetition", "presence", "frequency")
    )
    has_drafts = any(row.drafts for row in rows)
    return Penalties(*vectors, *_csr(held), _csr(counts)[1], prefix if has_drafts else None)


def _allowed(rows: Sequence[Row], num_columns: int) -> torch.Tensor:
    num_words = -(-num_columns // 32)
    allowed = torch.full((len(rows), num_words), -1, dtype=torch.int32)
    for place, row in enumerate(rows):
        if row.allowed is not None:
            words = [
                sum(1 << v % 32 for v in row.allowed if v // 32 == w) for w in range(num_words)
            ]
            signed = [word - 2**32 if word >= 2**31 else word for word in words]
            allowed[place] = torch.tensor(signed, dtype=torch.int32)
    return allowed


def _vector(rows: Sequence[Row], name: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([getattr(row, name) for row in rows], dtype=dtype)


def _optional(rows: Sequence[Row], name: str, dtype: torch.dtype) -> torch.Tensor | None:
    is_neutral = all(getattr(row, name) == getattr(Row(), name) for row in rows)
    return None if is_neutral else _vector(rows, name, dtype)


def _bias(requests: Sequence[Row]) -> LogitBias:
    values = [value for r in requests for _, value in sorted(r.bias.items())]
    starts, ids = _csr([sorted(r.bias) for r in requests])
    return LogitBias(starts, ids, torch.tensor(values, dtype=torch.float32))


def sample_batch(
    rows: Sequence[Row],
    num_columns: int,
    device: torch.device = CPU,
    *,
    vocab_size: int | None = None,
) -> SampleBatch:
    """The batch of these rows; what is neutral in all of them is None.

    Rows of equal bias, prompt and output are one request; requests stand in reverse order.
    """
    keys = [(tuple(row.bias.items()), row.prompt, row.output) for row in rows]
    order = {key: place for place, key in enumerate(dict.fromkeys(reversed(keys)))}
    requests = [rows[keys.index(key)] for key in order]
    has_penalties = any((r.repetition, r.presence, r.frequency) != (1.0, 0.0, 0.0) for r in rows)
    has_allowed = any(row.allowed is not None for row in rows)
    batch = SampleBatch(
        temperature_Q=_vector(rows, "temperature", torch.float32),
        seed_Q=_vector(rows, "seed", torch.int64),
        position_Q=_vector(rows, "position", torch.int64),
        sample_index_Q=_optional(rows, "sample_index", torch.int64),
        top_k_Q=_optional(rows, "top_k", torch.int32),
        top_p_Q=_optional(rows, "top_p", torch.float32),
        min_p_Q=_optional(rows, "min_p", torch.float32),
        request_Q=torch.tensor([order[key] for key in keys], dtype=torch.int32),
        bias=_bias(requests) if any(r.bias for r in rows) else None,
        banned=BannedIds(*_csr([r.banned for r in rows])) if any(r.banned for r in rows) else None,
        penalties=_penalties(rows, requests) if has_penalties else None,
        allowed_QW=_allowed(rows, vocab_size or num_columns) if has_allowed else None,
        vocab_size=vocab_size,
    )
    return map_tensors(batch, lambda tensor: tensor.to(device))


def map_tensors(holder: object, change: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """A copy of a dataclass of tensors and such dataclasses with every tensor changed."""
    changed = {}
    for name in (f.name for f in fields(holder)):
        value = getattr(holder, name)
        if isinstance(value, torch.Tensor):
            changed[name] = change(value)
        elif hasattr(value, "__dataclass_fields__"):
            changed[name] = map_tensors(value, change)
    return replace(holder, **changed)


def plain_edited(logits_V: torch.Tensor, row: Row) -> torch.Tensor:
    """One row's edited logits, token by token in fp32."""
    logits = logits_V.clone()
    num_tokens = len(logits)
    for token, value in row.bias.items():
        if 0 <= token < num_tokens:
            logits[token] += value
    if row.allowed is not None:
        for token in set(range(num_tokens)) - set(row.allowed):
            logits[token] = -INF
    for token in row.banned:
        if 0 <= token < num_tokens:
            logits[token] = -INF
    output = Counter(row.output + row.drafts)
    repetition, presence, frequency = torch.tensor([row.repetition, row.presence, row.frequency])
    for token in {*row.prompt, *output}:
        if 0 <= token < num_tokens:
            own = logits[token]
            own = own / repetition if own > 0 else own * repetition
            own = own - frequency * float(output[token])
            logits[token] = own - presence * float(output[token] > 0)
    return logits


def plain_probabilities(logits_V: torch.Tensor, row: Row) -> torch.Tensor:
    """One row's distribution (fp64) after edits, temperature and cuts, by sorting."""
    logits_V = plain_edited(logits_V.float(), row)
    if row.temperature == 0:
        return torch.nn.functional.one_hot(logits_V.argmax(), len(logits_V)).double()
    probs_V = (logits_V * (1.0 / torch.tensor(row.temperature))).double().softmax(-1)
    probs_V = probs_V * (probs_V >= row.min_p * probs_V.max() * (1 - 1e-9))
    if 1 <= row.top_k < len(probs_V):
        probs_V = probs_V * (probs_V >= probs_V.topk(row.top_k).values[-1])
    if row.top_p < 1.0:
        probs_V = probs_V / probs_V.sum()
        sorted_V = probs_V.sort(descending=True).values
        before_V = sorted_V.cumsum(-1) - sorted_V
        num_kept = max(1, int((before_V < row.top_p).sum()))
        probs_V = probs_V * (probs_V >= sorted_V[num_kept - 1])
    return probs_V / probs_V.sum()
