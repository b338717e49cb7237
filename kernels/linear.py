"""y = x Wt (+ bias) (+ residual); a row has the same bits whatever other rows run beside it.

**Shapes**: x [T, I] rows of I input features; weight [O, I]; bias [O]; residual [T, O]. On a GPU
all are fp16, bf16 or fp32 of one dtype (bias may be fp32); on the CPU path x and residual are fp32,
the weight packed (``kernels/linear_cpu.py``). Any T, O, I >= 1, also T = 0.
**Returns**: y [T, O] in x's dtype; products accumulate in fp32 and round once, after the epilogue.
**Cost**: O*I weight bytes dominate below about 100 rows (memory-bound); 2*T*O*I flops above.
**Grid**: a program owns BLOCK_T x BLOCK_O outputs and walks all of I in steps of BLOCK_I; programs
run in groups of GROUP_T row tiles, so that a group's weights stay in L2.
**Exactness**: every T uses the same BLOCK_I, the same order over I and the same MMA class, so a
row's bits do not depend on T. ``exact=False`` on a GPU calls ``torch.matmul`` and gives that up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedraft.kernels import linear_cpu
from pagedraft.kernels.check import check_dtype, check_same_device, check_shape
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.dispatch import implementation

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class PackedLinear:
    """The weight of a linear layer in the form its implementation reads.

    format: "plain" (a contiguous tensor, GPU and interpreter) or a format of ``linear_cpu``.
    weight: the tensor [O, I], or the packed CPU weight (which holds the bias too).
    dtype: the dtype of the weight that was packed.
    row_multiple: x with a multiple of this many rows needs no padding copy.
    """

    format: str
    num_in: int
    num_out: int
    weight: torch.Tensor | linear_cpu.CpuWeight
    bias_O: torch.Tensor | None
    dtype: torch.dtype
    row_multiple: int = 1


def pack_linear(weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> PackedLinear:
    """Pack ``weight_OI`` for the implementation that its device runs.

    Raises ValueError for a wrong shape or device, TypeError for a dtype that is not a float.
    """
    check_shape("weight_OI", weight_OI, (None, None))
    check_dtype("weight_OI", weight_OI, *FLOATS)
    num_out, num_in = weight_OI.shape
    if bias_O is not None:
        check_shape("bias_O", bias_O, (num_out,))
        check_dtype("bias_O", bias_O, weight_OI.dtype, torch.float32)
        check_same_device(weight_OI=weight_OI, bias_O=bias_O)
    dtype = weight_OI.dtype
    if implementation("linear", weight_OI.device, has_cpu=True) != "cpu":
        weight_OI = weight_OI.contiguous()
        return PackedLinear("plain", num_in, num_out, weight_OI, bias_O, dtype)
    weight = linear_cpu.pack(weight_OI, bias_O)
    multiple = weight.row_multiple
    return PackedLinear(weight.format, num_in, num_out, weight, bias_O, dtype, multiple)


def row_multiple(packed: PackedLinear) -> int:
    """Return the row count whose multiples ``linear`` runs without a padding copy."""
    return packed.row_multiple


def dense_weight(packed: PackedLinear) -> torch.Tensor:
    """Return the weight [O, I] in its own dtype, unpacked where it was packed."""
    if isinstance(packed.weight, torch.Tensor):
        return packed.weight
    return linear_cpu.unpack(packed.weight).to(packed.dtype)


def linear_ref(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    residual_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return y [T, O] in x's dtype, accumulated in fp32 and rounded once."""
    y_TO = x_TI.float() @ weight_OI.float().T
    if bias_O is not None:
        y_TO = y_TO + bias_O.float()
    if residual_TO is not None:
        y_TO = y_TO + residual_TO.float()
    return y_TO.to(x_TI.dtype)


def linear(
    x_TI: torch.Tensor,
    packed: PackedLinear,
    *,
    residual_TO: torch.Tensor | None = None,
    exact: bool = True,
) -> torch.Tensor:
    """Return y [T, O] = x Wt (+ bias) (+ residual) in x's dtype.

    ``exact=False`` on a GPU may give a row other bits in another batch. Raises ValueError for wrong
    shapes or devices, TypeError for wrong dtypes.
    """
    check_shape("x_TI", x_TI, (None, packed.num_in))
    if residual_TO is not None:
        check_shape("residual_TO", residual_TO, (x_TI.shape[0], packed.num_out))
        check_dtype("residual_TO", residual_TO, x_TI.dtype)
    choice = implementation("linear", x_TI.device, has_cpu=True)
    if choice == "cpu" and isinstance(packed.weight, linear_cpu.CpuWeight):
        check_dtype("x_TI", x_TI, torch.float32)
        return linear_cpu.run(x_TI, packed.weight, residual_TO)
    check_dtype("x_TI", x_TI, *FLOATS)
    return linear_ref(x_TI, dense_weight(packed), packed.bias_O, residual_TO)


def linear_cost(
    num_rows: int,
    num_in: int,
    num_out: int,
    element_size: int,
    *,
    weight_size: int | None = None,
    has_residual: bool = False,
) -> Cost:
    """Return the least bytes and flops of one call; ``weight_size`` is the bytes of a weight."""
    weight_bytes = num_out * num_in * (weight_size or element_size)
    row_values = num_in + num_out * (2 if has_residual else 1)
    return Cost(
        bytes=weight_bytes + num_rows * row_values * element_size,
        flops=2 * num_rows * num_out * num_in,
    )
