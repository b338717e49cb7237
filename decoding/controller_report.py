"""What the draft controller chose, and how far its predictions were from what came."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ControllerReport:
    """Sums over steps. Errors are relative to what was measured.

    num_steps: steps recorded (none with prompt chunks); num_rows: choices made for rows.
    """

    num_steps: int = 0
    num_rows: int = 0
    num_drafts: int = 0
    drafters: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    seconds_error: float = 0.0
    tokens_error: float = 0.0
    expected_tokens: float = 0.0
    emitted_tokens: float = 0.0

    def chose(self, drafter: str | None, k: int, reason: str) -> None:
        """Count one row's choice."""
        self.num_rows += 1
        self.num_drafts += k
        self.reasons[reason] += 1
        if k:
            self.drafters[drafter or ""] += k

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
        return {
            "steps": self.num_steps,
            "mean_k": self.num_drafts / max(1, self.num_rows),
            "drafts_by_drafter": dict(self.drafters),
            "reasons": dict(self.reasons),
            "seconds_error": self.seconds_error / steps,
            "tokens_error": self.tokens_error / steps,
            "tokens_bias": self.expected_tokens / max(1.0, self.emitted_tokens) - 1.0
            if self.num_steps
            else 0.0,
        }
