"""The attention calls whose launches are compiled offline: a base point and one axis at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from pagedraft.bench.record import Call
from pagedraft.bench.shapes import DTYPES

CACHE_DTYPES = {**DTYPES, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
NUM_KV_HEADS = 8
CONTEXT = 8192
# Queries of each row; all rows have the same context.
STEPS = {
    "decode": (1,) * 8,
    **{f"verify{span}": (span,) * 8 for span in (2, 5, 8, 9)},
    "prefill": (512,),
    "mixed": (512, 5, 5, 5, 1, 1, 1, 1),
}


@dataclass(frozen=True)
class AttentionCase:
    """One call; group: query heads a KV head; cache: dtype of keys and values, None: ``dtype``.

    min_kv_bytes: floor of KV bytes a warp instruction on sm_90.
    """

    step: str
    head_dim: int = 128
    group: int = 4
    block_size: int = 64
    dtype: str = "bf16"
    cache: str | None = None
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    min_kv_bytes: float | None = None

    @property
    def name(self) -> str:
        """The step and what differs from the base point."""
        sizes = {
            "D": (self.head_dim, 128),
            "group": (self.group, 4),
            "block": (self.block_size, 64),
            "window": (self.window, None),
            "cap": (self.soft_cap, None),
        }
        parts = [f"{mark}{size}" for mark, (size, usual) in sizes.items() if size != usual]
        parts += ["sinks"] * self.has_sinks + [self.cache] * (self.cache is not None)
        return "-".join([self.step, *parts, self.dtype])


BASE = AttentionCase("decode")
FLOORS = {"decode": 24.0, "verify8": 18.0}
QUICK = (
    replace(BASE, min_kv_bytes=FLOORS["decode"]),
    AttentionCase("verify8", min_kv_bytes=FLOORS["verify8"]),
    AttentionCase("mixed"),
    AttentionCase("verify5", head_dim=80, group=7, block_size=16, dtype="fp16"),
    AttentionCase("verify9", head_dim=64, dtype="fp32"),
)
ALONG = ("decode", "verify9", "prefill")
FULL = (
    *QUICK,
    *(AttentionCase(step) for step in ("verify2", "verify5", "verify9", "prefill")),
    *(AttentionCase(step, head_dim=d) for d in (64, 80, 96, 256) for step in ALONG),
    *(AttentionCase(step, group=group) for group in (1, 7) for step in ALONG),
    *(AttentionCase(step, block_size=16) for step in (*ALONG, "verify8")),
    *(AttentionCase("decode", block_size=size) for size in (8, 32, 128)),
    *(AttentionCase(step, dtype="fp16") for step in ("decode", "verify8", "mixed")),
    *(AttentionCase(step, dtype="fp32") for step in ("decode", "prefill")),
)


def _tensors(case: AttentionCase) -> dict[str, Any]:
    """Return unread tensors of one step over a pool of just enough blocks, and its rules."""
    spans = STEPS[case.step]
    blocks_a_row = -(-CONTEXT // case.block_size)
    pool = (1 + len(spans) * blocks_a_row, NUM_KV_HEADS, case.block_size, case.head_dim)
    dtype = DTYPES[case.dtype]
    num_heads = case.group * NUM_KV_HEADS
    rules: dict[str, Any] = {}
    if case.window is not None:
        rules["window"] = case.window
    if case.soft_cap is not None:
        rules["soft_cap"] = case.soft_cap
    if case.has_sinks:
        rules["sinks_H"] = torch.empty(num_heads)
    if case.cache is not None:
        rules |= {name: torch.empty(pool[:3]) for name in ("k_scale_NGB", "v_scale_NGB")}
    return {
        "q_THD": torch.empty(sum(spans), num_heads, case.head_dim, dtype=dtype),
        **{
            name: torch.empty(pool, dtype=CACHE_DTYPES[case.cache or case.dtype])
            for name in ("k_cache_NGBD", "v_cache_NGBD")
        },
        "block_table_RM": torch.empty(len(spans), blocks_a_row, dtype=torch.int32),
        "query_starts_R1": torch.empty(len(spans) + 1, dtype=torch.int32),
        "kv_lens_R": torch.empty(len(spans), dtype=torch.int32),
        "max_query_len": max(spans),
        "max_kv_len": CONTEXT,
        **rules,
    }


def _run(case: AttentionCase) -> None:
    from pagedraft.kernels.paged_attention import paged_attention

    paged_attention(**_tensors(case))


def attention_calls(*, quick: bool) -> Iterator[Call]:
    """Yield the calls of ``paged_attention`` to compile; ``quick``: a few that differ most."""
    for case in QUICK if quick else FULL:
        yield Call(
            "paged_attention",
            case.name,
            lambda case=case: _run(case),
            span=max(STEPS[case.step]),
            context=CONTEXT,
            min_kv_bytes=case.min_kv_bytes,
        )
