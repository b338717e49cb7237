"""The linear layers with quantised weights whose launches ``bench/static.py`` compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pagedraft.kernels.weight_quant import CODE_DTYPES, QuantWeight, WeightFormat

# Format and group (0 for one factor an output) by the activations' dtype: each form once. Groups of
# 128, an fp8 checkpoint's blocks among them, multiply "down" and add a residual, others "qkv".
FORMS: dict[torch.dtype, tuple[tuple[WeightFormat, int], ...]] = {
    torch.bfloat16: (("int8", 0), ("fp8", 128), ("int4", 32), ("int4", 128)),
    torch.float16: (("int8", 128), ("fp8", 0), ("int4", 64)),
    torch.float32: (("int8", 0), ("int4", 64)),
}


def empty_weight(format: WeightFormat, group: int, num_out: int, num_in: int) -> QuantWeight:
    """Return a weight that nobody reads."""
    group = group or num_in
    columns, factors = num_in // 2 if format == "int4" else num_in, (num_in // group, num_out)
    codes = torch.empty(num_out, columns, dtype=CODE_DTYPES[format])
    zero_CO = torch.empty(factors, dtype=torch.uint8) if format == "int4" else None
    return QuantWeight(format, codes, torch.empty(factors), zero_CO, group)


def quant_calls(
    sizes: dict[str, tuple[int, int]],
    num_rows: int,
    dtype: torch.dtype,
    forms: tuple[tuple[WeightFormat, int], ...] | None = None,
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield linear layers in ``forms``, by default those of ``dtype``.

    sizes: (out, in) features by name, of which "qkv" and "down" are used.
    """

    def run(name: str, format: WeightFormat, group: int) -> None:
        from pagedraft.kernels.linear import linear, pack_linear

        num_out, num_in = sizes[name]
        packed = pack_linear(empty_weight(format, group, num_out, num_in), dtype=dtype)
        x_TI = torch.empty(num_rows, num_in, dtype=dtype)
        residual_TO = torch.empty(num_rows, num_out, dtype=dtype) if name == "down" else None
        linear(x_TI, packed, residual_TO=residual_TO)

    for format, group in FORMS[dtype] if forms is None else forms:
        name = "down" if group == 128 else "qkv"
        suffix = f"-{name}-{format}" + (f"_{group}" if group else "")
        yield suffix, lambda n=name, f=format, g=group: run(n, f, g)
