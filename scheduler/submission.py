"""From a prompt and its SamplingParams to requests: encoded, resolved, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypedDict

from pagedraft.decoding.detokenize import OutputText
from pagedraft.decoding.load import encode
from pagedraft.decoding.params import SamplingParams, derive_seed, logit_rules
from pagedraft.decoding.sequence import Sequence
from pagedraft.model.config import ModelConfig
from pagedraft.scheduler.request import Request


class Options(TypedDict, total=False):
    """How a request is scheduled; the fields of Request."""

    priority: int
    tenant: str | None
    cache_salt: str | None
    ttft_ms: float | None
    itl_ms: float | None


OPTIONS = (*Options.__annotations__, "on_tokens")


@dataclasses.dataclass(frozen=True)
class Submission:
    """What all requests of one LLM share.

    defaults: what generation_config.json says of parameters that a request leaves unset.
    seed: where the noise of requests without a seed comes from.
    """

    config: ModelConfig
    tokenizer: Any
    defaults: Mapping[str, float]
    seed: int

    def requests(
        self, prompt: str | list[int], params: SamplingParams, index: int, **options: Any
    ) -> list[Request]:
        """The requests of submission number ``index``: one for each of the prompt's n samples.

        options: those of Request in OPTIONS.
        Raises TypeError or ValueError, naming the field, for what cannot run on this model.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params: expected SamplingParams, got {params!r}")
        _check_options(options)
        token_ids = encode(prompt, self.tokenizer)
        self._check(params)
        resolved = params
        if params.temperature is None:
            resolved = dataclasses.replace(params, temperature=self.defaults["temperature"])
        first = self._request(token_ids, resolved, index, 0, options)
        others = [
            self._request(token_ids, resolved, index, sample, options)
            for sample in range(1, params.n)
        ]
        for request in others:
            request.parent = first
        return [first, *others]

    def _request(
        self,
        token_ids: list[int],
        params: SamplingParams,
        index: int,
        sample: int,
        options: Mapping[str, Any],
    ) -> Request:
        eos_ids = () if params.ignore_eos else self.config.eos_token_ids
        stop_ids = frozenset((*eos_ids, *params.stop_token_ids))
        assert params.temperature is not None
        return Request(
            request_id=f"request-{index}" + (f".{sample}" if params.n > 1 else ""),
            sequence=Sequence(
                token_ids=list(token_ids),
                num_prompt=len(token_ids),
                temperature=params.temperature,
                seed=derive_seed(self.seed, index) if params.seed is None else params.seed,
                sample_index=sample,
                rules=logit_rules(params, self.defaults, stop_ids),
                processors=params.logits_processors,
                accept=params.accept,
            ),
            params=params,
            stop_ids=stop_ids,
            max_context=self.config.max_positions,
            output_text=self._output_text(params),
            **options,
        )

    def _output_text(self, params: SamplingParams) -> OutputText | None:
        if not params.stop:
            return None
        return OutputText(
            self.tokenizer,
            stop=tuple(params.stop),
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _check(self, params: SamplingParams) -> None:
        vocab_size = self.config.vocab_size
        unknown = [token for token in params.logit_bias or () if token >= vocab_size]
        if unknown:
            raise ValueError(
                f"logit_bias: expected token ids from 0 to {vocab_size - 1}, got {unknown[0]}"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: text needs a tokenizer, and the model's folder has none")


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise TypeError for what is no option, and for callbacks that cannot be called."""
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"{name}: expected one of {', '.join(OPTIONS)}, got an unknown option")
    on_tokens = options.get("on_tokens")
    if on_tokens is not None and not callable(on_tokens):
        raise TypeError(f"on_tokens: expected a callable or None, got {on_tokens!r}")


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt or many, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        kind = type(prompts).__name__
        raise TypeError(f"prompts: expected text, token ids or a list of either, got a {kind}")
    if prompts and all(isinstance(token, int) for token in prompts):
        return [list(prompts)]
    return list(prompts)


def as_params(params: Any, count: int) -> list[SamplingParams]:
    """One SamplingParams for all prompts or one for each, as a list."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, (list, tuple)):
        raise TypeError(f"params: expected SamplingParams or a list of them, got {params!r}")
    if len(params) != count:
        raise ValueError(f"params: expected {count} as there are prompts, got {len(params)}")
    return list(params)
