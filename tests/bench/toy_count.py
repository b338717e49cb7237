"""Count what one program of toy kernels executes, for test_trips.py: prints one JSON document.

Runs in a process of its own, with TRITON_INTERPRET=0.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget

from pagedraft.bench.record import Call, record_calls
from pagedraft.bench.sass import asm_instructions, is_product
from pagedraft.bench.trips import ProgramCount, Trips
from pagedraft.tests.bench.toy_kernels import product_kernel, segments_kernel

SM_80 = GPUTarget("cuda", 80, 32)
KERNELS = {"product": product_kernel, "segments": segments_kernel}


def run(name: str, size: int) -> None:
    """Launch one toy over tiles of ``size``."""
    x = torch.empty(8, size, size, dtype=torch.float16)
    y = torch.empty(8, size, size)
    KERNELS[name][(1,)](x, x, y, 8, BLOCK=size, PRECISION="ieee")


def count(name: str, size: int, num_steps: int) -> dict[str, float]:
    """Return tensor-core instructions and 16-byte stores of one warp."""
    launches, failed = record_calls([Call("toy", name, lambda: run(name, size))], {"sm_80": SM_80})
    assert not failed, failed
    source, options = launches[0].source, launches[0].options
    compiled = triton.compile(source, target=SM_80, options=options)
    program = ProgramCount(asm_instructions(compiled.asm), lambda n: is_product(n, is_fp32=False))
    trips = Trips((num_steps,), (4,))
    return {
        "products": program.executed(trips, lambda name: name.startswith("HMMA")),
        "stores": program.executed(trips, lambda name: name.startswith("STG.E.128")),
    }


if __name__ == "__main__":
    json.dump([count(*case) for case in json.loads(sys.argv[1])], sys.stdout)
