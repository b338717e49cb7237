"""Linear layers with their neighbours: an MLP's first projection with its activation, and an output
projection with the residual and the norm that follow it.

**Shapes**: x [T, I]; weight [2F, I], gate rows, then up rows, or [E, I]; residual [T, E]; norm
weight [E]. Any sizes, also T = 0.
**Returns**: gated_linear -> [T, F] in x's dtype. linear_add_norm -> (normed rows, sum_TE): sum_TE =
x Wt (+ bias) + residual, rounded, is what gets normed and is the next residual.
**Cost**: that of ``linear``; the neighbours' own launches and their traffic, 5 T F and 5 T E
elements, are saved.
**One launch** with an exact Triton kernel of weights in the activations' dtype: the activation for
bf16 and fp16, residual and norm for bf16, whose range holds rows before their factor (``Normed``).
Without a GPU, in fp32, for a quantised weight and with ``exact=False`` these are the separate ops
in a row.
"""

from __future__ import annotations

import torch

from pagedraft.kernels import linear_fused_triton
from pagedraft.kernels.check import check_dtype, check_same_device, check_shape
from pagedraft.kernels.dispatch import implementation
from pagedraft.kernels.gated_mlp import ACTIVATIONS, Activation, gated_mlp, gated_mlp_ref
from pagedraft.kernels.linear import PackedLinear, linear, linear_ref, runs_in_one_launch
from pagedraft.kernels.normed import Normed, Rows
from pagedraft.kernels.rms_norm import add_rms_norm, rms_norm_ref

NARROW = (torch.float16, torch.bfloat16)


def gated_linear_ref(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    activation: Activation = "silu",
) -> torch.Tensor:
    """The separate references in fp32, rounded once to x's dtype."""
    gate_up_TO = linear_ref(x_TI, weight_OI, bias_O, out_dtype=torch.float32)
    return gated_mlp_ref(gate_up_TO, activation).to(x_TI.dtype)


def linear_add_norm_ref(
    x_TI: torch.Tensor,
    weight_EI: torch.Tensor,
    bias_E: torch.Tensor | None,
    residual_TE: torch.Tensor,
    norm_weight_E: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the norm of sum_TE, sum_TE): the references, each rounded once to x's dtype."""
    sum_TE = linear_ref(x_TI, weight_EI, bias_E, residual_TE)
    return rms_norm_ref(sum_TE, norm_weight_E, eps), sum_TE


def _is_one_launch(neighbour: str, x_TI: torch.Tensor, packed: PackedLinear, exact: bool) -> bool:
    """Whether linear and ``neighbour`` run as one kernel; an op that is swapped runs by itself."""
    is_triton = implementation(neighbour, x_TI.device, has_cpu=True) == "triton"
    return is_triton and runs_in_one_launch(x_TI, packed, exact)


def gated_linear(
    x: Rows, packed: PackedLinear, activation: Activation = "silu", *, exact: bool = True
) -> torch.Tensor:
    """Return activation(gate) * up, [T, F]; ``packed`` [2F, I] holds gate rows, then up rows."""
    x_TI = x.rows_TE if isinstance(x, Normed) else x
    if x_TI.dtype not in NARROW or not _is_one_launch("gated_mlp", x_TI, packed, exact):
        return gated_mlp(linear(x, packed, exact=exact), activation)
    check_shape("x_TI", x_TI, (None, packed.num_in))
    check_dtype("x_TI", x_TI, packed.dtype)
    check_same_device(x_TI=x_TI, weight_OI=packed.weight)
    if packed.num_out % 2:
        raise ValueError(f"packed: expected an even number of rows, got {packed.num_out}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {ACTIVATIONS}, got {activation!r}")
    return linear_fused_triton.launch_gated(x, packed.weight, packed.bias_O, activation)


def linear_add_norm(
    x_TI: torch.Tensor,
    packed: PackedLinear,
    residual_TE: torch.Tensor,
    norm_weight_E: torch.Tensor,
    eps: float,
    *,
    exact: bool = True,
) -> tuple[Rows, torch.Tensor]:
    """Return (rms_norm(sum_TE), sum_TE) with sum_TE = x Wt (+ bias) + residual_TE.

    In one launch the first is a Normed, whose reader finishes the norm.
    """
    if x_TI.dtype != torch.bfloat16 or not _is_one_launch("rms_norm", x_TI, packed, exact):
        return add_rms_norm(linear(x_TI, packed, exact=exact), residual_TE, norm_weight_E, eps)
    check_shape("x_TI", x_TI, (None, packed.num_in))
    check_shape("residual_TE", residual_TE, (x_TI.shape[0], packed.num_out))
    check_shape("norm_weight_E", norm_weight_E, (packed.num_out,))
    check_dtype("x_TI", x_TI, packed.dtype)
    check_dtype("residual_TE", residual_TE, x_TI.dtype)
    check_same_device(x_TI=x_TI, weight_OI=packed.weight, residual_TE=residual_TE)
    return linear_fused_triton.launch_add_norm(
        x_TI, packed.weight, packed.bias_O, residual_TE, norm_weight_E, eps
    )
