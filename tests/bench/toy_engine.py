"""Peers for tests of the engine bench: this engine's own tokens, with flaws as asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pagedraft.bench.peers import PeerFailed, PeerRun
from pagedraft.decoding.params import SamplingParams
from pagedraft.scheduler.llm import LLM


class ToyPeer:
    """Decodes with an LLM of its own.

    wrong_at: index of a token that it gets wrong in every answer. tells_first: whether it tells
    when first tokens came. fails_at: the call, from 0, in which it breaks.
    """

    def __init__(
        self,
        llm: LLM,
        name: str,
        modes: tuple[str, ...] = ("plain",),
        *,
        wrong_at: int | None = None,
        tells_first: bool = True,
        fails_at: int | None = None,
    ) -> None:
        self.llm, self.name, self.modes = llm, name, modes
        self.facts: dict[str, Any] = {"version": "1.2.3", "threads": 1}
        self.wrong_at, self.tells_first, self.fails_at = wrong_at, tells_first, fails_at
        self.calls: list[str] = []
        self.is_closed = False

    def run(self, prompts: Sequence[list[int]], num_tokens: int, mode: str = "plain") -> PeerRun:
        """As the protocol has it."""
        self.calls.append(mode)
        if len(self.calls) - 1 == self.fails_at:
            raise PeerFailed("the server died\nwith a long log")
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        began = time.perf_counter()
        completions = self.llm.generate(list(prompts), params)
        seconds = time.perf_counter() - began
        token_ids = [list(completion.token_ids) for completion in completions]
        for tokens in token_ids:
            if self.wrong_at is not None and self.wrong_at < len(tokens):
                tokens[self.wrong_at] += 1
        first = [seconds for _ in prompts] if self.tells_first else []
        return PeerRun(token_ids, seconds, first)

    def close(self) -> None:
        """Nothing to free."""
        self.is_closed = True
