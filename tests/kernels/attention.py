"""What the tests of paged_attention share: calls on poisoned outputs, references, prefix cases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from pagedraft.kernels import paged_attention_launch
from pagedraft.kernels.dispatch import INTERPRETED
from pagedraft.kernels.paged_attention import paged_attention, paged_attention_ref
from pagedraft.kernels.paged_attention_config import Split
from pagedraft.kernels.paged_attention_launch import KVPool, PagedRows, SharedPrefixes, launch
from pagedraft.kernels.score_rules import ScoreRules
from pagedraft.tests.compare import assert_no_worse
from pagedraft.tests.inputs import Guarded, PagedCase, paged_case, poisoned, randn

if INTERPRETED:
    from pagedraft.tests.sanitizer import sanitize


def arguments(case: PagedCase) -> tuple[torch.Tensor, ...]:
    """The six positional arguments of paged_attention."""
    return (
        *(case.q_THD, case.k_cache_NGBD, case.v_cache_NGBD),
        *(case.block_table_RM, case.query_starts_R1, case.kv_lens_R),
    )


def factors(case: PagedCase) -> dict[str, torch.Tensor | None]:
    """Keyword arguments of a quantised pool, None otherwise."""
    return {"k_scale_NGB": case.k_scale_NGB, "v_scale_NGB": case.v_scale_NGB}


@contextmanager
def checked() -> Iterator[None]:
    """Check every interpreted launch for stray accesses and races; its scratch is guarded."""
    guards: list[Guarded] = []

    def guarded_partials(q_THD: torch.Tensor, num_units: int) -> tuple[torch.Tensor, ...]:
        num_tokens, num_heads, head_dim = q_THD.shape
        shape = (num_tokens, num_heads, num_units)
        pair = [Guarded(*shape, width, device=q_THD.device) for width in (head_dim, 2)]
        guards.extend(pair)
        return tuple(guard.tensor for guard in pair)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention_launch, "new_partials", guarded_partials)
        with sanitize() if INTERPRETED else nullcontext():
            yield
    for guard in guards:
        guard.assert_untouched()


def attend(case: PagedCase, **options: Any) -> torch.Tensor:
    """Call paged_attention into a poisoned output; nothing around the pool may change."""
    out_THD = poisoned(*case.q_THD.shape, dtype=case.q_THD.dtype, device=case.q_THD.device)
    bounds = {"max_query_len": case.max_query_len, "max_kv_len": case.max_kv_len}
    options = {**bounds, **factors(case), "out": out_THD, **options}
    with checked():
        result = paged_attention(*arguments(case), **options)
    case.assert_guards()
    return result


def attend_split(
    case: PagedCase,
    split: Split,
    is_wide: bool = False,
    shared: SharedPrefixes | None = None,
    **rules: Any,
) -> torch.Tensor:
    """Launch the kernels with a given split."""
    out_THD = poisoned(*case.q_THD.shape, dtype=case.q_THD.dtype, device=case.q_THD.device)
    pool = KVPool(case.k_cache_NGBD, case.v_cache_NGBD, *factors(case).values())
    rows = PagedRows(*arguments(case)[3:], case.max_query_len, case.max_kv_len)
    rules = ScoreRules(case.q_THD.shape[-1] ** -0.5, **rules)
    args = (case.q_THD.contiguous(), pool, rows, rules, out_THD)
    with checked():
        launch(*args, shared, split, is_wide)
    case.assert_guards()
    return out_THD


def reference(case: PagedCase, dtype: torch.dtype, **rules: Any) -> torch.Tensor:
    """The reference in ``dtype``; a quantised pool keeps its stored values."""
    wide = [
        t.to(dtype) if t.dtype.is_floating_point and t.element_size() > 1 else t
        for t in arguments(case)
    ]
    return paged_attention_ref(*wide, **factors(case), **rules)


def check(case: PagedCase, out_THD: torch.Tensor, factor: float = 2.0, **rules: Any) -> None:
    """Compare with the reference in fp64 and in the dtype of the queries."""
    exact_THD = reference(case, torch.float64, **rules)
    same_THD = reference(case, case.q_THD.dtype, **rules)
    assert_no_worse(out_THD, exact=exact_THD, same_dtype=same_THD, factor=factor)


def sinks(num_heads: int, device: torch.device) -> torch.Tensor:
    """Sink logits that take a good part of the mass, one of them nearly all."""
    values_H = 2.0 + randn(num_heads, device=device, seed=99)
    values_H[0] = 60.0
    return values_H


def prefix_case(
    spans: list[int], ends: list[int], context: int, **sizes: Any
) -> tuple[PagedCase, torch.Tensor]:
    """Rows whose contexts are prefixes of one context, and the positions of their queries."""
    whole = paged_case([context], [context], **sizes)
    device = whole.q_THD.device
    position_T = torch.cat(
        [torch.arange(end - span, end) for span, end in zip(spans, ends, strict=True)]
    ).to(device)
    case = PagedCase(
        q_THD=whole.q_THD[position_T],
        k_cache_NGBD=whole.k_cache_NGBD,
        v_cache_NGBD=whole.v_cache_NGBD,
        block_table_RM=whole.block_table_RM.expand(len(spans), -1),
        query_starts_R1=torch.tensor([0, *spans]).cumsum(0).int().to(device),
        kv_lens_R=torch.tensor(ends, dtype=torch.int32, device=device),
        max_query_len=max(spans),
        max_kv_len=max(ends),
        guards=whole.guards,
        k_scale_NGB=whole.k_scale_NGB,
        v_scale_NGB=whole.v_scale_NGB,
    )
    return case, position_T
