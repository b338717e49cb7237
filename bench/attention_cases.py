"""What the attention sweep measures: a base point and one axis varied at a time, as data.

Not a full product: the step kinds over all contexts (which gives verify / decode), then each kind
at the base context along each axis. ``attention_sweep.py`` prices or measures the points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch

from pagedraft.bench.gate import Tensors
from pagedraft.bench.shapes import DTYPES
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.kv_quant import quantize_kv
from pagedraft.kernels.paged_attention import (
    AttentionPlan,
    paged_attention,
    paged_attention_cost,
)
from pagedraft.kernels.paged_attention_config import SECTION, SEGMENT, Split, split_for
from pagedraft.kernels.paged_attention_launch import KVPool, shape_of
from pagedraft.kernels.score_rules import ScoreRules

CACHE_DTYPES = {**DTYPES, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
CONTEXTS = (512, 2048, 8192, 32768, 65536)
BASE_CONTEXT, BASE_ROWS = 8192, 8
VERIFY_SPANS = (2, 5, 9)
# Queries of each row. A prefill chunk alone; in a mixed step it runs beside verifies and decodes.
STEPS = {
    "decode": (1,) * BASE_ROWS,
    **{f"verify{span}": (span,) * BASE_ROWS for span in VERIFY_SPANS},
    "prefill": (512,),
    "mixed": (512, 5, 5, 5, 1, 1, 1, 1),
}
AXIS_STEPS = ("decode", "verify9", "prefill", "mixed")
AXES: dict[str, tuple] = {
    "group": (1, 7),
    "head_dim": (64, 96),
    "block_size": (16,),
    "cache": ("int8", "fp8"),
    "window": (1024,),
}
# Keys of a segment and of a section: the levels at which split launches store partials.
TREE_UNITS = {"segments": SEGMENT, "sections": SECTION}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` in CACHE_DTYPES."""
    return next(name for name, value in CACHE_DTYPES.items() if value == dtype)


@dataclass(frozen=True)
class AttentionPoint:
    """One attention call: row r has query_lens[r] queries at the end of kv_lens[r] tokens.

    step: name in STEPS, or "prompt"; group: query heads a KV head; dtype: of queries and outputs;
    cache: dtype of keys and values, "int8" and "fp8" with one fp32 factor a token and KV head.
    """

    step: str
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    group: int = 4
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 64
    dtype: str = "bf16"
    cache: str = "bf16"
    window: int | None = None

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def num_heads(self) -> int:
        return self.group * self.num_kv_heads

    @property
    def context(self) -> int:
        return max(self.kv_lens)

    @property
    def is_quantized(self) -> bool:
        return CACHE_DTYPES[self.cache].itemsize == 1

    @property
    def axes(self) -> dict[str, Any]:
        """What differs from the base point, rows and context aside."""
        base = AttentionPoint(self.step, self.query_lens, self.kv_lens)
        names = ("num_kv_heads", "dtype", *AXES)
        return {k: getattr(self, k) for k in names if getattr(self, k) != getattr(base, k)}

    @property
    def name(self) -> str:
        """The step, rows x context, and what differs from the base point."""
        axes = "".join(f" {axis} {value}" for axis, value in self.axes.items())
        return f"{self.step} {self.num_rows}x{self.context}{axes}"

    def row_groups(self) -> list[tuple[slice, slice, int, int]]:
        """Return (rows, tokens, span, kv_len) of each run of equal rows."""
        found, row, token = [], 0, 0
        for (span, kv_len), run in groupby(zip(self.query_lens, self.kv_lens, strict=True)):
            count = len(list(run))
            rows, tokens = slice(row, row + count), slice(token, token + count * span)
            found.append((rows, tokens, span, kv_len))
            row, token = rows.stop, tokens.stop
        return found

    def first_key(self, span: int, kv_len: int) -> int:
        """Return the first key that any of a row's queries sees."""
        return 0 if self.window is None else max(0, kv_len - span - self.window + 1)


def step_point(step: str, context: int = BASE_CONTEXT, **axes: Any) -> AttentionPoint:
    """Return a point whose rows are those of ``STEPS[step]``, all of one context."""
    spans = STEPS[step]
    return AttentionPoint(step, spans, (context,) * len(spans), **axes)


def _rows_point(step: str, num_rows: int) -> AttentionPoint:
    span = STEPS[step][0]
    return AttentionPoint(step, (span,) * num_rows, (BASE_CONTEXT,) * num_rows)


