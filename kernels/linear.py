"""y = x Wt (+ bias) (+ residual); a row has the same bits whatever other rows run beside it.

**Shapes**: x [T, I] rows of I input features; weight [O, I]; bias [O]; residual [T, O]. On a GPU
all are fp16, bf16 or fp32 of one dtype (bias may be fp32); on the CPU path x and residual are fp32,
the weight packed (``kernels/linear_cpu.py``). Any T, O, I >= 1, also T = 0. x may be a Normed: rows
before their RMS factor, by which the kernel multiplies products, before the bias.
**Returns**: y [T, O] in x's dtype; products accumulate in fp32 and round once, after the epilogue.
**Cost**: O*I weight bytes dominate below about 100 rows (memory-bound); 2*T*O*I flops above.
**Grid**: a program owns BLOCK_T x BLOCK_O outputs and walks all of I in steps of BLOCK_I; programs
run in groups of ``group_t`` row tiles, so that a group's weights stay in L2. Few rows: 16 x 32 or
16 x 64 tiles, which stream the weight (``linear_config.py``).
**Exactness**: every T uses the same BLOCK_I, the same order over I and the same MMA class, so a
row's bits do not depend on T. ``exact=False`` on a GPU calls ``torch.matmul`` and gives that up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedraft.kernels import linear_cpu, linear_cpu_quant, linear_quant, linear_triton
from pagedraft.kernels.check import check_dtype, check_same_device, check_shape
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.dispatch import Implementation, implementation
from pagedraft.kernels.normed import Normed, Rows, finish_norm
from pagedraft.kernels.weight_quant import QuantWeight, check_weight, dequantize_weight

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
CPU_WEIGHTS = (linear_cpu.CpuWeight, linear_cpu_quant.CpuQuantWeight)


@dataclass(frozen=True)
class PackedLinear:
    """The weight of a linear layer in the form its implementation reads.

    format: "plain" (a contiguous tensor, GPU and interpreter), a format of ``linear_cpu``, or how a
        quantised weight is stored: "int8", "int4", "fp8", or a format of ``linear_cpu_quant``.
    weight: the tensor [O, I], the quantised weight, or the packed CPU weight (which holds the bias
        too).
    dtype: of the weight that was packed; of the activations that a quantised weight multiplies.
    row_multiple: x with a multiple of this many rows needs no padding copy.
    """

    format: str
    num_in: int
    num_out: int
    weight: torch.Tensor | QuantWeight | linear_cpu.CpuWeight | linear_cpu_quant.CpuQuantWeight
    bias_O: torch.Tensor | None
    dtype: torch.dtype
    row_multiple: int = 1


def pack_linear(
    weight: torch.Tensor | QuantWeight,
    bias_O: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> PackedLinear:
    """Pack ``weight`` [O, I] for the implementation that its device runs.

    dtype: of the activations, where ``weight`` is quantised.
    Raises ValueError for a wrong shape or device, TypeError for a dtype that is not a float.
    """
    if isinstance(weight, QuantWeight):
        return _pack_quantised(weight, bias_O, dtype)
    weight_OI = weight
    check_shape("weight_OI", weight_OI, (None, None))
    check_dtype("weight_OI", weight_OI, *FLOATS)
    num_out, num_in = weight_OI.shape
    bias_O = _checked_bias(bias_O, weight_OI, weight_OI.dtype)
    dtype = weight_OI.dtype
    if implementation("linear", weight_OI.device, has_cpu=True) != "cpu":
        return PackedLinear("plain", num_in, num_out, weight_OI.contiguous(), bias_O, dtype)
    cpu_weight = linear_cpu.pack(weight_OI, bias_O)
    multiple = cpu_weight.row_multiple
    return PackedLinear(cpu_weight.format, num_in, num_out, cpu_weight, bias_O, dtype, multiple)


def _pack_quantised(
    weight: QuantWeight, bias_O: torch.Tensor | None, dtype: torch.dtype
) -> PackedLinear:
    check_weight(weight, reads_values=False)
    bias_O = _checked_bias(bias_O, weight.codes, dtype)
    sizes = weight.num_in, weight.num_out
    if implementation("linear", weight.codes.device, has_cpu=True) != "cpu":
        return PackedLinear(weight.format, *sizes, weight, bias_O, dtype)
    cpu_weight = linear_cpu_quant.pack(weight, bias_O)
    multiple = cpu_weight.row_multiple
    return PackedLinear(cpu_weight.format, *sizes, cpu_weight, bias_O, dtype, multiple)


def _checked_bias(
    bias_O: torch.Tensor | None, weight: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    if bias_O is None:
        return None
    check_shape("bias_O", bias_O, (weight.shape[0],))
    check_dtype("bias_O", bias_O, dtype, torch.float32)
    check_same_device(weight=weight, bias_O=bias_O)
    return bias_O.contiguous()


def dense_weight(packed: PackedLinear) -> torch.Tensor:
    """Return the weight [O, I]: in its own dtype, unpacked where it was packed; a quantised one as
    the fp32 values that its codes stand for."""
    if isinstance(packed.weight, torch.Tensor):
        return packed.weight
    if isinstance(packed.weight, QuantWeight):
        return dequantize_weight(packed.weight)
    if isinstance(packed.weight, linear_cpu_quant.CpuQuantWeight):
        return linear_cpu_quant.unpack(packed.weight)
    return linear_cpu.unpack(packed.weight).to(packed.dtype)


def linear_ref(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    residual_TO: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return y [T, O] in ``out_dtype`` (x's), accumulated in fp32 and rounded once."""
    y_TO = x_TI.float() @ weight_OI.float().T
    if bias_O is not None:
        y_TO = y_TO + bias_O.float()
    if residual_TO is not None:
        y_TO = y_TO + residual_TO.float()
    return y_TO.to(out_dtype or x_TI.dtype)


