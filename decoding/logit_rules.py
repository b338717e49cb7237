"""What a request does to its logits before a token is drawn: resolved numbers, no unset values."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class LogitRules:
    """The parameters of SamplingParams that change logits or cut them off; all neutral by default.

    bias: (token id, what is added to its logit), each id once.
    min_tokens: stop_ids cannot be drawn before the output holds as many tokens.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()

    @cached_property
    def has_penalties(self) -> bool:
        """Whether the tokens of the context matter."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @cached_property
    def has_cut(self) -> bool:
        """Whether only some of the most probable tokens may be drawn."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @cached_property
    def changes_logits(self) -> bool:
        """Whether logits are edited in place before the draw."""
        return bool(self.bias) or self.has_penalties or bool(self.min_tokens and self.stop_ids)


NEUTRAL = LogitRules()


@dataclass
class TokenCounts:
    """The tokens of a committed context: which there are, and how often in the output.

    ids_n: int32, ascending. counts_n: int32, 0 for a token of the prompt alone.
    num_counted: tokens of the context that are in the counts.
    """

    ids_n: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    counts_n: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    num_counted: int = 0

    def catch_up(self, token_ids: Seq[int], num_prompt: int) -> None:
        """Count the tokens of the context that are new since the last call."""
        for is_output, part in (
            (0, token_ids[self.num_counted : num_prompt]),
            (1, token_ids[max(self.num_counted, num_prompt) :]),
        ):
            if part:
                self._add(*np.unique(np.asarray(part, np.int32), return_counts=True), is_output)
        self.num_counted = len(token_ids)

    def _add(self, ids_m: np.ndarray, counts_m: np.ndarray, is_output: int) -> None:
        place_m = np.searchsorted(self.ids_n, ids_m)
        is_known_m = np.zeros(len(ids_m), bool)
        inside_m = place_m < len(self.ids_n)
        is_known_m[inside_m] = self.ids_n[place_m[inside_m]] == ids_m[inside_m]
        added_m = (counts_m * is_output).astype(np.int32)
        self.counts_n[place_m[is_known_m]] += added_m[is_known_m]
        new_m = ~is_known_m
        self.ids_n = np.insert(self.ids_n, place_m[new_m], ids_m[new_m])
        self.counts_n = np.insert(self.counts_n, place_m[new_m], added_m[new_m])
