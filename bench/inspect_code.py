"""Figures of a compiled kernel for the inspector: executed instructions, 32-bit address products.

Executed warp instructions are counted as trips.py counts: over one program, for a warp that takes
part in everything.
"""

from __future__ import annotations

from functools import cached_property

from pagedraft.bench.record import Use
from pagedraft.bench.sass import is_product
from pagedraft.bench.static_checks import Compiled
from pagedraft.bench.trips import ProgramCount, Trips
from pagedraft.bench.ttir import read_values

ACCESSES = ("tt.load", "tt.store")
_PRODUCTS = ("arith.muli", "arith.shli")
_IS_32_BIT = ("xi32>", ": i32")


def address_products(ttir: str) -> int:
    """Return how many 32-bit integer products the addresses of loads and stores are made of."""
    found = {
        id(value)
        for access in read_values(ttir)
        if access.operation in ACCESSES
        for value in access.operands[0].sources()
        if value.operation in _PRODUCTS and value.text.endswith(_IS_32_BIT)
    }
    return len(found)


class ExecutedCount:
    """Executed warp instructions of a kernel on an NVIDIA target, where its loops are understood.

    These are attention's, a single one with products that runs as often as the launch's argument
    ``num_trips`` says (linear layers), or none at all.
    """

    def __init__(self, kernel: Compiled) -> None:
        self.kernel = kernel

    @cached_property
    def count(self) -> ProgramCount:
        is_fp32 = not self.kernel.is_narrow
        return ProgramCount(self.kernel.instructions, lambda name: is_product(name, is_fp32))

    def executed(self, use: Use) -> float | None:
        """Return the warp instructions of one program of ``use``, None where they are not known."""
        if not self.kernel.is_nvidia:
            return None
        try:
            executed = self._of_one_warp(use)
        except ValueError:  # control flow that is not understood
            return None
        return None if executed is None else self.kernel.num_warps * executed

    def _of_one_warp(self, use: Use) -> float | None:
        attention = self.kernel.attention
        if attention is not None:
            return attention.count.executed(attention.trips(use))
        if not self.count.flow.loops:
            return self.count.executed(Trips(()))
        trips = self._value(use, "num_trips")
        if trips is None or len(self.count.flow.loops) != 1:
            return None
        return self.count.executed(Trips((float(trips),)))

    def _value(self, use: Use, name: str) -> int | None:
        """Return an argument of that launch: a constexpr, a specialised or a run-time number."""
        found = self.kernel.launch.constants.get(name, use.numbers.get(name))
        return int(found) if isinstance(found, (int, float)) else None
