"""LLM: the Python front end. Prompts in, completions out, many at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagedraft.decoding.controller import DraftController
from pagedraft.decoding.drafters.base import Drafter
from pagedraft.decoding.drafters.draft_model import DraftModelDrafter, check_vocabularies
from pagedraft.decoding.drafters.lookup import NgramDrafter
from pagedraft.decoding.load import (
    check_text,
    default_sampling,
    encode,
    load_model,
    load_tokenizer,
    resolve_kv_dtype,
)
from pagedraft.decoding.params import SamplingParams, check_int, derive_seed, logit_rules
from pagedraft.decoding.sequence import Sequence
from pagedraft.kernels.paged_attention import BLOCK_SIZES
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.engine import Engine
from pagedraft.scheduler.memory import make_kv_caches
from pagedraft.scheduler.request import FinishReason, Request, RequestStats

SPECULATE = ("auto", "off", "draft", "ngram")


@dataclass(frozen=True)
class Completion:
    """What a request became.

    finish_reason: "stop" (EOS or a stop id, kept in token_ids), "length", "abort" or "error".
    logprobs: a dict per token from id to log-probability, if the request asked for them.
    error: what went wrong where finish_reason is "error".
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[dict[int, float]] | None
    stats: RequestStats
    error: str | None = None


class LLM:
    """A target model, optionally a draft, one KV pool, one engine.

    model, draft: a local folder, a hub id, ``demo``, or a loaded Transformer.
    speculate: "auto" is "draft" with a draft model and "ngram" without; "off".
    drafter: your own, in place of what ``speculate`` names (decoding/drafters/base.py).
    k: drafts a step and request, or "auto".
    dtype: of the weights; "auto" is bf16. On the CPU arithmetic and KV are fp32 all the same.
    weights: "int8", "int4" or "fp8" quantises the linear weights of both models as they are loaded;
        "auto" keeps what the checkpoint stores.
    kv_dtype: of the KV pools: "int8", "fp8", or "auto", the dtype of the activations.
    kv_tokens: capacity of the KV pool in tokens; None sizes it from free memory.
    seed: where the noise of requests without a seed comes from.
    """

    def __init__(
        self,
        model: str | Path | Transformer,
        draft: str | Path | Transformer | None = None,
        *,
        speculate: str = "auto",
        drafter: Drafter | None = None,
        k: int | str = "auto",
        dtype: str | torch.dtype = "auto",
        weights: str = "auto",
        kv_dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        block_size: int = 64,
        kv_tokens: int | None = None,
        exact: bool = True,
        seed: int = 0,
        max_rows: int = 64,
        token_budget: int = 512,
        chunk_tokens: int | None = None,
    ) -> None:
        if speculate not in SPECULATE:
            raise ValueError(f"speculate: expected one of {list(SPECULATE)}, got {speculate!r}")
        if block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size: expected one of {list(BLOCK_SIZES)}, got {block_size!r}")
        if kv_tokens is not None:
            check_int("kv_tokens", kv_tokens, 1)
        check_int("seed", seed, 0, 2**64 - 1)
        controller = DraftController(k)
        stored = resolve_kv_dtype(kv_dtype)
        options: dict[str, Any] = {"dtype": dtype, "weights": weights, "device": device}
        options["exact"] = exact
        self.target = load_model(model, **options)
        self.tokenizer = load_tokenizer(self.target)
        self.seed = seed
        draft_model = self._load_draft(draft, speculate, options)
        models = [self.target] if draft_model is None else [self.target, draft_model]
        caches = make_kv_caches(
            models, stored, block_size=block_size, kv_tokens=kv_tokens, max_rows=max_rows
        )
        self.engine = Engine(
            self.target,
            caches[0],
            drafter=drafter or self._drafter(speculate, draft_model, caches[-1]),
            controller=controller,
            max_rows=max_rows,
            token_budget=token_budget,
            chunk_tokens=chunk_tokens,
        )
        self._num_submitted = 0
        self._defaults = default_sampling(self.target.folder)

    def generate(
        self,
        prompts: str | list[int] | list[str] | list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Run all prompts together and return their completions in order.

        Every prompt is checked before any runs; a bad one raises ValueError naming its index. A
        request that fails while running ends alone, with finish_reason "error".
        """
        many = _as_prompts(prompts)
        rows = _as_params(params, len(many))
        requests: list[Request] = []
        try:
            for index, (prompt, row) in enumerate(zip(many, rows, strict=True)):
                try:
                    requests.append(self.submit(prompt, row))
                except (ValueError, TypeError) as error:
                    raise type(error)(f"prompts[{index}]: {error}") from error
            while not all(request.finished for request in requests):
                self.engine.step()
        finally:
            for request in requests:
                self.engine.abort(request)  # nothing is left behind, whatever was raised
        return [self.completion(request) for request in requests]

    def chat(
        self,
        messages: list[dict[str, str]] | list[list[dict[str, str]]],
        params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Like ``generate`` for conversations: lists of {"role", "content"} messages."""
        one = bool(messages) and isinstance(messages[0], dict)
        many: list[Any] = [messages] if one else list(messages)
        return self.generate([self.chat_ids(conversation) for conversation in many], params)

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation under the model's chat template, ready for an answer."""
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise ValueError("messages: the model's folder has no chat template")
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        check_text(text)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def stream(
        self, prompt: str | list[int], params: SamplingParams | None = None
    ) -> Iterator[list[int]]:
        """Yield the tokens of each step as they come; several where drafts were accepted.

        Closing the iterator aborts the request. A request that fails raises RuntimeError.
        """
        parts: list[list[int]] = []
        request = self.submit(prompt, params or SamplingParams(), on_tokens=parts.append)
        try:
            while not request.finished:
                self.engine.step()
                yield from parts
                parts.clear()
        finally:
            self.engine.abort(request)
        if request.error is not None:
            raise RuntimeError(request.error)

    def submit(self, prompt: str | list[int], params: SamplingParams, **options: Any) -> Request:
        """Queue one request and return it; it runs as ``engine.step()`` is called.

        options: ``priority`` and ``on_tokens`` of Request.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params: expected SamplingParams, got {params!r}")
        index = self._num_submitted
        temperature = params.temperature
        if temperature is None:
            temperature = self._defaults["temperature"]
        token_ids = encode(prompt, self.tokenizer)
        self._check_bias(params)
        eos_ids = () if params.ignore_eos else self.target.config.eos_token_ids
        stop_ids = frozenset((*eos_ids, *params.stop_token_ids))
        request = Request(
            request_id=f"request-{index}",
            sequence=Sequence(
                token_ids=token_ids,
                num_prompt=len(token_ids),
                temperature=temperature,
                seed=derive_seed(self.seed, index) if params.seed is None else params.seed,
                rules=logit_rules(params, self._defaults, stop_ids),
            ),
            params=dataclasses.replace(params, temperature=temperature),
            stop_ids=stop_ids,
            max_context=self.target.config.max_positions,
            **options,
        )
        self.engine.add(request)
        self._num_submitted += 1
        return request

    def _check_bias(self, params: SamplingParams) -> None:
        vocab_size = self.target.config.vocab_size
        unknown = [token for token in params.logit_bias or () if token >= vocab_size]
        if unknown:
            raise ValueError(
                f"logit_bias: expected token ids from 0 to {vocab_size - 1}, got {unknown[0]}"
            )

    def completion(self, request: Request) -> Completion:
        """The completion of a request that has ended."""
        if request.finish_reason is None:
            raise ValueError(f"request {request.request_id!r} has not ended")
        output_ids = request.sequence.output_ids
        wants_logprobs = request.params.logprobs is not None
        return Completion(
            text=self.decode(output_ids),
            token_ids=output_ids,
            finish_reason=request.finish_reason,
            logprobs=request.logprobs if wants_logprobs else None,
            stats=request.stats,
            error=request.error,
        )

    def decode(self, token_ids: list[int]) -> str:
        """Text of ``token_ids`` without special tokens; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _load_draft(
        self,
        draft: str | Path | Transformer | None,
        speculate: str,
        options: dict[str, Any],
    ) -> Transformer | None:
        if draft is None:
            if speculate == "draft":
                raise ValueError('speculate: "draft" needs a draft model, got none')
            return None
        if speculate in ("off", "ngram"):
            return None
        model = load_model(draft, **options)
        check_vocabularies(model, self.target)
        return model

    def _drafter(
        self, speculate: str, draft_model: Transformer | None, draft_cache: KVCache
    ) -> Drafter | None:
        if speculate == "off":
            return None
        if draft_model is None:
            return NgramDrafter()
        return DraftModelDrafter(
            draft_model, draft_cache, target_vocab_size=self.target.config.vocab_size
        )


def _as_prompts(prompts: Any) -> list[Any]:
    """One prompt or many, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        kind = type(prompts).__name__
        raise TypeError(f"prompts: expected text, token ids or a list of either, got a {kind}")
    if prompts and all(isinstance(token, int) for token in prompts):
        return [list(prompts)]
    return list(prompts)


def _as_params(params: Any, count: int) -> list[SamplingParams]:
    """One SamplingParams for all prompts or one for each, as a list."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, (list, tuple)):
        raise TypeError(f"params: expected SamplingParams or a list of them, got {params!r}")
    if len(params) != count:
        raise ValueError(f"params: expected {count} as there are prompts, got {len(params)}")
    return list(params)
