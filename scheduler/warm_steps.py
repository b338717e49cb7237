"""The forward passes that meet every kernel a model's steps can launch, as few as that takes.

A kernel is compiled for what the compiler must know (a tile, a kind of split), which follows from a
step's sizes alone. So a step of empty rows compiles what a step of long contexts with the same
bounds runs, and stores nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pagedraft.kernels.paged_attention_config import SECTION, SEGMENT
from pagedraft.kernels.paged_attention_launch import SharedPrefixes
from pagedraft.model.batch import StepBatch
from pagedraft.model.graph_shapes import AttentionChoices, powers
from pagedraft.model.padding import StepShape, empty_batch

# Numbers of rows of a linear layer, one of each tile (linear_config.py, linear_quant.py).
TILE_ROWS = (1, 8, 16, 32, 64, 65)
SPAN_STEPS = 64
KINDS_OF_SPLIT = 4  # a walk, with a total or without; segments; sections
MANY = 2**40  # keys saved: reading them once pays


class Limits(NamedTuple):
    """The largest step that a model runs."""

    max_rows: int
    max_tokens: int
    max_context: int


class WarmStep(NamedTuple):
    """A pass to run: its sizes and rows of logits.

    shared_keys: the bound of a shared prefix, 0 for none. spans: queries of its first rows; the
    other rows, all of them by default, are empty.
    """

    shape: StepShape
    num_logits: int
    shared_keys: int = 0
    spans: tuple[int, ...] = ()

    def batch(self, block_size: int, device: torch.device) -> StepBatch:
        """The step's inputs."""
        num_columns = max(1, -(-max(self.spans, default=1) // block_size))
        batch = empty_batch(self.shape, self.num_logits, num_columns, device, self.spans)
        if not self.shared_keys:
            return batch
        return replace(batch, shared=_empty_prefixes(self.shape, self.shared_keys, device))


def _empty_prefixes(shape: StepShape, max_keys: int, device: torch.device) -> SharedPrefixes:
    """Bounds of a prefix worth a pass of its own, over one run of rows that share nothing."""

    def zeros(*sizes: int) -> torch.Tensor:
        return torch.zeros(sizes, dtype=torch.int32, device=device)

    return SharedPrefixes(
        query_starts_P1=zeros(2),
        num_keys_P=zeros(1),
        num_keys_R=zeros(shape.num_rows),
        kv_lens_P=zeros(1),
        block_table_PM=zeros(1, 1),
        max_query_len=shape.max_query_len,
        max_keys=max_keys,
        num_saved_keys=MANY,
    )


def kernel_steps(limits: Limits, choices: AttentionChoices) -> list[WarmStep]:
    """Steps of all tiles of linear layers, all kernels of attention, with and without a prefix."""
    steps = list(_tile_steps(limits))
    spans = choices.spans(min(limits.max_tokens, limits.max_context))
    for first, last in zip([1, *(span + 1 for span in spans)], spans, strict=False):
        steps += _attention_steps(first, last, limits, choices)
        if limits.max_rows > 1:
            steps += _prefix_steps(first, limits)
    return list(dict.fromkeys(steps))


def _prefix_steps(span: int, limits: Limits) -> list[WarmStep]:
    """Steps with a shared prefix in units of segments and of sections, where contexts have them.

    Without it the step would be a walk over one unit, so that the prefix decides on the unit.
    """
    shape = StepShape(min(span + 1, limits.max_tokens), 2, span, SEGMENT)
    pairs = ((SEGMENT, SEGMENT), (SECTION, 2 * SECTION))
    return [WarmStep(shape, 1, keys) for unit, keys in pairs if unit <= limits.max_context]


def _tile_steps(limits: Limits) -> Iterator[WarmStep]:
    """Every tile with logits for all tokens, for a few of more, and for none."""
    context = min(SEGMENT, limits.max_context)
    counts = sorted({min(count, limits.max_tokens) for count in TILE_ROWS})

    def step(num_tokens: int, num_logits: int) -> WarmStep:
        num_rows = min(num_tokens, limits.max_rows)
        span = min(context, -(-num_tokens // num_rows))
        return WarmStep(StepShape(num_tokens, num_rows, span, context), num_logits)

    for count in counts:
        yield step(count, count)
        yield step(counts[-1], count)
    yield step(counts[-1], 0)


def _attention_steps(
    first: int, last: int, limits: Limits, choices: AttentionChoices
) -> list[WarmStep]:
    """A step for each kind of split that rows of ``first`` to ``last`` queries may take."""
    found: dict[Any, WarmStep] = {}
    for shape in _sizes(first, last, limits):
        choice = choices(shape)
        kind = choice.shape, choice.split.unit, choice.has_total
        if kind not in found:
            found[kind] = WarmStep(shape, min(1, shape.num_tokens))
            if len(found) == KINDS_OF_SPLIT:
                break
    return list(found.values())


def _sizes(first: int, last: int, limits: Limits) -> Iterator[StepShape]:
    """Sizes of steps whose longest span is one of ``first`` to ``last``.

    Dense where a choice may turn: rows beside the shortest and the longest span, spans of a lone
    row, contexts by sections.
    """
    edges = {SEGMENT, SEGMENT + 1, SECTION, SECTION + 1}
    sections = range(SECTION, limits.max_context, SECTION)
    contexts = sorted(c for c in {*edges, *sections} if c < limits.max_context)
    contexts.append(limits.max_context)
    spans = {first, last, *range(first, last, max(1, (last - first) // SPAN_STEPS))}
    for span in sorted(spans):
        rows = range(1, limits.max_rows + 1) if span in (first, last) else (1,)
        for num_rows in rows:
            most = min(limits.max_tokens, num_rows * span)
            least = span + num_rows - 1
            if least > most:
                break
            for num_tokens in powers(least, most):
                for context in contexts:
                    if context >= span:
                        yield StepShape(num_tokens, num_rows, span, context)


def small_steps(limits: Limits) -> list[WarmStep]:
    """A step of each kind with queries: one row, several, drafts, a chunk of a prompt.

    For processors, whose libraries set up threads and kernels at their first calls.
    """
    most = min(limits.max_tokens, limits.max_context)
    many = min(4, limits.max_rows, limits.max_tokens)
    steps = []
    for spans in ((1,), (1,) * many, (min(5, most),), (min(64, most),)):
        shape = StepShape(sum(spans), len(spans), max(spans), max(spans))
        num_logits = 1 if max(spans) > 5 else sum(spans)
        steps.append(WarmStep(shape, num_logits, spans=spans))
    return steps
