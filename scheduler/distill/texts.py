"""Texts for distillation: the target writes them in full batches, and its states are kept.

Nothing is computed for the states: they are what the head reads at each token that is drawn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from pagedraft.decoding.distill.prompt_tokens import Encoded
from pagedraft.decoding.distill.taught import Taught
from pagedraft.decoding.estimate_text import LOGIT_ROWS, Reader
from pagedraft.decoding.params import SamplingParams, derive_seed
from pagedraft.kernels.normed import Normed, finish_norm
from pagedraft.model.batch import Span, StepBatch
from pagedraft.model.feature_head import states_before
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.request import Request

TEMPERATURES = (0.0, 0.8)  # of the texts in turn
MAX_ROWS = 32
MIN_OUTPUT = 8  # tokens; of a text that was cut short


class _Ear:
    """Hears what the head of a model reads: pass its ``observe`` to ``forward``."""

    def __init__(self, model: Transformer) -> None:
        self._last = len(model.layers) - 1
        self._rows: torch.Tensor | Normed | None = None

    def observe(self, layer: int, stage: str, result: torch.Tensor | Normed) -> None:
        if layer == self._last and stage == "down_norm":
            self._rows = result

    def states(self, count: int, rows_Q: torch.Tensor | None = None) -> torch.Tensor:
        """The first ``count`` rows [count, E] of the last pass, or of its rows ``rows_Q``.

        fp32 and in memory of their own.
        """
        rows, self._rows = self._rows, None
        assert rows is not None
        states_TE = finish_norm(rows) if isinstance(rows, Normed) else rows
        if rows_Q is not None:
            states_TE = states_TE[rows_Q]
        return states_TE[:count].float().clone()


class _Lesson:
    """One request and the states it has brought."""

    def __init__(self, encoded: Encoded, temperature: float) -> None:
        self.encoded = encoded
        self.temperature = temperature
        self.states: list[torch.Tensor] = []
        self.lse: list[torch.Tensor] = []
        # States and log-sum-exp at the prompt's tokens but the last.
        self.before: tuple[torch.Tensor, torch.Tensor] | None = None

    def taught(self, request: Request) -> Taught:
        """What there is to learn so far."""
        num_prompt = request.sequence.num_prompt
        token_ids = request.sequence.token_ids[: num_prompt + len(self.states)]
        return Taught(
            torch.tensor(token_ids, dtype=torch.int32),
            num_prompt,
            _as_fp16(torch.stack(self.states)),
            torch.stack(self.lse).cpu(),
            self.encoded.prompt.kind,
            self.encoded.prompt.source,
            self.temperature,
            *(self.before or ()),
        )


class Writer:
    """Lets ``target`` continue prompts and keeps what its head read.

    max_tokens: of a continuation. temperatures: of the texts in turn. with_prompts: keep what the
        target thought at the prompts' tokens, too.
    """

    def __init__(
        self,
        target: Transformer,
        *,
        seed: int,
        max_prompt_tokens: int,
        max_tokens: int,
        temperatures: Sequence[float] = TEMPERATURES,
        max_rows: int = MAX_ROWS,
        with_prompts: bool = False,
    ) -> None:
        self._llm = LLM(
            target,
            speculate="off",
            prefix_cache=False,
            max_rows=max_rows,
            kv_tokens=max_rows * (max_prompt_tokens + max_tokens + 64),
        )
        self._cache = self._llm.engine.caches[0]
        if with_prompts:
            self._cache.add_features(target.config.embed_dim, target.activation_dtype)
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._temperatures = tuple(temperatures)
        self._seed = seed
        self._ear = _Ear(target)
        self._states_QE = self._lse_Q = torch.empty(0)
        self._llm.engine.launcher.forward = self._forward

    def write(
        self, encoded: Sequence[Encoded], first: int = 0, deadline: float | None = None
    ) -> Iterator[tuple[int, Taught | None]]:
        """Yield (index, text) of each prompt as it ends; None: there is nothing to learn from.

        first: index of the first prompt, which with the seed settles its draws; so prompts can be
        written in several calls. deadline: ``time.perf_counter`` when what is unfinished is taken
        as it is and the rest left.
        """
        engine = self._llm.engine
        lessons: dict[Request, tuple[int, _Lesson]] = {}
        left = iter(enumerate(encoded, start=first))
        try:
            while True:
                is_late = deadline is not None and time.perf_counter() >= deadline
                while not is_late and len(lessons) < self._max_rows:
                    index, prompt = next(left, (-1, None))
                    if prompt is None:
                        break
                    request, lesson = self._submit(index, prompt)
                    lessons[request] = index, lesson
                if not lessons:
                    return
                if is_late:
                    for request in lessons:
                        engine.abort(request)
                else:
                    for row, request in enumerate(engine.step()):
                        _, lesson = lessons[request]
                        if not lesson.states:
                            lesson.before = self._read_before(request)
                        lesson.states.append(self._states_QE[row])
                        lesson.lse.append(self._lse_Q[row])
                for request in [request for request in lessons if request.finished]:
                    index, lesson = lessons.pop(request)
                    is_little = len(lesson.states) < MIN_OUTPUT or request.finish_reason == "error"
                    yield index, None if is_little else lesson.taught(request)
        finally:
            for request in lessons:
                engine.abort(request)

    def _submit(self, index: int, encoded: Encoded) -> tuple[Request, _Lesson]:
        temperature = self._temperatures[index % len(self._temperatures)]
        params = SamplingParams(
            max_tokens=self._max_tokens,
            temperature=temperature,
            seed=derive_seed(self._seed, index),
        )
        request = self._llm.submit(list(encoded.token_ids), params)
        return request, _Lesson(encoded, temperature)

    def _read_before(self, request: Request) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What the target thought at all tokens of a prompt but the last: states, log-sum-exp."""
        if self._cache.features_NBE is None:
            return None
        target, sequence = self._llm.target, request.sequence
        after = sequence.token_ids[1 : sequence.num_prompt]
        if not after:
            return _as_fp16(torch.zeros(0, target.config.embed_dim)), torch.zeros(0)
        states_PE = states_before(self._cache, [Span(after, 1, sequence.block_ids, 0)], len(after))
        lse = [
            target.head.logits(rows, target.config.vocab_size, exact=target.exact).logsumexp(-1)
            for rows in states_PE.split(LOGIT_ROWS)
        ]
        return _as_fp16(states_PE), torch.cat(lse).cpu()

    def _forward(self, batch: StepBatch, cache: KVCache) -> torch.Tensor:
        """The target's pass; keeps the rows that its head read."""
        logits_QV = self._llm.target.forward(batch, cache, self._ear.observe)
        if batch.num_logits:
            rows = None if cache.features_NBE is None else batch.logit_rows_Q
            self._states_QE = self._ear.states(batch.num_logits, rows)
            self._lse_Q = logits_QV.logsumexp(-1)
        return logits_QV


