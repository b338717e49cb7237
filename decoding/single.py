"""Decoding in its two plainest forms: one sequence, no scheduler. Read this first.

``generate_with_kv_cache`` is plain decoding. ``speculative_decode`` drafts, verifies in one pass,
rolls back at the first mismatch, and returns the same. The engine does this for many requests
at once, and its tests compare it with these two.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pagedraft.decoding.drafters.draft_model import DraftModelDrafter, check_vocabularies
from pagedraft.decoding.drafters.feature_head import FeatureHeadDrafter
from pagedraft.decoding.draw import draw
from pagedraft.decoding.load import encode, load_draft_model, load_model, load_tokenizer
from pagedraft.decoding.params import MODEL_DEFAULTS, SamplingParams, logit_rules
from pagedraft.decoding.sequence import Sequence
from pagedraft.decoding.verify import verify_rows
from pagedraft.model.batch import Span, StepBatch, build_step_batch
from pagedraft.model.feature_head import FeatureHead
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer

Prompt = TypeVar("Prompt", str, list[int])
BLOCK_SIZE = 64


def generate_with_kv_cache(
    model: str | Path | Transformer,
    prompt: Prompt,
    max_length: int,
    *,
    params: SamplingParams | None = None,
    sample_index: int = 0,
) -> Prompt:
    """Continue ``prompt`` until EOS or until it has ``max_length`` tokens in all.

    model: a folder, a hub id, ``demo`` or a loaded Transformer. The result is of the prompt's kind,
    text or token ids, and holds the prompt too. Greedy unless ``params`` gives a temperature.
    sample_index: which of the prompt's samples, each with noise of its own.
    """
    target = load_model(model)
    tokenizer = load_tokenizer(target) if isinstance(prompt, str) else None
    token_ids = encode(prompt, tokenizer)
    sequence, cache = _start(target, token_ids, max_length, params, sample_index)
    stop_ids = _stop_ids(target, params)
    while sequence.num_tokens < max_length:
        batch = _batch(target, sequence, [], num_logits=1)
        logits_1V = target.forward(batch, cache)
        token = int(draw(logits_1V, [sequence], [sequence.num_tokens]))
        _check_tokens([token], sequence)
        sequence.append([token])
        if token in stop_ids:
            break
    return _finish(prompt, sequence, tokenizer)


def speculative_decode(
    prompt: Prompt,
    draft_model: str | Path | Transformer,
    target_model: str | Path | Transformer,
    num_drafts: int = 4,
    *,
    max_length: int | None = None,
    params: SamplingParams | None = None,
    sample_index: int = 0,
) -> Prompt:
    """The output of ``generate_with_kv_cache(target_model, prompt, max_length)``, sooner.

    Each round the draft model proposes ``num_drafts`` tokens and the target draws its own token at
    every one of these positions in a single pass. Drafts that equal the target's draws are kept,
    and the draw at the first mismatch (or after the last draft) is one more token for free.
    With ``params.accept`` of "rejection" or "block" drafts are judged by their probabilities
    instead: more are kept, and the output has the same distribution but is not the same.
    max_length counts all tokens; None means the prompt plus ``params.max_tokens``.
    """
    target = load_model(target_model)
    draft = load_draft_model(draft_model, target)
    check_vocabularies(draft, target)
    tokenizer = load_tokenizer(target) if isinstance(prompt, str) else None
    token_ids = encode(prompt, tokenizer)
    if max_length is None:
        max_length = len(token_ids) + (params or SamplingParams()).max_tokens
    keeps_states = isinstance(draft, FeatureHead)
    sequence, cache = _start(target, token_ids, max_length, params, sample_index, keeps_states)
    stop_ids = _stop_ids(target, params)
    drafter = _drafter(draft, cache, max_length, target.config.vocab_size)
    while sequence.num_tokens < max_length:
        k = min(num_drafts, max_length - sequence.num_tokens - 1)
        [proposal] = drafter.propose([sequence], [k])
        batch = _batch(target, sequence, proposal.tokens, num_logits=len(proposal.tokens) + 1)
        logits_LV = target.forward(batch, cache)
        [tokens] = verify_rows(logits_LV, [sequence], [proposal])
        stop = next((i for i, token in enumerate(tokens) if token in stop_ids), None)
        if stop is not None:
            tokens = tokens[: stop + 1]
        _check_tokens(tokens, sequence)
        sequence.append(tokens)  # rolls the KV of rejected drafts back: a count, not a copy
        if stop is not None:
            break
    return _finish(prompt, sequence, tokenizer)


def _start(
    model: Transformer,
    token_ids: list[int],
    max_length: int,
    params: SamplingParams | None,
    sample_index: int,
    keeps_states: bool = False,
) -> tuple[Sequence, KVCache]:
    if not token_ids:
        raise ValueError("prompt: expected at least one token, got none")
    vocab_size = model.config.vocab_size
    bad = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise ValueError(f"prompt: expected token ids from 0 to {vocab_size - 1}, got {bad}")
    if max_length > model.config.max_positions:
        raise ValueError(
            f"max_length: expected at most {model.config.max_positions} positions, got {max_length}"
        )
    params = params or SamplingParams(temperature=0.0)
    stop_ids = _stop_ids(model, params)
    cache = _cache(model, max_length, keeps_states)
    sequence = Sequence(
        token_ids=token_ids,
        num_prompt=len(token_ids),
        temperature=1.0 if params.temperature is None else params.temperature,
        seed=params.seed or 0,
        rules=logit_rules(params, MODEL_DEFAULTS, stop_ids),
        sample_index=sample_index,
        processors=params.logits_processors,
        accept=params.accept,
        block_ids=list(range(1, cache.num_blocks)),
    )
    return sequence, cache


def _cache(model: Transformer, max_length: int, keeps_states: bool = False) -> KVCache:
    """A pool for one sequence of ``max_length`` tokens, plus the null block."""
    num_blocks, dtype = 1 + -(-max(max_length, 1) // BLOCK_SIZE), model.activation_dtype
    features_dtype = dtype if keeps_states else None
    return KVCache(
        model.config, num_blocks, BLOCK_SIZE, dtype, model.device, features_dtype=features_dtype
    )


def _drafter(
    draft: Transformer, target_cache: KVCache, max_length: int, vocab_size: int
) -> DraftModelDrafter | FeatureHeadDrafter:
    """What drafts with a model; vocab_size: the target's."""
    options = {"target_vocab_size": vocab_size, "catch_up_tokens": max_length}
    if isinstance(draft, FeatureHead):
        return FeatureHeadDrafter(draft, _cache(draft, max_length), target_cache, **options)
    return DraftModelDrafter(draft, _cache(draft, max_length), **options)


