"""Linear layers in tiles that the compile check must refuse, and in those that the kernels take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import torch

from pagedraft.bench.record import Call
from pagedraft.kernels import linear_triton
from pagedraft.kernels.linear import linear, pack_linear
from pagedraft.kernels.linear_config import LinearConfig, linear_config


def multiply(num_rows: int, num_in: int = 4096, **changes: int) -> None:
    """Launch a bf16 layer of 4096 outputs with fields of its tile or options changed."""

    def changed(*sizes: int) -> LinearConfig:
        config = linear_config(*sizes)
        options = {k: v for k, v in changes.items() if k in LinearConfig._fields}
        fields = {k: v for k, v in changes.items() if k not in LinearConfig._fields}
        return config._replace(tile=replace(config.tile, **fields), **options)

    packed = pack_linear(torch.empty(4096, num_in, dtype=torch.bfloat16))
    with mock.patch.object(linear_triton, "linear_config", changed):
        linear(torch.empty(num_rows, num_in, dtype=torch.bfloat16), packed)


def calls() -> Iterator[Call]:
    """Yield what ``python -m pagedraft.bench.static --calls`` compiles."""
    yield Call("linear", "one row", lambda: multiply(1))
    yield Call("linear", "32 rows", lambda: multiply(32))
    yield Call("linear", "64 rows", lambda: multiply(64))
    yield Call("linear", "few inputs", lambda: multiply(1, num_in=512))
    yield Call("linear", "one step a trip", lambda: multiply(1, unroll=1))
    yield Call("linear", "others' products", lambda: multiply(32, num_warps=4))
    yield Call("linear", "another class", lambda: multiply(512, num_warps=4))
    yield Call("linear", "spills", lambda: multiply(512, num_warps=1))
    yield Call("linear", "odd rows", lambda: multiply(1, num_in=4095))
