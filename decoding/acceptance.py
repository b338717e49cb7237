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

from pagedraft.decoding.drafters.base import Proposal

DEPTH_EDGES = (1, 2, 3, 4, 8)  # classes of depth: 0, 1, 2, 3, 4 to 7, 8 and deeper
EVIDENCE_EDGES = (1, 3, 5, 9, 17)  # classes of evidence: 0, 1-2, 3-4, 5-8, 9-16, 17 and more
NUM_CLASSES = len(DEPTH_EDGES) + 1
DEPTH_CLASS = tuple(bisect_right(DEPTH_EDGES, depth) for depth in range(64))

PRIOR, PRIOR_TRIALS = 0.5, 2.0  # what nobody has tried yet
TABLE_DECAY = 0.995  # per proposal: the engine remembers about 200 of each kind
OWN_DECAY = 0.95  # per proposal: a request remembers about 20 of each kind
OWN_TRIALS = 4.0  # trials that the engine-wide estimate is worth to a request
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
        depth_class = DEPTH_CLASS[depth] if depth < len(DEPTH_CLASS) else NUM_CLASSES - 1
        self.hits[depth_class] += is_hit
        self.tried[depth_class] += 1.0


Key = tuple[str, int]  # drafter, class of evidence


@dataclass
class AcceptanceTable:
    """What all requests of an engine have taught; every request's Acceptance writes to it."""

    cells: dict[Key, Cell] = field(default_factory=dict)

    def estimates(self, key: Key) -> list[float]:
        """Probability by class of depth."""
        cell = self.cells.get(key)
        if cell is None:
            return [PRIOR] * NUM_CLASSES
        return [
            (hits + PRIOR_TRIALS * PRIOR) / (tried + PRIOR_TRIALS)
            for hits, tried in zip(cell.hits, cell.tried, strict=True)
        ]


@dataclass
class _Watch:
    """A proposal on its way past the emitted tokens; ``num_recorded`` drafts are counted."""

    key: Key
    tokens: list[int]
    num_recorded: int
    depth: int = 0


@dataclass
class Acceptance:
    """Acceptance record of one request.

    After each step of the request: ``record`` for drafts of a model, ``watch`` for what each lookup
    offered, used or not, then ``emitted`` with the tokens of this step.
    """

    table: AcceptanceTable = field(default_factory=AcceptanceTable)
    cells: dict[Key, Cell] = field(default_factory=dict)
    watches: dict[str, _Watch] = field(default_factory=dict)

    def estimates(self, name: str, evidence: int, num_drafts: int) -> list[float]:
        """Probability of each draft's acceptance, given acceptance of those before it."""
        by_class = self._by_class((name, bisect_right(EVIDENCE_EDGES, evidence)))
        return [
            by_class[DEPTH_CLASS[depth] if depth < len(DEPTH_CLASS) else NUM_CLASSES - 1]
            for depth in range(num_drafts)
        ]

    def record(self, name: str, evidence: int, num_drafted: int, num_accepted: int) -> None:
        """Note verified drafts; those behind the first rejected one say nothing."""
        if num_drafted == 0:
            return
        key = (name, bisect_right(EVIDENCE_EDGES, evidence))
        for depth in range(min(num_drafted, num_accepted + 1)):
            self._count(key, depth, depth < num_accepted)

    def watch(self, name: str, proposal: Proposal, num_recorded: int = 0) -> None:
        """Score ``proposal`` against the tokens emitted from here on, until it is wrong.

        A drafter has one proposal at a time under watch; the next begins when that one ends. So a
        drafter that is off is sampled as it would be if all of its drafts were used.
        num_recorded: drafts at its start that ``record`` counts, because they were used.
        """
        if name not in self.watches and len(proposal.tokens) > num_recorded:
            key = (name, bisect_right(EVIDENCE_EDGES, proposal.evidence))
            self.watches[name] = _Watch(key, proposal.tokens, num_recorded)

    def emitted(self, tokens: Seq[int]) -> None:
        """Note the tokens that the request got in this step."""
        for name, watch in list(self.watches.items()):
            if not self._follow(watch, tokens):
                del self.watches[name]

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
        for cells, factor in ((self.cells, OWN_DECAY), (self.table.cells, TABLE_DECAY)):
            cell = cells.get(key)
            if cell is None:
                cell = cells[key] = Cell()
            if depth == 0:
                cell.decay(factor)
            cell.count(depth, is_hit)

    def _by_class(self, key: Key) -> list[float]:
        """Own hits and trials shrunk towards the table's estimate.

        Where a request does better or worse than others at one depth it is likely to do so at the
        next: half of the difference in log odds carries over to the prior there.
        """
        common = self.table.estimates(key)
        cell = self.cells.get(key)
        if cell is None:
            return common
        estimates, shift = [], 1.0
        for prior, hits, tried in zip(common, cell.hits, cell.tried, strict=True):
            odds = shift * prior / (1.0 - prior)
            own = (hits + OWN_TRIALS * odds / (1.0 + odds)) / (tried + OWN_TRIALS)
            estimates.append(own)
            ratio = own * (1.0 - prior) / ((1.0 - own) * prior)
            shift = min(max(ratio, ODDS_LIMITS[0]), ODDS_LIMITS[1]) ** 0.5
        return estimates
