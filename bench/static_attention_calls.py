"""The attention calls whose launches are compiled offline: a base point and one axis at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pagedraft.bench.record import Call
from pagedraft.bench.shapes import DTYPES

CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Triton refuses fp8 e4m3 for other targets.
FP8_TARGETS = ("sm_89", "sm_90", "sm_100", "gfx942")
NUM_KV_HEADS = 8
# Queries of each row; all rows have the same context.
STEPS = {
    "decode": (1,) * 8,
    "decode1": (1,),
    "decode256": (1,) * 256,
    **{f"verify{span}": (span,) * 8 for span in (2, 5, 8, 9)},
    "verify8x256": (8,) * 256,
    "prefill": (512,),
    "prompt": (4096,),
    "mixed": (512, 5, 5, 5, 1, 1, 1, 1),
}


@dataclass(frozen=True)
class AttentionCase:
    """One call; group: query heads a KV head; cache: dtype of keys and values, None: ``dtype``.

    is_shared: all rows begin with the same 4096 tokens.
    is_wide: with tiles of 64 rows that only sm_90 runs (HGMMA).
    min_kv_bytes: floor of KV bytes a warp instruction on sm_90.
    """

    step: str
    head_dim: int = 128
    group: int = 4
    block_size: int = 64
    dtype: str = "bf16"
    cache: str | None = None
    context: int = 8192
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    is_shared: bool = False
    is_wide: bool = False
    min_kv_bytes: float | None = None

    @property
    def name(self) -> str:
        """The step and what differs from the base point."""
        sizes = {
            "D": (self.head_dim, 128),
            "group": (self.group, 4),
            "block": (self.block_size, 64),
            "context": (self.context, 8192),
            "window": (self.window, None),
            "cap": (self.soft_cap, None),
        }
        parts = [f"{mark}{size}" for mark, (size, usual) in sizes.items() if size != usual]
        marks = {"sinks": self.has_sinks, "shared": self.is_shared, "wide": self.is_wide}
        parts += [mark for mark, is_set in marks.items() if is_set]
        parts += [self.cache] if self.cache else []
        return "-".join([self.step, *parts, self.dtype])

    @property
    def spans(self) -> tuple[int, ...]:
        return STEPS[self.step]

    @property
    def targets(self) -> tuple[str, ...]:
        """Targets that it can run on, all if empty."""
        if self.is_wide:
            return ("sm_90",)
        return FP8_TARGETS if self.cache == "fp8" else ()


# Floors hold at the base point: one section of 2048 keys a program, or all keys.
FLOORS = {"decode": 24.0, "decode256": 24.0, "verify8": 18.0, "verify8x256": 18.0}
QUICK = (
    *(AttentionCase(step, min_kv_bytes=floor) for step, floor in FLOORS.items()),
    AttentionCase("mixed", cache="int8"),
    AttentionCase("verify5", head_dim=80, group=7, block_size=16, dtype="fp16"),
    AttentionCase("verify9", head_dim=64, window=1024, soft_cap=30.0, has_sinks=True),
    AttentionCase("decode", head_dim=64, dtype="fp32"),
)
ALONG = ("decode", "verify9", "prefill")
GPT_OSS = {"head_dim": 64, "group": 8, "has_sinks": True}
GEMMA_2 = {"head_dim": 256, "group": 2, "soft_cap": 50.0}
FULL = (
    *QUICK,
    *(AttentionCase(step) for step in ("decode1", "verify2", "verify5", "verify9", "prefill")),
    *(AttentionCase(step) for step in ("mixed", "prompt")),
    *(AttentionCase(step, context=256) for step in ("decode", "verify9")),
    *(AttentionCase(step, head_dim=d) for d in (64, 80, 96, 256) for step in ALONG),
    *(AttentionCase(step, group=group) for group in (1, 7) for step in ALONG),
    *(AttentionCase(step, block_size=16) for step in (*ALONG, "verify8")),
    *(AttentionCase("decode", block_size=size) for size in (8, 32, 128)),
    *(AttentionCase(step, dtype="fp16") for step in ("decode", "verify8")),
    *(AttentionCase(step, dtype="fp32") for step in ("decode", "prefill")),
    *(AttentionCase(step, cache=cache) for cache in CACHE_DTYPES for step in ALONG),
    AttentionCase("decode", cache="int8", block_size=16),
    AttentionCase("decode", cache="fp8", head_dim=64, dtype="fp16"),
    *(AttentionCase(step, window=1024) for step in (*ALONG, "prompt")),
    *(AttentionCase(step, window=128, **GPT_OSS) for step in ALONG),
    *(AttentionCase(step, window=4096, **GEMMA_2) for step in ALONG),
    *(AttentionCase(step, is_shared=True) for step in ("decode", "verify9")),
    *(AttentionCase(step, is_wide=True) for step in ("verify9", "prefill", "prompt")),
)


def _int32(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32)


def _run(case: AttentionCase) -> None:
    """Call the launcher on unread tensors over a pool of just enough blocks."""
    from pagedraft.kernels.paged_attention_launch import KVPool, PagedRows, launch
    from pagedraft.kernels.score_rules import ScoreRules

    num_rows, num_tokens = len(case.spans), sum(case.spans)
    num_heads, dtype = case.group * NUM_KV_HEADS, DTYPES[case.dtype]
    blocks_a_row = -(-case.context // case.block_size)
    slots = (1 + num_rows * blocks_a_row, NUM_KV_HEADS, case.block_size)
    kv_dtype = CACHE_DTYPES.get(case.cache, dtype)
    pool = [torch.empty(*slots, case.head_dim, dtype=kv_dtype) for _ in range(2)]
    if case.cache is not None:
        pool += [torch.empty(slots) for _ in range(2)]
    q_THD = torch.empty(num_tokens, num_heads, case.head_dim, dtype=dtype)
    rows = (_int32(num_rows, blocks_a_row), _int32(num_rows + 1), _int32(num_rows))
    sinks_H = torch.empty(num_heads) if case.has_sinks else None
    launch(
        q_THD,
        KVPool(*pool),
        PagedRows(*rows, max(case.spans), case.context),
        ScoreRules(0.1, case.window, case.soft_cap, sinks_H),
        torch.empty_like(q_THD),
        _shared(case) if case.is_shared else None,
        is_wide=case.is_wide,
    )


def _shared(case: AttentionCase) -> Any:
    from pagedraft.kernels.paged_attention_launch import SharedPrefixes

    num_keys, num_rows = case.context // 2, len(case.spans)
    return SharedPrefixes(
        *(_int32(2), _int32(1), _int32(num_rows), _int32(1)),
        _int32(1, num_keys // case.block_size),
        max_query_len=sum(case.spans),
        max_keys=num_keys,
        num_saved_keys=num_keys * (num_rows - 1),
    )


def attention_calls(*, quick: bool) -> Iterator[Call]:
    """Yield the calls of ``paged_attention`` to compile; ``quick``: a few that differ most."""
    for case in QUICK if quick else FULL:
        yield Call(
            "paged_attention",
            case.name,
            lambda case=case: _run(case),
            span=max(case.spans),
            context=case.context,
            min_kv_bytes=case.min_kv_bytes,
            targets=case.targets,
        )
