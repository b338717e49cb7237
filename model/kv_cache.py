"""KVCache: the preallocated pool tensors of one model. Who owns a block is BlockPool's matter."""

from __future__ import annotations

import torch

from pagedraft.model.config import ModelConfig

BLOCK_SIZES = (8, 16, 32, 64, 128)  # tokens; what the attention kernels are tested with


class KVCache:
    """Per layer ``k`` and ``v`` tensors of shape [N, G, B, D]: one block of one head is contiguous.

    Block 0 is the null block: padded rows of a step write there, nobody reads it.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks: expected at least 2 (one is the null block), got {num_blocks}"
            )
        if block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size: expected one of {list(BLOCK_SIZES)}, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        layers = range(config.num_layers)
        # Not zeroed: attention masks what nobody wrote, and untouched memory costs nothing.
        self.k = [torch.empty(shape, dtype=dtype, device=device) for _ in layers]
        self.v = [torch.empty(shape, dtype=dtype, device=device) for _ in layers]

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers, keys and values."""
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v))


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of KV that one context token takes in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
