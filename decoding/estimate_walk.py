"""How many target passes a text takes with up to k drafts a pass, from what is accepted where.

A pass starts where the one before it ended, so starts are not spread evenly: acceptances come in
runs, and alpha**k would miss that. The walk visits the starts as decoding does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch

from pagedraft.decoding.drafters.base import Drafter, learns
from pagedraft.decoding.drafters.guard import (
    Contexts,
    free_safely,
    learn_safely,
    propose_safely,
)
from pagedraft.decoding.estimate_text import Text
from pagedraft.decoding.sequence import Sequence as TokenSequence


@dataclass
class Walk:
    """Counts of the passes over one or several texts; expected ones where acceptance is a chance.

    num_tokens: tokens that the passes emit: all of an output but its first token, which belongs to
        the prompt's pass.
    passes_n: passes with n drafts, n from 0 to k.
    num_full: passes that accepted all of their drafts, with another pass to follow: a draft model
        has yet to read the last of these drafts.
    num_accepted: accepted drafts that became part of the output.
    num_read: tokens of prompts, which a draft model reads before its first draft.
    offered_n, reached_n, accepted_n: drafts by their place in the pass, index 0 is the first, as
        far as the output goes: all, those that came to be judged because those before them were
        accepted, and those that were accepted.
    """

    passes_n: list[float]
    num_tokens: int = 0
    num_full: float = 0.0
    num_accepted: float = 0.0
    num_read: int = 0
    offered_n: list[float] = field(default_factory=list, compare=False)
    reached_n: list[float] = field(default_factory=list, compare=False)
    accepted_n: list[float] = field(default_factory=list, compare=False)

    @property
    def num_passes(self) -> float:
        """Passes after the prompt's."""
        return sum(self.passes_n)

    @property
    def num_drafts(self) -> float:
        """Drafts verified in all passes."""
        return sum(n * count for n, count in enumerate(self.passes_n))

    def __add__(self, other: Walk) -> Walk:
        """Both texts' counts together."""
        return Walk(
            [a + b for a, b in zip(self.passes_n, other.passes_n, strict=True)],
            self.num_tokens + other.num_tokens,
            self.num_full + other.num_full,
            self.num_accepted + other.num_accepted,
            self.num_read + other.num_read,
            _sum(self.offered_n, other.offered_n),
            _sum(self.reached_n, other.reached_n),
            _sum(self.accepted_n, other.accepted_n),
        )

    def count(self, place: int, offered: float, reached: float, accepted: float) -> None:
        """Add drafts at ``place`` of their passes, all earlier places having been counted once."""
        if place == len(self.offered_n):
            for counts in (self.offered_n, self.reached_n, self.accepted_n):
                counts.append(0.0)
        self.offered_n[place] += offered
        self.reached_n[place] += reached
        self.accepted_n[place] += accepted


def _sum(a: list[float], b: list[float]) -> list[float]:
    return [x + y for x, y in zip_longest(a, b, fillvalue=0.0)]


def walk(
    accept_n: Sequence[float],
    k: int,
    num_output: int,
    max_tokens: int,
    reach: int | None = None,
    later: Sequence[Sequence[float]] = (),
) -> Walk:
    """Decode an output of ``num_output`` tokens with at most ``k`` drafts a pass.

    accept_n: probability that a draft of output token n is accepted, if all of its pass before it
        were. With zeros and ones the walk is the one that decoding takes.
    max_tokens: the request's: no more drafts than could be kept.
    reach: output tokens that the drafter is able to propose; None for all.
    later: as accept_n for the second draft of a pass, the third, and so on, the last one for all
        after it; empty where the place does not matter.
    """
    by_place = [accept_n, *later]
    result = Walk([0.0] * (k + 1), max(0, num_output - 1))
    visits = [0.0] * (num_output + 1)
    visits[min(1, num_output)] = 1.0
    for start in range(1, num_output):
        if visits[start] == 0.0:
            continue
        drafts = min(k, max_tokens - start - 1)
        drafts = max(0, min(drafts, (max_tokens if reach is None else reach) - start))
        result.passes_n[drafts] += visits[start]
        chance = visits[start]  # that a pass begins here and all drafts so far are accepted
        for place in range(start, min(start + drafts, num_output)):
            accepted = chance * by_place[min(place - start, len(later))][place]
            result.count(place - start, visits[start], chance, accepted)
            visits[min(place + 1, num_output)] += chance - accepted
            result.num_accepted += accepted
            chance = accepted
        end = start + drafts
        visits[min(end + 1, num_output)] += chance
        if drafts > 0 and end + 1 < num_output:
            result.num_full += chance
    return result


def replay(drafter: Drafter, text: Text, k: int, vocab_size: int) -> Walk:
    """Decode ``text`` with the real drafts of a lookup, which learns during passes, as there.

    Exact for greedy decoding and for the match rule, where a draft counts if it is the text's
    token. vocab_size: of the target. Raises RuntimeError if the drafter fails.
    """
    num_output = len(text.output_ids)
    result = Walk([0.0] * (k + 1), max(0, num_output - 1))
    sequence = text.sequence(0)
    _learn(drafter, sequence)
    sequence.append(list(text.output_ids[:1]))
    while (start := len(sequence.output_ids)) < num_output:
        limit = min(k, text.max_tokens - start - 1)
        drafts = _propose(drafter, sequence, limit, vocab_size) if limit > 0 else []
        _learn(drafter, sequence)
        rest = text.output_ids[start:]
        pairs = zip(drafts, rest, strict=False)
        accepted = next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(drafts), len(rest))
        )
        result.passes_n[len(drafts)] += 1
        result.num_accepted += accepted
        for place in range(min(len(drafts), len(rest))):
            result.count(place, 1.0, float(place <= accepted), float(place < accepted))
        sequence.append(list(rest[: accepted + 1]))
        if drafts and accepted == len(drafts) and len(rest) > accepted + 1:
            result.num_full += 1
    free_safely(drafter, sequence)
    return result


def _propose(drafter: Drafter, sequence: TokenSequence, k: int, vocab_size: int) -> list[int]:
    [proposal], errors = propose_safely(drafter, [sequence], [k], vocab_size, torch.device("cpu"))
    if errors:
        raise RuntimeError(f"{drafter.name}: {errors[0]}")
    return proposal.tokens


def _learn(drafter: Drafter, sequence: TokenSequence) -> None:
    """Let the drafter learn the context of a pass that is under way."""
    errors = learn_safely(drafter, [sequence], Contexts()) if learns(drafter) else None
    if errors:
        raise RuntimeError(f"{drafter.name}: {errors[0]}")
