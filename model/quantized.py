"""Quantised linear weights: made from floats at load, or read from a checkpoint that stores them.

A layout says which tensors a layer [O, I] has in the file and how they become a ``QuantWeight``
whose values are exactly those of the file (C: groups of inputs, I / group):

==========  ====================================================================================
gptq        qweight int32 [I/8, O], qzeros int32 [C, O/8], scales [C, O], g_idx int32 [I]
awq         qweight int32 [I, O/8], qzeros int32 [C, O/8], scales [C, O]
packed      weight_packed int32 [O, I/8], weight_scale [O, C], weight_zero_point int32 [O/8, C]
blocks      weight e4m3 [O, I], a factor for each block of 128 x 128
scaled      weight e4m3 or int8 [O, I], weight_scale of each output or of the tensor
==========  ====================================================================================

An int32 holds eight 4-bit numbers, the first in its lowest bits; awq stores outputs of eight in the
order ``AWQ_ORDER``. ``weight = (code - zero) * scale`` throughout.
Sources: AutoGPTQ, AutoAWQ, DeepSeek-V3 and compressed-tensors, as their files are documented.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from pagedraft.kernels.weight_quant import (
    FP8_BLOCK,
    INT4_GROUPS,
    ZERO_STEPS,
    QuantWeight,
    WeightFormat,
    pack_int4,
    quantize_weight,
)
from pagedraft.model.quant_scheme import Layout, QuantScheme
from pagedraft.model.weight_files import FLOATS, Header

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of an int32 holds output AWQ_ORDER[i] of its eight
SLAB_WEIGHTS = 2**24  # quantised at a time: bounds the fp32 copies that rounding makes
PACKED, INDICES = ("I32",), ("I32", "I64")
FILE_CODES = {"fp8": ("F8_E4M3",), "int8": ("I8",)}
# Endings of what describes activations and the KV cache, or repeats a shape: nobody reads it.
UNREAD = (".input_scale", ".input_zero_point", ".k_scale", ".v_scale", ".weight_shape")

Tensors = Mapping[str, torch.Tensor]


def quantize(weight_OI: torch.Tensor, format: WeightFormat) -> QuantWeight:
    """Return ``quantize_weight(weight_OI, format)``, worked out a slab of outputs at a time."""
    rows = max(1, SLAB_WEIGHTS // max(1, weight_OI.shape[1]))
    return concatenate([quantize_weight(slab_XI, format) for slab_XI in weight_OI.split(rows)])


def concatenate(weights: Sequence[QuantWeight]) -> QuantWeight:
    """Return the weight whose outputs are those of ``weights``, one below the other.

    Raises ValueError where they order or group their inputs differently.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    if len({(weight.format, weight.group, weight.scale_CO.dtype) for weight in weights}) > 1:
        raise ValueError(f"expected equal groups of inputs, got {[w.group for w in weights]}")
    if not all(_same_order(first, weight) for weight in weights):
        raise ValueError("expected equal orders of inputs (g_idx), got different ones")
    zeros_CO = [weight.zero_CO for weight in weights if weight.zero_CO is not None]
    return QuantWeight(
        first.format,
        torch.cat([weight.codes for weight in weights]),
        torch.cat([weight.scale_CO for weight in weights], dim=1),
        torch.cat(zeros_CO, dim=1) if zeros_CO else None,
        first.group,
        first.order_I,
    )


def select_outputs(weight: QuantWeight, rows_X: torch.Tensor) -> QuantWeight:
    """Return the weight of the outputs ``rows_X`` (int64), with the same codes and factors."""
    codes = weight.codes
    return replace(
        weight,
        codes=codes.view(torch.uint8)[rows_X].view(codes.dtype),  # not all devices index fp8
        scale_CO=weight.scale_CO[:, rows_X].contiguous(),
        zero_CO=None if weight.zero_CO is None else weight.zero_CO[:, rows_X].contiguous(),
    )


def _same_order(a: QuantWeight, b: QuantWeight) -> bool:
    if a.order_I is None or b.order_I is None:
        return a.order_I is b.order_I
    return torch.equal(a.order_I, b.order_I)


