"""The engine beside a fake model: real scheduling, batches, draws and commits, no arithmetic.

The fake model writes no KV and continues one scripted text, a pattern that repeats with noise: the
logits of a row are those of the script's token after its position. So what is drafted, accepted and
emitted is the same in every run, whatever it costs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pagedraft.decoding.controller import DraftController
from pagedraft.decoding.drafters.indexed import IndexedDrafter
from pagedraft.decoding.drafters.suffix_automaton import SuffixAutomaton
from pagedraft.decoding.params import SamplingParams
from pagedraft.decoding.sequence import Sequence
from pagedraft.kernels.philox import NOISE_CHUNK
from pagedraft.model.batch import StepBatch
from pagedraft.scheduler.engine import Engine
from pagedraft.scheduler.request import Request

VOCAB_SIZE = NOISE_CHUNK  # the least that the sampler's kernels work on
PERIOD = 40  # tokens after which the script repeats
NOISE = 0.14  # share of its tokens that are another one; half of four drafts are right then
CERTAIN = 100.0  # the logit of the script's token, above 0 of the others: any temperature draws it
NUM_NAME_TOKENS = 3  # a prompt begins with its number, so that no two share a block
INDEXED_TOKENS = 512  # how much of a prompt's end the lookup knows
NO_LIMIT = 2**31 - 1


def script(num_tokens: int) -> np.ndarray:
    """The text: int64 [num_tokens]."""
    rng = np.random.default_rng(0)
    tokens = np.resize(rng.integers(VOCAB_SIZE, size=PERIOD), num_tokens)
    is_noise = rng.random(num_tokens) < NOISE
    tokens[is_noise] = rng.integers(VOCAB_SIZE, size=int(is_noise.sum()))
    return tokens


@dataclass
class FakeCache:
    """As much of a KV pool as the engine asks for."""

    num_blocks: int
    block_size: int
    tensors: tuple[torch.Tensor, ...] = ()


class FakeTarget:
    """Answers with the script."""

    def __init__(self, max_positions: int) -> None:
        self.device = torch.device("cpu")
        self.row_multiple = 1
        self.config: Any = SimpleNamespace(
            vocab_size=VOCAB_SIZE, max_positions=max_positions, eos_token_ids=()
        )
        self.script = script(max_positions + 1)
        self._following_P = torch.from_numpy(self.script[1:].copy())

    def forward(self, batch: StepBatch, cache: FakeCache) -> torch.Tensor:
        """The logits after every position that asks for them, fp32 [Q, V]."""
        position_Q = batch.positions_T[batch.logit_rows_Q]
        logits_QV = torch.zeros(len(position_Q), VOCAB_SIZE)
        return logits_QV.scatter_(1, self._following_P[position_Q, None], CERTAIN)


class EndIndex(SuffixAutomaton):
    """A suffix automaton over a text, of what the first call brings only the end.

    What a token takes does not grow with the index; its memory and what it takes to build do. (Even
    of ends, many rows have more than caches hold.)
    """

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append committed tokens."""
        if not self.tokens:
            tokens = list(token_ids)
            self.tokens += tokens[:-INDEXED_TOKENS]
            self.num_learned = len(self.tokens)
            token_ids = tokens[-INDEXED_TOKENS:]
        super().extend(token_ids)


class EndDrafter(IndexedDrafter):
    """The suffix drafter over the ends of the prompts, whole at the first call."""

    name = "suffix"
    copies_contexts = True  # as the suffix drafter does

    def __init__(self) -> None:
        super().__init__(EndIndex, index_tokens=NO_LIMIT)


def make_engine(
    target: FakeTarget, *, max_rows: int, num_blocks: int, block_size: int, k: int = 0
) -> Engine:
    """An engine over the fake model; ``k`` drafts a row by suffix lookup, none with 0."""
    return Engine(
        target,  # type: ignore[arg-type]
        [FakeCache(num_blocks, block_size)],  # type: ignore[list-item]
        drafters=[EndDrafter()] if k else [],
        controller=DraftController(k),
        max_rows=max_rows,
    )


