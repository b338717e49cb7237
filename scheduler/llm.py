"""LLM: the Python front end. Prompts in, completions out, many at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagedraft.decoding.controller import DraftController
from pagedraft.decoding.drafters.base import Drafter, check_drafter
from pagedraft.decoding.drafters.draft_model import check_vocabularies
from pagedraft.decoding.drafters.table import Setup, drafter_names, make_drafters
from pagedraft.decoding.failure import describe
from pagedraft.decoding.load import (
    check_text,
    default_sampling,
    load_draft_model,
    load_model,
    load_tokenizer,
    resolve_kv_dtype,
)
from pagedraft.decoding.params import SamplingParams, check_int
from pagedraft.kernels.paged_attention import BLOCK_SIZES
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.engine import Engine
from pagedraft.scheduler.memory import make_kv_caches, resolve_swap_bytes
from pagedraft.scheduler.request import FinishReason, Request, RequestStats
from pagedraft.scheduler.submission import Submission, as_params, as_prompts
from pagedraft.scheduler.trace import Trace


@dataclass(frozen=True)
class Completion:
    """What a request became.

    index: which of the prompt's n samples it is.
    finish_reason: "stop" (EOS, a stop id or a stop string), "length", "abort" or "error".
    stop_reason: the stop id or string that ended it, kept in token_ids; a string is cut off
        ``text``.
    logprobs: a dict per token from id to log-probability, if the request asked for them.
    error: what went wrong where finish_reason is "error".
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[dict[int, float]] | None
    stats: RequestStats
    error: str | None = None
    stop_reason: int | str | None = None
    index: int = 0


