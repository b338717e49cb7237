"""Bitwise row equality on the device itself: what no interpreter shows.

Each check returns what differs, an empty list if nothing does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pagedraft.bench.attention_cases import AttentionPoint, dtype_name, point_inputs
from pagedraft.bench.shapes import ModelShape
from pagedraft.bench.static_calls import linear_sizes
from pagedraft.kernels.linear import linear, pack_linear
from pagedraft.kernels.linear_fused import gated_linear, linear_add_norm
from pagedraft.kernels.normed import Normed
from pagedraft.kernels.paged_attention import paged_attention
from pagedraft.kernels.weight_quant import QuantWeight, WeightFormat, quantize_weight

Linear = Callable[..., torch.Tensor]
Attention = Callable[..., torch.Tensor]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype hold the same bytes."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _rows_that_differ(
    name: str, run: Callable[[slice], tuple[torch.Tensor, ...]], row_counts: Sequence[int]
) -> list[str]:
    """Compare each row of a call of few rows with the same row in the largest call."""
    problems = []
    largest = max(row_counts)
    whole = run(slice(0, largest))
    for count in row_counts:
        for start in sorted({0, (largest - count) // 2, largest - count}):
            rows = slice(start, start + count)
            pairs = zip(run(rows), whole, strict=True)
            if not all(same_bits(part, full[rows]) for part, full in pairs):
                problems.append(f"linear {name}: {count} rows from {start} of {largest}")
    return problems


def linear_rows(
    model: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    row_counts: Sequence[int],
    run: Linear = linear,
    weights: WeightFormat | None = None,
) -> list[str]:
    """Check the projections with a residual; ``weights``: of this format."""
    problems = []
    largest = max(row_counts)
    for name, (num_out, num_in) in linear_sizes(model).items():
        weight: torch.Tensor | QuantWeight = _weight(num_out, num_in, dtype, device)
        if weights is not None:
            weight = quantize_weight(weight, weights)
        packed = pack_linear(weight, dtype=dtype)
        x_TI = torch.randn(largest, num_in, device=device).to(dtype)
        residual_TO = torch.randn(largest, num_out, device=device).to(dtype)

        def call(rows: slice, packed=packed, x_TI=x_TI, residual_TO=residual_TO):
            return (run(x_TI[rows], packed, residual_TO=residual_TO[rows]),)

        problems += _rows_that_differ(name, call, row_counts)
    return problems


def fused_rows(
    model: ModelShape, dtype: torch.dtype, device: torch.device, row_counts: Sequence[int]
) -> list[str]:
    """Check an output projection with residual and norm, and the gated projection behind it."""
    largest, width = max(row_counts), model.embed_dim
    sizes = linear_sizes(model)
    o, gate_up = (
        pack_linear(_weight(*sizes[name], dtype, device), dtype=dtype) for name in ("o", "gate_up")
    )
    x_TI = torch.randn(largest, sizes["o"][1], device=device).to(dtype)
    residual_TE = torch.randn(largest, width, device=device).to(dtype)
    norm_E = torch.randn(width, device=device).to(dtype)

    def call(rows: slice) -> tuple[torch.Tensor, ...]:
        normed, sum_TE = linear_add_norm(x_TI[rows], o, residual_TE[rows], norm_E, 1e-5)
        parts = (normed.rows_TE, normed.squares_TP) if isinstance(normed, Normed) else (normed,)
        return *parts, sum_TE, gated_linear(normed, gate_up)

    return _rows_that_differ("with its neighbours", call, row_counts)


def _weight(num_out: int, num_in: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return (torch.randn(num_out, num_in, device=device) * num_in**-0.5).to(dtype)


@dataclass(frozen=True)
class AttentionVariant:
    """What a check of attention varies.

    group: query heads a KV head, the model's if None; cache: a name in CACHE_DTYPES, the queries'
    dtype if None; rules: keyword arguments of paged_attention.
    """

    group: int | None = None
    block_size: int = 64
    cache: str | None = None
    rules: dict[str, Any] = field(default_factory=dict)


PLAIN = AttentionVariant()
ATTENTION_VARIANTS = {
    "plain": PLAIN,
    "group 7, blocks of 16": AttentionVariant(group=7, block_size=16),
    "window": AttentionVariant(rules={"window": 300}),
    "soft cap": AttentionVariant(rules={"soft_cap": 15.0}),
    "int8 cache": AttentionVariant(cache="int8"),
    "int8 cache, group 7, blocks of 16, window": AttentionVariant(
        group=7, block_size=16, cache="int8", rules={"window": 1000}
    ),
}


class _Pool:
    """Rows of one context length in one pool; queries for their last ``num_queries`` tokens."""

    def __init__(
        self,
        model: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        variant: AttentionVariant,
        *,
        num_rows: int,
        context: int,
        num_queries: int,
    ) -> None:
        name = dtype_name(dtype)
        point = AttentionPoint(
            *("rows", (num_queries,) * num_rows, (context,) * num_rows),
            group=variant.group or model.num_heads // model.num_kv_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=variant.block_size,
            dtype=name,
            cache=variant.cache or name,
        )
        tensors = point_inputs(point, device)
        self.k, self.v, self.table = tensors["k"], tensors["v"], tensors["table"]
        self.q_RQHD = tensors["q"].unflatten(0, (num_rows, num_queries))
        self.options = dict(variant.rules)
        if point.is_quantized:
            self.options |= {f"{x}_scale_NGB": tensors[f"{x}_scale"] for x in ("k", "v")}
        self.context, self.num_queries, self.device = context, num_queries, device

    def attend(self, run: Attention, rows: slice, first: int, span: int, bound: int = 0):
        """Return out [rows, span, H, D] of queries ``first``..``first + span`` of each row.

        bound: max_kv_len and max_query_len are at least this, as in a captured graph.
        """
        q_RLHD = self.q_RQHD[rows, first : first + span]
        num_rows = q_RLHD.shape[0]
        kv_len = self.context - self.num_queries + first + span
        starts = torch.arange(num_rows + 1, device=self.device) * span
        out_THD = run(
            q_RLHD.flatten(0, 1).contiguous(),
            self.k,
            self.v,
            self.table[rows].contiguous(),
            starts.int(),
            torch.full((num_rows,), kv_len, device=self.device).int(),
            max_query_len=max(span, min(bound, 16)),
            max_kv_len=max(kv_len, bound),
            **self.options,
        )
        return out_THD.view_as(q_RLHD)


def attention_rows(
    model: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    contexts: Sequence[int],
    spans: Sequence[int],
    num_rows: int = 4,
    variant: AttentionVariant = PLAIN,
    run: Attention = paged_attention,
) -> list[str]:
    """Compare decoding one query alone with longer spans, batches and looser bounds."""
    problems = []
    longest = max(spans)
    sizes = {"num_rows": num_rows, "num_queries": longest}
    for context in contexts:
        pool = _Pool(model, dtype, device, variant, context=context, **sizes)
        alone, everyone = slice(0, 1), slice(0, num_rows)
        tail = min(longest, 9)
        first = longest - tail
        decoded = torch.cat(
            [pool.attend(run, alone, first + index, 1) for index in range(tail)], dim=1
        )
        for span in spans:
            seen = min(span, tail)
            for rows in (alone, everyone):
                for bound in (0, context + 4096):
                    out = pool.attend(run, rows, longest - span, span, bound)
                    if not same_bits(out[:1, -seen:], decoded[:, -seen:]):
                        problems.append(
                            f"attention context {context}: span {span} among {rows.stop} rows, "
                            f"bound {bound} differs from decode"
                        )
    return problems