def headers(scheme: QuantScheme, module: str, num_out: int, num_in: int) -> list[Header]:
    """Return what the layer ``module`` has in the file; ValueError for sizes that do not fit.

    Names are those of the file; a layer's tensors differ in what follows the module.
    """
    group = _group(scheme, num_in)
    if num_in % group or (scheme.format == "int4" and num_in % INT4_GROUPS[0]):
        raise ValueError(f"{module}: {num_in} inputs do not divide into groups of {group}")
    if scheme.layout in ("gptq", "awq") and num_out % 8:
        raise ValueError(f"{module}: expected a multiple of 8 outputs, got {num_out}")
    tensors = LAYOUTS[scheme.layout].tensors(scheme, num_out, num_in)
    return [replace(header, source=f"{module}.{header.source}") for header in tensors]


def read_layer(scheme: QuantScheme, tensors: Tensors) -> QuantWeight:
    """Return the layer made of ``tensors``, each by the last part of its name."""
    return LAYOUTS[scheme.layout].read(scheme, tensors)


def _group(scheme: QuantScheme, num_in: int) -> int:
    return min(scheme.group or num_in, num_in)


def _gptq_tensors(scheme: QuantScheme, num_out: int, num_in: int) -> list[Header]:
    num_groups = num_in // _group(scheme, num_in)
    return [
        Header("qweight", ((num_in // 8, num_out),), PACKED),
        Header("qzeros", ((num_groups, num_out // 8),), PACKED),
        Header("scales", ((num_groups, num_out),), FLOATS),
        Header("g_idx", ((num_in,),), INDICES, is_optional=not scheme.has_order),
        Header("bias", ((num_out,),), is_optional=True),  # some packers write zeros
    ]


def _read_gptq(scheme: QuantScheme, tensors: Tensors) -> QuantWeight:
    codes_OI = nibbles(tensors["qweight"].T)
    zero_CO = nibbles(tensors["qzeros"]) + scheme.zero_offset
    return _int4_weight(codes_OI, tensors["scales"], zero_CO, tensors.get("g_idx"))


def _awq_tensors(scheme: QuantScheme, num_out: int, num_in: int) -> list[Header]:
    num_groups = num_in // _group(scheme, num_in)
    return [
        Header("qweight", ((num_in, num_out // 8),), PACKED),
        Header("qzeros", ((num_groups, num_out // 8),), PACKED),
        Header("scales", ((num_groups, num_out),), FLOATS),
    ]


def _read_awq(scheme: QuantScheme, tensors: Tensors) -> QuantWeight:
    codes_IO, zero_CO = (_awq_nibbles(tensors[name]) for name in ("qweight", "qzeros"))
    return _int4_weight(codes_IO.T, tensors["scales"], zero_CO)


def _packed_tensors(scheme: QuantScheme, num_out: int, num_in: int) -> list[Header]:
    num_groups = num_in // _group(scheme, num_in)
    result = [
        Header("weight_packed", ((num_out, num_in // 8),), PACKED),
        Header("weight_scale", ((num_out, num_groups),), FLOATS),
        Header("weight_g_idx", ((num_in,),), INDICES, is_optional=not scheme.has_order),
    ]
    if scheme.has_zero:
        result.append(Header("weight_zero_point", ((-(-num_out // 8), num_groups),), PACKED))
    return result


def _read_packed(scheme: QuantScheme, tensors: Tensors) -> QuantWeight:
    """Codes and zero points are signed numbers plus 8."""
    scale_CO = tensors["weight_scale"].T
    zero_CO = torch.full(scale_CO.shape, 8, dtype=torch.uint8, device=scale_CO.device)
    if scheme.has_zero:
        zero_CO = nibbles(tensors["weight_zero_point"].T)[:, : scale_CO.shape[1]]
    codes_OI = nibbles(tensors["weight_packed"])
    return _int4_weight(codes_OI, scale_CO, zero_CO, tensors.get("weight_g_idx"))


def _block_tensors(scheme: QuantScheme, num_out: int, num_in: int) -> list[Header]:
    blocks = tuple(-(-size // FP8_BLOCK) for size in (num_out, num_in))
    return [
        Header("weight", ((num_out, num_in),), FILE_CODES[scheme.format]),
        Header(scheme.scale_name, (blocks,), FLOATS),
    ]


def _read_blocks(scheme: QuantScheme, tensors: Tensors) -> QuantWeight:
    codes_OI = tensors["weight"]
    num_out, num_in = codes_OI.shape
    scale_OC = tensors[scheme.scale_name].float().repeat_interleave(FP8_BLOCK, 0)[:num_out]
    group = min(FP8_BLOCK, num_in)
    return QuantWeight(scheme.format, codes_OI, scale_OC.T.contiguous(), None, group)


def _scaled_tensors(scheme: QuantScheme, num_out: int, num_in: int) -> list[Header]:
    return [
        Header("weight", ((num_out, num_in),), FILE_CODES[scheme.format]),
        Header(scheme.scale_name, ((num_out, 1), (num_out,), (1,), (), (1, 1)), FLOATS),
    ]


def _read_scaled(scheme: QuantScheme, tensors: Tensors) -> QuantWeight:
    codes_OI = tensors["weight"]
    num_out, num_in = codes_OI.shape
    scale_1O = tensors[scheme.scale_name].float().reshape(1, -1).expand(1, num_out).contiguous()
    return QuantWeight(scheme.format, codes_OI, scale_1O, None, num_in)


class _LayoutRow(NamedTuple):
    """tensors: (scheme, O, I) -> what a layer has; read: (scheme, tensors) -> the layer."""

    tensors: Callable[[QuantScheme, int, int], list[Header]]
    read: Callable[[QuantScheme, Tensors], QuantWeight]


LAYOUTS: Mapping[Layout, _LayoutRow] = {
    "gptq": _LayoutRow(_gptq_tensors, _read_gptq),
    "awq": _LayoutRow(_awq_tensors, _read_awq),
    "packed": _LayoutRow(_packed_tensors, _read_packed),
    "blocks": _LayoutRow(_block_tensors, _read_blocks),
    "scaled": _LayoutRow(_scaled_tensors, _read_scaled),
}


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return uint8 [.., 8 W] from int32 [.., W], the lowest four bits first."""
    bytes_ = packed.contiguous().view(torch.uint8)
    return torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1).flatten(-2)


def _awq_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return uint8 [.., 8 W] from int32 [.., W] in the order of the outputs."""
    place = [AWQ_ORDER.index(output) for output in range(8)]
    return nibbles(packed).unflatten(-1, (-1, 8))[..., place].flatten(-2)


def _int4_weight(
    codes_OI: torch.Tensor,
    scale_CO: torch.Tensor,
    zero_CO: torch.Tensor,
    group_I: torch.Tensor | None = None,
) -> QuantWeight:
    """Return the weight of codes 0..15; group_I [I] says which group an input belongs to."""
    num_in, num_groups = codes_OI.shape[1], scale_CO.shape[0]
    order_I = None if group_I is None else _order(group_I, num_groups)
    if order_I is not None:
        codes_OI = codes_OI[:, order_I]
    stored = num_in // num_groups
    group = next(size for size in reversed(INT4_GROUPS) if stored % size == 0)
    if scale_CO.dtype != torch.float16:
        scale_CO = scale_CO.float()
    return QuantWeight(
        "int4",
        pack_int4(codes_OI.unflatten(1, (-1, group))),
        scale_CO.repeat_interleave(stored // group, 0).contiguous(),
        (zero_CO * ZERO_STEPS).to(torch.uint8).repeat_interleave(stored // group, 0).contiguous(),
        group,
        order_I,
    )


def _order(group_I: torch.Tensor, num_groups: int) -> torch.Tensor | None:
    """Return the inputs in the order of their groups; None where that is the natural order."""
    group_I = group_I.long()
    counts = torch.bincount(group_I.clamp(0, num_groups), minlength=num_groups).tolist()
    if int(group_I.min()) < 0 or set(counts) != {len(group_I) // num_groups}:
        raise ValueError(
            f"g_idx: expected {len(group_I) // num_groups} inputs in each of {num_groups} groups, "
            f"got {counts[:8]}"
        )
    order_I = torch.argsort(group_I, stable=True)
    natural = torch.arange(len(group_I), device=group_I.device)
    return None if torch.equal(order_I, natural) else order_I
