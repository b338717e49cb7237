"""How often drafts are right: measured per drafter, depth and evidence, for a request and for all.

A draft at depth i counts only where the drafts before it were right, so an estimate is the
probability that draft i is accepted given that those before it were.

A request has few trials of its own, so its estimate begins at the engine-wide one and moves away
from it as it learns. Drafts of lookups are scored also where they were not used: an emitted token
tells whether a draft for its position would have been accepted, under every acceptance rule.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Any

import numpy as np

from pagedraft.decoding.acceptance_cell import (
    DEPTH_CLASS,
    NUM_CLASSES,
    NUM_DEPTHS,
    NUM_EVIDENCE,
    OWN_DECAY,
    PRIOR_TRIALS,
    WEIGHT,
    Cell,
    CommonCell,
    class_of,
)
from pagedraft.decoding.drafters.base import Proposal

OWN_TRIALS = 8.0  # trials that the engine-wide estimate is worth to a request
MAX_WATCHES = 4  # of a request and drafter: about 1 us a step each
ODDS_LIMITS = (0.02, 50.0)
FEW = 16  # rows whose estimates are made one by one


class AcceptanceTable:
    """What all requests of an engine have taught; every request's Acceptance writes to it."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, int], CommonCell] = {}

    def cell(self, name: str, evidence_class: int) -> CommonCell:
        """The cell of a drafter and class of evidence."""
        key = (name, evidence_class)
        cell = self.cells.get(key)
        if cell is None:
            cell = self.cells[key] = CommonCell(evidence_class)
        return cell


class _Watch:
    """A proposal on its way past the emitted tokens.

    num_recorded: drafts at its start that are counted elsewhere.
    """

    __slots__ = ("depth", "evidence_class", "num_recorded", "tokens")

    def __init__(self, evidence_class: int, tokens: list[int], num_recorded: int) -> None:
        self.evidence_class = evidence_class
        self.tokens = tokens
        self.num_recorded = num_recorded
        self.depth = 0


class _Record:
    """One request's trials of one drafter.

    tally: decayed hits at any depth and evidence, those that the table expected, and trials.
    cells: by class of evidence, its own and the table's; None before the first use.
    watches: proposals that are followed; the last ``num_brief`` of them only through this step.
    """

    __slots__ = ("cells", "name", "num_brief", "table", "tally", "watches")

    def __init__(self, name: str, table: AcceptanceTable) -> None:
        self.name = name
        self.table = table
        self.tally = [0.0, 0.0, 0.0]
        self.cells: list[tuple[Cell, CommonCell] | None] = [None] * NUM_EVIDENCE
        self.watches: list[_Watch] = []
        self.num_brief = 0

    def pair(self, evidence_class: int) -> tuple[Cell, CommonCell]:
        """The cells of a class of evidence."""
        pair = self.cells[evidence_class]
        if pair is None:
            common = self.table.cell(self.name, evidence_class)
            pair = self.cells[evidence_class] = (Cell(OWN_DECAY), common)
        return pair

    def count(self, evidence_class: int, start: int, num_hits: int, num_misses: int) -> None:
        """Add trials of one proposal from depth ``start`` on: hits, then a miss if there was."""
        own, common = self.cells[evidence_class] or self.pair(evidence_class)
        tally = self.tally
        if start == 0:
            own.age()
            common.age()
            tally[0] *= OWN_DECAY
            tally[1] *= OWN_DECAY
            tally[2] *= OWN_DECAY
        values, shared, priors = own.values, common.values, common.priors
        weight, shared_weight = values[WEIGHT], shared[WEIGHT]
        trials, end = PRIOR_TRIALS * shared_weight, start + num_hits
        for depth in range(start, end + num_misses):
            hit = DEPTH_CLASS[depth] if depth < NUM_DEPTHS else NUM_CLASSES - 1
            tried = hit + NUM_CLASSES
            tally[1] += (shared[hit] + trials * priors[hit]) / (shared[tried] + trials)
            values[tried] += weight
            shared[tried] += shared_weight
            if depth < end:
                values[hit] += weight
                shared[hit] += shared_weight
        common.has_changed = True
        tally[0] += num_hits
        tally[2] += num_hits + num_misses

    def follow(self, tokens: list[int]) -> None:
        """Move the watches past ``tokens``, each until its first wrong draft or its end."""
        live, num_kept = [], len(self.watches) - self.num_brief
        for i, watch in enumerate(self.watches):
            drafts, depth = watch.tokens, watch.depth
            end = min(len(drafts), depth + len(tokens))
            reached = depth
            while reached < end and drafts[reached] == tokens[reached - depth]:
                reached += 1
            missed = reached < end
            first = max(depth, watch.num_recorded)
            if reached + missed > first:
                self.count(watch.evidence_class, first, reached - first, missed)
            if not missed and reached < len(drafts) and i < num_kept:
                watch.depth = reached
                live.append(watch)
        self.watches, self.num_brief = live, 0