def _matmul(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    residual_TO: torch.Tensor | None,
) -> torch.Tensor:
    """The vendor's GEMM: its choice of kernel, and so a row's bits, may depend on T."""
    y_TO = torch.matmul(x_TI, weight_OI.T)
    for term in (bias_O, residual_TO):
        if term is not None:
            y_TO += term
    return y_TO


def linear(
    x: Rows,
    packed: PackedLinear,
    *,
    residual_TO: torch.Tensor | None = None,
    exact: bool = True,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return y [T, O] = x Wt (+ bias) (+ residual) in ``out_dtype``, by default x's.

    A Normed x stands for its rows with their factor; a kernel multiplies products by it.
    ``exact=False`` on a GPU may give a row other bits in another batch. Raises ValueError for wrong
    shapes or devices, TypeError for wrong dtypes.
    """
    x_TI = x.rows_TE if isinstance(x, Normed) else x
    if x_TI.ndim != 2 or x_TI.shape[1] != packed.num_in:
        check_shape("x_TI", x_TI, (None, packed.num_in))
    if residual_TO is not None:
        check_shape("residual_TO", residual_TO, (x_TI.shape[0], packed.num_out))
        check_dtype("residual_TO", residual_TO, x_TI.dtype)
    choice = implementation("linear", x_TI.device, has_cpu=True)
    if _is_one_launch(choice, x_TI, packed, exact):
        check_dtype("x_TI", x_TI, packed.dtype)
        check_same_device(x_TI=x_TI, weight_OI=packed.weight, residual_TO=residual_TO)
        out_dtype = out_dtype or x_TI.dtype
        return linear_triton.launch(x, packed.weight, packed.bias_O, residual_TO, out_dtype)
    if isinstance(x, Normed):
        x_TI = finish_norm(x)
    return _separate(choice, x_TI, packed, residual_TO, out_dtype)


def _is_one_launch(
    choice: Implementation, x_TI: torch.Tensor, packed: PackedLinear, exact: bool
) -> bool:
    is_dense = choice == "triton" and isinstance(packed.weight, torch.Tensor)
    return is_dense and (exact or not x_TI.is_cuda)


def runs_in_one_launch(x_TI: torch.Tensor, packed: PackedLinear, exact: bool) -> bool:
    """Whether the exact Triton kernels for weights of the activations' dtype run."""
    choice = implementation("linear", x_TI.device, has_cpu=True)
    return _is_one_launch(choice, x_TI, packed, exact)


def _separate(
    choice: Implementation,
    x_TI: torch.Tensor,
    packed: PackedLinear,
    residual_TO: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """``linear`` by anything but ``linear_triton``."""
    if choice == "cpu" and isinstance(packed.weight, CPU_WEIGHTS):
        if x_TI.dtype != torch.float32:
            check_dtype("x_TI", x_TI, torch.float32)
        is_dense = isinstance(packed.weight, linear_cpu.CpuWeight)
        run = linear_cpu.run if is_dense else linear_cpu_quant.run
        y_TO = run(x_TI, packed.weight, residual_TO)
        return y_TO if out_dtype is None else y_TO.to(out_dtype)
    out_dtype = out_dtype or x_TI.dtype
    bias_O = packed.bias_O
    if choice == "triton" and isinstance(packed.weight, QuantWeight):
        check_dtype("x_TI", x_TI, packed.dtype)
        check_same_device(x_TI=x_TI, codes=packed.weight.codes, residual_TO=residual_TO)
        return linear_quant.launch(x_TI, packed.weight, bias_O, residual_TO, out_dtype)
    weight_OI = dense_weight(packed)
    check_same_device(x_TI=x_TI, weight_OI=weight_OI, bias_O=bias_O, residual_TO=residual_TO)
    if choice != "triton":
        check_dtype("x_TI", x_TI, *FLOATS)
        return linear_ref(x_TI, weight_OI, bias_O, residual_TO, out_dtype)
    check_dtype("x_TI", x_TI, weight_OI.dtype)
    return _matmul(x_TI, weight_OI, bias_O, residual_TO).to(out_dtype)


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
