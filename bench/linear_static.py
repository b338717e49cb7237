"""What machine code says about the dense linear kernels: weight bytes a warp instruction, loads.

    python -m pagedraft.bench.linear_static [--target sm_90]

Counted is one whole program (trips.py), the loop over the inputs as often as it runs; the few trips
of the loop that adds a normed row's squares count once. Without a GPU, in a process in which
``TRITON_INTERPRET`` is 0.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton

from pagedraft.bench.control_flow import Instruction
from pagedraft.bench.record import Call, Launch, record_calls
from pagedraft.bench.sass import asm_instructions, is_product, load_bits, machine_code
from pagedraft.bench.shapes import LLAMA_8B
from pagedraft.bench.static_linear_calls import linear_calls
from pagedraft.bench.table import print_table
from pagedraft.bench.trips import ProgramCount, Trips
from pagedraft.kernels.linear_config import LinearTile

# Weight bytes a warp instruction on sm_90 by Triton version: of 1 to 16 rows and 4096 inputs or
# more, 16-bit numbers. On 3.6 what was measured (38.7 at least).
FLOORS = {(3, 6): 38.0, (3, 7): 36.0}
FLOOR_ROWS, FLOOR_INPUTS = 16, 4096
SIXTEEN_BITS = ("*bf16", "*fp16")


def weight_floor(triton_version: tuple[int, ...]) -> float | None:
    """Return the floor for a Triton version: that of the newest one not after it."""
    known = [version for version in FLOORS if version <= triton_version[:2]]
    return FLOORS[max(known)] if known else None


@dataclass(frozen=True)
class LinearCode:
    """A dense linear kernel's machine code for an NVIDIA target beside what its launch says."""

    launch: Launch
    instructions: list[Instruction]
    num_warps: int

    @property
    def tile(self) -> LinearTile:
        return self.launch.constants["tile"]

    @property
    def is_floored(self) -> bool:
        """Whether a floor of weight bytes a warp instruction holds for it."""
        return self.tile.block_t <= FLOOR_ROWS and self.tile.num_in >= FLOOR_INPUTS

    @cached_property
    def count(self) -> ProgramCount:
        return ProgramCount(self.instructions, lambda name: is_product(name, False))

    @property
    def products_a_step(self) -> float:
        """Products (m16n8k16) that a warp issues in a step of the loop over the inputs."""
        tile = self.tile
        return tile.block_t * tile.block_o * tile.block_i / (16 * 8 * 16) / self.num_warps

    def steps_an_iteration(self) -> list[float]:
        """Return how many steps each loop with products holds: compilers unroll some.

        Raises ValueError where products and loads disagree (warps that do each other's products).
        """
        found = []
        for loop in self.count.attention:
            names = self.count.names(loop)
            steps = sum(is_product(name, False) for name in names) / self.products_a_step
            loaded = self._tile_share(names)
            if abs(loaded / steps - 1) > 0.01:
                raise ValueError(
                    f"loop over inputs: expected products and loads of as many steps, "
                    f"got {steps:g} and {loaded:g}"
                )
            found.append(steps)
        return found

    def _tile_share(self, names: list[str], min_bits: int = 0) -> float:
        """Return how many steps' tiles of x and the weight those loads bring."""
        tile = self.tile
        widths = filter(None, map(load_bits, (n for n in names if n != "LDGDEPBAR")))
        num_bytes = 32 * self.num_warps * sum(bits // 8 for bits in widths if bits >= min_bits)
        return num_bytes / (2 * (tile.block_t + tile.block_o) * tile.block_i)

    def trips(self) -> Trips:
        """Return how often the loops run; a later one takes what is left of an earlier one.

        Raises ValueError for a kernel without them, and if steps are left after the last.
        """
        left, tiles = float(triton.cdiv(self.tile.num_in, self.tile.block_i)), []
        for steps in self.steps_an_iteration():
            if steps < 1:
                raise ValueError(f"loop over inputs: expected whole steps, got {steps:.2f}")
            tiles.append(float(left // steps))
            left -= tiles[-1] * steps
        if not tiles or left:
            raise ValueError(f"loop over inputs: expected all steps in it, {left:g} are left")
        return Trips(tuple(tiles))

    def weight_bytes_per_instruction(self) -> float:
        """Return the weight bytes of one full program over the warp instructions it issues."""
        instructions = self.num_warps * self.count.executed(self.trips())
        return 2 * self.tile.block_o * self.tile.num_in / instructions

    def wide_share(self) -> float:
        """Return what 16-byte loads carry of the loops' tiles of x and the weight, at best 1."""
        loops = [self.count.names(loop) for loop in self.count.attention]
        return min((self._tile_share(n, 128) / self._tile_share(n) for n in loops), default=0.0)

    def spills(self) -> int:
        """Return how many spill loads and stores stand in the loops (NVIDIA)."""
        names = [name for loop in self.count.attention for name in self.count.names(loop)]
        return sum(name.startswith(("LDL", "STL")) for name in names)


def is_linear(launch: Launch) -> bool:
    """Whether the launch multiplies by a dense weight of 16-bit numbers."""
    if launch.source is None or not isinstance(launch.constants.get("tile"), LinearTile):
        return False
    return launch.source.signature.get("w_ptr") in SIXTEEN_BITS


def _report_calls(num_rows: int) -> Iterator[Call]:
    """One call of each form for the 8B shapes, and a plain one with its widest weight."""
    from pagedraft.bench.static_calls import model_weights

    for name, run in linear_calls(model_weights(LLAMA_8B), num_rows, torch.bfloat16):
        yield Call("linear", f"{num_rows} rows{name}", run)


def _row(launch: Launch, target) -> list[str]:
    compiled = triton.compile(launch.source, target=target, options=launch.options)
    instructions = asm_instructions(compiled.asm)
    machine = machine_code(compiled.asm, instructions)
    code = LinearCode(launch, instructions, compiled.metadata.num_warps)
    tile = code.tile
    is_nvidia = launch.target.startswith("sm_")
    return [
        launch.kernel,
        launch.cases[0],
        f"{tile.block_t}x{tile.block_o}x{tile.block_i}",
        f"{code.num_warps}/{compiled.metadata.num_stages}",
        f"{code.weight_bytes_per_instruction():.1f}" if is_nvidia else "",
        str(machine.registers),
        str(machine.spill_bytes),
        f"{compiled.metadata.shared / 1024:.0f}",
        f"{code.wide_share():.2f}" if is_nvidia else "",
    ]


HEADERS = ("kernel", "case", "tile", "warps/stages", "B/instr", "regs", "spill", "KB", "16-byte")


def main() -> None:
    """Print a row for each distinct kernel of 1, 16, 32, 64 and 512 rows."""
    from pagedraft.bench.static_compile import TARGETS

    parser = argparse.ArgumentParser(prog="python -m pagedraft.bench.linear_static")
    parser.add_argument("--target", default="sm_90", choices=TARGETS)
    name = parser.parse_args().target
    calls = [call for rows in (1, 16, 32, 64, 512) for call in _report_calls(rows)]
    launches, failed = record_calls(calls, {name: TARGETS[name]})
    rows = [_row(launch, TARGETS[name]) for launch in filter(is_linear, launches)]
    print_table(f"triton {triton.__version__}, {name}", HEADERS, rows)
    for call, error in failed:
        print(f"FAILED {call.case}: {error}")


if __name__ == "__main__":
    main()