class LLM:
    """A target model, optionally a draft, one KV pool, one engine.

    model, draft: a local folder, a hub id, ``demo``, or a loaded Transformer. draft: also the
        folder of a draft that shares the target's embedding and head, and ``demo-draft``.
    speculate: "off", or drafters by name (decoding/drafters/table.py), joined by "+" where the
        engine shall choose among several; "auto": the draft model, if there is one, and lookup.
    drafter: your own, in place of what ``speculate`` names (decoding/drafters/base.py).
    k: drafts a step and request, or "auto": as many as pay.
    dtype: of the weights; "auto" is bf16. On the CPU arithmetic and KV are fp32 all the same.
    weights: "int8", "int4" or "fp8" quantises the linear weights of both models as they are loaded;
        "auto" keeps what the checkpoint stores.
    kv_dtype: of the KV pools: "int8", "fp8", or "auto", the dtype of the activations.
    kv_tokens: capacity of the KV pool in tokens; None sizes it from free memory.
    prefix_cache: keep KV of ended requests for prompts that begin the same.
    swap_bytes: host memory for KV of preempted requests (scheduler/swap.py), or "auto"; 0: it is
        recomputed.
    seed: where the noise of requests without a seed comes from.
    trace: a file for what the engine does (trace.py), which Perfetto shows and ``replay`` runs
        again; ``llm.trace.close()`` writes its end.
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
        prefix_cache: bool = True,
        swap_bytes: int | str = 0,
        trace: str | Path | None = None,
    ) -> None:
        options = {k: v for k, v in locals().items() if k not in ("self", "trace")}
        self.trace = None if trace is None else Trace(trace)
        names = [] if drafter is not None else drafter_names(speculate, has_draft=draft is not None)
        if drafter is not None:
            check_drafter(drafter)
        if block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size: expected one of {list(BLOCK_SIZES)}, got {block_size!r}")
        for name, value in (("max_rows", max_rows), ("token_budget", token_budget)):
            check_int(name, value, 1)
        if kv_tokens is not None:
            check_int("kv_tokens", kv_tokens, 1)
        check_int("seed", seed, 0, 2**64 - 1)
        controller = DraftController(k)
        stored = resolve_kv_dtype(kv_dtype)
        loading: dict[str, Any] = {"dtype": dtype, "weights": weights, "device": device}
        loading["exact"] = exact
        self.target = load_model(model, **loading)
        self.tokenizer = load_tokenizer(self.target)
        draft_model = self._load_draft(draft, loading) if "draft" in names else None
        models = [self.target] if draft_model is None else [self.target, draft_model]
        caches = make_kv_caches(
            models, stored, block_size=block_size, kv_tokens=kv_tokens, max_rows=max_rows
        )
        setup = Setup(self.target, caches[0], draft_model, caches[-1] if draft_model else None)
        self.engine = Engine(
            self.target,
            caches,
            drafters=make_drafters(names, setup) if drafter is None else [drafter],
            controller=controller,
            max_rows=max_rows,
            token_budget=token_budget,
            chunk_tokens=chunk_tokens,
            prefix_cache=prefix_cache,
            swap_bytes=resolve_swap_bytes(swap_bytes, caches),
        )
        if self.trace is not None:
            self.trace.begin(self.engine, options)
        self.owner: object | None = None  # the AsyncEngine that runs it
        self._num_submitted = 0
        self._submission = Submission(
            self.target.config, self.tokenizer, default_sampling(self.target.folder), seed
        )

    def generate(
        self,
        prompts: str | list[int] | list[str] | list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Run all prompts together and return their completions in order, n for each prompt.

        Every prompt is checked before any runs; a bad one raises ValueError naming its index. A
        request that fails while running ends alone, with finish_reason "error".
        """
        many = as_prompts(prompts)
        rows = as_params(params, len(many))
        requests: list[Request] = []
        try:
            for index, (prompt, row) in enumerate(zip(many, rows, strict=True)):
                try:
                    requests += self.submit_all(prompt, row)
                except (ValueError, TypeError) as error:
                    raise type(error)(f"prompts[{index}]: {error}") from error
            for request in requests:
                while not request.finished:
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
        if not isinstance(messages, list):
            raise ValueError(f"messages: expected a list of role and content, got {messages!r}")
        one = bool(messages) and isinstance(messages[0], dict)
        many: list[Any] = [messages] if one else list(messages)
        return self.generate([self.chat_ids(conversation) for conversation in many], params)

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation under the model's chat template, ready for an answer."""
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise ValueError("messages: the model's folder has no chat template")
        _check_messages(messages)
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
        request = self.submit(prompt, params or SamplingParams())
        token_ids = request.sequence.token_ids
        num_seen = len(token_ids)
        try:
            while not request.finished:
                self.engine.step()
                if len(token_ids) > num_seen:
                    tokens = token_ids[num_seen:]
                    num_seen += len(tokens)
                    yield tokens
        finally:
            self.engine.abort(request)
        if request.error is not None:
            raise RuntimeError(request.error)

    def submit(self, prompt: str | list[int], params: SamplingParams, **options: Any) -> Request:
        """Queue one request and return it; it runs as ``engine.step()`` is called.

        options: priority, tenant, cache_salt, ttft_ms, itl_ms and on_tokens of Request.
        """
        if isinstance(params, SamplingParams) and params.n > 1:
            raise ValueError(f"n: expected 1, got {params.n}; generate and submit_all take more")
        [request] = self.submit_all(prompt, params, **options)
        return request

    def submit_all(
        self, prompt: str | list[int], params: SamplingParams, **options: Any
    ) -> list[Request]:
        """Queue a request for each of the prompt's n samples; they share the prompt's KV."""
        requests = self.prepare(prompt, params, self._num_submitted, **options)
        for request in requests:
            self.engine.add(request)
        self._num_submitted += 1
        return requests

    def prepare(
        self, prompt: str | list[int], params: SamplingParams, index: int, **options: Any
    ) -> list[Request]:
        """The requests of submission number ``index``, not yet queued; any thread may call it."""
        return self._submission.requests(prompt, params, index, **options)

    def take_index(self) -> int:
        """The number of the next submission, which is then taken; seeds are derived from it."""
        self._num_submitted += 1
        return self._num_submitted - 1

    def reset_prefix_cache(self) -> None:
        """Forget the KV of ended requests, as a measurement of cold prompts needs."""
        self.engine.prefixes.clear()
        self.engine.outbox.cleared()

    def completion(self, request: Request) -> Completion:
        """The completion of a request that has ended."""
        if request.finish_reason is None:
            raise ValueError(f"request {request.request_id!r} has not ended")
        output_ids = request.sequence.output_ids
        wants_logprobs = request.params.logprobs is not None
        reason, error, output_text = request.finish_reason, request.error, request.output_text
        try:
            text = self.decode(output_ids) if output_text is None else output_text.text
        except Exception as failure:  # whatever a tokenizer raises on what a model made
            text, reason, error = "", "error", error or f"text: {describe(failure)}"
        return Completion(
            text=text,
            token_ids=output_ids,
            finish_reason=reason,
            logprobs=request.logprobs if wants_logprobs else None,
            stats=request.stats,
            error=error,
            stop_reason=request.stop_reason,
            index=request.sequence.sample_index,
        )

    def decode(self, token_ids: list[int]) -> str:
        """Text of ``token_ids`` without special tokens; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _load_draft(
        self, draft: str | Path | Transformer | None, options: dict[str, Any]
    ) -> Transformer:
        assert draft is not None
        model = load_draft_model(draft, self.target, **options)
        check_vocabularies(model, self.target)
        return model


def _check_messages(messages: Any) -> None:
    is_list = isinstance(messages, list) and bool(messages)
    for index, message in enumerate(messages if is_list else ()):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(
                f"messages[{index}]: expected a dict with role and content, got {message!r}"
            )
    if not is_list:
        raise ValueError(f"messages: expected a list of role and content, got {messages!r}")
