"""``quantization_config``: what is read from it, and an error for each unsupported scheme."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pagedraft.model.quant_scheme import QuantScheme, parse_scheme
from pagedraft.tests.model.quant_cases import (
    AWQ,
    BLOCKS,
    CASES,
    FLOAT,
    FP8,
    INT4,
    INT8,
    compressed,
    gptq,
)

CHANNEL = FLOAT | {"strategy": "channel"}
TWO_GROUPS = compressed("float-quantized", **CHANNEL)
TWO_GROUPS["config_groups"] = {"a": {}, "b": {}}
ONE_LAYER = compressed("float-quantized", **CHANNEL)
ONE_LAYER["config_groups"]["group_0"]["targets"] = ["re:.*down_proj"]

UNSUPPORTED: Mapping[str, tuple[object, str]] = {
    "a word": ("gptq", "expected an object, got 'gptq'"),
    "no method": ({"bits": 4}, "quant_method None: unknown quant_method"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
    "hqq": ({"quant_method": "hqq"}, "'hqq': unknown"),
    "mxfp4": ({"quant_method": "mxfp4"}, "'mxfp4': unknown"),
    "method of another kind": ({"quant_method": ["gptq"]}, r"\['gptq'\]: unknown"),
    "gptq, 3 bits": (gptq(bits=3), "'gptq': bits: expected 4, got 3"),
    "gptq, 8 bits": (gptq(bits=8), "'gptq': bits: expected 4, got 8"),
    "gptq without bits": ({"quant_method": "gptq"}, "bits: expected 4, got None"),
    "gptq, odd groups": (gptq(48), "group_size: expected -1 or a multiple of 32, got 48"),
    "gptq, groups by name": (gptq("all"), "group_size: expected -1 or a multiple of 32, got all"),
    "gptq, no groups named": (gptq(None), "group_size: .* got None"),
    "gptq for marlin": (
        gptq(checkpoint_format="marlin"),
        "checkpoint_format: expected gptq or gptq_v2, got 'marlin'",
    ),
    "gptq that differs by layer": (gptq(dynamic={"-:lm_head": {}}), "dynamic: expected {}"),
    "awq, 8 bits": (AWQ | {"bits": 8}, "'awq': bits: expected 4, got 8"),
    "awq gemv": (AWQ | {"version": "gemv"}, "version: expected gemm or GEMM, got 'gemv'"),
    "awq without zero points": (AWQ | {"zero_point": False}, "zero_point: expected True"),
    "fp8, e5m2": (FP8 | {"fmt": "e5m2"}, "fmt: expected e4m3 .*, got 'e5m2'"),
    "fp8, other blocks": (
        BLOCKS | {"weight_block_size": [64, 128]},
        r"weight_block_size: expected \[128, 128\], got \[64, 128\]",
    ),
    "list of modules": (AWQ | {"modules_to_not_convert": "lm_head"}, "expected a list of names"),
    "broken pattern": (compressed("int-quantized", ("re:(",), **INT8), "unterminated subpattern"),
    "compressed, two groups": (TWO_GROUPS, "config_groups: expected one group"),
    "compressed, one layer": (ONE_LAYER, r"targets: expected \['Linear'\]"),
    "compressed, fp4": (compressed("nvfp4-pack-quantized"), "format: expected float-quantized"),
    "compressed, by token": (
        compressed("float-quantized", **FLOAT, strategy="token"),
        "strategy: expected channel or tensor or block, got 'token'",
    ),
    "compressed, int8 with zero points": (
        compressed("int-quantized", **(INT8 | {"symmetric": False})),
        "symmetric: expected True, got False",
    ),
    "compressed, packed int8": (
        compressed("pack-quantized", **(INT4 | {"num_bits": 8})),
        "num_bits: expected 4, got 8",
    ),
    "compressed, no object": (
        compressed("int-quantized", **INT8) | {"sparsity_config": [1]},
        "sparsity_config: expected an object",
    ),
    "compressed, sparse": (
        compressed("int-quantized", **INT8) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "format: expected dense, got 'sparse-24-bitmask'",
    ),
}


@pytest.mark.parametrize(("config", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_scheme_is_named(config, message):
    with pytest.raises(ValueError, match=rf"^quantization_config: .*{message}"):
        parse_scheme(config)


def test_errors_name_the_way_out():
    with pytest.raises(ValueError, match=r"supported: gptq and awq .* weights=\"int4\".*--weights"):
        parse_scheme({"quant_method": "hqq"})


@pytest.mark.parametrize("name", CASES)
def test_format(name):
    assert parse_scheme(CASES[name].config).format == CASES[name].format


SKIPPED = {
    "whole name": ("model.layers.0.mlp.up_proj", True),
    "the end": ("up_proj", True),
    "the beginning": ("model.layers.0", True),
    "the middle": ("0.mlp", True),
    "part of a word": ("up", False),
    "another layer": ("layers.10", False),
    "a pattern": (r"re:.*\.mlp\.(up|gate)_proj$", True),
    "a pattern that begins elsewhere": (r"re:mlp\..*", False),
    "a pattern without its mark": (".*up_proj", False),
}


@pytest.mark.parametrize(("entry", "is_skipped"), SKIPPED.values(), ids=SKIPPED)
def test_modules_that_are_stored_plain(entry, is_skipped):
    scheme = QuantScheme("awq", "awq", "int4", 32, skipped=("lm_head", entry))
    assert scheme.covers("model.layers.0.mlp.up_proj") != is_skipped
    assert not scheme.covers("lm_head")


HEADS = {
    "gptq": (gptq(), False),
    "gptq says so": (gptq(lm_head=True), True),
    "awq": (AWQ, False),
    "fp8": (BLOCKS, False),
    "compressed": (compressed("int-quantized", (), **INT8), True),
    "compressed, ignored": (compressed("int-quantized", **INT8), False),
}


@pytest.mark.parametrize(("config", "is_quantised"), HEADS.values(), ids=HEADS)
def test_head(config, is_quantised):
    assert parse_scheme(config).covers("lm_head") == is_quantised