@dataclass(frozen=True)
class Case:
    """One configuration. context: tokens of the prompts; k: drafts a row, 0 for none.

    answer: tokens after which a request ends and another starts; None: nothing ends.
    """

    rows: int
    context: int
    k: int
    block_size: int = 64
    answer: int | None = None
    temperature: float = 0.0

    @property
    def name(self) -> str:
        """What the table calls it."""
        turnover = "" if self.answer is None else ", turnover"
        return f"{self.rows} rows, context {self.context}{turnover}, k={self.k}"


@contextmanager
def set_up_is_no_garbage() -> Iterator[None]:
    """Keep the collector from walking what was made before: prompts, indexes, PyTorch itself.

    One such walk takes as long as many steps, and falls on any of them. What the steps make is
    collected as ever.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Bed:
    """An engine in a steady state of one case: all rows decode, at staggered places in blocks."""

    def __init__(self, case: Case, num_steps: int) -> None:
        self.case = case
        self.num_new = case.answer or (num_steps + 8) * (case.k + 1)
        capacity = case.context + self.num_new + 1
        self.target = FakeTarget(capacity + case.k)
        blocks_a_row = -(-capacity // case.block_size) + 1
        self.engine = make_engine(
            self.target,
            max_rows=case.rows,
            num_blocks=1 + case.rows * blocks_a_row,
            block_size=case.block_size,
            k=case.k,
        )
        self.requests: list[Request] = []
        self.num_ended = 0
        self._prepared: list[Request] = []
        self._fill()

    def _fill(self) -> None:
        """Admit all prompts at once, and take the first steps."""
        for _ in range(self.case.rows):
            self.engine.add(self._request())
        self.engine.token_budget = NO_LIMIT
        self.engine.step()
        self.engine.token_budget = max(2048, 8 * self.case.rows)
        for _ in range(3):
            self.prepare()
            self.step()

    def prepare(self) -> None:
        """Make ready, off the clock, what the next step may have to submit."""
        if self.case.answer is not None:
            while len(self._prepared) < self.case.rows:
                self._prepared.append(self._request())

    def step(self) -> None:
        """One step, and a new request for each that ended."""
        for request in self.engine.step():
            if request.finished:
                self.num_ended += 1
                self.engine.add(self._prepared.pop())

    def check(self) -> None:
        """Raise RuntimeError unless every request says what the script says, drafts and all."""
        self.engine.check_integrity()
        for request in self.requests:
            sequence = request.sequence
            want = self.target.script[sequence.num_prompt : sequence.num_tokens].tolist()
            if sequence.output_ids != want or request.finish_reason not in (None, "length"):
                raise RuntimeError(
                    f"{self.case.name}: {request.request_id} left the script "
                    f"({request.finish_reason}, {request.error})"
                )
        errors = [error for request in self.requests for error in request.stats.drafter_errors]
        if errors or (self.accepted is None) != (self.case.k == 0):
            raise RuntimeError(
                f"{self.case.name}: expected drafts, accepted {self.accepted}: {errors[:1]}"
            )

    @property
    def accepted(self) -> float | None:
        """Share of the drafts that were accepted; None without drafts."""
        drafted = sum(sum(request.stats.drafted) for request in self.requests)
        accepted = sum(sum(request.stats.accepted) for request in self.requests)
        return accepted / drafted if drafted else None

    def _request(self) -> Request:
        """The next one. Prompts differ in length by up to a block."""
        number, case = len(self.requests), self.case
        num_prompt = case.context - number * 7 % min(64, case.context // 2)
        token_ids = self.target.script[:num_prompt].tolist()
        name = [number // VOCAB_SIZE**digit % VOCAB_SIZE for digit in range(NUM_NAME_TOKENS)]
        token_ids[:NUM_NAME_TOKENS] = name
        num_new = self.num_new
        if case.answer is not None:  # the first ones end one by one
            is_first = number < case.rows
            num_new = 4 + number * case.answer // case.rows if is_first else case.answer
        request = Request(
            request_id=f"request-{number}",
            sequence=Sequence(token_ids, num_prompt, case.temperature, seed=number),
            params=SamplingParams(max_tokens=num_new, temperature=case.temperature),
            stop_ids=frozenset(),
            max_context=self.target.config.max_positions,
        )
        self.requests.append(request)
        return request
