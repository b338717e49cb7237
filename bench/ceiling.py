"""What the device reaches at best, measured here and now: copy and read bandwidth, matmul rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from pagedraft.bench.timing import measure
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.linear_cpu import FORMATS

OTHER_PRODUCT = "bf16 all through"


@dataclass(frozen=True)
class Ceiling:
    """What ops are judged by.

    copy_rate: bytes/s of a large copy, read and write both counted.
    matmul_rate: flop/s of the fastest product that takes and gives the dtype of activations.
    read_rate: bytes/s of a large read; above copy_rate where a write costs a read, too. None where
        it was not measured.
    products: flop/s of each product that was tried, by name, also of dtypes that do not judge.
    """

    copy_rate: float
    matmul_rate: float
    read_rate: float | None = None
    products: Mapping[str, float] = field(default_factory=dict)

    @property
    def byte_rate(self) -> float:
        """bytes/s that no mix of reads and writes exceeds."""
        return max(self.copy_rate, self.read_rate or 0.0)

    def floor(self, cost: Cost) -> float:
        """Return the seconds below which no call of this cost can end."""
        return max(cost.bytes / self.byte_rate, cost.flops / self.matmul_rate)

    def text(self) -> str:
        """Return all of them for a header."""
        copy, matmul = self.copy_rate / 1e9, self.matmul_rate / 1e12
        read = f", read {self.read_rate / 1e9:.1f} GB/s" if self.read_rate else ""
        tried = ", ".join(f"{name} {rate / 1e12:.3f}" for name, rate in self.products.items())
        best = f" ({tried})" if len(self.products) > 1 else ""
        return f"copy {copy:.1f} GB/s (read + write){read}, matmul {matmul:.3f} TFLOP/s{best}"


def measure_ceiling(device: torch.device, dtype: torch.dtype) -> Ceiling:
    """Measure all on ``device``, products in ``dtype`` (two to four seconds).

    A ceiling is what is reached at best: of the 20th percentile of calls, and on a CPU of calls
    that end within about a time slice, as long ones would count what else the machine does.
    """
    is_cuda = device.type == "cuda"
    num_bytes, num_pieces = (2 << 30, 1) if is_cuda else (128 << 20, 16)
    source = torch.ones(num_pieces, num_bytes // num_pieces // 4, device=device)
    target = torch.zeros_like(source)
    pairs = list(zip(target, source, strict=True))
    copy = measure([partial(into.copy_, piece) for into, piece in pairs], device).p20
    reads = ([piece.sum for piece in source], [partial(torch.dot, p, p) for p in source])
    read = min(measure(runs, device, budget=0.25).p20 for runs in reads)
    # A millisecond of two cores at 384, near their best from there on; more cores, larger.
    size = 8192 if is_cuda else 64 * round(6 * max(1.0, torch.get_num_threads() / 2) ** (1 / 3))
    products = {
        name: 2 * size**3 / measure([product], device, budget=0.25).p20
        for name, product in _products(size, device, dtype)
    }
    judging = [rate for name, rate in products.items() if name != OTHER_PRODUCT]
    piece_bytes = num_bytes / num_pieces
    return Ceiling(2 * piece_bytes / copy, max(judging), piece_bytes / read, products)


def _products(
    size: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Square products by name; on a CPU by each library that the linear op may choose.

    Libraries differ by up to half on processors that one of them does not know.
    """
    # Random values: zeros draw less power and run faster than any real product.
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    yield "mm", lambda: torch.mm(a, b, out=out)
    if device.type != "cpu" or dtype != torch.float32:
        return
    for name, form in FORMATS.items():
        with suppress(RuntimeError, AttributeError):  # this build of torch lacks the library
            run = partial(form.run, a, form.pack(b, None))
            run()
            yield name, run
    a16, b16 = a.bfloat16(), b.bfloat16()
    yield OTHER_PRODUCT, lambda: torch.mm(a16, b16)