def _stop_ids(model: Transformer, params: SamplingParams | None) -> set[int]:
    params = params or SamplingParams()
    eos_ids = () if params.ignore_eos else model.config.eos_token_ids
    return {*eos_ids, *params.stop_token_ids}


def _batch(model: Transformer, sequence: Sequence, drafts: list[int], num_logits: int) -> StepBatch:
    """What the target has not seen yet, followed by the drafts."""
    tokens = sequence.token_ids[sequence.num_written :] + drafts
    span = Span(tokens, sequence.num_written, sequence.block_ids, num_logits)
    return build_step_batch(
        [span], block_size=BLOCK_SIZE, device=model.device, row_multiple=model.row_multiple
    )


def _check_tokens(tokens: list[int], sequence: Sequence) -> None:
    """Raise ValueError where the last of a step's tokens could not be drawn, saying why."""
    if tokens[-1] < 0:
        position = sequence.num_tokens + len(tokens) - 1
        reason = f"logits: no finite maximum at position {position} (NaN?)"
        raise ValueError(sequence.failures.get(position, reason))


def _finish(prompt: Prompt, sequence: Sequence, tokenizer) -> Prompt:  # noqa: ANN001
    if isinstance(prompt, str):
        return tokenizer.decode(sequence.token_ids, skip_special_tokens=True)
    return list(sequence.token_ids)
