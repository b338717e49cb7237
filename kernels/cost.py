"""What an op must move and compute at the least: the yardstick of every benchmark row."""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """Lower bound of one call.

    bytes: bytes read from and written to device memory, each operand once.
    flops: floating-point operations, a multiply-add counted as two.
    """

    bytes: int
    flops: int

    def __add__(self, other: object) -> Cost:
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(self.bytes + other.bytes, self.flops + other.flops)
