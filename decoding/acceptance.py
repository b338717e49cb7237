"""How often drafts are right: measured per drafter, depth and evidence, for a request and for all.

A draft at depth i counts only where the drafts before it were right, so an estimate is the
probability that draft i is accepted given that those before it were.

A request has few trials of its own, so its estimate begins at the engine-wide one and moves away
from it as it learns. Drafts of lookups are scored also where they were not used: an emitted token
tells whether a draft for its position would have been accepted, under every acceptance rule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import sqrt

from pagedraft.decoding.drafters.base import Proposal

DEPTH_EDGES = (1, 2, 3, 4, 8)  # classes of depth: 0, 1, 2, 3, 4 to 7, 8 and deeper
EVIDENCE_EDGES = (1, 3, 5, 9, 17)  # classes of evidence: 0, 1-2, 3-4, 5-8, 9-16, 17 and more
NUM_CLASSES = len(DEPTH_EDGES) + 1
DEPTH_CLASS = tuple(bisect_right(DEPTH_EDGES, depth) for depth in range(64))

# What nobody has tried yet, by class of evidence: the first draft, and those behind a right one.
PRIORS = ((0.5, 0.6), (0.4, 0.7), (0.7, 0.7), (0.7, 0.7), (0.8, 0.8), (0.8, 0.8))
PRIOR_TRIALS = 2.0
TABLE_DECAY = 0.98  # per proposal: the engine remembers about 50 of each kind
OWN_DECAY = 0.95  # per proposal: a request remembers about 20 of each kind
OWN_TRIALS = 8.0  # trials that the engine-wide estimate is worth to a request
MAX_WATCHES = 4  # of a request and drafter: about 1 us a step each
ODDS_LIMITS = (0.02, 50.0)


@dataclass
class Cell:
    """Decayed hits and trials by class of depth, of one drafter and class of evidence."""

    hits: list[float] = field(default_factory=lambda: [0.0] * NUM_CLASSES)
    tried: list[float] = field(default_factory=lambda: [0.0] * NUM_CLASSES)

    def decay(self, factor: float) -> None:
        """Age all depths: a proposal that did not get deep says little about depth, not nothing."""
        self.hits = [factor * hits for hits in self.hits]
        self.tried = [factor * tried for tried in self.tried]

    def count(self, depth: int, is_hit: bool) -> None:
        """Add one trial."""
        depth_class = DEPTH_CLASS[min(depth, len(DEPTH_CLASS) - 1)]
        self.hits[depth_class] += is_hit
        self.tried[depth_class] += 1.0


_EMPTY = Cell()
Key = tuple[str, int]  # drafter, class of evidence


@dataclass
class AcceptanceTable:
    """What all requests of an engine have taught; every request's Acceptance writes to it."""

    cells: dict[Key, Cell] = field(default_factory=dict)
    _estimates: dict[Key, list[float]] = field(default_factory=dict)

    def estimates(self, key: Key) -> list[float]:
        """Probability by class of depth."""
        known = self._estimates.get(key)
        if known is None:
            cell = self.cells.get(key) or Cell()
            first, behind = PRIORS[key[1]]
            priors = (first, *[behind] * (NUM_CLASSES - 1))
            known = self._estimates[key] = [
                (hits + PRIOR_TRIALS * prior) / (tried + PRIOR_TRIALS)
                for prior, hits, tried in zip(priors, cell.hits, cell.tried, strict=True)
            ]
        return known

    def count(self, key: Key, depth: int, is_hit: bool) -> None:
        """Add one trial."""
        _count(self.cells, key, TABLE_DECAY, depth, is_hit)
        self._estimates.pop(key, None)


@dataclass
class _Watch:
    """A proposal on its way past the emitted tokens.

    num_recorded: drafts at its start that are counted elsewhere. is_brief: ends with its step.
    """

    key: Key
    tokens: list[int]
    num_recorded: int
    is_brief: bool
    depth: int = 0


@dataclass
class _Tally:
    """Decayed hits of a drafter at any depth and evidence, those the table expected, and trials."""

    hits: float = 0.0
    expected: float = 0.0
    tried: float = 0.0

    def count(self, depth: int, is_hit: bool, expected: float) -> None:
        """Add one trial."""
        decay = OWN_DECAY if depth == 0 else 1.0
        self.hits = decay * self.hits + is_hit
        self.expected = decay * self.expected + expected
        self.tried = decay * self.tried + 1.0

    @property
    def odds(self) -> float:
        """Odds of a hit over those expected, shrunk to 1."""
        hits, misses = self.hits + OWN_TRIALS / 2, self.tried - self.hits + OWN_TRIALS / 2
        expected = self.expected + OWN_TRIALS / 2
        return hits / misses * (self.tried + OWN_TRIALS - expected) / expected


