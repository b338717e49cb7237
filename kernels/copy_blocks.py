"""Copies of whole KV blocks in many pools at once: what a fork needs of blocks that are not full.

Shapes: caches: tensors [N, ...] contiguous, of one N and any dtypes (keys, values and scales of all
    layers); a block is ``caches[i][n]``, a multiple of 16 bytes at an address that 16 divides;
    pairs_P2 [P, 2] int64 (source block, destination block).
Returns: nothing; ``caches[i][destination]`` holds the bytes of ``caches[i][source]``.
Units: pairs count blocks of the pool. Destinations are distinct, none is a source and none the null
    block 0: checked where the pairs are on the CPU, a promise of the caller elsewhere.
Cost: 2 P times the bytes of a block in all pools, 16 P for the pairs; no flops. Bandwidth-bound.
Grid: a program owns BLOCK_W 4-byte words of one pair's block in one pool. Addresses come from a
    table, so that one launch serves any number of pools.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from pagedraft.kernels.check import (
    check_contiguous,
    check_dtype,
    check_same_device,
    check_shape,
)
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.dispatch import implementation

BLOCK_W = 2048  # words of a program: 8 KB, four 16-byte loads of each of 128 threads; not measured
ALIGNMENT = 16  # bytes


def copy_blocks_ref(caches: Sequence[torch.Tensor], pairs_P2: torch.Tensor) -> None:
    """Plain PyTorch on bytes, pool by pool."""
    source_P, destination_P = pairs_P2.unbind(1)
    for cache in caches:
        blocks_NY = cache.view(cache.shape[0], -1).view(torch.uint8)
        blocks_NY[destination_P] = blocks_NY[source_P]


@triton.jit
def _copy_blocks_kernel(table_ptr, pairs_ptr, BLOCK_W: tl.constexpr):
    pair, cache = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs_w = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    # Both hints are needed for 16-byte loads; the launcher checks what they promise.
    cache_ptr = tl.load(table_ptr + 2 * cache).to(tl.pointer_type(tl.int32))
    cache_ptr = tl.multiple_of(cache_ptr, 16)
    num_words = tl.multiple_of(tl.load(table_ptr + 2 * cache + 1), 4)
    source_ptr = cache_ptr + tl.load(pairs_ptr + 2 * pair) * num_words
    destination_ptr = cache_ptr + tl.load(pairs_ptr + 2 * pair + 1) * num_words
    mask_w = offs_w < num_words
    words_W = tl.load(source_ptr + offs_w, mask=mask_w, other=0)  # [BLOCK_W] int32
    tl.store(destination_ptr + offs_w, words_W, mask=mask_w)


def _block_bytes(cache: torch.Tensor) -> int:
    return cache[0].numel() * cache.element_size()


def _check(caches: Sequence[torch.Tensor], pairs_P2: torch.Tensor) -> None:
    check_shape("pairs_P2", pairs_P2, (None, 2))
    check_dtype("pairs_P2", pairs_P2, torch.int64)
    num_blocks = caches[0].shape[0]
    for index, cache in enumerate(caches):
        name = f"caches[{index}]"
        check_shape(name, cache, (num_blocks, *cache.shape[1:]))
        check_contiguous(name, cache)
        check_same_device(**{"caches[0]": caches[0], name: cache})
        if _block_bytes(cache) % ALIGNMENT or cache.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"{name}: expected blocks of a multiple of {ALIGNMENT} bytes at an address that "
                f"{ALIGNMENT} divides, got {_block_bytes(cache)} bytes at {cache.data_ptr():#x}"
            )
    if pairs_P2.device.type == "cpu":
        _check_pairs(pairs_P2.tolist(), num_blocks)


def _check_pairs(pairs: list[list[int]], num_blocks: int) -> None:
    """Raise ValueError unless all copies can run at once and in any order."""
    sources, destinations = ({pair[end] for pair in pairs} for end in (0, 1))
    outside = sorted(block for block in sources | destinations if not 0 < block < num_blocks)
    if outside:
        raise ValueError(f"pairs_P2: expected blocks from 1 to {num_blocks - 1}, got {outside[0]}")
    if len(destinations) < len(pairs):
        raise ValueError("pairs_P2: expected distinct destinations, got one twice")
    if sources & destinations:
        block = min(sources & destinations)
        raise ValueError(f"pairs_P2: expected no block to be source and destination, got {block}")


def copy_blocks(caches: Sequence[torch.Tensor], pairs_P2: torch.Tensor) -> None:
    """Copy block source to block destination in all ``caches``; see the module docstring.

    pairs_P2 may be on the CPU where the caches are not: then it is checked and sent there.
    """
    if not caches:
        return
    _check(caches, pairs_P2)
    device = caches[0].device
    pairs_P2 = pairs_P2.to(device, non_blocking=True).contiguous()
    if implementation("copy_blocks", device) != "triton":
        copy_blocks_ref(caches, pairs_P2)
        return
    if pairs_P2.shape[0] == 0:
        return
    rows = [(cache.data_ptr(), _block_bytes(cache) // 4) for cache in caches]
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    num_pieces = triton.cdiv(max(num_words for _, num_words in rows), BLOCK_W)
    grid = (pairs_P2.shape[0], len(caches), num_pieces)
    _copy_blocks_kernel[grid](table, pairs_P2, BLOCK_W)


def copy_blocks_cost(num_pairs: int, block_bytes: int) -> Cost:
    """Lower bound of one call; block_bytes: of a block in all pools together."""
    return Cost(bytes=num_pairs * (2 * block_bytes + 16), flops=0)
