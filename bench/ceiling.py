"""What the device reaches at best, measured here and now: copy bandwidth and matmul rate."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedraft.bench.timing import measure
from pagedraft.kernels.cost import Cost


@dataclass(frozen=True)
class Ceiling:
    """copy_rate: bytes/s of a large copy, read and write both counted; matmul_rate: flop/s."""

    copy_rate: float
    matmul_rate: float

    def floor(self, cost: Cost) -> float:
        """Return the seconds below which no call of this cost can end."""
        return max(cost.bytes / self.copy_rate, cost.flops / self.matmul_rate)

    def text(self) -> str:
        """Return both for a header."""
        copy, matmul = self.copy_rate / 1e9, self.matmul_rate / 1e12
        return f"copy {copy:.1f} GB/s (read + write), matmul {matmul:.3f} TFLOP/s"


def measure_ceiling(device: torch.device, dtype: torch.dtype) -> Ceiling:
    """Measure both on ``device``, the product in ``dtype`` (about two seconds)."""
    is_cuda = device.type == "cuda"
    num_bytes = (2 << 30) if is_cuda else (128 << 20)
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    copy = measure([lambda: target.copy_(source)], device)
    size = 8192 if is_cuda else 1024
    # Random values: zeros draw less power and run faster than any real product.
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty(size, size, dtype=dtype, device=device)
    product = measure([lambda: torch.mm(a, b, out=out)], device)
    return Ceiling(2 * num_bytes / copy.median, 2 * size**3 / product.median)
