"""What machine code says about linear layers with quantised weights: weights a warp instruction.

    python -m pagedraft.bench.quant_static [--target sm_90]

Counted is the loop over the inputs. An H200 issues about 0.9 T warp instructions a second: where it
reads codes at 4.3 TB/s, 8 bits need 4.8 weights an instruction at full issue, 4 bits 9.6.
Without a GPU, in a process in which ``TRITON_INTERPRET`` is 0.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton

from pagedraft.bench.control_flow import Instruction
from pagedraft.bench.record import Call, Launch, record_calls
from pagedraft.bench.sass import asm_instructions, is_product, machine_code
from pagedraft.bench.shapes import LLAMA_8B
from pagedraft.bench.static_attention_calls import FP8_TARGETS
from pagedraft.bench.static_quant_calls import FORMS, quant_calls
from pagedraft.bench.table import print_table
from pagedraft.bench.trips import ProgramCount
from pagedraft.kernels.linear_quant_triton import QuantTile

if TYPE_CHECKING:
    from pagedraft.bench.static_checks import Compiled


def is_quant_linear(launch: Launch) -> bool:
    """Whether the launch multiplies 16-bit activations by a quantised weight."""
    if launch.source is None or not isinstance(launch.constants.get("tile"), QuantTile):
        return False
    return launch.source.signature["x_ptr"] in ("*bf16", "*fp16")


def weights_per_instruction(
    launch: Launch, instructions: list[Instruction], num_warps: int
) -> float:
    """Return the weights of an iteration of the loop over warp instructions that it takes.

    Raises ValueError for a kernel without such a loop.
    """
    tile: QuantTile = launch.constants["tile"]
    count = ProgramCount(instructions, lambda name: is_product(name, False))
    if not count.attention:
        raise ValueError("loop over inputs: expected a loop with products, got none")
    names = count.names(count.attention[0])
    products = tile.block_t * tile.block_o * tile.step // (8 * 16 * 16) * tile.slice_groups
    steps = sum(is_product(name, False) for name in names) * num_warps / products
    return steps * tile.block_o * tile.step / (num_warps * len(names))


def quant_products(compiled: Compiled) -> Iterator[str]:
    """Yield what is wrong with a quantised linear kernel: spills, and products other than HMMA."""
    if not is_quant_linear(compiled.launch):
        return
    if compiled.code.spill_bytes:
        yield f"spills {compiled.code.spill_bytes} bytes a thread, expected none"
    wanted = {"HMMA"} if compiled.is_nvidia else {"MFMA"}
    if set(compiled.code.mma) != wanted:
        yield f"products in {sorted(compiled.code.mma)}, expected {sorted(wanted)} for every tile"


def _row(launch: Launch, target) -> list[str]:
    compiled = triton.compile(launch.source, target=target, options=launch.options)
    instructions = asm_instructions(compiled.asm)
    code, num_warps = machine_code(compiled.asm, instructions), compiled.metadata.num_warps
    is_nvidia = launch.target.startswith("sm_")
    per_instruction = weights_per_instruction(launch, instructions, num_warps) if is_nvidia else 0
    return [
        launch.cases[0],
        str(compiled.metadata.num_stages),
        f"{per_instruction:.1f}" if is_nvidia else "",
        str(code.registers),
        str(code.spill_bytes),
        f"{compiled.metadata.shared / 1024:.0f}",
        " ".join(f"{bits}:{n}" for bits, n in sorted(code.loads.items(), reverse=True)),
    ]


HEADERS = ("case", "stages", "weights/instr", "regs", "spill", "KB", "loads")


def main() -> None:
    """Print a row for each distinct kernel of 1, 16, 32, 64 rows of an 8B projection."""
    from pagedraft.bench.static_calls import linear_sizes
    from pagedraft.bench.static_compile import TARGETS

    parser = argparse.ArgumentParser(prog="python -m pagedraft.bench.quant_static")
    parser.add_argument("--target", default="sm_90", choices=TARGETS)
    name = parser.parse_args().target
    sizes = linear_sizes(LLAMA_8B)
    forms = sorted({form for forms in FORMS.values() for form in forms})
    forms = tuple(form for form in forms if form[0] != "fp8" or name in FP8_TARGETS)
    calls = [
        Call("linear", f"{rows} rows{suffix}", run)
        for rows in (1, 16, 32, 64)
        for suffix, run in quant_calls(sizes, rows, torch.bfloat16, forms)
    ]
    launches, failed = record_calls(calls, {name: TARGETS[name]})
    rows = [_row(launch, TARGETS[name]) for launch in launches]
    print_table(f"triton {triton.__version__}, {name}", HEADERS, rows)
    for call, error in failed:
        print(f"FAILED {call.case}: {error}")


if __name__ == "__main__":
    main()
