"""What a compiled kernel must fulfil on each target: one function a check, all in ``CHECKS``.

A check yields a line for each thing that is wrong, with what was found and what was expected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import triton

from pagedraft.bench.attention_static import AttentionCode, is_attention
from pagedraft.bench.control_flow import Instruction
from pagedraft.bench.linear_static import LinearCode, is_linear, weight_floor
from pagedraft.bench.quant_static import quant_products
from pagedraft.bench.record import Launch
from pagedraft.bench.sass import MachineCode
from pagedraft.bench.ttir import constant_masks, narrow_products

# Bytes of shared memory that one program may use.
SHARED_LIMITS = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
}
# Ops of the inner step loop: here a 16-bit kernel may not spill more than ALLOWED_SPILL bytes a
# thread (fp32 serves comparisons, not speed). ptxas stores one 64-bit value once, outside any loop,
# to stay at 32 registers (write_kv on sm_90) or at 168, for three programs on a multiprocessor
# (attention on sm_100). Attention's loops over keys hold no spill at all; its wide tiles spill what
# a program needs again once in 2048 keys.
ALLOWED_SPILL = 8
ALLOWED_WIDE_SPILL = 96
HOT_OPS = frozenset({"rms_norm", "linear", "write_kv", "paged_attention", "gated_mlp"})
# The target and the oldest Triton that floors of KV bytes a warp instruction hold for.
FLOOR_TARGET = "sm_90"
FLOOR_TRITON = (3, 7)
TRITON_VERSION = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for a target; ttir: Triton's IR."""

    launch: Launch
    ttir: str
    instructions: list[Instruction]
    code: MachineCode
    shared_bytes: int
    num_warps: int

    @property
    def is_narrow(self) -> bool:
        """Whether any tensor holds 16-bit numbers."""
        return any(kind in ("*fp16", "*bf16") for kind in self.launch.source.signature.values())

    @property
    def is_nvidia(self) -> bool:
        return self.launch.target.startswith("sm_")

    @cached_property
    def attention(self) -> AttentionCode | None:
        """The kernel as one that reads keys and values, None if it does not."""
        if not is_attention(self.launch):
            return None
        return AttentionCode(self.launch, self.instructions, self.num_warps)

    @cached_property
    def linear(self) -> LinearCode | None:
        """The kernel as one that multiplies by a dense 16-bit weight, None if it does not."""
        if not is_linear(self.launch):
            return None
        return LinearCode(self.launch, self.instructions, self.num_warps)

    @cached_property
    def weight_bytes(self) -> float | None:
        """Weight bytes a warp instruction; None where there is nothing to count."""
        if self.linear is None or not self.is_nvidia:
            return None
        return self.linear.weight_bytes_per_instruction()

    @cached_property
    def kv_bytes(self) -> dict[str, float]:
        """KV bytes a warp instruction by case; empty where there is nothing to count."""
        if self.attention is None or not self.is_nvidia or not self.is_narrow:
            return {}
        return {
            use.call.case: self.attention.kv_bytes_per_instruction(use) for use in self.launch.uses
        }


def _shared_memory(compiled: Compiled) -> Iterator[str]:
    limit = SHARED_LIMITS[compiled.launch.target]
    if compiled.shared_bytes > limit:
        yield f"shared memory: {compiled.shared_bytes} bytes of {limit}"


def _spill(compiled: Compiled) -> Iterator[str]:
    if compiled.launch.op not in HOT_OPS or not compiled.is_narrow:
        return
    code = compiled.attention
    allowed = ALLOWED_WIDE_SPILL if code and code.shape.block_m == 64 else ALLOWED_SPILL
    if compiled.code.spill_bytes > allowed:
        yield f"spills {compiled.code.spill_bytes} bytes a thread of {allowed}"
    if code and compiled.is_nvidia and any(code.spills()):
        yield f"{code.spills()} spill loads and stores in the loops over keys, expected none"
    if compiled.linear and compiled.is_nvidia and compiled.linear.spills():
        found = compiled.linear.spills()
        yield f"{found} spill loads and stores in the loop over inputs, expected none"


