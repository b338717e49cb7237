"""Runs of this engine and of others, told alike, and what makes their speeds comparable.

Everything is greedy and never stops early, so that all sides do the same work. Two gates:
speculation must not be visible in our tokens (GateError: no speed is reported), and how far
another engine's tokens are ours is counted and told, as its sums may be rounded differently.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedraft.bench.peers import Peer
from pagedraft.decoding.params import SamplingParams
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.request import RequestStats

Prompts = Sequence[list[int]]


class GateError(RuntimeError):
    """Our output is wrong, so no speed may be reported."""


@dataclass(frozen=True)
class Run:
    """Prompts that one side decoded.

    token_ids: the new tokens of each prompt. seconds: wall time of all.
    first_seconds: from the call to each prompt's first token; empty where a side cannot say.
    stats: of our requests, in order; empty for others.
    """

    token_ids: list[list[int]]
    seconds: float
    first_seconds: list[float] = field(default_factory=list)
    stats: list[RequestStats] = field(default_factory=list, repr=False)

    @property
    def speed(self) -> float:
        """New tokens a second of wall time, prompts included."""
        return sum(map(len, self.token_ids)) / max(self.seconds, 1e-9)

    def __add__(self, other: Run) -> Run:
        """This one, then the other."""
        return Run(
            self.token_ids + other.token_ids,
            self.seconds + other.seconds,
            self.first_seconds + other.first_seconds,
            self.stats + other.stats,
        )


@dataclass(frozen=True)
class Side:
    """Who decodes: this engine with its drafts, or a peer in a mode.

    name: unique among the sides of a case. peer, mode: of another engine, else None.
    has_drafts: of ours, whether it drafts. decode: prompts at once, and how many new tokens.
    """

    name: str
    decode: Callable[[Prompts, int], Run] = field(repr=False)
    peer: str | None = None
    mode: str | None = None
    has_drafts: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether it is this engine."""
        return self.peer is None


def our_side(name: str, llm: LLM, *, has_drafts: bool = False, **changes: Any) -> Side:
    """This engine; ``changes`` are fields of SamplingParams."""

    def decode(prompts: Prompts, num_tokens: int) -> Run:
        return run_ours(llm, prompts, num_tokens, **changes)

    return Side(name, decode, has_drafts=has_drafts)


def run_ours(llm: LLM, prompts: Prompts, num_tokens: int, **changes: Any) -> Run:
    """Decode prompts at once. GateError for a request or a drafter that failed."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, **changes)
    began = time.perf_counter()
    completions = llm.generate(list(prompts), params)
    seconds = time.perf_counter() - began
    for index, completion in enumerate(completions):
        errors = [*completion.stats.drafter_errors, *filter(None, [completion.error])]
        if errors:
            raise GateError(f"prompt {index}: {errors[0]}: no speed is reported")
    stats = [completion.stats for completion in completions]
    first = [one.emissions[0][0] - began for one in stats if one.emissions]
    return Run([completion.token_ids for completion in completions], seconds, first, stats)


def peer_side(peer: Peer, mode: str) -> Side:
    """Another engine."""

    def decode(prompts: Prompts, num_tokens: int) -> Run:
        run = peer.run(prompts, num_tokens, mode=mode)
        return Run(run.token_ids, run.seconds, list(run.first_seconds))

    return Side(f"{peer.name} {mode}", decode, peer=peer.name, mode=mode)


def in_groups(side: Side, groups: Sequence[Prompts], num_tokens: int) -> Run:
    """Groups one after another, the prompts of each at once."""
    total = Run([], 0.0)
    for group in groups:
        total += side.decode(group, num_tokens)
    return total


def check_same(where: str, expected: Prompts, got: Prompts) -> None:
    """GateError naming prompt and token unless both are the same tokens."""
    for index, (one, other) in enumerate(zip(expected, got, strict=True)):
        place = first_difference(one, other)
        if place is not None:
            raise GateError(
                f"{where} changed the output of prompt {index} at token {place}: "
                "no speed is reported"
            )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs or that one of them lacks; None if there is none."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


@dataclass(frozen=True)
class Agreement:
    """How far a peer's tokens are ours, each prompt up to the end of our answer.

    num_same: of num_prompts prompts, those that agree in all tokens. first: of the others, where
    the earliest difference is, (token, prompt); None where all agree.
    """

    num_same: int
    num_prompts: int
    first: tuple[int, int] | None

    def __str__(self) -> str:
        text = f"{self.num_same} of {self.num_prompts}"
        return text if self.first is None else f"{text}, token {self.first[0]}"


def agreement(ours: Prompts, theirs: Prompts, eos_ids: Collection[int]) -> Agreement:
    """Compare up to our first EOS: past it engines may go on differently, all of them rightly."""
    places = []
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        end = next((i for i, token in enumerate(mine) if token in eos_ids), None)
        place = first_difference(mine[:end], other[: len(mine) if end is None else end])
        if place is not None:
            places.append((place, index))
    return Agreement(len(ours) - len(places), len(ours), min(places, default=None))


class Clock:
    """Seconds since it was made, against a limit; None: there is none."""

    def __init__(self, limit: float | None = None) -> None:
        self.limit = limit
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._began

    def is_past(self, share: float) -> bool:
        """Whether this share of the limit is used up."""
        return self.limit is not None and self.seconds > share * self.limit
