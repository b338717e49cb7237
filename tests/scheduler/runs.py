"""Small runs of the engine for the exactness tests: prompts, parameters, ways to run them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pagedraft.decoding.drafters.base import Drafter
from pagedraft.decoding.params import SamplingParams
from pagedraft.decoding.single import generate_with_kv_cache
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.llm import LLM


def use_drafter(llm: LLM, drafter: Drafter) -> None:
    """Let ``drafter`` draft in place of those that the engine has."""
    llm.engine.speculation.drafters = {drafter.name: drafter}


def random_prompts(vocab_size: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Token ids without the special ones; the second half of each repeats the first."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for length in lengths:
        half = torch.randint(3, vocab_size, (-(-length // 2),), generator=generator).tolist()
        prompts.append((half + half)[:length])
    return prompts


GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
MIXED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.0, "repetition_penalty": 0.8, "frequency_penalty": -0.2, "min_tokens": 4},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "presence_penalty": -0.7, "logit_bias": {7: 2}},
    {"temperature": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
)


def mixed_params(count: int, max_tokens: int) -> list[SamplingParams]:
    """Greedy and seeded sampled rows in turn, plain ones and such with every rule."""
    return [
        SamplingParams(max_tokens=max_tokens, seed=1000 + i, **MIXED[i % len(MIXED)])
        for i in range(count)
    ]


def plain_outputs(
    model: Transformer, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[list[int]]:
    """The oracle: each prompt alone through the plainest decoding loop."""
    return [
        generate_with_kv_cache(model, prompt, len(prompt) + row.max_tokens, params=row)[
            len(prompt) :
        ]
        for prompt, row in zip(prompts, params, strict=True)
    ]


@dataclass(frozen=True)
class Outcome:
    """Output token ids of each prompt, and what the run did on the way."""

    token_ids: list[list[int]]
    num_passes: int
    num_preemptions: int
    num_drafted: int
    num_accepted: int


def run_together(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> Outcome:
    """All prompts in one batch; checks the pool after every step."""
    requests = [llm.submit(prompt, row) for prompt, row in zip(prompts, params, strict=True)]
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    return outcome(requests)


def run_staggered(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams], gap: int = 2
) -> Outcome:
    """A new prompt arrives every ``gap`` steps."""
    requests, queue = [], list(zip(prompts, params, strict=True))
    step = 0
    while queue or llm.engine.has_work:
        if queue and step % gap == 0:
            requests.append(llm.submit(*queue.pop(0)))
        llm.engine.step()
        llm.engine.check_integrity()
        step += 1
    return outcome(requests)


def run_preempted(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams], seed: int = 0
) -> Outcome:
    """All prompts in one batch; before most steps a random running request loses its KV."""
    engine, choose = llm.engine, random.Random(seed)
    requests = [llm.submit(prompt, row) for prompt, row in zip(prompts, params, strict=True)]
    while engine.has_work:
        if engine.running and choose.random() < 0.95:
            engine.preempt(choose.choice(engine.running))
        engine.step()
        engine.check_integrity()
    return outcome(requests)


def run_alone(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Outcome:
    """One prompt after another."""
    requests = []
    for prompt, row in zip(prompts, params, strict=True):
        requests.append(llm.submit(prompt, row))
        while llm.engine.has_work:
            llm.engine.step()
    return outcome(requests)


def outcome(requests: Sequence) -> Outcome:
    """Collect what the requests became; every one must have ended without an error."""
    errors = [request.error for request in requests if request.error]
    assert not errors, errors
    assert all(request.finished for request in requests)
    return Outcome(
        token_ids=[request.sequence.output_ids for request in requests],
        num_passes=max(request.stats.num_passes for request in requests),
        num_preemptions=sum(request.stats.num_preemptions for request in requests),
        num_drafted=sum(sum(request.stats.drafted) for request in requests),
        num_accepted=sum(sum(request.stats.accepted) for request in requests),
    )


def without_speculation(params: Sequence[SamplingParams]) -> list[SamplingParams]:
    """The same requests with drafts turned off."""
    return [replace(row, speculate=False) for row in params]
