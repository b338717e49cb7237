"""Staging: small inputs on their way to the device, in one copy from pinned memory a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

NUM_BUFFERS = 2


class Staging:
    """``device_x``, uint8, and pinned buffers that are copied to it in turn.

    A buffer is written again only when its copy is done. On a CPU there is one memory and no copy.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.device_x = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._is_cuda = device.type == "cuda"
        self._buffers = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
            for _ in range(NUM_BUFFERS if self._is_cuda else 0)
        ]
        self._copied = [torch.cuda.Event() for _ in self._buffers]
        self._next = 0

    @contextmanager
    def host(self, num_bytes: int) -> Iterator[torch.Tensor]:
        """Host memory to write; at the end of the ``with`` block it is sent to ``device_x``."""
        if not self._is_cuda:
            yield self.device_x[:num_bytes]
            return
        index = self._next
        self._next = (index + 1) % len(self._buffers)
        self._copied[index].synchronize()
        memory_x = self._buffers[index][:num_bytes]
        yield memory_x
        self.device_x[:num_bytes].copy_(memory_x, non_blocking=True)
        self._copied[index].record()
