"""What the quality bench asks every mode, what one mode answers, and the gate of the control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagedraft.bench import quality_choice, quality_greedy, quality_text
from pagedraft.bench.quality_tasks import Choice, Task, Written
from pagedraft.model.transformer import Transformer

GATE_TASKS = 8


@dataclass(frozen=True)
class Probe:
    """What every mode is asked.

    tokens: of the text; window: how many of them see each other.
    prompt_ids: prompts that greedy decoding answers, num_new tokens each.
    """

    tokens: list[int]
    window: int
    prompt_ids: list[list[int]]
    num_new: int
    tasks: list[Task]
    tokenizer: Any

    @property
    def choices(self) -> list[Choice]:
        """The tasks that are judged by log-likelihood."""
        return [task for task in self.tasks if isinstance(task, Choice)]

    @property
    def written(self) -> list[Written]:
        """The tasks whose answer is generated."""
        return [task for task in self.tasks if isinstance(task, Written)]


@dataclass(frozen=True)
class Reading:
    """What a mode made of a probe.

    losses, best: negative log-likelihood and most likely token of each predicted token of the text.
    answers: greedy ones; forced: the most likely tokens at the positions of the control's answers.
    scores: each choice's options'; texts: each written task's answer.
    """

    losses: torch.Tensor
    best: torch.Tensor
    answers: list[list[int]]
    forced: list[list[int]]
    scores: list[torch.Tensor]
    texts: list[str]

    def is_right(self, probe: Probe) -> torch.Tensor:
        """A flag for each task, in the probe's order."""
        scores, texts = iter(self.scores), iter(self.texts)
        return torch.tensor(
            [
                quality_choice.is_right(task, next(scores))
                if isinstance(task, Choice)
                else task.is_right(next(texts))
                for task in probe.tasks
            ]
        )

    def right_probability(self, probe: Probe) -> torch.Tensor:
        """Probability of the right option of each choice."""
        pairs = zip(probe.choices, self.scores, strict=True)
        return torch.tensor([quality_choice.right_probability(*pair) for pair in pairs])


def read(
    model: Transformer,
    probe: Probe,
    kv_dtype: str,
    stored: torch.dtype,
    expected: Sequence[list[int]] | None = None,
) -> Reading:
    """Ask ``model``; kv_dtype, stored: what its pools store, by name and by dtype.

    expected: the control's answers, None where the model is the control.
    """
    losses, best = quality_text.score(model, probe.tokens, stored, window=probe.window)
    answers = quality_greedy.answers(model, probe.prompt_ids, kv_dtype, probe.num_new)
    expected = answers if expected is None else expected
    return Reading(
        losses=losses,
        best=best,
        answers=answers,
        forced=quality_greedy.best_tokens(model, probe.prompt_ids, expected, stored),
        scores=quality_choice.option_scores(model, probe.choices, probe.tokenizer.encode, stored),
        texts=quality_greedy.writes(model, probe.written, probe.tokenizer, kv_dtype),
    )


def check_control(model: Transformer, probe: Probe, reading: Reading, stored: torch.dtype) -> None:
    """Raise RuntimeError where the control differs from itself, fed in other portions.

    The text in halves of its chunks, tasks one by one, and answers at once instead of token by
    token: all have to give the same numbers, bit by bit.
    """
    half = quality_text.CHUNK // 2
    few = probe.tokens[: min(probe.window, quality_text.CHUNK) + 1]
    losses, best = quality_text.score(model, few, stored, window=probe.window, chunk=half)
    if not torch.equal(losses, reading.losses[: len(losses)]):
        raise RuntimeError("the control's losses differ when the text is fed in other chunks")
    tasks, encode = probe.choices[:GATE_TASKS], probe.tokenizer.encode
    scores = quality_choice.option_scores(model, tasks, encode, stored, chunk=1)
    if not all(map(torch.equal, scores, reading.scores)):
        raise RuntimeError("the control's scores differ when tasks are fed one by one")
    if reading.forced != reading.answers:
        raise RuntimeError("the control's answers are not its best tokens given what is before")
