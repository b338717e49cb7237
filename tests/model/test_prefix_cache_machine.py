"""Pool and prefix cache together under random use, against lists that are searched."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagedraft.model.block_pool import BlockPool, IntegrityError
from pagedraft.model.prefix_cache import Node, PrefixCache

BLOCK = 2
Entry = tuple["Entry | None", tuple[int, ...], int]  # parent, tokens, block


@dataclass
class Run:
    """A request: its context and blocks, and how far its content is known."""

    tokens: list[int]
    block_ids: list[int]
    nodes: list[Node]
    entries: list[Entry]


def blocks_of(nodes: list[Node]) -> list[int]:
    return [node.block_id for node in nodes]


class CacheMachine(RuleBasedStateMachine):
    """Pool and cache against lists: who owns what, what is known, in which order it is evicted.

    Requests have contexts of two different tokens, so that most of them meet. A known content is
    its parent (itself such an entry) and tokens; identity makes an evicted parent unreachable.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=8, block_size=BLOCK)
        self.cache = PrefixCache(self.pool)
        self.free = list(range(1, 8))
        self.unused: list[int] = []  # evictable, the next to go first
        self.known: list[Entry] = []
        self.runs: dict[int, Run] = {}
        self.num_started = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10))
    def start(self, tokens: list[int]) -> None:
        """A request takes what is known and allocates the rest, if there is room for it."""
        owner, self.num_started = self.num_started, self.num_started + 1
        entries = self.lookup(tokens)
        nodes = self.cache.match(tokens, len(tokens))
        assert blocks_of(nodes) == [entry[2] for entry in entries]
        self.pool.share(owner, blocks_of(nodes))
        self.unused = [block for block in self.unused if block not in blocks_of(nodes)]
        self.runs[owner] = Run(tokens, blocks_of(nodes), nodes, entries)
        missing = self.pool.blocks_for(len(tokens)) - len(nodes)
        if missing > self.pool.num_free:
            self.end(owner)
            return
        new = self.pool.allocate(owner, missing)
        self.take(new)
        self.runs[owner].block_ids.extend(new)

    def find(self, parent: Entry | None, part: tuple[int, ...]) -> Entry | None:
        return next((e for e in self.known if e[0] is parent and e[1] == part), None)

    def lookup(self, tokens: list[int]) -> list[Entry]:
        found: list[Entry] = []
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            parent = found[-1] if found else None
            entry = self.find(parent, tuple(tokens[start : start + BLOCK]))
            if entry is None:
                break
            found.append(entry)
        return found

    def take(self, new: list[int]) -> None:
        """Free blocks in any order, then evictable ones in theirs."""
        num_free = min(len(new), len(self.free))
        assert set(new[:num_free]) <= set(self.free)
        self.free = [block for block in self.free if block not in new]
        num_evicted = len(new) - num_free
        assert new[num_free:] == self.unused[:num_evicted]
        self.unused = self.unused[num_evicted:]
        self.known = [entry for entry in self.known if entry[2] not in new]

    @precondition(lambda self: self.runs)
    @rule(seed=st.integers(0, 2**16))
    def publish_one(self, seed: int) -> None:
        """The rest of a request's full blocks: each new, or known of another's by now."""
        run = self.runs[random.Random(seed).choice(sorted(self.runs))]
        for index in range(len(run.nodes), len(run.tokens) // BLOCK):
            part, block = tuple(run.tokens[index * BLOCK :][:BLOCK]), run.block_ids[index]
            parent = run.entries[-1] if run.entries else None
            entry = self.find(parent, part)
            node = self.cache.insert(run.nodes[-1] if run.nodes else None, part, block)
            if entry is None:
                entry = (parent, part, block)
                self.known.append(entry)
            assert node.block_id == entry[2]
            run.nodes.append(node)
            run.entries.append(entry)

    @precondition(lambda self: self.runs)
    @rule(seed=st.integers(0, 2**16))
    def end_one(self, seed: int) -> None:
        self.end(random.Random(seed).choice(sorted(self.runs)))

    def end(self, owner: int) -> None:
        own = self.runs.pop(owner).block_ids
        self.pool.free(owner, own)
        others = {block for run in self.runs.values() for block in run.block_ids}
        kept = {entry[2] for entry in self.known}
        gone = [block for block in reversed(own) if block not in others]
        self.unused += [block for block in gone if block in kept]
        self.free += [block for block in gone if block not in kept]

    @precondition(lambda self: len(self.known) > 4)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.free += self.unused
        self.known, self.unused = [], []
        for run in self.runs.values():  # what runs now starts its chain anew
            run.nodes, run.entries = [], []

    @invariant()
    def every_block_has_one_place(self) -> None:
        self.pool.check_integrity({owner: run.block_ids for owner, run in self.runs.items()})
        self.cache.check_integrity()
        assert self.pool.num_free == len(self.free) + len(self.unused)
        assert list(self.pool._evictable) == self.unused
        assert self.pool.kept == {entry[2] for entry in self.known}


CacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
TestCacheMachine = CacheMachine.TestCase


def evict_newest(pool: BlockPool) -> int:
    """``_evict`` from the wrong end."""
    block, _ = pool._evictable.popitem()
    pool._kept.remove(block)
    pool.on_evict(block)
    return block


def evict_silently(pool: BlockPool) -> int:
    """``_evict`` that does not tell the cache."""
    block, _ = pool._evictable.popitem(last=False)
    pool._kept.remove(block)
    return block


def match_tokens_alone(parent: Node | None, tokens, salt) -> tuple:
    """``_key`` without the parent: a block would match after any other."""
    return 0, salt, tuple(tokens)


BROKEN = {
    "evicts the newest": ("pagedraft.model.block_pool.BlockPool._evict", evict_newest),
    "evicts silently": ("pagedraft.model.block_pool.BlockPool._evict", evict_silently),
    "compares no parent": ("pagedraft.model.prefix_cache._key", match_tokens_alone),
}


@pytest.mark.parametrize("name, broken", BROKEN.values(), ids=BROKEN)
def test_the_machine_has_teeth(name: str, broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name, broken)
    quick = settings(CacheMachine.TestCase.settings, phases=[Phase.generate], database=None)
    with pytest.raises((AssertionError, IntegrityError, KeyError)):
        run_state_machine_as_test(
            CacheMachine, settings=settings(quick, report_multiple_bugs=False)
        )
