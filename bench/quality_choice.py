"""Choices by log-likelihood: which of the texts that may follow does the model expect most?

An option's score is the log-likelihood of its tokens after those that all options of the task have
in common, so that how a tokenizer joins context and option does not matter. Options of one such
token are read from the same row of logits; rows of many tasks share a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix

import torch

from pagedraft.bench.quality_tasks import Choice
from pagedraft.bench.quality_text import BLOCK_SIZE, CHUNK, check_finite
from pagedraft.model.batch import Span, build_step_batch
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Row:
    """Tokens to feed, and the options of one task that their last logits score.

    tails: of each such option's index, the tokens that its score is the likelihood of; all but the
        last of them end ``tokens``.
    """

    task: int
    tokens: tuple[int, ...]
    tails: dict[int, tuple[int, ...]]

    @property
    def num_logits(self) -> int:
        """How many of the last tokens need logits."""
        return len(next(iter(self.tails.values())))


def rows_of(index: int, task: Choice, encode: Encode) -> list[Row]:
    """The rows of task number ``index``; ValueError if its options cannot be told apart."""
    whole = [tuple(encode(task.context + option)) for option in task.options]
    shared = len(commonprefix(whole))
    shortest = min(map(len, whole))
    if not 0 < shared < shortest:
        raise ValueError(
            f"task {task.id}: expected options that part after at least one token and before the "
            f"shortest ends, they share {shared} of its {shortest} tokens"
        )
    tails: dict[tuple[int, ...], dict[int, tuple[int, ...]]] = {}
    for option, tokens in enumerate(whole):
        tails.setdefault(tokens[:-1], {})[option] = tokens[shared:]
    return [Row(index, tokens, options) for tokens, options in tails.items()]


def option_scores(
    model: Transformer,
    tasks: Sequence[Choice],
    encode: Encode,
    stored: torch.dtype,
    *,
    chunk: int = CHUNK,
) -> list[torch.Tensor]:
    """Each task's log-likelihood of each option, fp64 on the CPU.

    stored: what the KV pool stores. chunk: tokens of a forward pass, more where one row is longer.
    Raises FloatingPointError naming the task whose scores are no numbers.
    """
    scores = [torch.zeros(len(task.options), dtype=torch.float64) for task in tasks]
    rows = [row for index, task in enumerate(tasks) for row in rows_of(index, task, encode)]
    for together in _packed(rows, chunk):
        logprobs_QV = _forward(model, together, stored).double().log_softmax(-1)
        parts = logprobs_QV.split([row.num_logits for row in together])
        for row, logprobs_LV in zip(together, parts, strict=True):
            for option, tail in row.tails.items():
                scores[row.task][option] = log_likelihood(logprobs_LV, tail)
    for task, values in zip(tasks, scores, strict=True):
        check_finite(values, f"task {task.id}, option")
    return scores


def log_likelihood(logprobs_LV: torch.Tensor, tokens: Sequence[int]) -> float:
    """Sum of the log-probabilities of ``tokens``, the i-th of which row i predicts."""
    wanted_L = torch.tensor(tokens, device=logprobs_LV.device)
    return float(logprobs_LV.gather(1, wanted_L[:, None]).sum())


def is_right(task: Choice, scores: torch.Tensor) -> bool:
    """Whether the right option is the most likely one; of equal ones the first is taken."""
    return int(scores.argmax()) == task.answer


def right_probability(task: Choice, scores: torch.Tensor) -> float:
    """Probability of the right option among the options."""
    return float(scores.softmax(0)[task.answer])


def _packed(rows: Sequence[Row], chunk: int) -> Iterator[list[Row]]:
    """Rows in order, as many at once as have ``chunk`` tokens together, at least one."""
    together: list[Row] = []
    for row in rows:
        if together and sum(len(r.tokens) for r in together) + len(row.tokens) > chunk:
            yield together
            together = []
        together.append(row)
    if together:
        yield together


def _forward(model: Transformer, rows: Sequence[Row], stored: torch.dtype) -> torch.Tensor:
    """Logits of the rows' last tokens, rows one after another, from a pool of their own."""
    spans, used = [], 1  # block 0 is the null block
    for row in rows:
        num_blocks = -(-len(row.tokens) // BLOCK_SIZE)
        blocks = range(used, used + num_blocks)
        spans.append(Span(row.tokens, 0, list(blocks), num_logits=row.num_logits))
        used += num_blocks
    pool = KVCache(model.config, used, BLOCK_SIZE, stored, model.device)
    batch = build_step_batch(
        spans, block_size=BLOCK_SIZE, device=model.device, row_multiple=model.row_multiple
    )
    return model.forward(batch, pool)
