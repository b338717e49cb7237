"""The linear layers with quantised weights whose launches ``bench/static.py`` compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pagedraft.kernels.weight_quant import CODE_DTYPES, QuantWeight, WeightFormat

# (format, group; 0 for one factor an output). A checkpoint's fp8 blocks are groups of 128.
FORMS: tuple[tuple[WeightFormat, int], ...] = (
    *(("int8", 0), ("int8", 128), ("fp8", 0), ("fp8", 128)),
    *(("int4", 32), ("int4", 64), ("int4", 128)),
)


def empty_weight(format: WeightFormat, group: int, num_out: int, num_in: int) -> QuantWeight:
    """Return a weight that nobody reads."""
    group = group or num_in
    columns, factors = num_in // 2 if format == "int4" else num_in, (num_in // group, num_out)
    codes = torch.empty(num_out, columns, dtype=CODE_DTYPES[format])
    zero_CO = torch.empty(factors, dtype=torch.uint8) if format == "int4" else None
    return QuantWeight(format, codes, torch.empty(factors), zero_CO, group)


def quant_calls(
    sizes: dict[str, tuple[int, int]], num_rows: int, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the projections with and without a residual, in each form that fits their inputs.

    sizes: (out, in) features by name, of which "qkv" and "down" are called.
    """

    def run(name: str, format: WeightFormat, group: int) -> None:
        from pagedraft.kernels.linear import linear, pack_linear

        num_out, num_in = sizes[name]
        packed = pack_linear(empty_weight(format, group, num_out, num_in), dtype=dtype)
        x_TI = torch.empty(num_rows, num_in, dtype=dtype)
        residual_TO = torch.empty(num_rows, num_out, dtype=dtype) if name == "down" else None
        linear(x_TI, packed, residual_TO=residual_TO)

    for name in ("qkv", "down"):
        for format, group in FORMS:
            if sizes[name][1] % max(group, 1) == 0:
                suffix = f"-{name}-{format}" + (f"_{group}" if group else "")
                yield suffix, lambda n=name, f=format, g=group: run(n, f, g)
