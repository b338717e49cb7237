"""Quantised checkpoints for tests, packed here number by number as each format's files are.

A packer takes a weight [O, I] and returns (what the layer has in the file, the fp32 weight that it
stands for).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from pagedraft.model.weight_files import SINGLE
from pagedraft.tests.model.tiny import save_tiny

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
Packer = Callable[[torch.Tensor], Packed]

# Every number of inputs is a multiple of 128, every number of outputs but the head's one of 8.
SIZES: Mapping[str, Any] = {
    **{"hidden_size": 128, "intermediate_size": 256, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
E4M3 = torch.float8_e4m3fn


def pack_nibbles(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32 [n, ..] from codes 0..15 [8 n, ..]; nibble i holds row order[i] of its eight."""
    words = torch.zeros(codes.shape[0] // 8, *codes.shape[1:], dtype=torch.int64)
    for place, row in enumerate(order):
        words |= codes[row::8].long() << (4 * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def round_int4(
    weight_OI: torch.Tensor,
    group_I: torch.Tensor,
    *,
    symmetric: bool = False,
    largest_zero: int = 15,
    scale_dtype: torch.dtype = torch.float16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [O, I], scale [C, O], zero [C, O], the weight they stand for).

    group_I: the group of each input. Zero points are 1 to 15, the first one largest_zero.
    """
    groups = [weight_OI[:, group_I == group] for group in range(int(group_I.max()) + 1)]
    low_CO = torch.stack([group_OK.amin(1) for group_OK in groups])
    high_CO = torch.stack([group_OK.amax(1) for group_OK in groups])
    zero_CO = torch.full_like(low_CO, 8)
    scale_CO = (torch.maximum(-low_CO, high_CO) / 7.5).to(scale_dtype)
    if not symmetric:
        scale_CO = ((high_CO - low_CO) / 15).to(scale_dtype)
        zero_CO = (-low_CO / scale_CO.float()).round().clamp(1, 15)
        zero_CO[0, 0] = largest_zero
    scale_OI, zero_OI = (t.float()[group_I].T for t in (scale_CO, zero_CO))
    codes_OI = (weight_OI / scale_OI + zero_OI).round().clamp(0, 15)
    return codes_OI.int(), scale_CO, zero_CO.int(), (codes_OI - zero_OI) * scale_OI


def groups_of(num_in: int, group: int, shuffled: bool = False) -> torch.Tensor:
    """Which group each input belongs to; shuffled: the same for all layers of as many inputs."""
    group_I = torch.arange(num_in) // (num_in if group == -1 else group)
    if not shuffled:
        return group_I
    return group_I[torch.randperm(num_in, generator=torch.Generator().manual_seed(7))]


def gptq(
    group: int, *, version: int = 1, shuffled: bool = False, symmetric: bool = False
) -> Packer:
    def pack(weight_OI: torch.Tensor) -> Packed:
        group_I = groups_of(weight_OI.shape[1], group, shuffled)
        codes, scale, zero, values = round_int4(
            weight_OI, group_I, symmetric=symmetric, largest_zero=16 if version == 1 else 15
        )
        tensors = {
            "qweight": pack_nibbles(codes.T),
            "qzeros": pack_nibbles((zero - (1 if version == 1 else 0)).T).T,
            "scales": scale,
            "g_idx": group_I.int(),
        }
        return tensors, values

    return pack


def awq(group: int) -> Packer:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def pack(weight_OI: torch.Tensor) -> Packed:
        group_I = groups_of(weight_OI.shape[1], group)
        codes, scale, zero, values = round_int4(weight_OI, group_I)
        tensors = {
            "qweight": pack_nibbles(codes, order).T,
            "qzeros": pack_nibbles(zero.T, order).T,
            "scales": scale,
        }
        return tensors, values

    return pack


def packed(group: int, *, shuffled: bool = False, symmetric: bool = False) -> Packer:
    """compressed-tensors, pack-quantized."""

    def pack(weight_OI: torch.Tensor) -> Packed:
        group_I = groups_of(weight_OI.shape[1], group, shuffled)
        codes, scale, zero, values = round_int4(
            weight_OI, group_I, symmetric=symmetric, scale_dtype=torch.bfloat16
        )
        tensors = {
            "weight_packed": pack_nibbles(codes.T).T,
            "weight_scale": scale.T,
            "weight_shape": torch.tensor(weight_OI.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack_nibbles(
                F.pad(zero.T, (0, 0, 0, -zero.shape[1] % 8))
            )
        if shuffled:
            tensors["weight_g_idx"] = group_I.int()
        return tensors, values

    return pack


def scaled(strategy: str, *, dtype: torch.dtype = E4M3, name: str = "weight_scale") -> Packer:
    """One factor for the tensor, for each output, or for each block of 128 x 128."""
    largest = 448.0 if dtype == E4M3 else 127.0

    def pack(weight_OI: torch.Tensor) -> Packed:
        num_out, num_in = weight_OI.shape
        rows, columns = {"tensor": (num_out, num_in), "channel": (1, num_in)}.get(
            strategy, (128, 128)
        )
        padded = torch.zeros(-(-num_out // rows) * rows, -(-num_in // columns) * columns)
        padded[:num_out, :num_in] = weight_OI
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scale = blocks.abs().amax((1, 3)) / largest
        scale_OI = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        scale_OI = scale_OI[:num_out, :num_in]
        codes = weight_OI / scale_OI
        codes = (codes if dtype == E4M3 else codes.round()).to(dtype)
        stored = scale.reshape(1) if strategy == "tensor" else scale
        return {"weight": codes, name: stored}, codes.float() * scale_OI

    return pack


def save_packed(
    folder: Path, packer: Packer, config: Mapping[str, Any], plain: tuple[str, ...] = ("lm_head",)
) -> tuple[Path, Path]:
    """Save a tiny model twice: quantised, and with the weights that the quantised ones stand for.

    config: the quantization_config. plain: parts of names of layers that stay as they are.
    """
    stored, dense = folder / "stored", folder / "dense"
    for each in (stored, dense):
        save_tiny(each, "llama", **SIZES)
    tensors = load_file(dense / SINGLE)
    quantised = dict(tensors)
    for name in list(tensors):
        is_linear = name.endswith(("_proj.weight", "lm_head.weight"))
        if not is_linear or any(part in name for part in plain):
            continue
        parts, tensors[name] = packer(quantised.pop(name))
        module = name.removesuffix(".weight")
        quantised |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    save(stored, quantised)
    save(dense, tensors)
    edit_config(stored, quantization_config=dict(config))
    return stored, dense


def save(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the single safetensors file of ``folder``."""
    save_file({name: t.clone().contiguous() for name, t in tensors.items()}, folder / SINGLE)


def edit_config(folder: Path, **fields: Any) -> None:
    """Replace fields of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
