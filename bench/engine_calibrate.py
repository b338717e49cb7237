"""What a decode step of a batch takes by its number of drafts, with drafts that are all wrong.

Every step then brings one token a row, whatever it verified, so steps with many drafts and with
none take turns in one run: a load of the machine that comes and goes hits all alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from pagedraft.bench.engine_runs import Prompts
from pagedraft.bench.engine_steps import StepLog, StepTimes
from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.params import SamplingParams
from pagedraft.decoding.sequence import Sequence as TokenSequence
from pagedraft.scheduler.llm import LLM

PROMPT_STEPS = 32  # most steps until the last prompt of a batch is read


class WrongDrafter:
    """Proposes one token over and over; steps in which it is right by chance are not counted."""

    is_lookup = True
    name = "wrong"

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(
        self, sequences: Sequence[TokenSequence], num_drafts: Sequence[int]
    ) -> list[Proposal]:
        """As many as are asked for."""
        return [Proposal([self.token] * k) for k in num_drafts]

    def on_free(self, sequence: TokenSequence) -> None:
        """Nothing is kept."""


def new_tokens(lengths: Sequence[int], repeats: int) -> int:
    """Tokens a request needs for ``step_times``."""
    return PROMPT_STEPS + repeats * len(lengths) + max(lengths) + 1


def step_times(
    llm: LLM, log: StepLog, prompts: Prompts, lengths: Sequence[int], repeats: int
) -> StepTimes | None:
    """Median seconds of steps with each number of drafts a row; None where no step was full.

    llm: with a WrongDrafter. log: an observer of its engine. Requests end after ``new_tokens`` or
    where the model has no positions left; later steps are not full.
    """
    room = llm.target.config.max_positions - max(map(len, prompts))
    params = SamplingParams(
        max_tokens=min(room, new_tokens(lengths, repeats)), temperature=0.0, ignore_eos=True
    )
    controller = llm.engine.speculation.controller
    controller.k = 0
    requests = [llm.submit(prompt, params) for prompt in prompts]
    try:
        while any(request.num_output == 0 for request in requests):
            llm.engine.step()
        log.begin(len(prompts))
        for _ in range(repeats):
            for k in lengths:
                controller.k = k
                llm.engine.step()
    finally:
        for request in requests:
            llm.engine.abort(request)
    seconds: dict[int, list[float]] = defaultdict(list)
    sizes = {len(prompts) * (1 + k) for k in lengths}
    for step in log.steps:
        if step.num_kept == step.num_rows and step.num_fed in sizes:
            seconds[step.num_fed].append(step.seconds)
    found = {size: median(values) for size, values in seconds.items()}
    return StepTimes(found) if found else None