PROMPT = AttentionPoint("prompt", (BASE_CONTEXT,), (BASE_CONTEXT,))
GRID = tuple(step_point(step, context) for context in CONTEXTS for step in STEPS)
FULL = (
    *GRID,
    PROMPT,
    *(_rows_point(step, count) for count in (1, 64) for step in ("decode", "verify9")),
    *(
        step_point(step, **{axis: value})
        for axis, values in AXES.items()
        for value in values
        for step in AXIS_STEPS
    ),
)
# What attention_targets.py judges.
SHORT = (
    *(step_point(step, context) for context in (8192, 65536) for step in ("decode", "verify9")),
    *(step_point(step, cache="int8") for step in ("decode", "verify9")),
    step_point("prefill"),
    PROMPT,
)
# Tries the script where there is no GPU; its times mean nothing.
TRIAL = tuple(
    AttentionPoint(
        *(step, (span, span), (70, 70)),
        group=2,
        num_kv_heads=2,
        head_dim=16,
        block_size=16,
        dtype="fp32",
        cache="fp32",
    )
    for step, span in (("decode", 1), ("verify9", 9))
)
SELECTIONS = {"full": FULL, "short": SHORT, "trial": TRIAL}


def point_cost(point: AttentionPoint) -> Cost:
    """Return the lower bound of ``point``."""
    return paged_attention_cost(
        *(point.query_lens, point.kv_lens),
        *(point.num_heads, point.num_kv_heads, point.head_dim),
        DTYPES[point.dtype].itemsize,
        kv_itemsize=CACHE_DTYPES[point.cache].itemsize,
        scale_itemsize=4 if point.is_quantized else 0,
        window=point.window,
    )


def launched_split(point: AttentionPoint, is_wide: bool) -> Split:
    """Return how the launcher shares out the keys: see Split; is_wide: see wide_tiles."""
    dtype, cache_dtype = DTYPES[point.dtype], CACHE_DTYPES[point.cache]
    q_shape = (point.num_tokens, point.num_heads, point.head_dim)
    q_THD = torch.empty(q_shape, dtype=dtype, device="meta")
    block = (1, point.num_kv_heads, point.block_size, point.head_dim)
    pool = KVPool(*[torch.empty(block, dtype=cache_dtype, device="meta") for _ in range(2)])
    longest = max(point.query_lens)
    rules = ScoreRules(point.head_dim**-0.5, point.window)
    shape, _ = shape_of(q_THD, pool, longest, rules, is_wide)
    return split_for(shape, point.num_tokens, point.num_rows, longest, point.context)


def num_units(point: AttentionPoint, unit: int) -> int:
    """Return how many pieces of ``unit`` keys the keys that a row sees may touch."""
    span = max(point.query_lens)
    seen = point.context - point.first_key(span, point.context)
    return -(-seen // unit) + (seen < point.context)


def scratch_bytes(point: AttentionPoint, num_units: int) -> int:
    """Bytes of fp32 partials that a split launch writes and the one that merges them reads.

    Each (query, head, unit) has D sums, a maximum and a denominator.
    """
    return 2 * 4 * point.num_tokens * point.num_heads * num_units * (point.head_dim + 2)


def point_inputs(point: AttentionPoint, device: torch.device) -> Tensors:
    """Return q, caches filled at random behind shuffled block tables, starts and lengths.

    Quantized caches come with k_scale and v_scale. Block 0 belongs to nobody.
    """
    blocks = [-(-kv_len // point.block_size) for kv_len in point.kv_lens]
    order = 1 + torch.randperm(sum(blocks), device=device)
    table_RM = torch.zeros(point.num_rows, max(blocks), device=device, dtype=torch.int32)
    for row, ids in enumerate(order.split(blocks)):
        table_RM[row, : len(ids)] = ids
    dtype, cache_dtype = DTYPES[point.dtype], CACHE_DTYPES[point.cache]
    pool = (1 + sum(blocks), point.num_kv_heads, point.block_size, point.head_dim)
    q_shape = (point.num_tokens, point.num_heads, point.head_dim)
    starts = (0, *accumulate(point.query_lens))
    tensors = {
        "q": torch.randn(q_shape, device=device, dtype=dtype),
        "table": table_RM,
        "starts": torch.tensor(starts, device=device, dtype=torch.int32),
        "lens": torch.tensor(point.kv_lens, device=device, dtype=torch.int32),
    }
    for name in ("k", "v"):
        values = torch.randn(pool, device=device, dtype=dtype)
        if point.is_quantized:
            tensors[name], tensors[f"{name}_scale"] = quantize_kv(values, cache_dtype)
        else:
            tensors[name] = values.to(cache_dtype)
    return tensors


def prepare_attention(point: AttentionPoint) -> Callable[[Tensors], Callable[[], torch.Tensor]]:
    """Return what turns inputs into a call of ``paged_attention`` that does nothing else."""
    rules: dict[str, Any] = {"max_query_len": max(point.query_lens), "max_kv_len": point.context}
    if point.window is not None:
        rules["window"] = point.window

    def prepare(t: Tensors) -> Callable[[], torch.Tensor]:
        args = (t["q"], t["k"], t["v"], t["table"], t["starts"], t["lens"])
        options = dict(rules)
        if point.is_quantized:
            options |= {"k_scale_NGB": t["k_scale"], "v_scale_NGB": t["v_scale"]}
        out, plan = torch.empty_like(t["q"]), AttentionPlan()  # as the layers of a step share it
        return lambda: paged_attention(*args, **options, out=out, plan=plan)

    return prepare
