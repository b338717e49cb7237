"""Executed warp instructions of one program, from machine code and what the caller knows of loops.

The count is a static one, for a warp that takes part in everything:

- An instruction counts once for each time its block is entered, also where its predicate is off.
- Code outside loops counts once, both sides of its branches included. Ways out (``EXIT``, ``BRA``
  out of a loop) are not taken early. Calls count as one instruction.
- An attention loop (innermost, holds matrix products) runs as often as it has tiles. What is done
  less often has a level: a conditional region in such a loop, a region in that region, a loop
  around it all. Level 1 runs once in ``periods[0]`` tiles, level 2 once in ``periods[1]``.
- A region of fewer than ``SMALL_REGION`` instructions counts each time (a store by some of the
  threads). Of two large sides of one branch the smaller takes what the larger leaves.
- A loop before the first attention loop runs ``search`` times (the search for the program's row);
  other loops run once each time they are reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pagedraft.bench.control_flow import ControlFlow, Instruction, Loop

SMALL_REGION = 16


@dataclass(frozen=True)
class Trips:
    """How often the loops of one program run.

    tiles: of each attention loop, in program order.
    periods: tiles between two segment ends, between two section ends.
    search: trips of a loop before the first attention loop.
    """

    tiles: tuple[float, ...]
    periods: tuple[float, ...] = ()
    search: float = 0.0


class ProgramCount:
    """Counts over the blocks of one function; see the module docstring.

    is_product: tells the names of matrix-product instructions.
    """

    def __init__(
        self, instructions: Iterable[Instruction], is_product: Callable[[str], bool]
    ) -> None:
        self.flow = ControlFlow(instructions)
        has_product = {
            block
            for block in self.flow.successors
            if any(is_product(instruction.name) for instruction in self.flow.blocks[block])
        }
        holding = [loop for loop in self.flow.loops if loop.body & has_product]
        self.attention = [
            loop for loop in holding if not any(other.body < loop.body for other in holding)
        ]

    def names(self, loop: Loop) -> list[str]:
        """The instructions of a loop, inner loops included."""
        return [i.name for block in sorted(loop.body) for i in self.flow.blocks[block]]

    def executed(self, trips: Trips, counts: Callable[[str], float] = lambda name: 1.0) -> float:
        """Return the sum of ``counts(name)`` over the instructions that one warp issues.

        Raises ValueError unless ``trips`` gives the tiles of each attention loop.
        """
        if len(trips.tiles) != len(self.attention):
            raise ValueError(
                f"trips: expected tiles of {len(self.attention)} attention loops, got {trips.tiles}"
            )
        return sum(
            self._entries(block, trips)
            * sum(counts(instruction.name) for instruction in self.flow.blocks[block])
            for block in self.flow.successors
        )

    def _entries(self, block: int, trips: Trips) -> float:
        """How often ``block`` is entered."""
        loop = self.flow.innermost(block)
        if loop is None:
            return 1.0
        inside = [n for n, inner in enumerate(self.attention) if inner.body <= loop.body]
        if not inside:
            return self._other_loop(loop, trips)
        level = self._level(loop)
        share = _share(level, trips)
        for arm in self.flow.arms(loop, block):
            share, level = self._arm_share(loop, arm, share, level, trips)
        return share * sum(trips.tiles[n] for n in inside)

    def _level(self, loop: Loop) -> int:
        """Level of the blocks of ``loop`` that lie on each iteration's way."""
        if loop in self.attention:
            return 0
        inner = [
            other
            for other in self.flow.loops
            if other.body < loop.body and any(a.body <= other.body for a in self.attention)
        ]
        return 1 + max(self._level(other) + self._depth(other) for other in inner)

    def _depth(self, loop: Loop) -> int:
        """The most large regions of ``loop`` that hold one another."""
        return max(
            sum(self._size(loop, arm) >= SMALL_REGION for arm in self.flow.arms(loop, block))
            for block in loop.body
            if self.flow.innermost(block) == loop
        )

    def _arm_share(
        self, loop: Loop, arm: int, share: float, level: int, trips: Trips
    ) -> tuple[float, int]:
        """Return the share of the tiles that enter ``arm``, and its level."""
        size = self._size(loop, arm)
        if size < SMALL_REGION:
            return share, level
        taken = min(share, _share(level + 1, trips))
        others = [self._size(loop, other) for other in self.flow.siblings(loop, arm)]
        if any(other >= size for other in others):
            return share - taken, level
        return taken, level + 1

    def _size(self, loop: Loop, arm: int) -> int:
        return sum(len(self.flow.blocks[block]) for block in self.flow.region(loop, arm))

    def _other_loop(self, loop: Loop, trips: Trips) -> float:
        parent = self.flow.parent(loop)
        if parent is not None:
            outside = next(b for b in sorted(parent.body - loop.body) if self._leads(b, loop))
            return self._entries(outside, trips)
        first = min((loop.header for loop in self.attention), default=0)
        return trips.search if loop.header < first else 1.0

    def _leads(self, block: int, loop: Loop) -> bool:
        return loop.header in self.flow.successors[block]


def _share(level: int, trips: Trips) -> float:
    """The share of tiles at which code of this level runs; past the last period, the last one."""
    if level == 0 or not trips.periods:
        return 1.0
    return 1.0 / trips.periods[min(level, len(trips.periods)) - 1]
