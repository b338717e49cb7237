"""What a comparison found."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

# The ops of dispatch.OPS that make a stage, in order; "draw" is what follows the head.
STAGE_OPS: dict[str, tuple[str, ...]] = {
    "embed": (),
    "input_norm": ("rms_norm",),
    "qkv": ("linear",),
    "write_kv": ("write_kv",),
    "attention": ("write_kv", "paged_attention"),
    "o_norm": ("linear", "rms_norm"),
    "gate_up": ("linear", "gated_mlp"),
    "down_norm": ("linear", "rms_norm"),
    "head": ("linear",),
    "draw": ("sample",),
}
USED_OPS = tuple(dict.fromkeys(op for ops in STAGE_OPS.values() for op in ops))


@dataclass(frozen=True)
class Finding:
    """One place where the sides part.

    token: index of the generated token that the step was for; position: of the first row that
        parts, in tokens of the context.
    layer: -1 before the first layer, the number of layers behind the last.
    ops: the op that parts them, where running it by its reference on both sides makes the stage
        agree; else all ops of the stage.
    error, tolerance: as compare.py defines them; the largest error of the step's rows, infinite
        beside a NaN.
    max_abs: largest absolute difference.
    ulps, max_ulps: at the largest error, and of any element; None beside a NaN.
    nan: sides with a NaN or an infinity where the other has none: "", "A", "B" or "AB".
    """

    token: int
    position: int
    layer: int
    stage: str
    ops: tuple[str, ...]
    error: float
    tolerance: float
    max_abs: float
    ulps: int | None
    max_ulps: int | None
    nan: str = ""

    @property
    def is_beyond(self) -> bool:
        return self.error > self.tolerance

    @property
    def share(self) -> float:
        """The error in tolerances."""
        return self.error / self.tolerance if self.tolerance else math.inf


@dataclass(frozen=True)
class TokenDifference:
    """The first token that B, fed A's tokens, would have drawn otherwise.

    margin: between A's best two logits; logit_error: largest difference of the sides' logits.
    A token of -1: no logit was finite.
    """

    token: int
    position: int
    a_id: int
    b_id: int
    margin: float
    logit_error: float


@dataclass
class Report:
    """The findings of one comparison, and each stage's worst.

    first_bit, first_error, worst: of isolated steps, where B's stages start from A's results.
    first_token, logit_error: of B as it runs, its errors carried along.
    a_ids, b_ids: the tokens that A drew, and B behind the same context.
    num_stages, num_equal: results compared, and how many had equal bits.
    """

    a_ids: list[int] = field(default_factory=list)
    b_ids: list[int] = field(default_factory=list)
    first_bit: Finding | None = None
    first_error: Finding | None = None
    first_token: TokenDifference | None = None
    worst: dict[str, Finding] = field(default_factory=dict)
    num_stages: int = 0
    num_equal: int = 0
    logit_error: float = 0.0

    @property
    def parts(self) -> bool:
        """Whether the sides part beyond tolerance."""
        return self.first_error is not None

    def note(self, finding: Finding) -> None:
        """Keep ``finding`` where it is its stage's worst so far."""
        known = self.worst.get(finding.stage)
        if known is None or finding.share > known.share:
            self.worst[finding.stage] = finding

    def to_json(self) -> dict[str, Any]:
        """A dictionary for JSON: numbers that are not finite become null."""
        return {"parts": self.parts, **_plain(asdict(self))}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
