"""Activation of the gate half times the up half of an MLP's first projection.

Shapes: gate_up_TF2 [T, 2F] fp32, fp16 or bf16, rows contiguous: gate in columns 0..F-1, then up.
Returns: y_TF [T, F] in the same dtype; activation and product in fp32, rounded once.
Cost: 3 T F * itemsize bytes; about 6 T F flops. Bandwidth-bound.
Grid: one program a row and tile of F.
Source: Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202; gelu_tanh is Hendrycks and
    Gimpel, arXiv 1606.08415, in the form x * sigmoid(2u), which equals x/2 * (1 + tanh(u)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pagedraft.kernels.check import check_dtype, check_shape
from pagedraft.kernels.cost import Cost
from pagedraft.kernels.dispatch import implementation

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS = ("silu", "gelu_tanh")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# torch runs gelu on up to this many elements, and silu on twice as many, in one piece. Larger ones
# are cut for the threads anywhere in a row, and the elements at a cut take another exp: other bits.
MAX_CPU_ELEMENTS = 16384
VECTOR = 64  # elements; a multiple of what torch's loops take at once, at any vector width


def _activate(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def gated_mlp_ref(gate_up_TF2: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """Plain PyTorch in at least fp32, rounded once at the end."""
    wide = torch.promote_types(gate_up_TF2.dtype, torch.float32)
    gate_TF, up_TF = gate_up_TF2.to(wide).chunk(2, dim=-1)
    return (_activate(gate_TF, activation) * up_TF).to(gate_up_TF2.dtype)


def _is_cut_at_vectors(num_tokens: int, mlp_dim: int) -> bool:
    """Whether threads that share the elements evenly cut between vectors, wherever they cut."""
    threads = torch.get_num_threads()
    size = num_tokens * mlp_dim
    return mlp_dim % VECTOR == 0 and all(size % (n * VECTOR) == 0 for n in range(2, threads + 1))


def gated_mlp_cpu(gate_up_TF2: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """The reference so cut that a row's bits do not depend on T or threads."""
    num_tokens, num_columns = gate_up_TF2.shape
    max_rows = max(1, 2 * MAX_CPU_ELEMENTS // max(1, num_columns))
    if num_tokens > max_rows and not _is_cut_at_vectors(num_tokens, num_columns // 2):
        pieces = [gated_mlp_cpu(piece, activation) for piece in gate_up_TF2.split(max_rows)]
        return torch.cat(pieces)
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    return _activate(gate_TF, activation).mul_(up_TF)


@triton.jit
def gated(gate, up, IS_GELU: tl.constexpr):
    """Return activation(gate) * up of fp32 tensors."""
    if IS_GELU:
        # 2 * sqrt(2 / pi)
        slope = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    else:
        slope = gate
    return gate / (1.0 + tl.exp(-slope)) * up


@triton.jit
def _gated_mlp_kernel(
    gate_up_ptr, y_ptr, stride_gt, num_columns, IS_GELU: tl.constexpr, BLOCK_F: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    offs_f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask_f = offs_f < num_columns
    gate_ptrs = gate_up_ptr + row * stride_gt + offs_f
    gate_F = tl.load(gate_ptrs, mask=mask_f, other=0.0).to(tl.float32)  # [BLOCK_F] fp32
    up_F = tl.load(gate_ptrs + num_columns, mask=mask_f, other=0.0).to(tl.float32)
    y_F = gated(gate_F, up_F, IS_GELU)
    y_ptrs = y_ptr + row * num_columns + offs_f
    tl.store(y_ptrs, y_F.to(y_ptr.dtype.element_ty), mask=mask_f)


@dataclass(frozen=True)
class GatedMlpConfig:
    block_f: int = 1024
    num_warps: int = 4


def gated_mlp_config(mlp_dim: int) -> GatedMlpConfig:
    """Eight elements a thread: one 16-byte load of each half. Not yet measured on a GPU."""
    block_f = min(1024, max(128, triton.next_power_of_2(mlp_dim)))
    return GatedMlpConfig(block_f, num_warps=max(1, block_f // 256))


def gated_mlp(gate_up_TF2: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """Return activation(gate) * up, [T, F]."""
    if gate_up_TF2.ndim != 2:
        check_shape("gate_up_TF2", gate_up_TF2, (None, None))
    check_dtype("gate_up_TF2", gate_up_TF2, *FLOATS)
    num_tokens, num_columns = gate_up_TF2.shape
    if num_columns % 2:
        raise ValueError(f"gate_up_TF2: expected an even number of columns, got {num_columns}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {ACTIVATIONS}, got {activation!r}")
    is_fp32 = gate_up_TF2.dtype == torch.float32
    choice = implementation("gated_mlp", gate_up_TF2.device, has_cpu=is_fp32)
    if choice == "cpu":
        return gated_mlp_cpu(gate_up_TF2, activation)
    if choice == "ref":
        return gated_mlp_ref(gate_up_TF2, activation)
    if gate_up_TF2.stride(1) != 1:
        gate_up_TF2 = gate_up_TF2.contiguous()
    mlp_dim = num_columns // 2
    y_TF = torch.empty((num_tokens, mlp_dim), dtype=gate_up_TF2.dtype, device=gate_up_TF2.device)
    config = gated_mlp_config(mlp_dim)
    if y_TF.numel():
        _gated_mlp_kernel[(num_tokens, triton.cdiv(mlp_dim, config.block_f))](
            gate_up_TF2,
            y_TF,
            gate_up_TF2.stride(0),
            mlp_dim,
            IS_GELU=activation == "gelu_tanh",
            BLOCK_F=config.block_f,
            num_warps=config.num_warps,
        )
    return y_TF


def gated_mlp_cost(num_tokens: int, mlp_dim: int, itemsize: int) -> Cost:
    """Lower bound of one call."""
    num_elements = num_tokens * mlp_dim
    return Cost(bytes=3 * num_elements * itemsize, flops=6 * num_elements)
