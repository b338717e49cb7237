"""Basic blocks, loops and conditions of machine code: what a count of executed instructions needs.

Source: Cooper, Harvey and Kennedy, A Simple, Fast Dominance Algorithm, 2001.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

ENTRY = 0
SINK = -1  # stands for the end of an iteration


@dataclass(frozen=True)
class Instruction:
    """One instruction in program order.

    labels: names of this place. targets: labels that it may jump to.
    falls_through: whether the next instruction may follow.
    """

    name: str
    labels: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    falls_through: bool = True


@dataclass(frozen=True)
class Loop:
    """Natural loop: its header dominates every block of the body, latches jump back to it."""

    header: int
    body: frozenset[int]
    latches: frozenset[int]


class ControlFlow:
    """The blocks of one function that can be reached from its entry, numbered in program order.

    Raises ValueError for a jump to an unknown label and for a loop with a second entry.
    """

    def __init__(self, instructions: Iterable[Instruction]) -> None:
        self.blocks, self.successors = _split(list(instructions))
        reached = _postorder(self.successors, ENTRY)
        self.successors = {block: self.successors[block] for block in sorted(reached)}

    @cached_property
    def dominators(self) -> dict[int, int]:
        """Immediate dominator of each block, the entry's being itself."""
        return immediate_dominators(self.successors, ENTRY)

    @cached_property
    def loops(self) -> list[Loop]:
        """Loops in program order of their headers; back edges to one header are one loop."""
        predecessors = _reversed(self.successors)
        order = {block: i for i, block in enumerate(_postorder(self.successors, ENTRY))}
        latches: dict[int, set[int]] = {}
        for block, targets in self.successors.items():
            for target in targets:
                if order[target] >= order[block]:
                    if target not in _chain(self.dominators, block):
                        raise ValueError(f"control flow: loop of block {target} has two entries")
                    latches.setdefault(target, set()).add(block)
        return [
            Loop(header, _body(header, latches[header], predecessors), frozenset(latches[header]))
            for header in sorted(latches)
        ]

    def parent(self, loop: Loop) -> Loop | None:
        """The smallest loop around ``loop``."""
        outer = [other for other in self.loops if loop.body < other.body]
        return min(outer, key=lambda other: len(other.body), default=None)

    def innermost(self, block: int) -> Loop | None:
        """The smallest loop that holds ``block``."""
        holding = [loop for loop in self.loops if block in loop.body]
        return min(holding, key=lambda loop: len(loop.body), default=None)

    def arms(self, loop: Loop, block: int) -> list[int]:
        """Entries of the conditional regions of ``loop`` that hold ``block``, outermost first.

        A region is entered by one side of a branch only and ends where the sides meet: its entry
        does not lie on every path from the branch to the end of the iteration.
        """
        after = self._postdominators(loop)
        chain = [b for b in _chain(self.dominators, block) if b in loop.body]
        return [
            b
            for b in chain[: chain.index(loop.header)][::-1]
            if b not in _chain(after, self.dominators[b])
        ]

    def region(self, loop: Loop, arm: int) -> set[int]:
        """The blocks of ``loop`` that are only reached through ``arm``."""
        return {block for block in loop.body if arm in _chain(self.dominators, block)}

    def siblings(self, loop: Loop, arm: int) -> list[int]:
        """The other conditional sides of the branch that leads to ``arm``."""
        branch = self.dominators[arm]
        return [
            other
            for other in self.successors[branch]
            if other != arm and other in loop.body and other in self.arms(loop, other)
        ]

    def _postdominators(self, loop: Loop) -> dict[int, int]:
        """Immediate postdominators within one iteration; ways out of the loop do not count."""
        backward: dict[int, list[int]] = {block: [] for block in loop.body} | {SINK: []}
        for block in loop.body:
            for target in self.successors[block]:
                if target == loop.header:
                    backward[SINK].append(block)
                elif target in loop.body:
                    backward[target].append(block)
        return immediate_dominators(backward, SINK)


def immediate_dominators(successors: Mapping[int, list[int]], root: int) -> dict[int, int]:
    """Return the immediate dominator of every node reached from ``root``."""
    postorder = _postorder(successors, root)
    order = {node: i for i, node in enumerate(postorder)}
    predecessors = _reversed({node: successors[node] for node in postorder})
    found = {root: root}
    changed = True
    while changed:
        changed = False
        for node in postorder[-2::-1]:
            known = [p for p in predecessors[node] if p in found]
            new = known[0]
            for other in known[1:]:
                while new != other:
                    if order[new] < order[other]:
                        new = found[new]
                    else:
                        other = found[other]
            changed |= found.get(node) != new
            found[node] = new
    return found


def _split(
    instructions: list[Instruction],
) -> tuple[dict[int, list[Instruction]], dict[int, list[int]]]:
    blocks: dict[int, list[Instruction]] = {}
    labels: dict[str, int] = {}
    ended = True
    for instruction in instructions:
        if ended or instruction.labels:
            current = len(blocks)
            blocks[current] = []
            labels |= dict.fromkeys(instruction.labels, current)
        blocks[current].append(instruction)
        ended = bool(instruction.targets) or not instruction.falls_through
    successors: dict[int, list[int]] = {}
    for number, block in blocks.items():
        last = block[-1]
        if unknown := sorted(set(last.targets) - set(labels)):
            raise ValueError(f"control flow: {last.name} jumps to unknown labels {unknown}")
        following = [number + 1] if last.falls_through and number + 1 in blocks else []
        successors[number] = [*dict.fromkeys([*following, *(labels[t] for t in last.targets)])]
    return blocks, successors


def _postorder(successors: Mapping[int, list[int]], root: int) -> list[int]:
    order: list[int] = []
    seen = {root}
    stack = [(root, iter(successors[root]))]
    while stack:
        node, rest = stack[-1]
        child = next((n for n in rest if n not in seen), None)
        if child is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(child)
            stack.append((child, iter(successors[child])))
    return order


def _reversed(successors: Mapping[int, list[int]]) -> dict[int, list[int]]:
    predecessors: dict[int, list[int]] = {node: [] for node in successors}
    for node, targets in successors.items():
        for target in targets:
            predecessors[target].append(node)
    return predecessors


def _chain(parents: Mapping[int, int], node: int) -> Iterator[int]:
    yield node
    while parents[node] != node:
        node = parents[node]
        yield node


def _body(
    header: int, latches: Iterable[int], predecessors: Mapping[int, list[int]]
) -> frozenset[int]:
    body = {header}
    pending = list(latches)
    while pending:
        block = pending.pop()
        if block not in body:
            body.add(block)
            pending.extend(predecessors[block])
    return frozenset(body)
