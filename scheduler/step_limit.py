"""How many tokens a step may feed after one ran out of memory: fewer, then slowly more again.

The KV pool is allocated once; what a step can run out of is memory for activations and logits,
which grow with the tokens it feeds.
"""

from __future__ import annotations

import torch

GROW_STEPS = 64  # without a failure, until the limit doubles


class StepLimit:
    """Caps the token budget after a failure."""

    def __init__(self) -> None:
        self._tokens: int | None = None  # most that a step may feed; None: no failure counts
        self._num_steps = 0

    def cap(self, token_budget: int) -> int:
        """The budget of the next step, at least 1."""
        return token_budget if self._tokens is None else min(token_budget, self._tokens)

    def shrink(self, num_fed: int) -> None:
        """A step that fed so many tokens ran out of memory: half of it from here on."""
        self._tokens = max(1, num_fed // 2)
        self._num_steps = 0

    def note_step(self, token_budget: int) -> None:
        """A step worked; the cap goes when it has grown to the budget."""
        if self._tokens is None:
            return
        self._num_steps += 1
        if self._num_steps % GROW_STEPS == 0:
            self._tokens *= 2
            if self._tokens >= token_budget:
                self._tokens = None


def free_device_memory(device: torch.device) -> None:
    """Give back what PyTorch caches, so that a smaller step finds room."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a step failed for want of memory; PyTorch's CPU allocator raises RuntimeError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
