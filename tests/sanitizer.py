"""Memory checks for interpreted kernels: out of bounds, races between programs, launches, traffic.

`with sanitize() as launches:` checks every kernel launched inside and lists it. Each plain load and
store must stay inside the extent of a tensor argument, and no program may touch what another one
stores in the same launch: the interpreter runs programs in order, a GPU does not. Atomics are not
checked. Faults end the launch with Triton's InterpreterError, whose text holds the fault's message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

NOBODY, SEVERAL = -1, -2


class MemoryFault(Exception):
    """A kernel touched memory that it must not touch."""


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and past-the-end address of a tensor's own elements, whatever its storage holds."""
    num_elements = 0
    if tensor.numel():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        num_elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + num_elements * tensor.element_size()


class Region:
    """Who loaded and stored each address of one piece of memory, program by program."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.reader = np.full(end - start, NOBODY, dtype=np.int32)
        self.writer = np.full(end - start, NOBODY, dtype=np.int32)
        self.num_loads = np.zeros(end - start, dtype=np.int32)


@dataclass
class Launch:
    """One kernel launch: its name, grid size and traffic."""

    name: str
    extents: list[tuple[int, int]]
    regions: list[Region]
    num_programs: int = 0

    def bytes_loaded(self, tensor: torch.Tensor, *, unique: bool = False) -> int:
        """Bytes that plain loads read from ``tensor``; ``unique`` counts each element once."""
        start, end = extent(tensor)
        total = 0
        for region in self.regions:
            first, last = max(start, region.start), min(end, region.end)
            if first < last:
                loads = region.num_loads[first - region.start : last - region.start]
                total += int(np.count_nonzero(loads) if unique else loads.sum())
        return total * tensor.element_size()

    def on_load(self, addresses: np.ndarray, num_bytes: int) -> None:
        for region, offsets in self._locate("load", addresses, num_bytes):
            program = self.num_programs - 1
            writer = region.writer[offsets]
            foreign = (writer != NOBODY) & (writer != program)
            if foreign.any():
                self._race("loads what program", writer[foreign][0], "stored")
            reader = region.reader[offsets]
            shared = (reader != NOBODY) & (reader != program)
            region.reader[offsets] = np.where(shared, SEVERAL, program)
            np.add.at(region.num_loads, offsets, 1)

    def on_store(self, addresses: np.ndarray, num_bytes: int) -> None:
        for region, offsets in self._locate("store", addresses, num_bytes):
            program = self.num_programs - 1
            if len(np.unique(offsets)) < len(offsets):
                self._race("stores twice to one address, as does program", program, "")
            for owners, verb in ((region.writer, "stored"), (region.reader, "loaded")):
                owner = owners[offsets]
                foreign = (owner != NOBODY) & (owner != program)
                if foreign.any():
                    self._race("stores what program", owner[foreign][0], verb)
            region.writer[offsets] = program

    def _race(self, what: str, other: int, verb: str) -> None:
        who = "several" if other == SEVERAL else str(other)
        raise MemoryFault(
            f"race in {self.name}: program {self.num_programs - 1} {what} {who} {verb}"
        )

    def _locate(
        self, kind: str, addresses: np.ndarray, num_bytes: int
    ) -> Iterator[tuple[Region, np.ndarray]]:
        inside = np.zeros(addresses.shape, dtype=bool)
        for start, end in self.extents:
            inside |= (addresses >= start) & (addresses + num_bytes <= end)
        if not inside.all():
            stray = int(addresses[~inside][0])
            distance = min((stray - edge for pair in self.extents for edge in pair), key=abs)
            raise MemoryFault(
                f"out of bounds {kind} in {self.name}, program {self.num_programs - 1}: "
                f"{int((~inside).sum())} lanes, the first {distance} bytes from a tensor's edge"
            )
        for region in self.regions:
            here = (addresses >= region.start) & (addresses < region.end)
            if here.any():
                yield region, addresses[here] - region.start


def _tensors(arguments: Any) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, (tuple, list)):
            yield from _tensors(argument)
        elif isinstance(getattr(argument, "base", None), torch.Tensor) and not isinstance(
            argument, torch.Tensor
        ):
            yield argument.base
        elif isinstance(argument, torch.Tensor):
            yield argument


def _merge(extents: list[tuple[int, int]]) -> list[Region]:
    """One region for tensors that overlap, so that aliases cannot hide a race."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(pair for pair in extents if pair[0] < pair[1]):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return [Region(start, end) for start, end in merged]


def _active(ptrs: TensorHandle, mask: Any) -> tuple[np.ndarray, int]:
    """Addresses of the lanes that the mask lets through, and bytes an element."""
    lanes = mask.data if isinstance(mask, TensorHandle) else mask
    lanes = np.broadcast_to(lanes, ptrs.data.shape).reshape(-1).astype(bool)
    num_bytes = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
    return ptrs.data.reshape(-1).astype(np.int64)[lanes], num_bytes


@contextmanager
def sanitize(*reachable: torch.Tensor) -> Iterator[list[Launch]]:
    """Check and list every interpreted launch inside the ``with`` block.

    reachable: tensors that kernels may touch though no argument: through a table of addresses.
    """
    launches: list[Launch] = []
    builder = InterpreterBuilder
    stock_load, stock_store = builder.create_masked_load, builder.create_masked_store
    stock_call, stock_next = GridExecutor.__call__, builder.set_grid_idx

    def load(self, ptrs, mask, *rest, **options):
        launches[-1].on_load(*_active(ptrs, mask))
        return stock_load(self, ptrs, mask, *rest, **options)

    def store(self, ptrs, value, mask, *rest, **options):
        launches[-1].on_store(*_active(ptrs, mask))
        return stock_store(self, ptrs, value, mask, *rest, **options)

    def call(self, *args, **kwargs):
        extents = [extent(tensor) for tensor in _tensors([*args, *kwargs.values(), reachable])]
        launches.append(Launch(self.fn.__name__, extents, _merge(extents)))
        return stock_call(self, *args, **kwargs)

    def next_program(self, x, y, z):
        launches[-1].num_programs += 1
        return stock_next(self, x, y, z)

    builder.create_masked_load, builder.create_masked_store = load, store
    GridExecutor.__call__, builder.set_grid_idx = call, next_program
    try:
        yield launches
    finally:
        builder.create_masked_load, builder.create_masked_store = stock_load, stock_store
        GridExecutor.__call__, builder.set_grid_idx = stock_call, stock_next
