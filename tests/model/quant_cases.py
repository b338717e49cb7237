"""One row for each way of storing quantised layers, with its ``quantization_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from pagedraft.tests.model import packers
from pagedraft.tests.model.packers import Packer


def compressed(format: str, ignore: tuple[str, ...] = ("lm_head",), **weights: Any) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"dynamic": True}}
    return {
        **{"quant_method": "compressed-tensors", "format": format, "ignore": list(ignore)},
        **{"config_groups": {"group_0": group}, "kv_cache_scheme": None},
    }


def gptq(group: int = 32, **fields: Any) -> dict:
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, **fields}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"fmt": "e4m3", "weight_block_size": [128, 128]}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


class Case(NamedTuple):
    packer: Packer
    config: Mapping[str, Any]
    format: str
    group: int | None  # of a layer with 128 inputs
    plain: tuple[str, ...] = ("lm_head",)


CASES = {
    "gptq": Case(packers.gptq(32), gptq(), "int4", 32),
    "gptq symmetric": Case(packers.gptq(64, symmetric=True), gptq(64, sym=True), "int4", 64),
    "gptq v2": Case(
        packers.gptq(128, version=2), gptq(128, checkpoint_format="gptq_v2"), "int4", 128
    ),
    "gptq ordered by activation": Case(
        packers.gptq(32, shuffled=True), gptq(desc_act=True), "int4", 32
    ),
    "gptq without groups": Case(packers.gptq(-1), gptq(-1), "int4", 128),
    "gptq of some layers": Case(
        packers.gptq(32),
        gptq(modules_to_not_convert=["layers.0.mlp", "o_proj"]),
        "int4",
        32,
        ("lm_head", "layers.0.mlp", "o_proj"),
    ),
    "awq": Case(packers.awq(64), AWQ, "int4", 64),
    "fp8 blocks": Case(packers.scaled("block", name="weight_scale_inv"), BLOCKS, "fp8", 128),
    "fp8 tensor": Case(packers.scaled("tensor"), FP8, "fp8", 128),
    "fbgemm": Case(packers.scaled("channel"), {"quant_method": "fbgemm_fp8"}, "fp8", 128),
    "compressed fp8 channel": Case(
        packers.scaled("channel"),
        compressed("float-quantized", **FLOAT, strategy="channel"),
        "fp8",
        128,
    ),
    "compressed fp8 block": Case(
        packers.scaled("block"),
        compressed("float-quantized", **FLOAT, strategy="block", block_structure=[128, 128]),
        "fp8",
        128,
    ),
    "compressed int8, head too, but no layer 1": Case(
        packers.scaled("channel", dtype=torch.int8),
        compressed("int-quantized", (r"re:.*layers\.1\..*",), **INT8),
        "int8",
        128,
        ("layers.1.",),
    ),
    "compressed int4": Case(
        packers.packed(32, symmetric=True),
        compressed("pack-quantized", **INT4, symmetric=True),
        "int4",
        32,
    ),
    "compressed int4 with zeros, head too": Case(
        packers.packed(32),
        compressed("pack-quantized", (), **INT4, symmetric=False),
        "int4",
        32,
        (),
    ),
    "compressed int4 ordered by activation": Case(
        packers.packed(32, shuffled=True, symmetric=True),
        compressed("pack-quantized", **INT4, symmetric=True, actorder="group"),
        "int4",
        32,
    ),
}
