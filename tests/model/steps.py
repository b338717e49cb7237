"""Random steps over a pool whose contexts are written: what the tests of padding and graphs run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pagedraft.kernels.kv_quant import KV_DTYPES
from pagedraft.model.batch import Span, StepBatch, build_step_batch
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer


def filled_cache(
    model: Transformer, num_blocks: int, block_size: int, dtype: torch.dtype | None = None
) -> KVCache:
    """A pool whose blocks hold seeded values, but the null block NaN."""
    stored = dtype or model.activation_dtype
    cache = KVCache(model.config, num_blocks, block_size, stored, model.device)
    generator = torch.Generator().manual_seed(7)
    for tensor in cache.tensors:
        values = torch.randn(tensor.shape, generator=generator)
        is_codes = tensor.dtype in KV_DTYPES
        tensor.copy_((values * 30).clamp(-100, 100) if is_codes else values.abs() * 0.5)
        if not is_codes:
            tensor[0] = torch.nan
    return cache


def random_spans(
    seed: int, num_rows: int, longest: int, *, block_size: int, context: int, vocab: int = 90
) -> list[Span]:
    """Rows of 1 to ``longest`` tokens, each in blocks of its own, most with logits for all."""
    choose = random.Random(seed)
    spans, first_block = [], 1
    for _ in range(num_rows):
        length = choose.randint(1, longest)
        start = choose.randint(0, context - length)
        num_blocks = -(-(start + length) // block_size)
        blocks = list(range(first_block, first_block + num_blocks))
        first_block += num_blocks
        choose.shuffle(blocks)
        tokens = [choose.randrange(3, vocab) for _ in range(length)]
        spans.append(Span(tokens, start, blocks, choose.choice([length, length, 0, 1])))
    return spans


def blocks_of(spans: Sequence[Span]) -> int:
    """Blocks of a pool that holds the spans."""
    return 1 + sum(len(span.block_ids) for span in spans)


def step(model: Transformer, spans: Sequence[Span], block_size: int, **options: Any) -> StepBatch:
    """The step of the spans, not padded."""
    return build_step_batch(spans, block_size=block_size, device=model.device, **options)


def all_logits(spans: Sequence[Span]) -> list[Span]:
    """The same spans, all of whose tokens need logits."""
    return [replace(span, num_logits=len(span.token_ids)) for span in spans]
