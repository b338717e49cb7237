"""How many KV tokens fit, on the device and on the host: from free memory, and no more than is of
use."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagedraft.model.feature_head import FeatureHead
from pagedraft.model.kv_cache import KVCache, kv_bytes_per_token
from pagedraft.model.transformer import Transformer

CUDA_SHARE = 0.85  # of free device memory: the rest is for activations and graphs
CPU_SHARE = 0.25  # of available memory: other programs live there too


def make_kv_caches(
    models: Sequence[Transformer],
    kv_dtype: torch.dtype | None,
    *,
    block_size: int,
    kv_tokens: int | None,
    max_rows: int,
) -> list[KVCache]:
    """One pool a model, the target's first, all of the same blocks.

    With a FeatureHead among them the target's keeps states.

    kv_dtype: what they store; None: the dtype of each model's activations.
    kv_tokens: their capacity; None sizes it from free memory.
    """
    target = models[0]
    has_head = any(isinstance(model, FeatureHead) for model in models)
    features = [target.activation_dtype if has_head else None, *[None] * (len(models) - 1)]
    dtypes = [kv_dtype or model.activation_dtype for model in models]
    rows = list(zip(models, dtypes, features, strict=True))
    if kv_tokens is None:
        kv_tokens = default_kv_tokens(
            sum(kv_bytes_per_token(model.config, dtype, states) for model, dtype, states in rows),
            target.device,
            target.config.max_positions,
            max_rows,
        )
    num_blocks = 1 + -(-kv_tokens // block_size)
    return [
        KVCache(model.config, num_blocks, block_size, dtype, model.device, features_dtype=states)
        for model, dtype, states in rows
    ]


def default_kv_tokens(
    bytes_per_token: int, device: torch.device, max_positions: int, max_rows: int
) -> int:
    """Capacity of the KV pool in tokens when the user named none.

    bytes_per_token: of all models' pools together.
    """
    budget = _free_bytes(device) * (CUDA_SHARE if device.type == "cuda" else CPU_SHARE)
    fitting = int(budget) // bytes_per_token
    useful = max_positions * max_rows
    if device.type == "cpu":
        useful = min(useful, max(max_positions, 1024 * max_rows))
    return max(1, min(fitting, useful))


def resolve_swap_bytes(swap_bytes: int | str, caches: Sequence[KVCache]) -> int:
    """Host memory for the KV of preempted requests, in bytes; 0 for none.

    "auto": as much as the pools take, and no more than a share of what is free.
    """
    if swap_bytes == "auto":
        free = int(_free_bytes(torch.device("cpu")) * CPU_SHARE)
        return min(sum(cache.num_bytes for cache in caches), free)
    if isinstance(swap_bytes, bool) or not isinstance(swap_bytes, int) or swap_bytes < 0:
        raise ValueError(f'swap_bytes: expected "auto" or an integer >= 0, got {swap_bytes!r}')
    return swap_bytes


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 4 * 2**30
