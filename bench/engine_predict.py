"""The speed-up that acceptance and step times lead to expect, beside the one that is measured.

A step of b rows feeds one token and k drafts a row. Of measured step times v (with drafts that were
all wrong, see engine_sweep.py) and seconds c of a drafting round follows, as in the controller,

    speed-up = E[tokens a pass] * v(b) / (k * c + v(b * (1 + k)))

Where acceptance is set, E is 1 + alpha + ... + alpha**k. A real drafter often has fewer drafts than
k, and its acceptance is not the same everywhere; so the passes with the most drafts are gone
through again, each row cut to its first k drafts, and tokens and seconds added up. Passes begin
elsewhere with shorter drafts, so this is an estimate; so is every step time for the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pagedraft.bench.engine_steps import StepFacts, StepTimes
from pagedraft.bench.synthetic import expected_tokens_per_pass

NO_CUT = 2**31 - 1


def predict_set(alpha: float, k: int, num_rows: int, times: StepTimes) -> float:
    """Speed-up at an acceptance that is set, with drafts that cost nothing to make."""
    plain, verify = times.at(num_rows), times.at(num_rows * (1 + k))
    return expected_tokens_per_pass(alpha, k) * plain / verify


def predict_passes(
    steps: Sequence[StepFacts], k: int, times: StepTimes, round_seconds: float
) -> float | None:
    """Speed-up if each row of these steps had at most ``k`` drafts; None without steps.

    steps: all of one number of rows. round_seconds: of one round of the drafter.
    """
    if not steps:
        return None
    tokens = seconds = 0.0
    for step in steps:
        drafted = [min(count, k) for count in step.drafted_R]
        tokens += step.num_rows + sum(min(count, k) for count in step.accepted_R)
        seconds += times.at(step.num_rows + sum(drafted)) + max(drafted) * round_seconds
    num_rows = steps[0].num_rows
    return tokens / seconds * times.at(num_rows) / num_rows


def round_seconds(steps: Sequence[StepFacts]) -> float:
    """Median seconds of a drafting round; 0 where nobody drafts with a model."""
    drafting = [step for step in steps if max(step.drafted_R) > 0]
    if not drafting:
        return 0.0
    return median(step.drafting_seconds / max(step.drafted_R) for step in drafting)
