"""What the controller is asked and answers for a row, and the candidates that it chooses from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from pagedraft.decoding.acceptance import Acceptance
from pagedraft.decoding.allocate import allocate
from pagedraft.decoding.drafters.base import Proposal


@dataclass(frozen=True)
class Row:
    """What the controller knows of a request that decodes in the coming step.

    limit: drafts that could be kept (max_tokens, context); 0 for a row that must not draft.
    fixed_k: the request's own k, or None. offers: what lookups propose, by drafter.
    models: drafters that run a model and may be asked. num_context: committed tokens.
    """

    acceptance: Acceptance
    limit: int
    fixed_k: int | None = None
    offers: Mapping[str, Proposal] = field(default_factory=dict)
    models: Seq[str] = ()
    num_context: int = 0

    def worth(self, name: str, most: int) -> list[float]:
        """For each of at most ``most`` drafts: how likely it and all before it are accepted."""
        evidence, count = 0, min(most, self.limit)
        offer = self.offers.get(name)
        if offer is not None:
            evidence, count = offer.evidence, min(count, len(offer.tokens))
        return self.acceptance.worth(name, evidence, count)


@dataclass(frozen=True)
class Choice:
    """Drafts of one row: who drafts (None: nobody), how many at most, why, tokens expected."""

    drafter: str | None
    k: int
    reason: str
    expected: float = 1.0


@dataclass(frozen=True)
class Candidate:
    """A drafter for a row; worth[i] is the probability that drafts 0 to i are all accepted."""

    row: int
    name: str
    worth: list[float]


@dataclass(frozen=True)
class Lineup:
    """One candidate a row; ``model`` names the model drafter among them, if any."""

    candidates: list[Candidate]
    model: str | None = None


@dataclass(frozen=True)
class Drafts:
    """Drafts for some rows of a step: (candidate, how many of its drafts)."""

    chosen: list[tuple[Candidate, int]]

    @property
    def total(self) -> int:
        """Drafts of all rows."""
        return sum(k for _, k in self.chosen)

    @property
    def tokens(self) -> float:
        """Drafts expected to be accepted."""
        return sum(sum(candidate.worth[:k]) for candidate, k in self.chosen)


def lineups(rows: Seq[Row], undecided: Seq[int], max_drafts: int) -> list[Lineup]:
    """The ways to draft: lookups alone, and each model drafter beside them.

    A row takes the drafter from which most is expected, so at most one model runs in a step.
    """
    lookups: dict[int, Candidate] = {}
    models: dict[str, None] = {}
    for i in undecided:
        row = rows[i]
        models.update(dict.fromkeys(row.models))
        found = [
            Candidate(i, name, row.worth(name, max_drafts))
            for name, offer in row.offers.items()
            if offer.tokens
        ]
        if found:
            lookups[i] = max(found, key=_strength) if len(found) > 1 else found[0]
    ways = [Lineup(list(lookups.values()))]
    for name in models:
        mixed = dict(lookups)
        for i in undecided:
            if name in rows[i].models:
                candidate = Candidate(i, name, rows[i].worth(name, max_drafts))
                if i not in mixed or _strength(candidate) > _strength(mixed[i]):
                    mixed[i] = candidate
        ways.append(Lineup(list(mixed.values()), name))
    return ways


def best_drafts(
    ways: Seq[Lineup],
    step_seconds: np.ndarray,
    rate: float,
    round_seconds: Callable[[str, int], float],
) -> Drafts:
    """The drafts with the largest gain over none in ``tokens - rate * seconds``.

    step_seconds[n]: seconds of the step with n drafts; no more are chosen than it has entries for.
    round_seconds(name, rows): seconds of one round of a model drafter.
    """
    best_gain, best = 0.0, Drafts([])
    for way in ways:
        is_model, one_round = None, 0.0
        if way.model is not None:
            is_model = [candidate.name == way.model for candidate in way.candidates]
            one_round = round_seconds(way.model, sum(is_model))
        worth = [candidate.worth for candidate in way.candidates]
        ks, gain = allocate(worth, step_seconds, rate, is_model=is_model, round_seconds=one_round)
        if gain > best_gain:
            pairs = zip(way.candidates, ks, strict=True)
            best_gain, best = gain, Drafts([pair for pair in pairs if pair[1]])
    return best


def _strength(candidate: Candidate) -> float:
    return sum(candidate.worth)
