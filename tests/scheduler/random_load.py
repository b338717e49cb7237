"""A random load: requests of any length and any rules that come while others run."""

from __future__ import annotations

import random
import time
from typing import Any

from pagedraft.decoding.params import SamplingParams
from pagedraft.scheduler.llm import LLM

FIRST_TOKEN = 3  # those before are special in the tests' models
# Shares of the longest context that prompts begin with, alike for several requests.
STEMS = (0.88, 0.14, 0.06)


def random_params(num_tokens: int, choose: random.Random) -> SamplingParams:
    """Any rules, alone and together."""

    def maybe(value: Any, otherwise: Any = None) -> Any:
        return value if choose.random() < 0.3 else otherwise

    return SamplingParams(
        max_tokens=num_tokens,
        min_tokens=maybe(min(3, num_tokens), 0),
        temperature=choose.choice([0.0, 0.7, 1.0]),
        top_k=maybe(5),
        top_p=maybe(0.9),
        min_p=maybe(0.1),
        repetition_penalty=maybe(1.2),
        frequency_penalty=maybe(0.5, 0.0),
        logit_bias=maybe({5: 1.0, 6: -1.0}),
        stop_token_ids=(4,),
        logprobs=maybe(choose.choice([0, 1, 5])),
        n=maybe(choose.randint(2, 3), 1),
        speculate=choose.random() < 0.8,
        k=maybe(choose.randint(0, 12)),
        accept=choose.choice(["match", "match", "rejection", "block"]),
        ignore_eos=True,
    )


def run_load(
    llm: LLM, num_requests: int, choose: random.Random, *, longest: int = 30, seconds: float = 60.0
) -> list[str]:
    """Run it, with some preemptions, for at most so long; return the requests' errors.

    longest: tokens of an output. Prompts are as long as the model's positions allow.
    """
    config = llm.target.config
    most = config.max_positions - longest - 1

    def tokens(count: int) -> list[int]:
        return [choose.randrange(FIRST_TOKEN, config.vocab_size) for _ in range(count)]

    stems = [tokens(int(share * most)) for share in STEMS]
    requests, waiting, until = [], num_requests, time.monotonic() + seconds
    while (waiting or llm.engine.has_work) and time.monotonic() < until:
        for _ in range(min(waiting, choose.choice([0, 0, 1, 3]))):
            waiting -= 1
            stem = choose.choice([*stems, *stems[1:], [], [], []])
            prompt = (stem + tokens(choose.choice([1, 2, 9, 40, 130])))[:most]
            num_tokens = choose.choice([1, 2, min(9, longest), longest])
            requests += llm.submit_all(prompt, random_params(num_tokens, choose))
        if llm.engine.running and choose.random() < 0.02:
            llm.engine.preempt(choose.choice(llm.engine.running))
        llm.engine.step()
    llm.engine.abort_all()
    return [request.error for request in requests if request.error is not None]
