"""How many tokens to draft: as many as are expected to pay for themselves, and never a fixed habit.

A draft at depth i is accepted with about alpha**i, alpha being this request's measured acceptance.
Verifying it lengthens the step by ``seconds_per_token``; that time would otherwise have produced
``tokens_per_second * seconds_per_token`` tokens. So depth i is worth drafting while
alpha**i > tokens_per_second * seconds_per_token. The output never depends on the choice.
"""

from __future__ import annotations

from dataclasses import dataclass

PRIOR_ALPHA = 0.7  # a fresh request drafts until its own record says otherwise
DECAY = 0.8  # weight of the past against the newest verified step
RECOVERY = 0.02  # a step without drafts moves alpha this far back to the prior


@dataclass
class Acceptance:
    """Decayed acceptance record of one request."""

    accepted: float = 2.0 * PRIOR_ALPHA
    tried: float = 2.0

    @property
    def alpha(self) -> float:
        """Probability that a draft is accepted given that those before it were."""
        return min(0.98, self.accepted / self.tried)

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Note a verified step; drafts behind the first rejected one say nothing."""
        if num_drafted == 0:
            return
        tried = min(num_drafted, num_accepted + 1)
        self.accepted = DECAY * self.accepted + num_accepted
        self.tried = DECAY * self.tried + tried

    def recover(self) -> None:
        """Note a step without drafts, so that a request that stopped drafting tries again."""
        self.accepted += RECOVERY * (PRIOR_ALPHA * self.tried - self.accepted)


@dataclass
class StepCost:
    """Seconds of a step as ``base + per_token * tokens``, fitted to decayed measurements."""

    mean_tokens: float = 0.0
    mean_seconds: float = 0.0
    var_tokens: float = 0.0
    cov: float = 0.0
    rate: float = 0.0  # committed tokens a second, decayed
    seen: int = 0

    def record(self, num_tokens: int, num_committed: int, seconds: float) -> None:
        """Add a measured step that decoded (prompt chunks would drown the small steps)."""
        self.seen += 1
        share = max(0.02, 1.0 / self.seen)
        gap_tokens, gap_seconds = num_tokens - self.mean_tokens, seconds - self.mean_seconds
        self.mean_tokens += share * gap_tokens
        self.mean_seconds += share * gap_seconds
        self.var_tokens = (1 - share) * (self.var_tokens + share * gap_tokens**2)
        self.cov = (1 - share) * (self.cov + share * gap_tokens * gap_seconds)
        self.rate += share * (num_committed / seconds - self.rate)

    @property
    def seconds_per_token(self) -> float:
        """Marginal seconds of one more token in a step; 0 until two sizes were seen."""
        if self.var_tokens < 0.25:
            return 0.0
        return max(0.0, self.cov / self.var_tokens)


class DraftController:
    """Chooses k for a request from its acceptance and the engine's step cost.

    k: an integer fixes the draft length; "auto" chooses from 0 to ``max_drafts``.
    """

    def __init__(self, k: int | str = "auto", max_drafts: int = 8) -> None:
        if not (k == "auto" or (isinstance(k, int) and not isinstance(k, bool) and k >= 0)):
            raise ValueError(f'k: expected "auto" or an integer >= 0, got {k!r}')
        self.k = k
        self.max_drafts = max_drafts
        self.cost = StepCost()

    def choose(self, acceptance: Acceptance) -> int:
        """Drafts wanted for the next step of a request."""
        if isinstance(self.k, int):
            return self.k
        threshold = self.cost.rate * self.cost.seconds_per_token
        chosen, worth = 0, acceptance.alpha
        while chosen < self.max_drafts and worth > threshold:
            chosen += 1
            worth *= acceptance.alpha
        if chosen == 0:
            acceptance.recover()
        return chosen
