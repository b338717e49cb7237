"""A run of the controller without a model: acceptance and step costs are known by design.

Each row has a text of its own. A lookup (or a model) proposes the text's next tokens, each right
with the row's probability; behind the first wrong one all are wrong. Steps take what the cost curve
says, and are measured with noise and spikes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from pagedraft.decoding.acceptance import Acceptance, AcceptanceTable
from pagedraft.decoding.controller import Choice, DraftController, Row
from pagedraft.decoding.drafters.base import Proposal

Curve = Callable[[int], float]
FIXED = (0, 1, 2, 4, 8, 16)


def tiles(num_tokens: int) -> float:
    """Flat up to 16 tokens, then 60 % more for each 16."""
    return 0.010 * (1.0 + 0.6 * ((num_tokens - 1) // 16))


def linear(num_tokens: int) -> float:
    """4 % of a plain step a token."""
    return 0.010 * (1.0 + 0.04 * (num_tokens - 1))


def costly(num_tokens: int) -> float:
    """30 % of a plain step a token."""
    return 0.010 * (1.0 + 0.3 * (num_tokens - 1))


def demo(num_tokens: int) -> float:
    """Forward passes of a 135M model on two cores, one row of 300 tokens: 12 ms, 15.5 for 9."""
    return 0.0115 + 0.0002 * min(num_tokens, 5) + 0.0007 * max(0, num_tokens - 5)


CURVES: dict[str, Curve] = {"tiles": tiles, "linear": linear, "costly": costly, "demo": demo}


@dataclass
class Run:
    """What a run did; seconds without the noise of their measurement."""

    tokens: int = 0
    seconds: float = 0.0
    choices: list[list[Choice]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass
class Simulator:
    """Rows of one engine.

    alphas: for each row, the probability that a draft is right. Rows and curve may be changed
    between calls of ``run``.
    round_seconds: what a round of the drafter costs; 0: the drafter is a lookup.
    """

    alphas: Seq[float]
    curve: Curve
    controller: DraftController = field(default_factory=DraftController)
    noise: float = 0.03
    spike_share: float = 0.0
    round_seconds: float = 0.0
    evidence: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        table = AcceptanceTable()
        self.acceptances = [Acceptance(table) for _ in self.alphas]
        self.texts: list[list[int]] = [[] for _ in self.alphas]

    def run(self, num_steps: int) -> Run:
        """Run steps, and return what they did."""
        run = Run()
        for _ in range(num_steps):
            self._step(run)
        return run

    def _step(self, run: Run) -> None:
        offers = [self._offer(row) for row in range(len(self.alphas))]
        rows = [self._row(row, offer) for row, offer in enumerate(offers)]
        choices = self.controller.choose(rows, 0)
        num_tokens = len(rows) + sum(choice.k for choice in choices)
        emitted = [
            self._verify(*row) for row in zip(self.acceptances, offers, choices, strict=True)
        ]
        for row, count in enumerate(emitted):
            del self.texts[row][:count]
        rounds = max(choice.k for choice in choices) if self.round_seconds else 0
        self.controller.record_drafting(
            "draft", num_rows=len(rows), num_rounds=rounds, seconds=rounds * self.round_seconds
        )
        self.controller.record_step(
            num_tokens=num_tokens,
            num_rows=len(rows),
            num_context=300 * len(rows),
            seconds=self._measured(self.curve(num_tokens)),
            num_emitted=sum(emitted),
        )
        run.tokens += sum(emitted)
        run.seconds += self.curve(num_tokens) + rounds * self.round_seconds
        run.choices.append(choices)

    def _offer(self, row: int) -> list[int]:
        """The next 16 tokens of the row's text as the drafter sees them: -1 where it is wrong."""
        text = self.texts[row]
        while len(text) < 17:
            text.append(self.random.randrange(1000))
        right = 0
        while right < 16 and self.random.random() < self.alphas[row]:
            right += 1
        return text[:right] + [-1] * (16 - right)

    def _row(self, row: int, offer: list[int]) -> Row:
        if self.round_seconds:
            return Row(self.acceptances[row], 100, models=["draft"], num_context=300)
        offers = {"ngram": Proposal(offer, evidence=self.evidence)}
        return Row(self.acceptances[row], 100, offers=offers, num_context=300)

    def _verify(self, acceptance: Acceptance, offer: list[int], choice: Choice) -> int:
        """Tokens that the row gets, all of which its record sees."""
        right = offer.index(-1) if -1 in offer else len(offer)
        accepted = min(choice.k, right)
        text = self.texts[next(i for i, a in enumerate(self.acceptances) if a is acceptance)]
        evidence = 0 if self.round_seconds else self.evidence
        name = "draft" if self.round_seconds else "ngram"
        acceptance.record(name, evidence, choice.k, accepted)
        if not self.round_seconds:
            acceptance.watch(name, Proposal(offer, evidence=evidence), choice.k)
            acceptance.emitted(text[: accepted + 1])
        return accepted + 1

    def _measured(self, seconds: float) -> float:
        if self.random.random() < self.spike_share:
            seconds *= 5.0
        return seconds * max(0.5, self.random.gauss(1.0, self.noise))


def fixed_rate(alphas: Seq[float], curve: Curve, k: int, round_seconds: float = 0.0) -> float:
    """Tokens a second, in the mean, of k drafts in every row of every step."""
    emitted = sum(alpha**depth for alpha in alphas for depth in range(k + 1))
    return emitted / (curve(len(alphas) * (k + 1)) + k * round_seconds)


def best_fixed_rate(alphas: Seq[float], curve: Curve, round_seconds: float = 0.0) -> float:
    """The fastest of the fixed k, 0 among them."""
    return max(fixed_rate(alphas, curve, k, round_seconds) for k in FIXED)


def expected_rate(run: Run, alphas: Seq[float]) -> float:
    """Tokens a second that the choices of ``run`` get in the mean: its speed without luck."""
    tokens = sum(
        alpha**depth
        for choices in run.choices
        for alpha, choice in zip(alphas, choices, strict=True)
        for depth in range(choice.k + 1)
    )
    return tokens / run.seconds
