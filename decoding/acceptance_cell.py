"""Counts of right and wrong drafts that forget with time, and the classes they are kept by."""

from __future__ import annotations

from bisect import bisect_right

DEPTH_EDGES = (1, 2, 3, 4, 8)  # classes of depth: 0, 1, 2, 3, 4 to 7, 8 and deeper
EVIDENCE_EDGES = (1, 3, 5, 9, 17)  # classes of evidence: 0, 1-2, 3-4, 5-8, 9-16, 17 and more
NUM_CLASSES = len(DEPTH_EDGES) + 1
NUM_EVIDENCE = len(EVIDENCE_EDGES) + 1
NUM_DEPTHS = 64  # those beyond are of the last one's class
DEPTH_CLASS = tuple(bisect_right(DEPTH_EDGES, depth) for depth in range(NUM_DEPTHS))
EVIDENCE_CLASS = tuple(bisect_right(EVIDENCE_EDGES, n) for n in range(EVIDENCE_EDGES[-1] + 1))

# What nobody has tried yet, by class of evidence: the first draft, and those behind a right one.
PRIORS = ((0.5, 0.6), (0.4, 0.7), (0.7, 0.7), (0.7, 0.7), (0.8, 0.8), (0.8, 0.8))
PRIOR_TRIALS = 2.0
TABLE_DECAY = 0.98  # per proposal: the engine remembers about 50 of each kind
OWN_DECAY = 0.95  # per proposal: a request remembers about 20 of each kind
HUGE = 1e100  # a weight beyond it is scaled back to 1

WEIGHT = 2 * NUM_CLASSES  # where a cell's values have the weight
_PRIORS_BY_CLASS = tuple((first, *[behind] * (NUM_CLASSES - 1)) for first, behind in PRIORS)


def class_of(evidence: int) -> int:
    """Class of an amount of evidence."""
    if evidence >= EVIDENCE_EDGES[-1]:
        return NUM_EVIDENCE - 1
    return EVIDENCE_CLASS[evidence] if evidence >= 0 else 0


class Cell:
    """Decayed hits and trials by class of depth, of one drafter and class of evidence.

    Ages with each proposal, all depths at once: one that did not get deep says little about depth,
    not nothing. Nothing shrinks for that: the weight of what is counted next grows.

    values: hits by class, trials by class, and the weight of a trial, in which they are counted.
    """

    __slots__ = ("decay", "values")

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.values = [0.0] * WEIGHT + [1.0]

    @property
    def hits(self) -> list[float]:
        """Hits by class of depth."""
        return [hits / self.values[WEIGHT] for hits in self.values[:NUM_CLASSES]]

    @property
    def tried(self) -> list[float]:
        """Trials by class of depth."""
        return [tried / self.values[WEIGHT] for tried in self.values[NUM_CLASSES:WEIGHT]]

    def age(self) -> None:
        """Let a new proposal begin."""
        values = self.values
        values[WEIGHT] /= self.decay
        if values[WEIGHT] > HUGE:
            values[:] = [value / values[WEIGHT] for value in values]


class CommonCell(Cell):
    """The cell of all requests, and the probability of a hit by class of depth that it gives."""

    __slots__ = ("_estimates", "has_changed", "priors")

    def __init__(self, evidence_class: int) -> None:
        super().__init__(TABLE_DECAY)
        self.priors = _PRIORS_BY_CLASS[evidence_class]
        self.has_changed = True
        self._estimates: list[float] = []

    def estimates(self) -> list[float]:
        """Probability by class of depth."""
        if self.has_changed:
            values = self.values
            trials = PRIOR_TRIALS * values[WEIGHT]
            self._estimates = [
                (values[i] + trials * prior) / (values[NUM_CLASSES + i] + trials)
                for i, prior in enumerate(self.priors)
            ]
            self.has_changed = False
        return self._estimates
