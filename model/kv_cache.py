"""KVCache: the preallocated pool tensors of one model. Who owns a block is BlockPool's matter."""

from __future__ import annotations

import torch

from pagedraft.kernels.kv_quant import KV_DTYPES
from pagedraft.kernels.paged_attention import BLOCK_SIZES
from pagedraft.model.config import ModelConfig

FP8 = torch.float8_e4m3fn
MIN_FP8_CAPABILITY = (8, 9)
FP8_AMD_ARCH = "gfx942"


class KVCache:
    """Per layer ``k`` and ``v`` tensors of shape [N, G, B, D]: one block of one head is contiguous.

    kv_dtype: what they store. With a quantised one (kv_quant.KV_DTYPES) ``k_scale`` and ``v_scale``
    hold a layer's fp32 factors [N, G, B], one a token and head, else None.
    features_dtype: of ``features_NBE`` [N, B, E], each token's state after the final norm, which
    ``Transformer.forward`` then writes and a FeatureHead drafts from; None: no such pool. It lies
    in the tokens' blocks, so whatever copies, shares or drops KV does so to the states.
    Block 0 is the null block: padded tokens have slots there. No KV is written to it and nothing is
    read from it; states of padding are.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        kv_dtype: torch.dtype,
        device: torch.device,
        *,
        features_dtype: torch.dtype | None = None,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks: expected at least 2 (one is the null block), got {num_blocks}"
            )
        if block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size: expected one of {list(BLOCK_SIZES)}, got {block_size}")
        if kv_dtype == FP8:
            check_fp8_arch(gpu_arch(device))
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)

        def pools() -> list[torch.Tensor]:
            # Not zeroed: attention masks what nobody wrote, and untouched memory costs nothing.
            return [
                torch.empty(shape, dtype=kv_dtype, device=device) for _ in range(config.num_layers)
            ]

        def scales() -> list[torch.Tensor | None]:
            if kv_dtype not in KV_DTYPES:
                return [None] * config.num_layers
            return [torch.empty(shape[:3], device=device) for _ in range(config.num_layers)]

        self.k, self.v = pools(), pools()
        self.k_scale, self.v_scale = scales(), scales()
        self.features_NBE: torch.Tensor | None = None
        if features_dtype is not None:
            self.add_features(config.embed_dim, features_dtype)

    def add_features(self, embed_dim: int, dtype: torch.dtype) -> None:
        """Have a pool of states, too: from the next pass on, for the tokens that are written."""
        sizes = self.num_blocks, self.block_size, embed_dim
        self.features_NBE = torch.empty(sizes, dtype=dtype, device=self.k[0].device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All pool tensors of all layers, and states: what a copy of a block has to copy."""
        pools = (*self.k, *self.v, *self.k_scale, *self.v_scale, self.features_NBE)
        return [pool for pool in pools if pool is not None]

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers: keys, values and their factors; and of the states."""
        return sum(pool.nbytes for pool in self.tensors)


def kv_bytes_per_token(
    config: ModelConfig, kv_dtype: torch.dtype, features_dtype: torch.dtype | None = None
) -> int:
    """Bytes of KV that one context token takes in all layers, factors and state included."""
    scale_bytes = torch.float32.itemsize if kv_dtype in KV_DTYPES else 0
    head_bytes = config.head_dim * kv_dtype.itemsize + scale_bytes
    state_bytes = 0 if features_dtype is None else config.embed_dim * features_dtype.itemsize
    return 2 * config.num_layers * config.num_kv_heads * head_bytes + state_bytes


def gpu_arch(device: torch.device) -> tuple[int, int] | str | None:
    """Compute capability (major, minor) of a CUDA device, an AMD device's name, None for a CPU."""
    if device.type == "cpu":
        return None
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return torch.cuda.get_device_capability(device)


def check_fp8_arch(arch: tuple[int, int] | str | None) -> None:
    """Raise ValueError unless the kernels can store fp8 (e4m3) on ``arch`` (see gpu_arch)."""
    if arch is None or arch == FP8_AMD_ARCH:
        return
    if isinstance(arch, tuple) and arch >= MIN_FP8_CAPABILITY:
        return
    name = arch if isinstance(arch, str) else f"compute capability {arch[0]}.{arch[1]}"
    raise ValueError(
        f"kv_dtype: fp8 (e4m3) needs compute capability 8.9 or higher, or gfx942, this device has "
        f'{name}; "int8" takes the same memory and runs there'
    )
