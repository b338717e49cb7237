"""What the controller is asked and answers for a row, and the candidates that it chooses from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from pagedraft.decoding.acceptance import Acceptance, worth_of
from pagedraft.decoding.allocate import allocate
from pagedraft.decoding.drafters.base import Proposal

WORTH_IT, NOT_WORTH_IT, NOTHING_FOUND = "worth it", "not worth it", "nothing found"
FIXED, PROBE, LIMIT = "fixed", "probe", "limit"


@dataclass(slots=True)
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


class Choice(NamedTuple):
    """Drafts of one row: who drafts (None: nobody), how many at most, why, tokens expected.

    expected: 1 where k is fixed: nobody has weighed it.
    """

    drafter: str | None
    k: int
    reason: str
    expected: float = 1.0


OFF = Choice(None, 0, FIXED)
NO_ROOM = Choice(None, 0, LIMIT)
NONE_FOUND = Choice(None, 0, NOTHING_FOUND)
UNDECIDED = Choice(None, 0, NOT_WORTH_IT)


def unweighed(k: int | str, limit: int, offers: Mapping[str, Proposal], models: Seq[str]) -> Choice:
    """What a row gets without weighing; UNDECIDED for one that must be weighed."""
    if k == 0:
        return OFF
    if limit <= 0:
        return NO_ROOM
    drafter, count = models[0] if models else None, limit
    for name, offer in offers.items():
        if offer.tokens:
            drafter, count = name, len(offer.tokens)
            break
    if drafter is None:
        return NONE_FOUND
    return UNDECIDED if isinstance(k, str) else fixed(drafter, min(k, limit, count))


@lru_cache(maxsize=1024)
def fixed(drafter: str, k: int) -> Choice:
    """So many drafts because somebody asked for them."""
    return Choice(drafter, k, FIXED)


@dataclass(frozen=True)
class Lineup:
    """One candidate a row that may draft.

    worth_RK[r, i]: probability that drafts 0 to i of row ``rows[r]`` by ``names[r]`` are all
        accepted; 0 beyond its drafts. model: the model drafter among the names, if any.
    """

    rows: list[int]
    names: list[str]
    worth_RK: np.ndarray
    model: str | None = None


@dataclass(frozen=True)
class Drafts:
    """Drafts for the rows of a lineup.

    ks: how many of each candidate's. expected: how many of these are expected to be accepted.
    """

    lineup: Lineup
    ks: list[int]
    expected: list[float]

    @cached_property
    def total(self) -> int:
        """Drafts of all rows."""
        return sum(self.ks)

    @cached_property
    def tokens(self) -> float:
        """Drafts expected to be accepted."""
        return sum(self.expected)

    def of(self, name: str) -> list[int]:
        """Drafts of each row that the drafter drafts for."""
        rows = zip(self.ks, self.lineup.names, strict=True)
        return [k for k, other in rows if k and other == name]

    def choices(self, reason: str) -> list[tuple[int, Choice]]:
        """The rows that draft, and the choice of each."""
        rows = zip(self.lineup.rows, self.lineup.names, self.ks, self.expected, strict=True)
        return [(row, Choice(name, k, reason, 1.0 + more)) for row, name, k, more in rows if k]


NO_DRAFTS = Drafts(Lineup([], [], np.zeros((0, 1))), [], [])


def lineups(rows: Seq[Row], undecided: Seq[int], max_drafts: int, least: float) -> list[Lineup]:
    """The ways to draft: lookups alone, and each model drafter beside them.

    A row takes the drafter from which most is expected, so at most one model runs in a step.
    least: drafts that are worth no more are left out.
    """
    owners, asked, num_offers = _candidates(rows, undecided)
    worth_EK = worth_of(asked, max_drafts)
    strengths = worth_EK.sum(axis=1).tolist() if len(set(owners)) < len(owners) else []
    worth_EK *= worth_EK > least
    if not strengths and num_offers == len(owners):
        return [Lineup(owners, [name for _, name, _, _ in asked], worth_EK)]

    def strongest(best: Mapping[int, int], others: Iterable[int]) -> dict[int, int]:
        best = dict(best)
        for e in others:
            i = owners[e]
            if i not in best or strengths[e] > strengths[best[i]]:
                best[i] = e
        return best

    def lineup(best: Mapping[int, int], model: str | None = None) -> Lineup:
        places = list(best.values())
        return Lineup(list(best), [asked[e][1] for e in places], worth_EK[places], model)

    lookups = strongest({}, range(num_offers))
    ways = [lineup(lookups)]
    for model in dict.fromkeys(name for _, name, _, _ in asked[num_offers:]):
        own = (e for e in range(num_offers, len(asked)) if asked[e][1] == model)
        ways.append(lineup(strongest(lookups, own), model))
    return ways


def _candidates(
    rows: Seq[Row], undecided: Seq[int]
) -> tuple[list[int], list[tuple[Acceptance, str, int, int]], int]:
    """The row and what to ask of acceptance for all lookups' offers, then for all models.

    Also returns how many of them are offers.
    """
    owners: list[int] = []
    asked: list[tuple[Acceptance, str, int, int]] = []
    for i in undecided:
        row = rows[i]
        for name, offer in row.offers.items():
            owners.append(i)
            count = min(row.limit, len(offer.tokens))
            asked.append((row.acceptance, name, offer.evidence, count))
    num_offers = len(owners)
    for i in undecided:
        for name in rows[i].models:
            owners.append(i)
            asked.append((rows[i].acceptance, name, 0, rows[i].limit))
    return owners, asked, num_offers


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
    best_gain, best, best_ks_R = 0.0, NO_DRAFTS.lineup, np.zeros(0, dtype=np.int64)
    for way in ways:
        is_model, one_round = None, 0.0
        if way.model is not None:
            is_model = [name == way.model for name in way.names]
            one_round = round_seconds(way.model, sum(is_model))
        ks_R, gain = allocate(
            way.worth_RK, step_seconds, rate, is_model=is_model, round_seconds=one_round
        )
        if gain > best_gain:
            best_gain, best, best_ks_R = gain, way, ks_R
    if best_gain == 0.0:
        return NO_DRAFTS
    is_taken_RK = np.arange(best.worth_RK.shape[1]) < best_ks_R[:, None]
    expected_R = (best.worth_RK * is_taken_RK).sum(axis=1)
    return Drafts(best, best_ks_R.tolist(), expected_R.tolist())