class Acceptance:
    """Acceptance record of one request.

    After each step of the request: ``record`` for drafts that were verified, ``watch`` for what
    each lookup offered, used or not, then ``emitted`` with the tokens of this step.
    """

    __slots__ = ("_records", "table")

    def __init__(self, table: AcceptanceTable | None = None) -> None:
        self.table = AcceptanceTable() if table is None else table
        self._records: dict[str, _Record] = {}

    @property
    def cells(self) -> dict[tuple[str, int], Cell]:
        """The request's own cells by drafter and class of evidence."""
        return {
            (name, evidence_class): pair[0]
            for name, record in self._records.items()
            for evidence_class, pair in enumerate(record.cells)
            if pair is not None
        }

    @property
    def num_watches(self) -> int:
        """Proposals that are being followed."""
        return sum(len(record.watches) for record in self._records.values())

    def worth(self, name: str, evidence: int, num_drafts: int) -> list[float]:
        """For each draft the probability that it and all those before it are accepted."""
        worth_EK = worth_of([(self, name, evidence, num_drafts)], num_drafts)
        return [float(worth) for worth in worth_EK[0]]

    def record(self, name: str, evidence: int, num_drafted: int, num_accepted: int) -> None:
        """Note verified drafts; those behind the first rejected one say nothing."""
        if num_drafted:
            missed = num_accepted < num_drafted
            self.of(name).count(class_of(evidence), 0, num_accepted, missed)

    def watch(self, name: str, proposal: Proposal, num_recorded: int = 0) -> None:
        """Score ``proposal`` against the tokens emitted from here on, until it is wrong.

        Of a drafter's proposals MAX_WATCHES are followed at a time; others only through this step.
        num_recorded: drafts at its start that ``record`` counts, because they were used.
        """
        if len(proposal.tokens) > num_recorded:
            record = self.of(name)
            record.num_brief += len(record.watches) >= MAX_WATCHES
            evidence_class = class_of(proposal.evidence)
            record.watches.append(_Watch(evidence_class, proposal.tokens, num_recorded))

    def emitted(self, tokens: list[int]) -> None:
        """Note the tokens that the request got in this step."""
        for record in self._records.values():
            if record.watches:
                record.follow(tokens)

    def of(self, name: str) -> _Record:
        """The record of a drafter."""
        record = self._records.get(name)
        if record is None:
            record = self._records[name] = _Record(name, self.table)
        return record


def worth_of(asked: Seq[tuple[Acceptance, str, int, int]], num_drafts: int) -> np.ndarray:
    """How likely each draft and all before it are accepted; float64 [len(asked), num_drafts].

    asked: (request's record, drafter, evidence, drafts); the worth beyond so many drafts is 0.
    """
    depth_K, class_K = _depths(num_drafts)
    worth_EK = _estimates(asked).take(class_K, axis=1).cumprod(axis=1)
    worth_EK *= depth_K < np.array([one[3] for one in asked])[:, None]
    return worth_EK


@lru_cache(maxsize=32)
def _depths(num_drafts: int) -> tuple[np.ndarray, np.ndarray]:
    """Depths of drafts, and their classes."""
    depth_K = np.arange(num_drafts)
    return depth_K, np.array(DEPTH_CLASS)[np.minimum(depth_K, NUM_DEPTHS - 1)]


def _estimates(asked: Seq[tuple[Acceptance, str, int, int]]) -> np.ndarray:
    """Own hits and trials shrunk towards the table's estimate, by class of depth; [E, classes].

    Of many rows at once; a few are faster one by one.
    """
    rows: list[list[float]] = []
    commons: dict[CommonCell, int] = {}
    places = []
    for acceptance, name, evidence, _ in asked:
        record = acceptance.of(name)
        evidence_class = class_of(evidence)
        own, common = record.cells[evidence_class] or record.pair(evidence_class)
        rows.append([*own.values, *record.tally])
        places.append(commons.setdefault(common, len(commons)))
    priors = [common.estimates() for common in commons]
    if len(asked) < FEW:
        pairs = zip(rows, places, strict=True)
        estimates = [_shrunk(row, priors[place], _clip_one) for row, place in pairs]
        return np.array(estimates).reshape(len(asked), NUM_CLASSES)
    own_VE = np.array(rows).T
    return np.array(_shrunk(own_VE, np.array(priors).T[:, places], _clip_all)).T


def _shrunk(own_V: Any, prior_C: Any, clip: Callable[[Any], Any]) -> list[Any]:
    """Estimates by class of depth, of numbers or arrays.

    They are (hits + OWN_TRIALS * prior) / (trials + OWN_TRIALS). Where a request does better or
    worse than others, with other evidence or at one depth, it is likely to do so at the next: half
    of the difference in log odds carries over to the prior.
    own_V: values of a cell, then a record's tally.
    """
    weight, (hits, expected, tried) = own_V[WEIGHT], own_V[WEIGHT + 1 :]
    half = OWN_TRIALS / 2
    ratio = (hits + half) / (tried - hits + half)
    ratio = ratio * (tried - expected + half) / (expected + half)
    estimates = []
    for i in range(NUM_CLASSES):
        hits = own_V[i] / weight
        misses = own_V[NUM_CLASSES + i] / weight - hits
        common = prior_C[i] / (1.0 - prior_C[i])
        prior = common * clip(ratio) ** 0.5
        odds = (hits + (hits + OWN_TRIALS) * prior) / (misses + OWN_TRIALS + misses * prior)
        estimates.append(odds / (1.0 + odds))
        ratio = odds / common
    return estimates


def _clip_one(ratio: float) -> float:
    return min(max(ratio, ODDS_LIMITS[0]), ODDS_LIMITS[1])


def _clip_all(ratio_E: np.ndarray) -> np.ndarray:
    return np.minimum(np.maximum(ratio_E, ODDS_LIMITS[0]), ODDS_LIMITS[1])