@dataclass
class Acceptance:
    """Acceptance record of one request.

    After each step of the request: ``record`` for drafts of a model, ``watch`` for what each lookup
    offered, used or not, then ``emitted`` with the tokens of this step.
    """

    table: AcceptanceTable = field(default_factory=AcceptanceTable)
    cells: dict[Key, Cell] = field(default_factory=dict)
    watches: list[_Watch] = field(default_factory=list)
    tallies: dict[str, _Tally] = field(default_factory=dict)

    def worth(self, name: str, evidence: int, num_drafts: int) -> list[float]:
        """For each draft the probability that it and all those before it are accepted."""
        by_class = self._by_class((name, bisect_right(EVIDENCE_EDGES, evidence)))
        worth, product = [], 1.0
        for depth_class in _classes(num_drafts):
            product *= by_class[depth_class]
            worth.append(product)
        return worth

    def record(self, name: str, evidence: int, num_drafted: int, num_accepted: int) -> None:
        """Note verified drafts; those behind the first rejected one say nothing."""
        if num_drafted == 0:
            return
        key = (name, bisect_right(EVIDENCE_EDGES, evidence))
        for depth in range(min(num_drafted, num_accepted + 1)):
            self._count(key, depth, depth < num_accepted)

    def watch(self, name: str, proposal: Proposal, num_recorded: int = 0) -> None:
        """Score ``proposal`` against the tokens emitted from here on, until it is wrong.

        Of a drafter's proposals MAX_WATCHES are followed at a time; others only through this step.
        num_recorded: drafts at its start that ``record`` counts, because they were used.
        """
        if len(proposal.tokens) > num_recorded:
            key = (name, bisect_right(EVIDENCE_EDGES, proposal.evidence))
            live = sum(watch.key[0] == name for watch in self.watches)
            is_brief = live >= MAX_WATCHES
            self.watches.append(_Watch(key, proposal.tokens, num_recorded, is_brief))

    def emitted(self, tokens: Seq[int]) -> None:
        """Note the tokens that the request got in this step."""
        self.watches = [
            watch for watch in self.watches if self._follow(watch, tokens) and not watch.is_brief
        ]

    def _follow(self, watch: _Watch, tokens: Seq[int]) -> bool:
        """Compare until the first wrong draft or the end; return whether the watch goes on."""
        for token in tokens:
            is_hit = watch.tokens[watch.depth] == token
            if watch.depth >= watch.num_recorded:
                self._count(watch.key, watch.depth, is_hit)
            watch.depth += 1
            if not is_hit or watch.depth == len(watch.tokens):
                return False
        return True

    def _count(self, key: Key, depth: int, is_hit: bool) -> None:
        depth_class = DEPTH_CLASS[min(depth, len(DEPTH_CLASS) - 1)]
        tally = self.tallies.get(key[0])
        if tally is None:
            tally = self.tallies[key[0]] = _Tally()
        tally.count(depth, is_hit, self.table.estimates(key)[depth_class])
        _count(self.cells, key, OWN_DECAY, depth, is_hit)
        self.table.count(key, depth, is_hit)

    def _by_class(self, key: Key) -> list[float]:
        """Own hits and trials shrunk towards the table's estimate.

        Where a request does better or worse than others, with other evidence or at one depth, it is
        likely to do so at the next: half of the difference in log odds carries over to the prior.
        """
        common = self.table.estimates(key)
        tally = self.tallies.get(key[0])
        if tally is None:
            return common
        cell = self.cells.get(key) or _EMPTY
        estimates, shift = [], sqrt(min(max(tally.odds, ODDS_LIMITS[0]), ODDS_LIMITS[1]))
        for prior, hits, tried in zip(common, cell.hits, cell.tried, strict=True):
            odds = shift * prior / (1.0 - prior)
            own = (hits + OWN_TRIALS * odds / (1.0 + odds)) / (tried + OWN_TRIALS)
            estimates.append(own)
            ratio = own * (1.0 - prior) / ((1.0 - own) * prior)
            shift = sqrt(min(max(ratio, ODDS_LIMITS[0]), ODDS_LIMITS[1]))
        return estimates


def _classes(num_drafts: int) -> Seq[int]:
    """Class of each depth below ``num_drafts``."""
    extra = num_drafts - len(DEPTH_CLASS)
    return DEPTH_CLASS[:num_drafts] if extra <= 0 else (*DEPTH_CLASS, *[NUM_CLASSES - 1] * extra)


def _count(cells: dict[Key, Cell], key: Key, decay: float, depth: int, is_hit: bool) -> None:
    cell = cells.get(key)
    if cell is None:
        cell = cells[key] = Cell()
    if depth == 0:
        cell.decay(decay)
    cell.count(depth, is_hit)
