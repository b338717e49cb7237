"""Test inputs: seeded tensors, poisoned buffers, guard regions, paged KV caches.

Memory that nobody wrote holds POISON bytes (0xFF): NaN in every float format, -1 in signed
integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagedraft.kernels.kv_quant import quantize_kv
from pagedraft.kernels.paged_attention_cpu_tiles import use_threads

POISON = 0xFF
NUM_GUARD_ELEMENTS = 256
CPU = torch.device("cpu")
num_threads = use_threads


def randn(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    seed: int = 0,
    scale: float = 1.0,
) -> torch.Tensor:
    """Seeded normal values; the same numbers, rounded, in every dtype and on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(device=device, dtype=dtype)


def poisoned(
    *shape: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> torch.Tensor:
    """A buffer that nobody wrote."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.full((num_bytes,), POISON, dtype=torch.uint8, device=device)
    return raw.view(dtype).view(shape)


class Guarded:
    """A poisoned tensor between two guard regions that nobody may write to."""

    def __init__(
        self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU
    ) -> None:
        size = math.prod(shape)
        self._whole = poisoned(size + 2 * NUM_GUARD_ELEMENTS, dtype=dtype, device=device)
        self.tensor = self._whole[NUM_GUARD_ELEMENTS : NUM_GUARD_ELEMENTS + size].view(shape)

    def assert_untouched(self) -> None:
        """Assert that both guard regions still hold POISON."""
        raw = self._whole.view(torch.uint8)
        num_bytes = NUM_GUARD_ELEMENTS * self._whole.element_size()
        assert bool((raw[:num_bytes] == POISON).all()), "guard region before the tensor was written"
        assert bool((raw[-num_bytes:] == POISON).all()), "guard region after the tensor was written"


def guarded_copy(values: torch.Tensor, device: torch.device = CPU) -> Guarded:
    """An int32 copy of ``values`` between guard regions."""
    guard = Guarded(*values.shape, dtype=torch.int32, device=device)
    guard.tensor.copy_(values)
    return guard


def shuffled_block_table(
    kv_lens: Sequence[int], block_size: int, *, spare_blocks: int = 3, seed: int = 0
) -> tuple[torch.Tensor, int]:
    """Give each row its own blocks, in shuffled order and with gaps.

    Returns (block_table_RM int32, number of blocks in the pool). Block 0 is the null block and
    fills the entries past a row's blocks; ``spare_blocks`` further blocks belong to nobody.
    """
    blocks_per_row = [-(-kv_len // block_size) for kv_len in kv_lens]
    num_used = sum(blocks_per_row)
    num_blocks = 1 + num_used + spare_blocks
    generator = torch.Generator().manual_seed(seed)
    ids = 1 + torch.randperm(num_blocks - 1, generator=generator)[:num_used]
    table_RM = torch.zeros(len(kv_lens), max([1, *blocks_per_row]), dtype=torch.int32)
    for row, blocks in enumerate(ids.split(blocks_per_row)):
        table_RM[row, : len(blocks)] = blocks
    return table_RM, num_blocks


@dataclass(frozen=True)
class PagedCase:
    """Inputs of one attention call; cache slots that no row owns are poisoned.

    Row r owns queries query_starts[r]..query_starts[r+1], the last span of their kv_lens[r] tokens.
    """

    q_THD: torch.Tensor
    k_cache_NGBD: torch.Tensor
    v_cache_NGBD: torch.Tensor
    block_table_RM: torch.Tensor
    query_starts_R1: torch.Tensor
    kv_lens_R: torch.Tensor
    max_query_len: int
    max_kv_len: int
    guards: tuple[Guarded, ...]
    k_scale_NGB: torch.Tensor | None = None
    v_scale_NGB: torch.Tensor | None = None

    def slots(self, row: int) -> torch.Tensor:
        """Physical slots (int64) of the row's context tokens, in order."""
        block_size = self.k_cache_NGBD.shape[2]
        position_S = torch.arange(int(self.kv_lens_R[row]), device=self.q_THD.device)
        block_S = self.block_table_RM[row].long()[position_S // block_size]
        return block_S * block_size + position_S % block_size

    def row_kv(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies (k_SGD, v_SGD) of the row's context."""
        block_size = self.k_cache_NGBD.shape[2]
        slot_S = self.slots(row)
        index = (slot_S // block_size, slice(None), slot_S % block_size)
        return self.k_cache_NGBD[index], self.v_cache_NGBD[index]

    def plant_key(self, row: int, position: int, *, token: int, head: int) -> None:
        """Make the key at ``position`` parallel to query ``token`` of ``head``.

        It then holds about half of that head's attention mass.
        """
        num_heads, head_dim = self.q_THD.shape[1:]
        _, num_kv_heads, block_size, _ = self.k_cache_NGBD.shape
        q_D = self.q_THD[token, head].float()
        context = max(2, int(self.kv_lens_R[row]))
        key_D = q_D / q_D.square().sum() * math.sqrt(head_dim) * math.log(context)
        slot = int(self.slots(row)[position])
        kv_head = head // (num_heads // num_kv_heads)
        self.k_cache_NGBD[slot // block_size, kv_head, slot % block_size] = key_D.to(
            self.k_cache_NGBD.dtype
        )

    def assert_guards(self) -> None:
        """Assert that nothing around the caches and the tables was written."""
        for guard in self.guards:
            guard.assert_untouched()


def paged_case(
    query_spans: Sequence[int],
    kv_lens: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    padding_tokens: int = 0,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> PagedCase:
    """Build a case from each row's number of queries and of context tokens (queries included).

    ``padding_tokens`` poisoned queries follow those of the last row. ``kv_dtype``: int8 or fp8 of a
    quantised cache.
    """
    starts = [0]
    for span in query_spans:
        starts.append(starts[-1] + span)
    table_RM, num_blocks = shuffled_block_table(kv_lens, block_size, seed=seed)
    table, starts_R1, lens_R = (
        guarded_copy(values, device)
        for values in (table_RM, torch.tensor(starts), torch.tensor(list(kv_lens)))
    )
    q_THD = poisoned(starts[-1] + padding_tokens, num_heads, head_dim, dtype=dtype, device=device)
    q_THD[: starts[-1]] = randn(starts[-1], num_heads, head_dim, dtype=dtype, seed=seed).to(device)
    pool_shape = (num_blocks, num_kv_heads, block_size, head_dim)
    pool_dtype = kv_dtype or dtype
    k_pool, v_pool = (Guarded(*pool_shape, dtype=pool_dtype, device=device) for _ in range(2))
    scales = [Guarded(*pool_shape[:3], device=device) for _ in range(2)] if kv_dtype else []
    case = PagedCase(
        q_THD=q_THD,
        k_cache_NGBD=k_pool.tensor,
        v_cache_NGBD=v_pool.tensor,
        block_table_RM=table.tensor,
        query_starts_R1=starts_R1.tensor,
        kv_lens_R=lens_R.tensor,
        max_query_len=max([0, *query_spans]),
        max_kv_len=max([0, *kv_lens]),
        guards=(k_pool, v_pool, *scales, table, starts_R1, lens_R),
        k_scale_NGB=scales[0].tensor if scales else None,
        v_scale_NGB=scales[1].tensor if scales else None,
    )
    for row, kv_len in enumerate(kv_lens):
        slot_S = case.slots(row)
        index = (slot_S // block_size, slice(None), slot_S % block_size)
        shape = (kv_len, num_kv_heads, head_dim)
        for is_value, pool in enumerate((k_pool, v_pool)):
            x_SGD = randn(*shape, dtype=dtype, seed=seed + 2 * row + 1 + is_value).to(device)
            if kv_dtype:
                x_SGD, scales[is_value].tensor[index] = quantize_kv(x_SGD, kv_dtype)
            pool.tensor[index] = x_SGD
    return case
