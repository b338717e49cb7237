"""Greedy decoding: how far a mode's answers are the control's, and what it writes for tasks.

An answer goes on after the end-of-sequence token, so that all have the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagedraft.bench.kv_accuracy import BLOCK_SIZE, answers, forced_logits, shared_prefix
from pagedraft.bench.quality_stats import Estimate, mean, share
from pagedraft.bench.quality_tasks import Written
from pagedraft.bench.speculation_prompts import EDITS, QUESTIONS
from pagedraft.decoding.params import SamplingParams
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.llm import LLM

MOST_PROMPTS = len(QUESTIONS) + len(EDITS)

__all__ = ["Agreement", "agreement", "answers", "best_tokens", "chat_ids", "prompts", "writes"]


@dataclass(frozen=True)
class Agreement:
    """A mode's greedy answers beside the control's.

    same_answers: share of answers that are equal token by token.
    prefix: mean number of tokens before an answer parts, at most the length of an answer.
    same_best: share of the answers' positions whose best token is the control's, given the
        control's tokens before.
    """

    same_answers: Estimate
    prefix: Estimate
    same_best: Estimate


def prompts(tokenizer: Any, num_prompts: int) -> list[list[int]]:
    """Token ids of ``num_prompts`` chats, questions and code edits in turn."""
    if not 2 <= num_prompts <= MOST_PROMPTS:
        raise ValueError(f"prompts: expected 2 to {MOST_PROMPTS}, got {num_prompts}")
    texts = [text for pair in zip(QUESTIONS, EDITS, strict=True) for text in pair]
    return [chat_ids(tokenizer, text) for text in texts[:num_prompts]]


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of what a user says, ready for an answer; without a chat template, of the text."""
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(text))
    messages = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(chat, add_special_tokens=False))


def best_tokens(
    model: Transformer,
    prompt_ids: Sequence[list[int]],
    expected: Sequence[list[int]],
    stored: torch.dtype,
) -> list[list[int]]:
    """The most likely token at each position of the expected answers, given what is before it."""
    found = []
    for index, (prompt, answer) in enumerate(zip(prompt_ids, expected, strict=True)):
        logits_QV = forced_logits(model, prompt, answer, stored)
        if bool(logits_QV.isnan().any()):
            raise FloatingPointError(f"prompt {index}: expected logits that are numbers, got NaN")
        found.append(logits_QV.argmax(-1).tolist())
    return found


def agreement(
    own: Sequence[list[int]], best: Sequence[list[int]], expected: Sequence[list[int]]
) -> Agreement:
    """own, expected: greedy answers; best: of ``best_tokens``. All of the same lengths."""
    pairs = list(zip(own, expected, strict=True))
    prefixes = [float(shared_prefix(a, b)) for a, b in pairs]
    is_same = [
        a == b
        for row, answer in zip(best, expected, strict=True)
        for a, b in zip(row, answer, strict=True)
    ]
    return Agreement(
        same_answers=share(torch.tensor([a == b for a, b in pairs])),
        prefix=mean(torch.tensor(prefixes)),
        same_best=share(torch.tensor(is_same)),
    )


def writes(
    model: Transformer, tasks: Sequence[Written], tokenizer: Any, kv_dtype: str
) -> list[str]:
    """The greedy answer to each task, all tasks together; RuntimeError if a request fails."""
    if not tasks:
        return []
    prompt_ids = [
        chat_ids(tokenizer, task.prompt) if task.is_chat else list(tokenizer.encode(task.prompt))
        for task in tasks
    ]
    capacity = sum(
        len(ids) + task.num_tokens + BLOCK_SIZE for ids, task in zip(prompt_ids, tasks, strict=True)
    )
    llm = LLM(model, speculate="off", kv_dtype=kv_dtype, kv_tokens=capacity, block_size=BLOCK_SIZE)
    params = [SamplingParams(max_tokens=task.num_tokens, temperature=0) for task in tasks]
    completions = llm.generate(prompt_ids, params)
    for task, completion in zip(tasks, completions, strict=True):
        if completion.error:
            raise RuntimeError(f"task {task.id}: the request failed: {completion.error}")
    return [
        tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        for completion in completions
    ]
