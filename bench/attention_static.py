"""What machine code says about the attention kernels: KV bytes a warp instruction, load widths.

``kv_bytes_per_instruction(lambda: launch(...), context=8192, span=8)`` prices a launch without a
GPU, in a process in which ``TRITON_INTERPRET`` is 0. Counted is the program at the end of a row,
which has the masked tiles; what a count assumes: trips.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from pagedraft.bench.control_flow import Instruction
from pagedraft.bench.record import Call, Launch, Use, record_calls
from pagedraft.bench.sass import asm_instructions, is_product, load_bits
from pagedraft.bench.trips import ProgramCount, Trips

POINTER_BYTES = {"*fp32": 4, "*bf16": 2, "*fp16": 2, "*i8": 1, "*fp8e4nv": 1}


@dataclass(frozen=True)
class KeyWalk:
    """The keys of one program, in tiles of ``block_n``.

    num_keys: keys that some query of the program sees.
    edge, full, masked: tiles at a window's edge, seen by all queries, at the causal edge.
    """

    num_keys: int
    edge: int
    full: int
    masked: int


def key_walk(context: int, span: int, block_n: int, window: int, unit: int | None) -> KeyWalk:
    """Return the walk of the program that owns the newest of ``context`` keys.

    span: queries of the program, the last ones. window: 0 for none. unit: keys a program, cut at
    multiples of it; None: one program walks all keys.
    """
    begin = max(context - span - window + 1, 0) if window else 0
    start = begin // block_n * block_n
    if unit is not None:
        start = max(start, (context - 1) // unit * unit)
    edge = start
    if window:
        edge = min(max(math.ceil((context - window) / block_n) * block_n, start), context)
    full = min(max((context - span + 1) // block_n * block_n, edge), context)
    return KeyWalk(
        num_keys=context - max(start, begin),
        edge=math.ceil((edge - start) / block_n),
        full=math.ceil((full - edge) / block_n),
        masked=math.ceil((context - full) / block_n),
    )


@dataclass(frozen=True)
class AttentionCode:
    """An attention kernel's machine code beside what its launch says of it."""

    launch: Launch
    instructions: list[Instruction]
    num_warps: int

    @property
    def shape(self) -> Any:
        """The kernel's AttentionShape."""
        return self.launch.constants["shape"]

    @property
    def kv_itemsize(self) -> int:
        return POINTER_BYTES[self.launch.source.signature["k_ptr"]]

    @property
    def key_bytes(self) -> int:
        """Bytes of one key and value of one KV head, factors of a quantised cache included."""
        has_factors = self.launch.source.signature["k_factor_ptr"] != "constexpr"
        return 2 * (self.shape.head_dim * self.kv_itemsize + 4 * has_factors)

    @cached_property
    def count(self) -> ProgramCount:
        is_fp32 = self.launch.source.signature["q_ptr"] == "*fp32"
        return ProgramCount(self.instructions, lambda name: is_product(name, is_fp32))

    def walk(self, use: Use) -> KeyWalk:
        """Return the walk of the last program of ``use``; in a prefix pass all keys are seen."""
        unit, shape = self.launch.constants.get("UNIT"), self.shape
        if self.launch.constants.get("IS_PREFIX"):
            return KeyWalk(unit, 0, unit // shape.block_n, 0)
        span = min(use.call.span, shape.block_m // shape.group)
        return key_walk(use.call.context, span, shape.block_n, shape.window, unit)

    def trips(self, use: Use) -> Trips:
        """Return how often the loops of that program run; a single loop walks all tiles."""
        shape, walk = self.shape, self.walk(use)
        tiles = (walk.edge, walk.full, walk.masked) if shape.window else (walk.full, walk.masked)
        if len(self.count.attention) == 1:
            tiles = (sum(tiles),)
        search = 0.0 if shape.is_one_tile else math.ceil(math.log2(use.numbers["num_rows"]))
        periods = (shape.segment / shape.block_n, shape.section / shape.block_n)
        return Trips(tiles, periods, search)

    def kv_bytes_per_instruction(self, use: Use) -> float:
        """Return KV bytes of the last program of ``use`` over the warp instructions it issues.

        Raises ValueError where the loops are not those that ``trips`` speaks of.
        """
        instructions = self.num_warps * self.count.executed(self.trips(use))
        for number, tiles in enumerate(self.wide_tiles(self.shape.block_d)):
            if tiles > 1.5:
                raise ValueError(
                    f"loop {number} over keys: expected one tile an iteration, got {tiles:.1f}"
                )
        return self.walk(use).num_keys * self.key_bytes / instructions

    def tile_loads(self) -> list[dict[int, int]]:
        """Return bytes of a thread's global loads by width in bits, for each loop over keys."""
        found = []
        for loop in self.count.attention:
            loads: dict[int, int] = {}
            for bits in filter(None, map(load_bits, self.count.names(loop))):
                loads[bits] = loads.get(bits, 0) + bits // 8
            found.append(loads)
        return found

    def spills(self) -> list[int]:
        """Return how many spill loads and stores stand in each loop over keys (NVIDIA)."""
        return [
            sum(name.startswith(("LDL", "STL")) for name in self.count.names(loop))
            for loop in self.count.attention
        ]

    def wide_tiles(self, width: int, min_bits: int = 128) -> list[float]:
        """Return what a program's loads of ``min_bits`` and more carry in each loop over keys.

        In tiles of keys and values an iteration, ``width`` elements each; a tile takes a 16-byte
        load a thread at least.
        """
        num_threads = self.num_warps * (64 if self.launch.target.startswith("gfx") else 32)
        tile_bytes = max(self.shape.block_n * width * self.kv_itemsize, 16 * num_threads)
        return [
            sum(size for bits, size in loads.items() if bits >= min_bits)
            * (num_threads / (2 * tile_bytes))
            for loads in self.tile_loads()
        ]


def is_attention(launch: Launch) -> bool:
    """Whether the launch reads keys and values."""
    return launch.source is not None and {"k_ptr", "shape"} <= set(launch.source.fn.arg_names)


def kv_bytes_per_instruction(
    run: Callable[[], object],
    *,
    context: int,
    span: int = 1,
    target: GPUTarget = GPUTarget("cuda", 90, 32),  # noqa: B008
) -> dict[str, float]:
    """Return KV bytes a warp instruction by kernel, of the attention kernels that ``run`` launches.

    context, span: tokens and queries of the longest row. Raises RuntimeError if ``run`` fails.
    """
    call = Call("paged_attention", "priced", run, span, context)
    launches, failed = record_calls([call], {"target": target})
    if failed:
        raise RuntimeError(f"{failed[0][0].case}: {failed[0][1]}")
    found = {}
    for launch in filter(is_attention, launches):
        compiled = triton.compile(launch.source, target=target, options=launch.options)
        code = AttentionCode(launch, asm_instructions(compiled.asm), compiled.metadata.num_warps)
        found[launch.kernel] = code.kv_bytes_per_instruction(launch.uses[0])
    return found
