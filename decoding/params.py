"""SamplingParams: what one request asks for. Names and ranges as in vLLM and the OpenAI API."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from pagedraft.decoding.logit_rules import LogitRules

# Called with a request's output ids and the raw fp32 logits [V] of the next token; returns logits.
LogitsProcessor = Callable[[Sequence[int], torch.Tensor], torch.Tensor]
AcceptRule = Literal["match", "rejection", "block"]
MAX_LOGPROBS = 20
MAX_SAMPLES = 1024
MAX_TEMPERATURE = 1e6  # all tokens are alike long before that; 1 / T must stay a normal fp32
# name: (lowest, highest, whether the lowest itself is allowed)
RANGES: Mapping[str, tuple[float, float, bool]] = {
    "temperature": (0.0, MAX_TEMPERATURE, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (1e-6, 1e6, True),  # it divides fp32 logits
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
}
MAX_BIAS = 100.0
MAX_INT32 = 2**31 - 1  # what kernels take; no vocabulary has more tokens
# What a model's generation_config.json may set, and the value that changes nothing.
MODEL_DEFAULTS: Mapping[str, float] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and where it ends.

    temperature, top_k, top_p, min_p, repetition_penalty: None takes what the model's
    ``generation_config.json`` says, then the value that changes nothing.

    max_tokens: most tokens to generate, >= 1.
    min_tokens: no stop token is drawn before the output holds as many, 0 to max_tokens.
    temperature: 0 is greedy, at most 1e6.
    top_k: only the k most likely tokens; 0 and -1 are off.
    top_p: only the most likely tokens that together hold this much, above 0, at most 1.
    min_p: only tokens at least this likely relative to the likeliest, 0 to 1.
    repetition_penalty: above 1 makes tokens of prompt and output less likely, 1e-6 to 1e6.
    presence_penalty, frequency_penalty: taken off the logits of tokens in the output, once and for
        each time they occur there, -2 to 2.
    logit_bias: token id to what is added to its logit, -100 to 100.
    logits_processors: called with the output ids so far and the raw logits [V] of the next token,
        before everything else; each returns logits. They are called at drafted positions too, with
        the drafts among the output ids, and must be functions of their arguments alone.
    seed: fixes the noise, 0 <= seed < 2**64; None derives one from the LLM's seed and the order of
        submission.
    n: samples of the prompt, 1 to 1024, each with noise of its own.
    stop: text that ends the request where it appears in the output, one or several; it is cut off
        the text, and the tokens up to it are kept. What ends within ``min_tokens`` tokens is
        ignored.
    include_stop_str_in_output: keep that text in the output.
    stop_token_ids: ids that end the request besides the model's EOS; the id itself is kept.
    ignore_eos: do not end at the model's EOS.
    logprobs: None for none, else how many of the most likely tokens to report beside the chosen
        one, 0 to 20.
    speculate: False turns drafts off for this request.
    k: drafts a step, 0 and more; None leaves the choice to the engine.
    accept: how drafts are judged. "match": a draft counts if it is the token that the target draws;
        the output is that of plain decoding. "rejection", "block": more drafts are accepted when
        sampling, and the output has the same distribution but is not the same.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] | str | None = None
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = field(default=())
    ignore_eos: bool = False
    logprobs: int | None = None
    speculate: bool = True
    k: int | None = None
    accept: AcceptRule = "match"

    def __post_init__(self) -> None:
        if not isinstance(self.stop_token_ids, Collection) or isinstance(self.stop_token_ids, str):
            raise TypeError(f"stop_token_ids: expected token ids, got {self.stop_token_ids!r}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        check_int("max_tokens", self.max_tokens, 1)
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.top_k is not None:
            check_int("top_k", self.top_k, -1)
        for name in ("include_stop_str_in_output", "ignore_eos", "speculate"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        for name in RANGES:
            if getattr(self, name) is not None:
                _check_range(name, getattr(self, name))
        if self.logit_bias is not None:
            _check_bias(self.logit_bias)
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**64 - 1)
        for token_id in self.stop_token_ids:
            check_int("stop_token_ids", token_id, 0)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        check_int("n", self.n, 1, MAX_SAMPLES)
        if self.k is not None:
            check_int("k", self.k, 0)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "logits_processors", _processors(self.logits_processors))
        if self.accept not in get_args(AcceptRule):
            rules = list(get_args(AcceptRule))
            raise ValueError(f"accept: expected one of {rules}, got {self.accept!r}")


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise TypeError or ValueError, naming ``name``, unless it is an integer in the span."""
    span = f">= {low}" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer {span}, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}: expected an integer {span}, got {value}")


def _stop_strings(stop: object) -> tuple[str, ...]:
    """``stop`` as a tuple; each text once."""
    if stop is None or isinstance(stop, str):
        stop = () if stop is None else (stop,)
    if not isinstance(stop, Collection) or any(not isinstance(text, str) for text in stop):
        raise TypeError(f"stop: expected text or a list of texts, got {stop!r}")
    if "" in stop:
        raise ValueError("stop: expected texts of at least one character, got an empty one")
    return tuple(dict.fromkeys(stop))


def _processors(processors: object) -> tuple[LogitsProcessor, ...]:
    is_list = isinstance(processors, Collection) and not isinstance(processors, str)
    if not is_list or any(not callable(processor) for processor in processors):  # type: ignore
        raise TypeError(f"logits_processors: expected callables, got {processors!r}")
    return tuple(processors)  # type: ignore


def _check_range(name: str, value: object) -> None:
    low, high, is_inclusive = RANGES[name]
    span = f"from {low:g}" if is_inclusive else f"above {low:g}"
    _check_number(name, value)
    assert isinstance(value, (int, float))
    is_inside = (low <= value if is_inclusive else low < value) and value <= high
    if not is_inside:  # also of NaN
        raise ValueError(f"{name}: expected {span} to {high:.0f}, got {value}")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {value!r}")


def _check_bias(bias: object) -> None:
    if not isinstance(bias, Mapping):
        raise TypeError(f"logit_bias: expected token ids to numbers, got {bias!r}")
    for token_id, value in bias.items():
        check_int("logit_bias", token_id, 0)
        _check_number(f"logit_bias[{token_id}]", value)
        if not abs(value) <= MAX_BIAS:
            raise ValueError(f"logit_bias[{token_id}]: expected from -100 to 100, got {value}")


def logit_rules(
    params: SamplingParams, defaults: Mapping[str, float], stop_ids: Collection[int]
) -> LogitRules:
    """The rules of a request; ``defaults`` fill what it leaves unset (``MODEL_DEFAULTS``)."""

    def number(name: str) -> Any:
        value = getattr(params, name)
        return defaults[name] if value is None else value

    return LogitRules(
        top_k=min(max(0, int(number("top_k"))), MAX_INT32),
        top_p=float(number("top_p")),
        min_p=float(number("min_p")),
        repetition_penalty=float(number("repetition_penalty")),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        bias=tuple(sorted((params.logit_bias or {}).items())),
        min_tokens=params.min_tokens,
        stop_ids=tuple(sorted(token for token in stop_ids if token <= MAX_INT32)),
    )


def derive_seed(base_seed: int, index: int) -> int:
    """Seed of the ``index``-th submitted request that brought none (SplitMix64 finaliser).

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    mask = 2**64 - 1
    z = (base_seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
