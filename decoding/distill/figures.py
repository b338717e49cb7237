"""The figures of a report: those of judge.py, and what the engine was measured to do.

``to_json`` gives all of them, derived ones too; what is not known is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pagedraft.decoding.estimate_costs import Costs


@dataclass(frozen=True)
class Place:
    """Drafts at one place of their pass, as far as outputs go.

    offered: all. reached: those that all before them were accepted for. accepted: of these.
    """

    offered: int
    reached: int
    accepted: int

    @property
    def conditional(self) -> float | None:
        """Accepted, given that all before were."""
        return self.accepted / self.reached if self.reached else None

    @property
    def cumulative(self) -> float | None:
        """Accepted with all before them, of all."""
        return self.accepted / self.offered if self.offered else None

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        rates = {"conditional": self.conditional, "cumulative": self.cumulative}
        return {**asdict(self), **rates}


@dataclass(frozen=True)
class Pay:
    """What ``k`` drafts a pass come to.

    num_passes: over all texts, without the prompts' own. tokens_per_pass: accepted drafts and one
    more. drafts_per_pass: fewer than k where a drafter has none or the output ends.
    verify, drafting, catch_up, reading: what a pass costs, in steps of plain decoding: the target's
        step, the drafts, the draft's reading of a last accepted draft, and of prompts.
    """

    k: int
    num_passes: int
    tokens_per_pass: float
    drafts_per_pass: float
    verify: float
    drafting: float
    catch_up: float
    reading: float

    @property
    def cost(self) -> float:
        """Of a pass, in steps of plain decoding."""
        return self.verify + self.drafting + self.catch_up + self.reading

    @property
    def speedup(self) -> float:
        """Over plain decoding; below 1 it is slower."""
        return self.tokens_per_pass / self.cost

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return {**asdict(self), "cost": self.cost, "speedup": self.speedup}


@dataclass(frozen=True)
class Figures:
    """Of one drafter on some texts.

    num_tokens: of the texts, without each one's first, which no draft can be.
    alpha: mean over these of sum min(p, q) at temperature 1, the share of drafts that rejection
        sampling accepts. greedy: share of them where both models hold the same token most likely.
        None where there is no draft model or no token.
    places: at the largest k, from the first draft on. rows: by k from 1 on. Both are empty without
        a token, and places end where no draft reached.
    """

    num_texts: int
    num_tokens: int
    alpha: float | None
    greedy: float | None
    places: tuple[Place, ...]
    rows: tuple[Pay, ...]

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return {
            "num_texts": self.num_texts,
            "num_tokens": self.num_tokens,
            "alpha": self.alpha,
            "greedy": self.greedy,
            "places": [place.to_json() for place in self.places],
            "rows": [row.to_json() for row in self.rows],
        }


@dataclass(frozen=True)
class DrafterFigures:
    """Of one drafter: its costs, and its figures on all texts and by kind."""

    costs: Costs
    total: Figures
    kinds: Mapping[str, Figures]

    @property
    def draft_share(self) -> float:
        """c: one draft over a step of plain decoding."""
        return self.costs.draft_seconds[1] / self.costs.step_seconds[0]

    @property
    def verify_ratios(self) -> tuple[float, ...]:
        """v: a step that verifies n drafts over one of plain decoding, at index n."""
        return tuple(step / self.costs.step_seconds[0] for step in self.costs.step_seconds)

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        ratios = {"c": self.draft_share, "v": list(self.verify_ratios)}
        return {
            "costs": {**asdict(self.costs), **ratios},
            "total": self.total.to_json(),
            "kinds": {kind: figures.to_json() for kind, figures in self.kinds.items()},
        }


@dataclass(frozen=True)
class Judgement:
    """Figures by drafter.

    subject: the drafter that the report is about. max_drafts: the largest k.
    """

    device: str
    max_drafts: int
    subject: str
    drafters: Mapping[str, DrafterFigures]

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return {
            "device": self.device,
            "max_drafts": self.max_drafts,
            "subject": self.subject,
            "drafters": {name: found.to_json() for name, found in self.drafters.items()},
        }


@dataclass(frozen=True)
class MeasuredRow:
    """What the engine did with ``k`` drafts a step, one prompt after another.

    Seconds count from a text's first token on. round_speedups: of all texts, over plain decoding of
    the same texts in the same round. num_same: texts that became those of plain decoding in every
    round.
    """

    k: int
    tokens_per_second: float
    tokens_per_pass: float
    accepted_per_pass: float
    speedup: float
    round_speedups: tuple[float, ...]
    num_same: int


@dataclass(frozen=True)
class MeasuredGroup:
    """Measured on some texts, of which ``num_texts`` have more than their first token.

    num_tokens: of these texts, without each one's first.
    noise: by how much plain decoding of these texts differed from itself, before a run with drafts
        and after it: four fifths of the differences are at most so large.
    """

    num_texts: int
    num_tokens: int
    plain_tokens_per_second: float
    noise: float
    rows: tuple[MeasuredRow, ...]


@dataclass(frozen=True)
class Measured:
    """Measured on all texts and by kind; kinds without a token to draft are missing.

    num_rewritten: texts that plain decoding did not write as they were held out.
    """

    rounds: int
    num_rewritten: int
    total: MeasuredGroup
    kinds: Mapping[str, MeasuredGroup]

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return asdict(self)
