"""SamplingParams: what one request asks for. Names and ranges as in vLLM and the OpenAI API."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

MAX_LOGPROBS = 20
MAX_TEMPERATURE = 1e6  # all tokens are alike long before that; 1 / T must stay a normal fp32


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and where it ends.

    max_tokens: most tokens to generate, >= 1.
    temperature: 0 is greedy, at most 1e6; None takes the model's ``generation_config.json``, then
        1.0.
    seed: fixes the noise, 0 <= seed < 2**64; None derives one from the LLM's seed and the order of
        submission.
    stop_token_ids: ids that end the request besides the model's EOS; the id itself is kept.
    ignore_eos: do not end at the model's EOS.
    logprobs: None for none, else how many of the most likely tokens to report beside the chosen
        one, 0 to 20.
    speculate: False turns drafts off for this request; its output is the same either way.
    """

    max_tokens: int = 16
    temperature: float | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = field(default=())
    ignore_eos: bool = False
    logprobs: int | None = None
    speculate: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.stop_token_ids, Collection) or isinstance(self.stop_token_ids, str):
            raise TypeError(f"stop_token_ids: expected token ids, got {self.stop_token_ids!r}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        check_int("max_tokens", self.max_tokens, 1)
        if self.temperature is not None:
            _check_temperature(self.temperature)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**64 - 1)
        for token_id in self.stop_token_ids:
            check_int("stop_token_ids", token_id, 0)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise TypeError or ValueError, naming ``name``, unless it is an integer in the span."""
    span = f">= {low}" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer {span}, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}: expected an integer {span}, got {value}")


def _check_temperature(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"temperature: expected a number >= 0, got {value!r}")
    if not 0 <= value <= MAX_TEMPERATURE:  # also false for NaN
        raise ValueError(f"temperature: expected from 0 to {MAX_TEMPERATURE:.0f}, got {value}")


def derive_seed(base_seed: int, index: int) -> int:
    """Seed of the ``index``-th submitted request that brought none (SplitMix64 finaliser).

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    mask = 2**64 - 1
    z = (base_seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
