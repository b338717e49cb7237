"""Whether a preempted request's KV is copied to the host and back, or computed anew: measured.

Both take time that grows with the context: blocks to copy, and tokens to feed as a prompt. What
each costs here is measured: copies by a probe at the start and by every copy since, prompt tokens
by what a step that feeds some takes longer than a plain one. No clock here; seconds are passed in.
Old measurements fade.

On a CPU copying is cheaper from the first tokens on. SmolLM2-135M-Instruct in bf16, KV in fp32 (2.9
MB a block of 64 tokens), one thread, CPU time beyond that of the step that goes on, medians:

| context in tokens | 2 | 16 | 64 | 512 | 2048 |
|---|---|---|---|---|---|
| recomputed, ms | 21 | 70 | 215 | 1940 | 10250 |
| copied out and back, ms | 4 | 7 | 12 | 18 | 94 |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

KEPT = 0.9  # weight that a measurement keeps with each new one


class Decision(NamedTuple):
    """What was decided, from which expected seconds, and why in plain words."""

    swaps: bool
    copy_seconds: float
    recompute_seconds: float
    reason: str


@dataclass
class CopyTime:
    """Seconds of one copy as ``fixed + blocks * per_block``: a least-squares line that forgets."""

    _weight: float = 0.0
    _blocks: float = 0.0
    _blocks_squared: float = 0.0
    _seconds: float = 0.0
    _product: float = 0.0

    def record(self, num_blocks: int, seconds: float) -> None:
        """Add a copy of so many blocks; one of none says nothing."""
        if num_blocks < 1:
            return
        self._weight = self._weight * KEPT + 1
        self._blocks = self._blocks * KEPT + num_blocks
        self._blocks_squared = self._blocks_squared * KEPT + num_blocks**2
        self._seconds = self._seconds * KEPT + seconds
        self._product = self._product * KEPT + num_blocks * seconds

    @property
    def line(self) -> tuple[float, float]:
        """(fixed, per_block), neither of them negative; zeros before the first copy."""
        if self._weight == 0:
            return 0.0, 0.0
        spread = self._weight * self._blocks_squared - self._blocks**2
        if spread <= 1e-9 * self._weight * self._blocks_squared:  # copies of one size
            return 0.0, self._seconds / self._blocks
        slope = (self._weight * self._product - self._blocks * self._seconds) / spread
        fixed = (self._seconds - slope * self._blocks) / self._weight
        if slope < 0:  # noise; if it is too hopeful of big copies, these will tell
            return self._seconds / self._weight, 0.0
        return (fixed, slope) if fixed >= 0 else (0.0, self._product / self._blocks_squared)

    def seconds(self, num_blocks: int) -> float:
        """Expected seconds of a copy."""
        fixed, per_block = self.line
        return fixed + num_blocks * per_block


@dataclass
class SwapPolicy:
    """Compares the seconds of copying with those of recomputing.

    forced: True or False answers always so; None decides.
    out, back: copies to the host, and from it.
    """

    forced: bool | None = None
    out: CopyTime = field(default_factory=CopyTime)
    back: CopyTime = field(default_factory=CopyTime)
    _plain_seconds: float | None = None
    _tokens: float = 0.0
    _seconds: float = 0.0

    def record_step(self, num_prompt: int, seconds: float) -> None:
        """Note what a step took that fed so many prompt tokens; 0: a plain one.

        A chunk counts by its tokens: its weight is that of as many single tokens.
        """
        plain = self._plain_seconds
        if num_prompt > 0:
            self._tokens = self._tokens * KEPT + num_prompt
            self._seconds = self._seconds * KEPT + max(0.0, seconds - (plain or 0.0))
        elif plain is None:
            self._plain_seconds = seconds
        else:
            self._plain_seconds = KEPT * plain + (1 - KEPT) * seconds

    @property
    def seconds_per_token(self) -> float | None:
        """Of a prompt, lately, in steps that run anyway; None before the first."""
        return self._seconds / self._tokens if self._tokens else None

    def recompute_seconds(self, num_tokens: int) -> float:
        """Expected seconds to compute the KV of so many tokens; 0 while nothing is measured."""
        return num_tokens * (self.seconds_per_token or 0.0)

    def decide(self, num_blocks: int, num_tokens: int) -> Decision:
        """Whether to copy ``num_blocks`` out and later back, or to compute their tokens again."""
        copy = self.out.seconds(num_blocks) + self.back.seconds(num_blocks)
        return self._decide(num_blocks, num_tokens, copy)

    def decide_back(self, num_blocks: int, num_tokens: int) -> Decision:
        """The same for KV that is on the host already."""
        return self._decide(num_blocks, num_tokens, self.back.seconds(num_blocks))

    def _decide(self, num_blocks: int, num_tokens: int, copy: float) -> Decision:
        recompute = self.recompute_seconds(num_tokens)
        if self.forced is not None:
            swaps, why = self.forced, "forced"
        elif self.seconds_per_token is None:
            swaps, why = False, "no prompt tokens measured yet"
        else:
            swaps = copy < recompute
            why = "copying is cheaper" if swaps else "recomputing is cheaper"
        reason = (
            f"{why}: {1000 * copy:.2f} ms to copy {num_blocks} blocks, "
            f"{1000 * recompute:.2f} ms to recompute {num_tokens} tokens"
        )
        return Decision(swaps, copy, recompute, reason)
