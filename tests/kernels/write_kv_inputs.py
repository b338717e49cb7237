"""Inputs and checks that the tests of ``write_kv`` share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from pagedraft.kernels.kv_quant import KV_DTYPES, dequantize_kv
from pagedraft.kernels.write_kv import write_kv, write_kv_ref
from pagedraft.model.kv_cache import FP8, check_fp8_arch, gpu_arch
from pagedraft.tests.compare import assert_no_worse, assert_same_bits
from pagedraft.tests.inputs import POISON, Guarded, randn

CPU = torch.device("cpu")
MAX_POSITIONS = 512


class Case(NamedTuple):
    """num_freqs: R, D/2 if None. cache_dtype: that of qkv if None. The last ``padding`` tokens
    have slots in the null block."""

    tokens: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    qk_norm: bool = False
    num_freqs: int | None = None
    interleaved: bool = False
    padding: int = 0


def rotary_tables(num_freqs: int, num_positions: int = MAX_POSITIONS) -> tuple[torch.Tensor, ...]:
    """(cos_PR, sin_PR) with theta 10000."""
    frequency_R = 1.0 / 10000 ** (torch.arange(num_freqs) / max(1, num_freqs))
    angle_PR = torch.arange(num_positions)[:, None] * frequency_R
    return angle_PR.cos(), angle_PR.sin()


def skip_without_fp8(device: torch.device) -> None:
    """Skip the test, with the error that a pool would raise, where kernels cannot store fp8."""
    try:
        check_fp8_arch(gpu_arch(device))
    except ValueError as error:
        pytest.skip(str(error))


@dataclass
class Inputs:
    """Arguments of one call, with poisoned caches and scales between guards."""

    case: Case
    device: torch.device
    seed: int = 0

    def __post_init__(self) -> None:
        case, device, dtype = self.case, self.device, self.case.dtype
        columns = (case.heads + 2 * case.kv_heads) * case.head_dim
        self.qkv_TC = randn(case.tokens, columns, dtype=dtype, device=device, seed=self.seed)
        num_freqs = case.head_dim // 2 if case.num_freqs is None else case.num_freqs
        generator = torch.Generator().manual_seed(self.seed)
        self.num_blocks = 3 + max(2, 2 * case.tokens // case.block_size)
        # Block 0 is the null block.
        slots_T = torch.randperm((self.num_blocks - 1) * case.block_size, generator=generator)
        slots_T = case.block_size + slots_T[: case.tokens]
        num_stored = case.tokens - case.padding
        slots_T[num_stored:] = torch.arange(case.padding) % 2
        self.stored_slots = slots_T[:num_stored].to(device)
        self.tables = (
            *(table.to(device) for table in rotary_tables(num_freqs)),
            torch.randint(MAX_POSITIONS, (case.tokens,), generator=generator).to(device),
            slots_T.to(device),
        )
        shape = (self.num_blocks, case.kv_heads, case.block_size, case.head_dim)
        cache_dtype = case.cache_dtype or dtype
        if cache_dtype == FP8:
            skip_without_fp8(device)
        self.guards = [Guarded(*shape, dtype=cache_dtype, device=device) for _ in range(2)]
        self.caches = tuple(guard.tensor for guard in self.guards)
        self.scales: dict[str, torch.Tensor] = {}
        if cache_dtype in KV_DTYPES:
            guards = [Guarded(*shape[:3], device=device) for _ in range(2)]
            names = ("k_scale_NGB", "v_scale_NGB")
            self.scales = {name: g.tensor for name, g in zip(names, guards, strict=True)}
            self.guards += guards
        norms = [1 + randn(case.head_dim, device=device, seed=s, scale=0.3) for s in (7, 8)]
        self.norms = tuple(n.to(dtype) for n in norms) if case.qk_norm else (None, None)

    def run(self, op: Callable[..., torch.Tensor] = write_kv, **changes: object) -> torch.Tensor:
        """Call ``op`` and return q_THD."""
        options = {"interleaved": self.case.interleaved, **self.scales, **changes}
        return op(self.qkv_TC, *self.tables, *self.caches, self.case.heads, *self.norms, **options)

    def written(self, pool: torch.Tensor) -> torch.Tensor:
        """What a cache or its scales hold at the stored tokens' slots, [T, G, D] or [T, G]."""
        size = self.case.block_size
        return pool[self.stored_slots // size, :, self.stored_slots % size]

    def values(self) -> list[torch.Tensor]:
        """The stored tokens' keys and values, dequantised, [T, G, D]."""
        stored = [self.written(cache) for cache in self.caches]
        scales = [self.written(scale) for scale in self.scales.values()]
        return list(map(dequantize_kv, stored, scales)) if scales else stored

    def assert_only_slots_written(self) -> None:
        size = self.case.block_size
        for guard in self.guards:
            guard.assert_untouched()
            rest = (
                guard.tensor.clone().view(torch.uint8).unflatten(-1, (guard.tensor.shape[-1], -1))
            )
            rest = rest if guard.tensor.ndim == 3 else rest.flatten(-2)
            rest[self.stored_slots // size, :, self.stored_slots % size] = POISON
            assert bool((rest == POISON).all()), "a slot that no token owns was written"

    def reference(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> list[torch.Tensor]:
        """(q_THD, keys, values) of the reference with inputs of ``dtype``."""
        copy = Inputs(self.case._replace(cache_dtype=cache_dtype), self.device, self.seed)
        copy.qkv_TC = self.qkv_TC.to(dtype)
        copy.norms = tuple(norm if norm is None else norm.to(dtype) for norm in self.norms)
        return [copy.run(write_kv_ref), *copy.values()]


def check(inputs: Inputs) -> None:
    """Run write_kv and compare with the reference: queries and keys within rounding, values, which
    no arithmetic precedes, bit by bit."""
    case = inputs.case
    exact = inputs.reference(torch.float64, torch.float64)
    same = inputs.reference(case.dtype, case.cache_dtype or case.dtype)
    q_THD = inputs.run()
    k_TGD, v_TGD = inputs.values()
    assert_no_worse(q_THD, exact=exact[0], same_dtype=same[0])
    assert_no_worse(k_TGD, exact=exact[1], same_dtype=same[1])
    assert_same_bits(v_TGD, same[2])
    inputs.assert_only_slots_written()
