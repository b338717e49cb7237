"""The oracle: one request, one token at a time, in the simplest code that can do it.

It shares with the engine the model's forward pass and the kernels of a draw, which have tests of
their own. What a request keeps, where it ends and its text are decided here a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch

from pagedraft.decoding.draw import draw, process
from pagedraft.decoding.params import MODEL_DEFAULTS, SamplingParams, logit_rules
from pagedraft.decoding.sequence import Sequence
from pagedraft.kernels.logprobs import logprobs
from pagedraft.model.batch import Span, build_step_batch
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer

BLOCK_SIZE = 64


@dataclass
class Plain:
    """What a request becomes. finish_reason None: the forced tokens ran out before it ended."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text: str = ""
    logprobs: list[dict[int, float]] = field(default_factory=list)


def decode_plainly(
    model: Transformer,
    prompt: Seq[int],
    params: SamplingParams,
    *,
    seed: int,
    sample_index: int = 0,
    tokenizer: Any = None,
    kv_dtype: torch.dtype | None = None,
    forced: Seq[int] | None = None,
) -> Plain:
    """Decode ``prompt`` alone, drawing a token a pass; ``forced``: take these instead of drawing.

    seed: of the request; sample_index: which of its n samples. kv_dtype: what its KV is stored in;
    None: the dtype of the activations.
    """
    stop_ids = set(params.stop_token_ids)
    stop_ids |= set() if params.ignore_eos else set(model.config.eos_token_ids)
    row = Sequence(
        list(prompt),
        len(prompt),
        temperature=1.0 if params.temperature is None else params.temperature,
        seed=seed,
        sample_index=sample_index,
        rules=logit_rules(params, MODEL_DEFAULTS, stop_ids),
    )
    plain, next_logits = Plain(), _forward_one_by_one(model, row, params.max_tokens, kv_dtype)
    while plain.finish_reason is None:
        raw_1V = next_logits()
        token, plain.finish_reason = _next_token(raw_1V, row, params, forced)
        if token is None:
            break
        row.append([token])
        plain.token_ids.append(token)
        plain.logprobs.append(_logprobs(raw_1V, token, params.logprobs or 0))
        _end(plain, params, stop_ids, tokenizer)
        if plain.finish_reason is None and row.num_tokens >= model.config.max_positions:
            plain.finish_reason = "length"
    return plain


def _forward_one_by_one(
    model: Transformer, row: Sequence, max_tokens: int, kv_dtype: torch.dtype | None
) -> Callable[[], torch.Tensor]:
    """A function that feeds what is new and returns raw logits [1, V] of the next token."""
    num_blocks = 1 + -(-(row.num_tokens + max_tokens) // BLOCK_SIZE)
    dtype = kv_dtype or model.activation_dtype
    cache = KVCache(model.config, num_blocks, BLOCK_SIZE, dtype, model.device)
    blocks = list(range(1, num_blocks))

    def next_logits() -> torch.Tensor:
        span = Span(row.token_ids[row.num_written :], row.num_written, blocks, num_logits=1)
        batch = build_step_batch(
            [span], block_size=BLOCK_SIZE, device=model.device, row_multiple=model.row_multiple
        )
        return model.forward(batch, cache)

    return next_logits


def _next_token(
    raw_1V: torch.Tensor, row: Sequence, params: SamplingParams, forced: Seq[int] | None
) -> tuple[int | None, str | None]:
    """The token that follows, or None and why there is none ("impossible": it can't be drawn)."""
    output_ids = row.output_ids
    try:
        edited_1V = _processed(raw_1V, params, output_ids)
    except (ArithmeticError, TypeError):
        return None, "error"
    drawn_from_1V = edited_1V.clone()
    token = int(draw(edited_1V, [row], [row.num_tokens]))
    if token < 0:
        return None, "error"
    if forced is None:
        return token, None
    if len(forced) == len(output_ids):
        return None, None
    process(drawn_from_1V, [row], [row.num_tokens])
    token = forced[len(output_ids)]
    return (token, None) if drawn_from_1V[0, token] > -torch.inf else (None, "impossible")


def _processed(raw_1V: torch.Tensor, params: SamplingParams, output_ids: list[int]) -> torch.Tensor:
    """A copy of the logits as the request's processors leave them; TypeError for a wrong shape."""
    logits_V = raw_1V[0].clone()
    for processor in params.logits_processors:
        logits_V = processor(list(output_ids), logits_V)
        if logits_V.shape != raw_1V.shape[1:] or logits_V.dtype != raw_1V.dtype:
            raise TypeError("a processor that returns another shape or dtype")
    return logits_V[None].clone()


def _logprobs(raw_1V: torch.Tensor, token: int, top_n: int) -> dict[int, float]:
    row = logprobs(raw_1V, torch.tensor([token]), top_n)
    entry = dict(zip(row.top_ids_Qn[0].tolist(), row.top_logprobs_Qn[0].tolist(), strict=True))
    return entry | {token: float(row.chosen_Q[0])}


def _end(plain: Plain, params: SamplingParams, stop_ids: set[int], tokenizer: Any) -> None:
    """Set the finish reason if the newest token ends the request: stop before length."""
    token, num_output = plain.token_ids[-1], len(plain.token_ids)
    found = None
    if params.stop and num_output > params.min_tokens:
        found = _stop_string(plain.token_ids, params, tokenizer)
    plain.text = _text(tokenizer, plain.token_ids)
    if found is not None:
        start, stop = found
        plain.text = plain.text[: start + len(stop) * params.include_stop_str_in_output]
    if token in stop_ids:
        plain.finish_reason, plain.stop_reason = "stop", token
    elif found is not None:
        plain.finish_reason, plain.stop_reason = "stop", stop
    elif num_output >= params.max_tokens:
        plain.finish_reason = "length"


def _stop_string(
    token_ids: list[int], params: SamplingParams, tokenizer: Any
) -> tuple[int, str] | None:
    """Beginning and text of the first stop string that ends behind ``min_tokens`` tokens."""
    text = _text(tokenizer, token_ids)
    ignored = len(_text(tokenizer, token_ids[: params.min_tokens]).rstrip("\ufffd"))
    found = [
        (end - len(stop), len(stop), stop)
        for stop in params.stop or ()
        for end in range(ignored + 1, len(text) + 1)
        if text[:end].endswith(stop)
    ]
    if not found:
        return None
    start, _, stop = min(found)
    return start, stop


def _text(tokenizer: Any, token_ids: list[int]) -> str:
    return "" if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=True)