def _tf32(compiled: Compiled) -> Iterator[str]:
    if compiled.code.tf32:
        yield "products of fp32 run in tf32, expected full precision"


def _tensor_cores(compiled: Compiled) -> Iterator[str]:
    is_matmul = compiled.attention or compiled.linear
    if is_matmul and compiled.is_narrow and not compiled.code.mma:
        yield "no tensor-core instruction, expected 16-bit products on tensor cores"
    others = sorted(set(compiled.code.mma) - {"HMMA"})
    if compiled.linear and compiled.is_nvidia and others:
        yield f"products in {', '.join(others)}, expected HMMA, whose sums all tiles share"


def _wide_loads(compiled: Compiled) -> Iterator[str]:
    """Keys and values come in 16-byte loads: these alone carry a whole tile, in each loop.

    On NVIDIA the pipeliner copies values of one byte in 8-byte pieces, whatever the tile.
    """
    code = compiled.attention
    if code is None or code.shape.head_dim * code.kv_itemsize % 16:
        return
    min_bits = 64 if code.kv_itemsize == 1 and compiled.is_nvidia else 128
    tiles = code.wide_tiles(code.shape.head_dim, min_bits)
    if not tiles:
        yield "no loop with products found, expected the loops over keys"
    for number, (found, loads) in enumerate(zip(tiles, code.tile_loads(), strict=True)):
        if found < 1:
            shown = ", ".join(f"{n} bytes in {bits}-bit loads" for bits, n in loads.items())
            yield (
                f"loop {number} over keys: {min_bits // 8}-byte loads carry {found:.2f} of a "
                f"tile's keys and values, expected all; a thread loads {shown or 'nothing'}"
            )


def _wide_weight_loads(compiled: Compiled) -> Iterator[str]:
    """Rows and weights come in 16-byte loads, where the weight's rows are multiples of a step."""
    code = compiled.linear
    if code is None or not compiled.is_nvidia or code.tile.num_in % code.tile.block_i:
        return
    if code.wide_share() < 1:
        yield f"16-byte loads carry {code.wide_share():.2f} of rows and weights, expected all"


def _weight_bytes(compiled: Compiled) -> Iterator[str]:
    found, floor = compiled.weight_bytes, weight_floor(TRITON_VERSION)
    if found is None or floor is None or compiled.launch.target != FLOOR_TARGET:
        return
    if compiled.linear and compiled.linear.is_floored and found < floor:
        yield f"{found:.1f} weight bytes a warp instruction, expected {floor:g}"


def _addresses(compiled: Compiled) -> Iterator[str]:
    if compiled.attention:
        for product in narrow_products(compiled.ttir):
            yield f"address from a 32-bit product of a loaded integer, expected 64 bits: {product}"


def _masks(compiled: Compiled) -> Iterator[str]:
    if compiled.attention:
        for mask in constant_masks(compiled.ttir):
            yield f"keys or values are loaded under a mask that always holds, expected none: {mask}"


def _kv_bytes(compiled: Compiled) -> Iterator[str]:
    found = compiled.kv_bytes
    if compiled.launch.target != FLOOR_TARGET or TRITON_VERSION < FLOOR_TRITON:
        return
    for use in compiled.launch.uses:
        case, floor = use.call.case, use.call.min_kv_bytes
        if case in found and floor is not None and found[case] < floor:
            yield f"{case}: {found[case]:.1f} KV bytes a warp instruction, expected {floor:g}"


CHECKS: tuple[Callable[[Compiled], Iterator[str]], ...] = (
    _shared_memory,
    _spill,
    _tf32,
    _tensor_cores,
    _wide_loads,
    _wide_weight_loads,
    _weight_bytes,
    _addresses,
    _masks,
    _kv_bytes,
    quant_products,
)


def problem_of(compiled: Compiled) -> str | None:
    """Return all that is wrong with a kernel, None if nothing is."""
    lines: list[str] = []
    for check in CHECKS:
        try:
            lines += check(compiled)
        except ValueError as error:
            lines.append(f"cannot be judged: {error}")
    return "; ".join(dict.fromkeys(lines)) or None
