"""Exact verification rules over small vocabularies, in fractions: what they accept and emit.

A model is a function from a prefix (tuple of tokens) to the fractions of the next token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import product

Distribution = list[Fraction]
Model = Callable[[tuple[int, ...]], Distribution]
# (accepted drafts, probability, distribution of the token after them)
Outcome = tuple[int, Fraction, Distribution]
Rule = Callable[[tuple[int, ...], Model, Model], list[Outcome]]


def table_model(weights: list[list[int]]) -> Model:
    """A first-order model: row 1 + t of integer weights follows token t, row 0 an empty prefix."""

    def model(prefix: tuple[int, ...]) -> Distribution:
        row = weights[prefix[-1] + 1 if prefix else 0]
        return [Fraction(weight, sum(row)) for weight in row]

    return model


def point_model(model: Model) -> Model:
    """A deterministic drafter: all mass on the most probable token of ``model``, lowest first."""

    def point(prefix: tuple[int, ...]) -> Distribution:
        weights = model(prefix)
        return [Fraction(int(v == weights.index(max(weights)))) for v in range(len(weights))]

    return point


def residual(p: Distribution, q: Distribution, scale: Fraction) -> Distribution:
    """max(0, scale * p - q), not normalised."""
    return [max(Fraction(0), scale * a - b) for a, b in zip(p, q, strict=True)]


def normalised(weights: Distribution, fallback: Distribution) -> Distribution:
    total = sum(weights)
    return [weight / total for weight in weights] if total else fallback


def prefix_tests(
    drafts: tuple[int, ...], target: Model, drafter: Model
) -> list[tuple[Fraction, Fraction]]:
    """The block rule's (p_i, h_i) for i = 1..k."""
    p, found = Fraction(1), []
    for i in range(1, len(drafts) + 1):
        before, token = drafts[: i - 1], drafts[i - 1]
        p = min(Fraction(1), p * target(before)[token] / drafter(before)[token])
        if i == len(drafts):
            found.append((p, p))
        else:
            s = sum(residual(target(drafts[:i]), drafter(drafts[:i]), p))
            found.append((p, s / (s + 1 - p) if s + 1 - p else Fraction(0)))
    return found


def block_rule(drafts: tuple[int, ...], target: Model, drafter: Model) -> list[Outcome]:
    tests = prefix_tests(drafts, target, drafter)
    outcomes = [(len(drafts), tests[-1][1] if tests else Fraction(1), target(drafts))]
    all_later_fail = 1 - outcomes[0][1]
    for i in range(len(drafts) - 1, -1, -1):
        p, h = tests[i - 1] if i else (Fraction(1), Fraction(1))
        here = target(drafts[:i])
        left = normalised(residual(here, drafter(drafts[:i]), p), here)
        outcomes.append((i, all_later_fail * h, left))
        all_later_fail *= 1 - h
    return outcomes


def token_rule(drafts: tuple[int, ...], target: Model, drafter: Model) -> list[Outcome]:
    outcomes, all_accepted = [], Fraction(1)
    for i, token in enumerate(drafts):
        p, q = target(drafts[:i]), drafter(drafts[:i])
        accept = min(Fraction(1), p[token] / q[token])
        left = normalised(residual(p, q, Fraction(1)), p)
        outcomes.append((i, all_accepted * (1 - accept), left))
        all_accepted *= accept
    return [*outcomes, (len(drafts), all_accepted, target(drafts))]


def paths(model: Model, length: int, vocab_size: int) -> Iterator[tuple[tuple[int, ...], Fraction]]:
    """All sequences of ``length`` tokens that ``model`` can yield, with their probabilities."""
    for path in product(range(vocab_size), repeat=length):
        probability = Fraction(1)
        for i, token in enumerate(path):
            probability *= model(path[:i])[token]
        if probability:
            yield path, probability


def emitted(
    rule: Rule, target: Model, drafter: Model, num_drafts: int, vocab_size: int
) -> tuple[dict[tuple[int, ...], Fraction], Fraction]:
    """Distribution of the first k + 1 tokens and the expected number of accepted drafts.

    Tokens that a step does not reach come from the target, as later steps would yield them.
    """
    joint: dict[tuple[int, ...], Fraction] = {}
    mean = Fraction(0)
    for drafts, drafted in paths(drafter, num_drafts, vocab_size):
        for num_accepted, probability, following in rule(drafts, target, drafter):
            mean += drafted * probability * num_accepted
            for token, weight in enumerate(following):
                start = (*drafts[:num_accepted], token)
                rest = num_drafts - num_accepted
                for tail, tail_weight in paths(lambda t, s=start: target(s + t), rest, vocab_size):
                    mass = drafted * probability * weight * tail_weight
                    joint[start + tail] = joint.get(start + tail, Fraction(0)) + mass
    return {path: mass for path, mass in joint.items() if mass}, mean