def write_own(
    target: Transformer,
    draft: Transformer,
    encoded: Sequence[Encoded],
    *,
    seed: int,
    max_tokens: int,
    temperatures: Sequence[float] = TEMPERATURES,
) -> list[Taught]:
    """Texts that the draft wrote, with what the target thinks at each of their tokens."""
    llm = LLM(draft, speculate="off", max_rows=MAX_ROWS)
    drawn = [temperatures[index % len(temperatures)] for index in range(len(encoded))]
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=value, seed=derive_seed(seed, index))
        for index, value in enumerate(drawn)
    ]
    completions = llm.generate([list(prompt.token_ids) for prompt in encoded], params)
    longest = max(len(prompt.token_ids) for prompt in encoded) + max_tokens
    reader = Reader(target, longest)
    texts = []
    for prompt, completion, temperature in zip(encoded, completions, drawn, strict=True):
        if len(completion.token_ids) < MIN_OUTPUT or completion.finish_reason == "error":
            continue
        states_NE, lse_N = _judge(reader, list(prompt.token_ids), completion.token_ids)
        texts.append(
            Taught(
                torch.tensor([*prompt.token_ids, *completion.token_ids], dtype=torch.int32),
                len(prompt.token_ids),
                _as_fp16(states_NE),
                lse_N.cpu(),
                prompt.prompt.kind,
                prompt.prompt.source,
                temperature,
            )
        )
    return texts


def _judge(
    reader: Reader, prompt_ids: list[int], output_ids: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """States [N, E] of a model that reads a text, and log-sum-exps [N] of its logits."""
    ear = _Ear(reader.model)
    token_ids = [*prompt_ids, *output_ids]
    reader.skip(prompt_ids[:-1])
    states, lse = [], []
    for first in range(len(prompt_ids) - 1, len(token_ids) - 1, LOGIT_ROWS):
        fed = token_ids[first : min(first + LOGIT_ROWS, len(token_ids) - 1)]
        logits_QV = reader.read(fed, first, ear.observe)
        states.append(ear.states(len(fed)))
        lse.append(logits_QV.logsumexp(-1))
    return torch.cat(states), torch.cat(lse)


def _as_fp16(states_NE: torch.Tensor) -> torch.Tensor:
    states_NE = states_NE.to("cpu", torch.float16)
    if not bool(states_NE.isfinite().all()):
        raise ValueError("target: its states after the final norm do not fit 16 bits")
    return states_NE
