"""Sequence: the tokens of one request, its blocks, and how much of them each model has written."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedraft.decoding.logit_rules import NEUTRAL, LogitRules, TokenCounts
from pagedraft.decoding.params import AcceptRule, LogitsProcessor


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """Tokens and state of one request.

    token_ids: the committed context: prompt, then output. Only ``append`` changes it.
    num_prompt: how many of them are the prompt.
    temperature, seed, sample_index, rules, processors, accept: how its tokens are drawn and its
        drafts accepted; fixed for its life. sample_index: which of a prompt's n samples it is.
    failures: position to why no token could be drawn there, for positions after the context that a
        row of drafts reached; they count only where decoding gets to them.
    block_ids: the pool blocks it owns, in order; shared by the target's and the draft's pools.
    num_written: tokens whose target KV is in the pool and committed. Rolling back a rejected draft
        is setting this count: nothing is copied.
    num_draft_written: the same for the draft model.
    """

    token_ids: list[int]
    num_prompt: int
    temperature: float
    seed: int
    rules: LogitRules = NEUTRAL
    sample_index: int = 0
    processors: tuple[LogitsProcessor, ...] = ()
    accept: AcceptRule = "match"
    block_ids: list[int] = field(default_factory=list)
    num_written: int = 0
    num_draft_written: int = 0
    failures: dict[int, str] = field(default_factory=dict)
    signed_seed: int = field(init=False, repr=False)
    _counts: TokenCounts = field(default_factory=TokenCounts, repr=False)

    def __post_init__(self) -> None:
        """``signed_seed``: the 64 bits of the seed as what an int64 can hold."""
        self.signed_seed = self.seed - 2**64 if self.seed >= 2**63 else self.seed

    @property
    def num_tokens(self) -> int:
        """Committed context length in tokens."""
        return len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """Committed tokens that the target has yet to see."""
        return len(self.token_ids) - self.num_written

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt :]

    def counts(self) -> TokenCounts:
        """The tokens of the committed context, counted; for penalties."""
        self._counts.catch_up(self.token_ids, self.num_prompt)
        return self._counts

    def append(self, tokens: list[int]) -> None:
        """Commit ``tokens``; KV that was written for rejected drafts is rolled back.

        The last committed token was never fed, so at most all tokens but one are written. Accepted
        drafts are committed tokens, so what a model wrote for them stays valid.
        """
        self.token_ids.extend(tokens)
        if self.failures:
            self.failures.clear()
        self.num_written = written = len(self.token_ids) - 1
        if self.num_draft_written > written:
            self.num_draft_written = written

    def drop_kv(self) -> None:
        """Forget all KV (preemption): everything is written anew later."""
        self.num_written = 0
        self.num_draft_written = 0
