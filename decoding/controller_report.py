"""What the draft controller chose, and how far its predictions were from what came."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ControllerReport:
    """Sums over steps. Errors are relative to what was measured.

    choices: how often a row got (drafter, drafts, reason).
    num_steps: steps compared (none with prompt chunks or drafts whose number is fixed).
    """

    choices: Counter[tuple[str | None, int, str]] = field(default_factory=Counter)
    num_steps: int = 0
    seconds_error: float = 0.0
    tokens_error: float = 0.0
    expected_tokens: float = 0.0
    emitted_tokens: float = 0.0

    def chose(self, choices: Iterable[tuple[str | None, int, str]]) -> None:
        """Count choices, each of one row."""
        self.choices.update(choices)

    def compare(self, predicted: float, seconds: float, expected: float, emitted: float) -> None:
        """Count one step: seconds and tokens as predicted and as they came."""
        self.num_steps += 1
        self.seconds_error += abs(predicted - seconds) / seconds
        self.tokens_error += abs(expected - emitted) / max(emitted, 1.0)
        self.expected_tokens += expected
        self.emitted_tokens += emitted

    def as_dict(self) -> dict[str, Any]:
        """For tables and JSON.

        tokens_error is that of single steps, mostly the coin flips of acceptance; tokens_bias is
        that of the sum, which a right estimate brings to 0.
        """
        steps = max(1, self.num_steps)
        drafters: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        for (drafter, k, reason), count in self.choices.items():
            reasons[reason] += count
            if drafter is not None and k:
                drafters[drafter] += k * count
        return {
            "steps": self.num_steps,
            "mean_k": drafters.total() / max(1, self.choices.total()),
            "drafts_by_drafter": dict(drafters),
            "reasons": dict(reasons),
            "seconds_error": self.seconds_error / steps,
            "tokens_error": self.tokens_error / steps,
            "tokens_bias": self.expected_tokens / max(1.0, self.emitted_tokens) - 1.0
            if self.num_steps
            else 0.0,
        }
