"""Which padded shapes a model's steps are captured for, and why these.

Rows go by powers of two: a row without queries ends its programs at once, but rows decide how a
launch splits the keys, so few must not be padded to many. Tokens go by what a linear layer's row
tiles hold (TOKENS): inside a tile they are free. Spans go by attention's tiles: a bound within one
kernel's reach costs nothing, one beyond it reads keys twice or in a slower tile. Contexts go by
powers of two, because units of keys past a row's end are programs that end at once; contexts that
launch alike are one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from pagedraft.kernels.paged_attention_config import SEGMENT
from pagedraft.kernels.paged_attention_launch import (
    KVPool,
    LaunchChoice,
    choose_launch,
    wide_tiles,
)
from pagedraft.kernels.score_rules import ScoreRules
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.padding import StepShape
from pagedraft.model.transformer import Transformer

TOKENS = (8, 16, 32, 64, 128, 192, 256, 384, 512)
COARSE = 4  # contexts of steps with drafts grow by this factor: they are more, and each is rarer


@dataclass(frozen=True)
class GraphLimits:
    """The largest step that is captured.

    max_rows, max_kv_len: of the engine. max_drafts: drafts a row. max_tokens: beyond these a step
    computes for longer than its launches take.
    """

    max_rows: int
    max_drafts: int
    max_kv_len: int
    max_tokens: int = TOKENS[-1]

    def __post_init__(self) -> None:
        for name, least in (("max_rows", 1), ("max_drafts", 0), ("max_kv_len", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        if not 1 <= self.max_tokens <= TOKENS[-1]:
            raise ValueError(f"max_tokens: expected 1 to {TOKENS[-1]}, got {self.max_tokens}")


class AttentionChoices:
    """What attention launches for steps of a model over a cache, told from their sizes."""

    def __init__(self, target: Transformer, cache: KVCache) -> None:
        config = target.config
        self._heads = config.num_heads, config.head_dim
        self._dtype = target.activation_dtype
        self._pool = KVPool(cache.k[0], cache.v[0], cache.k_scale[0], cache.v_scale[0])
        self._rules = ScoreRules(config.head_dim**-0.5)
        self._is_wide = wide_tiles(target.device, self._dtype, config.head_dim)

    def __call__(self, shape: StepShape) -> LaunchChoice:
        """Return the choice; all steps of one choice run the same kernels on the same grids."""
        q_THD = torch.empty(shape.num_tokens, *self._heads, dtype=self._dtype, device="meta")
        sizes = (shape.num_rows, shape.max_query_len, shape.max_kv_len)
        return choose_launch(q_THD, self._pool, *sizes, self._rules, self._is_wide)

    def spans(self, longest: int) -> list[int]:
        """The largest span of each kernel that spans of 1 to ``longest`` queries run, ascending."""
        found: dict[Any, int] = {}
        for span in range(1, longest + 1):
            found[self(StepShape(span, 1, span, SEGMENT)).shape] = span
        return sorted(found.values())


def powers(first: int, last: int, factor: int = 2) -> list[int]:
    """first, first * factor, ..., and ``last`` as the end."""
    values = []
    while first < last:
        values.append(first)
        first *= factor
    return [*values, last]


def graph_shapes(limits: GraphLimits, choices: AttentionChoices) -> list[StepShape]:
    """Return the shapes to capture, largest first, so that smaller ones fit the memory of larger.

    Decoding, one token a row, has every context; longer spans have every COARSE-th.
    """
    shapes: list[StepShape] = []
    spans = choices.spans(limits.max_drafts + 1)
    for num_rows in powers(1, limits.max_rows):
        decode = _round_tokens(num_rows)
        for span in spans:
            least, most = (_round_tokens(num_rows * factor) for factor in (1, span))
            for num_tokens in TOKENS:
                if least <= num_tokens <= most and num_rows <= limits.max_tokens:
                    step = StepShape(num_tokens, num_rows, span, limits.max_kv_len)
                    is_plain = span == spans[0] and num_tokens == decode
                    factor = 2 if is_plain else COARSE
                    contexts = powers(SEGMENT, limits.max_kv_len, factor)
                    shapes += _distinct(step, contexts, choices)
    within = [shape for shape in shapes if shape.num_tokens <= _round_tokens(limits.max_tokens)]
    return sorted(within, reverse=True)


def _round_tokens(num_tokens: int) -> int:
    return next((size for size in TOKENS if size >= num_tokens), TOKENS[-1])


def _distinct(
    step: StepShape, contexts: Iterable[int], choices: AttentionChoices
) -> list[StepShape]:
    """The step with the largest context of each launch."""
    found: dict[LaunchChoice, StepShape] = {}
    for context in contexts:
        shape = replace(step, max_kv_len=context)
        found[choices(shape)] = shape
    return list(found.values())
