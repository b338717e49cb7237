"""What a step costs on this machine: the target's with n tokens, the drafter's with n drafts.

Other work on a machine only ever adds to a measured time, so of several runs the lower ones count:
the first quintile, as the median moves with a load that comes and goes. How far the runs lie apart
is said too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from pagedraft.decoding.drafters.base import Drafter, is_lookup
from pagedraft.decoding.draw import draw
from pagedraft.decoding.estimate_text import Reader, Text
from pagedraft.decoding.estimate_walk import Walk
from pagedraft.decoding.sequence import Sequence as TokenSequence

REPEATS = 15


@dataclass(frozen=True)
class Costs:
    """Seconds, each the first quintile of several runs, of one request alone.

    num_context: tokens of the context that they were measured at.
    step_seconds: a target's step of n + 1 tokens, forward pass and draws, at index n.
    draft_seconds: proposing n drafts, at index n; index 0 is what asking in vain costs. Measured
        for 1 draft and for the most, and a line between.
    catch_up_seconds: what proposing takes longer after a step that accepted every draft.
    reads_accepted: a feature head reads every draft that was accepted; then these are the seconds
        for one of them, measured with as many as a step can accept.
    read_seconds: a draft model's for a token of a prompt; 0 for others.
    noise: by how much the median of the runs of a plain step is above that, as a share.
    """

    num_context: int
    step_seconds: tuple[float, ...]
    draft_seconds: tuple[float, ...]
    catch_up_seconds: float = 0.0
    read_seconds: float = 0.0
    noise: float = 0.0
    reads_accepted: bool = False

    def plain_seconds(self, num_tokens: int) -> float:
        """Decoding ``num_tokens`` tokens one by one."""
        return num_tokens * self.step_seconds[0]

    def walk_seconds(self, walk: Walk) -> float:
        """Decoding as ``walk`` does."""
        steps = zip(walk.passes_n, self.step_seconds, self.draft_seconds, strict=False)
        seconds = sum(count * (step + draft) for count, step, draft in steps)
        return seconds + self.reading_again(walk) + walk.num_read * self.read_seconds

    def reading_again(self, walk: Walk) -> float:
        """Reading drafts that were accepted, in all passes of ``walk``."""
        count = walk.num_accepted if self.reads_accepted else walk.num_full
        return count * self.catch_up_seconds


def measure_costs(
    target: Reader,
    drafter: Drafter,
    text: Text,
    num_context: int,
    max_drafts: int,
    draft: Reader | None = None,
    *,
    repeats: int = REPEATS,
) -> Costs:
    """Time steps and proposals in turn, so that noise hits all alike, after one warm-up.

    num_context: committed tokens of the request, the beginning of ``text``. The pools of ``target``
    and ``draft`` must hold ``num_context + max_drafts`` tokens.
    """
    token_ids = (text.token_ids * (1 + max_drafts))[: num_context + max_drafts]
    sequence = text.sequence(len(text.output_ids))
    sequence.token_ids = token_ids[:num_context]
    sequence.block_ids = target.block_ids
    for reader in (target, draft):
        if reader is not None:
            reader.skip(token_ids[: num_context - 1])
    sequence.num_written = num_context - 1

    def step(num_drafts: int) -> None:
        _step(target, sequence, token_ids[num_context : num_context + num_drafts])

    def propose(num_drafts: int, num_missing: int) -> None:
        sequence.num_draft_written = num_context - 1 - num_missing
        drafter.propose([sequence], [num_drafts])

    reads_accepted = bool(getattr(drafter, "reads_accepted", False))
    num_missing = min(max_drafts if reads_accepted else 1, num_context - 1)
    tasks: dict[Any, Callable[[], None]] = {"catch up": partial(propose, 1, num_missing)}
    if draft is not None:
        tasks["read"] = partial(draft.skip, token_ids[:num_context])
    for n in range(max_drafts + 1):  # drafting and steps in turn, as decoding runs them
        if n in (1, max_drafts):
            tasks["draft", n] = partial(propose, n, 0)
        tasks["step", n] = partial(step, n)
    runs = _measure(tasks, repeats)
    drafter.on_free(sequence)
    low = {name: values[len(values) // 5] for name, values in runs.items()}
    first, last, plain = low["draft", 1], low["draft", max_drafts], runs["step", 0]
    slope = (last - first) / max(1, max_drafts - 1)
    return Costs(
        num_context,
        _rising([low["step", n] for n in range(max_drafts + 1)]),
        (first if is_lookup(drafter) else 0.0, *(first + slope * n for n in range(max_drafts))),
        0.0 if is_lookup(drafter) else max(0.0, low["catch up"] - first) / max(1, num_missing),
        low["read"] / num_context if draft is not None else 0.0,
        plain[len(plain) // 2] / low["step", 0] - 1.0,
        reads_accepted,
    )


def _rising(seconds: Sequence[float]) -> tuple[float, ...]:
    """No step takes longer than one of more tokens: where it seems to, it was disturbed."""
    return tuple(accumulate(reversed(seconds), min))[::-1]


def _step(target: Reader, sequence: TokenSequence, drafts: Sequence[int]) -> None:
    """What the engine's step does for one request: feed, then draw at every position."""
    num_tokens, num_rows = sequence.num_tokens, len(drafts) + 1
    logits_QV = target.read([sequence.token_ids[-1], *drafts], num_tokens - 1)
    prefixes = [drafts[:i] for i in range(num_rows)]
    positions = range(num_tokens, num_tokens + num_rows)
    draw(logits_QV, [sequence] * num_rows, positions, prefixes).tolist()


def _measure(tasks: dict[Any, Callable[[], None]], repeats: int) -> dict[Any, list[float]]:
    """Ascending seconds of each task: all once unmeasured, then all in turn ``repeats`` times."""
    measured: dict[Any, list[float]] = {name: [] for name in tasks}
    for is_warm in (False, *[True] * repeats):
        for name, task in tasks.items():
            began = time.perf_counter()
            task()
            if is_warm:
                measured[name].append(time.perf_counter() - began)
    return {name: sorted(values) for name, values in measured.items()}
