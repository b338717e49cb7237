"""Whether an estimate holds: the same prompts through the engine, with the drafter and without."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagedraft.decoding.estimate import Estimate, Row
from pagedraft.decoding.estimate_text import Text
from pagedraft.decoding.params import SamplingParams
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.llm import LLM, Completion


@dataclass(frozen=True)
class Measured:
    """What the engine did at ``k`` drafts a step, each prompt alone, after its first token.

    num_passes: target passes of the run with drafts.
    """

    k: int
    num_tokens: int
    num_passes: int
    seconds: float
    plain_seconds: float

    @property
    def speedup(self) -> float:
        """Of the run with drafts over the plain one."""
        return self.plain_seconds / self.seconds

    def line(self, expected: Row) -> str:
        """One line: measured beside expected."""
        error = expected.speedup / self.speedup - 1
        return (
            f"measured at k={self.k}: {self.speedup:.2f}x, {self.num_tokens / self.num_passes:.2f} "
            f"tokens/pass; expected {expected.speedup:.2f}x ({error:+.0%}), "
            f"{expected.tokens_per_pass:.2f} tokens/pass"
        )

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return {**dataclasses.asdict(self), "speedup": self.speedup}


def measure(
    target: Transformer,
    draft: Transformer | None,
    texts: Sequence[Text],
    estimate: Estimate,
    kv_dtype: str = "auto",
) -> Measured:
    """Generate the texts anew at the estimate's best k (match rule) and plainly, in turn.

    Raises RuntimeError if a request fails or becomes another text.
    """
    k = estimate.best().k
    llm = LLM(target, draft, speculate=estimate.drafter, k=k, kv_dtype=kv_dtype)
    num_tokens = num_passes = 0
    seconds = {True: 0.0, False: 0.0}
    for index, text in enumerate([texts[0], *texts]):  # the first run warms up
        for speculate in (True, False):
            completion = _generate(llm, text, speculate)
            if index == 0:
                continue
            emissions = completion.stats.emissions
            seconds[speculate] += emissions[-1][0] - emissions[0][0]
            if speculate:
                num_passes += len(emissions) - 1
                num_tokens += len(text.output_ids) - emissions[0][1]
    return Measured(k, num_tokens, num_passes, seconds[True], seconds[False])


def _generate(llm: LLM, text: Text, speculate: bool) -> Completion:
    params = dataclasses.replace(request_params(text), speculate=speculate)
    [completion] = llm.generate([list(text.prompt_ids)], params)
    if completion.error is not None:
        raise RuntimeError(f"the engine failed: {completion.error}")
    if completion.token_ids != list(text.output_ids):
        raise RuntimeError("the engine's output differs from the text of the estimate")
    return completion


def request_params(text: Text) -> SamplingParams:
    """The request that ``text`` is the answer to."""
    rules = text.rules
    return SamplingParams(
        max_tokens=text.max_tokens,
        min_tokens=rules.min_tokens,
        temperature=text.temperature,
        seed=text.seed,
        top_k=rules.top_k,
        top_p=rules.top_p,
        min_p=rules.min_p,
        repetition_penalty=rules.repetition_penalty,
        presence_penalty=rules.presence_penalty,
        frequency_penalty=rules.frequency_penalty,
        logit_bias=dict(rules.bias),
        stop_token_ids=rules.stop_ids,
        ignore_eos=True,  # the rules hold it among the stop ids, where it ends the text
    )
