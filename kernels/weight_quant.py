"""Weights of a linear layer in 8 or 4 bits: the format, and rounding to it.

A group of inputs of one output shares a factor: ``weight = (code - zero) * scale``.

**Shapes**: weight_OI [O, I]; codes as ``QuantWeight`` says; scale_CO, zero_CO [C, O], where
C = I / group counts the groups of an output (1 for one factor per output channel).
**Units**: ``group`` counts inputs.
**Formats**: ``int8`` symmetric, -127..127; ``int4`` 0..15 with an integer zero point; ``fp8`` e4m3,
symmetric, largest 448.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from pagedraft.kernels.check import check_dtype, check_shape

WeightFormat = Literal["int8", "int4", "fp8"]
WEIGHT_FORMATS = ("int8", "int4", "fp8")
INT4_GROUPS = (32, 64, 128)
FP8_BLOCK = 128
CODE_DTYPES = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}
LARGEST_CODE = {"int8": 127.0, "fp8": 448.0}


@dataclass(frozen=True)
class QuantWeight:
    """A quantised weight [O, I].

    format: "int8", "int4" or "fp8".
    codes: int8 or float8_e4m3fn [O, I]; int4: uint8 [O, I / 2], where byte j of a group's group / 2
        bytes holds input j of the group in its low half and input j + group / 2 in its high half.
    scale_CO: fp32 or fp16 [C, O].
    zero_CO: uint8 [C, O] for int4 (0..16: a checkpoint may store zero - 1 in four bits), else None.
    group: inputs that share a factor; I for one factor an output.
    order_I: int64 [I], None for the natural order: column i of the codes is input order_I[i].
    """

    format: WeightFormat
    codes: torch.Tensor
    scale_CO: torch.Tensor
    zero_CO: torch.Tensor | None
    group: int
    order_I: torch.Tensor | None = None

    @property
    def num_out(self) -> int:
        return self.codes.shape[0]

    @property
    def num_in(self) -> int:
        return self.codes.shape[1] * (2 if self.format == "int4" else 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, factors and zero points."""
        parts = [self.codes, self.scale_CO, self.zero_CO]
        return sum(t.numel() * t.element_size() for t in parts if t is not None)


def quantize_weight(
    weight_OI: torch.Tensor, format: WeightFormat, group: int | None = None
) -> QuantWeight:
    """Round ``weight_OI`` to ``format``; group None: the format's usual one.

    int8 and fp8: one factor an output. int4: the smallest of INT4_GROUPS that divides I.
    Raises ValueError for an unknown format, for a group that does not divide I, or weights that are
    not finite.
    """
    check_shape("weight_OI", weight_OI, (None, None))
    check_dtype("weight_OI", weight_OI, torch.float32, torch.float16, torch.bfloat16)
    if format not in WEIGHT_FORMATS:
        raise ValueError(f"format: expected one of {list(WEIGHT_FORMATS)}, got {format!r}")
    num_out, num_in = weight_OI.shape
    if group is None:
        group = num_in if format != "int4" else INT4_GROUPS[0]
    if group < 1 or num_in % group or (format == "int4" and group not in INT4_GROUPS):
        raise ValueError(f"group: {group} does not suit {format} weights of {num_in} inputs")
    weight_OCK = weight_OI.float().unflatten(1, (-1, group))
    if not bool(weight_OCK.isfinite().all()):
        raise ValueError("weight_OI: expected finite weights, got NaN or infinity")
    if format == "int4":
        return _quantize_int4(weight_OCK)
    scale_OC = weight_OCK.abs().amax(-1) / LARGEST_CODE[format]
    scale_OC = torch.where(scale_OC > 0, scale_OC, 1.0)
    codes_OCK = weight_OCK / scale_OC[..., None]
    if format == "int8":
        codes_OCK = codes_OCK.round_().clamp_(-127, 127)
    codes_OI = codes_OCK.to(CODE_DTYPES[format]).flatten(1)
    return QuantWeight(format, codes_OI, scale_OC.T.contiguous(), None, group)


def _quantize_int4(weight_OCK: torch.Tensor) -> QuantWeight:
    low_OC, high_OC = weight_OCK.amin(-1).clamp(max=0), weight_OCK.amax(-1).clamp(min=0)
    scale_OC = (high_OC - low_OC) / 15
    scale_OC = torch.where(scale_OC > 0, scale_OC, 1.0)
    zero_OC = (-low_OC / scale_OC).round_().clamp_(0, 15)
    codes_OCK = (weight_OCK / scale_OC[..., None]).round_().add_(zero_OC[..., None]).clamp_(0, 15)
    return QuantWeight(
        "int4",
        pack_int4(codes_OCK.to(torch.uint8)),
        scale_OC.T.contiguous(),
        zero_OC.to(torch.uint8).T.contiguous(),
        weight_OCK.shape[-1],
    )


def pack_int4(codes_OCK: torch.Tensor) -> torch.Tensor:
    """Return uint8 [O, I / 2] from uint8 codes 0..15, [O, C, group]."""
    low_OCH, high_OCH = codes_OCK.chunk(2, dim=-1)
    return (low_OCH | (high_OCH << 4)).flatten(1).contiguous()


def unpack_int4(codes_OB: torch.Tensor, group: int) -> torch.Tensor:
    """Return uint8 codes 0..15, [O, C, group], the inverse of ``pack_int4``."""
    bytes_OCH = codes_OB.unflatten(1, (-1, group // 2))
    return torch.cat([bytes_OCH & 15, bytes_OCH >> 4], dim=-1)


def dequantize_weight(weight: QuantWeight) -> torch.Tensor:
    """Return the fp32 weight [O, I] that the codes stand for, inputs in their natural order."""
    if weight.format == "int4":
        assert weight.zero_CO is not None
        values_OCK = unpack_int4(weight.codes, weight.group).float()
        values_OCK -= weight.zero_CO.T[..., None].float()
    else:
        values_OCK = weight.codes.float().unflatten(1, (-1, weight.group))
    values_OI = (values_OCK * weight.scale_CO.T[..., None].float()).flatten(1)
    if weight.order_I is None:
        return values_OI
    natural_OI = torch.empty_like(values_OI)
    natural_OI[:, weight.order_I] = values_OI
    return natural_OI
