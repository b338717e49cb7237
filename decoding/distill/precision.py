"""In which dtype a draft is trained: products may be bf16, weights and sums are fp32 always."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BF16_FEATURES = ("avx512_bf16", "amx_bf16")  # x86 processors with one of them multiply bf16


def resolve_dtype(name: str, device: torch.device) -> str:
    """A name of DTYPES; "auto" is bf16 where ``device`` multiplies that faster than fp32."""
    if name == "auto":
        return "bf16" if _multiplies_bf16(device) else "fp32"
    return name


def products_in(name: str, device: torch.device) -> AbstractContextManager[object]:
    """Inside, torch makes products of fp32 tensors in this dtype."""
    if name == "fp32":
        return nullcontext()
    return torch.autocast(device.type, DTYPES[name])


def _multiplies_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # not in 2.11
    return any(capabilities.get(feature, False) for feature in BF16_FEATURES)
