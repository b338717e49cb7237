"""The linear layers whose launches ``bench/static.py`` compiles, alone and with neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

# The projections and what is fused with them, by dtype.
FORMS = {
    torch.bfloat16: (
        *(("qkv", ""), ("qkv", "normed"), ("o", "residual"), ("o", "norm")),
        *(("gate_up", "normed-gated"), ("down", "norm"), ("up", ""), ("head", "normed-fp32")),
    ),
    torch.float16: (("qkv", ""), ("o", "residual"), ("gate_up", "gated"), ("down", "residual")),
    torch.float32: (("qkv", ""), ("o", "residual"), ("gate_up", ""), ("down", "residual")),
}


def linear_calls(
    sizes: dict[str, tuple[int, int]], num_rows: int, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the linear layers of a model, in the forms that a step of ``dtype`` runs them in.

    sizes: (out, in) features by name: qkv, o, gate_up, down, up, head.
    """

    def run(num_out: int, num_in: int, form: str) -> None:
        from pagedraft.kernels.linear import linear, pack_linear
        from pagedraft.kernels.linear_fused import gated_linear, linear_add_norm
        from pagedraft.kernels.normed import SQUARE_COLUMNS, Normed

        packed = pack_linear(torch.empty(num_out, num_in, dtype=dtype))
        x_TI = torch.empty(num_rows, num_in, dtype=dtype)
        normed = Normed(x_TI, torch.empty(num_rows, -(-num_in // SQUARE_COLUMNS)), 1e-5)
        residual_TO = torch.empty(num_rows, num_out, dtype=dtype)
        {
            "": lambda: linear(x_TI, packed),
            "residual": lambda: linear(x_TI, packed, residual_TO=residual_TO),
            "normed": lambda: linear(normed, packed),
            "normed-fp32": lambda: linear(normed, packed, out_dtype=torch.float32),
            "gated": lambda: gated_linear(x_TI, packed, "gelu_tanh"),
            "normed-gated": lambda: gated_linear(normed, packed),
            "norm": lambda: linear_add_norm(x_TI, packed, residual_TO, residual_TO[0], 1e-5),
        }[form]()

    for name, form in FORMS[dtype]:
        suffix = f"-{name}-{form}" if form else f"-{name}"
        yield suffix, lambda n=name, f=form: run(*sizes[n], f)
