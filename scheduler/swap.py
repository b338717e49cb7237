"""KV of preempted requests in host memory: copied out before their blocks are others', and back.

The bits come back as they were, so output does not depend on it. Every pool tensor is copied: keys
and values of all layers and models, and the factors of quantised ones.

**Units**: blocks of the KV pool; a block's bytes are those of all pool tensors together.
**Cost**: one gather and one scatter a pool tensor, and on a GPU a transfer each between pinned and
device memory, on the stream of the forward pass; it is waited for, so its seconds are those of the
step.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pagedraft.decoding.params import check_int
from pagedraft.model.block_pool import NULL_BLOCK
from pagedraft.scheduler.request import Request
from pagedraft.scheduler.swap_policy import Decision, SwapPolicy

PROBE_BLOCKS = 8
PROBE_REPEATS = 3
PIECE_BLOCKS = 64  # gathered at once on a GPU, to bound the device memory that takes
WORD = torch.int64  # what is copied: on a CPU, int8 elements took 3 times as long


class Pools(Protocol):
    """What is read of a KVCache."""

    @property
    def tensors(self) -> list[torch.Tensor]: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...


@dataclass
class Saved:
    """One request's KV on the host.

    num_written, num_draft_written: the request's counts of tokens when it was saved.
    first_block: index of the first block that is here; those before had left the window.
    rows: for each pool tensor [n, words of a block].
    seconds: what it took to copy it out.
    """

    num_written: int
    num_draft_written: int
    first_block: int
    rows: list[torch.Tensor]
    seconds: float

    @property
    def num_blocks(self) -> int:
        """Blocks that are here."""
        return self.rows[0].shape[0]

    @property
    def num_bytes(self) -> int:
        """Host memory that it takes."""
        return sum(row.nbytes for row in self.rows)


@dataclass
class SwapStats:
    """Sums over a swap space's life.

    num_swapped_out, num_swapped_in: requests copied out and back; bytes and seconds likewise.
    num_recomputed: decisions for recomputing, at a preemption or an admission.
    num_evicted: dropped for others' room. tokens_in: whose KV came back.
    seconds_saved: expected seconds of recomputing what came back, less those of copying it.
    """

    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_recomputed: int = 0
    num_evicted: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    tokens_in: int = 0
    seconds_out: float = 0.0
    seconds_in: float = 0.0
    seconds_saved: float = 0.0


class SwapSpace:
    """Saves and restores requests' KV, within a budget of host memory; the oldest is dropped first.

    caches: KV pools of the same blocks, all models'. max_bytes: most that is kept here. Pinned
    buffers come from PyTorch's pool of them, which rounds each up to a power of two and keeps it.
    last: the last decision, and why. decisions: whether KV was copied, each time that was decided;
        None until somebody who wants to know puts a list there.
    """

    def __init__(
        self,
        caches: Sequence[Pools],
        max_bytes: int,
        policy: SwapPolicy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_int("swap_bytes", max_bytes, 1)
        self.max_bytes = max_bytes
        self.policy = policy or SwapPolicy()
        self.stats = SwapStats()
        self.last: Decision | None = None
        self.decisions: list[bool] | None = None
        self._clock = clock
        self._block_size = caches[0].block_size
        self._pools = [_words(tensor) for cache in caches for tensor in cache.tensors]
        self._device = self._pools[0].device
        self._block_bytes = sum(pool[0].nbytes for pool in self._pools)
        self._saved: OrderedDict[Request, Saved] = OrderedDict()
        self._used = 0
        self._probe(min(PROBE_BLOCKS, caches[0].num_blocks - 1))

    @property
    def block_bytes(self) -> int:
        """Of one block in all pools."""
        return self._block_bytes

    @property
    def num_bytes(self) -> int:
        """Host memory in use."""
        return self._used

    def __len__(self) -> int:
        """Number of requests whose KV is here."""
        return len(self._saved)

    def save(self, request: Request, keep: Collection[Request] = ()) -> bool:
        """Copy a request's written KV out, if that pays and fits; its blocks are still its own.

        keep: requests whose KV is not dropped for it.
        """
        sequence = request.sequence
        end = -(-sequence.num_written // self._block_size)
        first = next((i for i, b in enumerate(sequence.block_ids) if b != NULL_BLOCK), end)
        if end > len(sequence.block_ids):
            raise ValueError(
                f"request {request.request_id!r}: expected {end} blocks for {sequence.num_written} "
                f"written tokens, got {len(sequence.block_ids)}"
            )
        num_bytes = (end - first) * self._block_bytes
        self.drop(request)
        if not 0 < num_bytes <= self.max_bytes:
            return False
        if not self._note(self.policy.decide(end - first, sequence.num_written)):
            return False
        while self._used + num_bytes > self.max_bytes:
            oldest = next((other for other in self._saved if other not in keep), None)
            if oldest is None:
                return False
            self.drop(oldest)
            self.stats.num_evicted += 1
        began = self._clock()
        try:
            rows = self._new_rows(end - first)
            self._gather(sequence.block_ids[first:end], rows)
        except (RuntimeError, MemoryError):  # no memory on either side: what is lost is time
            return False
        seconds = self._clock() - began
        num_drafted = min(sequence.num_draft_written, sequence.num_written)
        self._saved[request] = Saved(sequence.num_written, num_drafted, first, rows, seconds)
        self._used += num_bytes
        self.policy.out.record(end - first, seconds)
        self.stats.num_swapped_out += 1
        self.stats.bytes_out += num_bytes
        self.stats.seconds_out += seconds
        return True

    def find(self, request: Request, num_known: int) -> Saved | None:
        """A waiting request's KV, if it is here and copying it back beats computing it.

        num_known: tokens whose KV the pool has. What does not pay is dropped.
        """
        saved = self._saved.get(request)
        if saved is None:
            return None
        num_tokens = saved.num_written - max(num_known, 0)
        end = saved.first_block + saved.num_blocks
        num_blocks = end - max(saved.first_block, num_known // self._block_size)
        if num_tokens > 0 and self._note(self.policy.decide_back(num_blocks, num_tokens)):
            return saved
        self.drop(request)
        return None

    def restore(self, request: Request, first: int) -> None:
        """Copy a request's KV into its blocks from index ``first`` on, and drop it here."""
        saved = self._saved[request]
        skipped = max(0, first - saved.first_block)
        rows = [row[skipped:] for row in saved.rows]
        num_blocks = rows[0].shape[0]
        start = saved.first_block + skipped
        began = self._clock()
        self._scatter(request.block_ids[start : start + num_blocks], rows)
        seconds = self._clock() - began
        num_tokens = saved.num_written - start * self._block_size
        self.policy.back.record(num_blocks, seconds)
        self.stats.num_swapped_in += 1
        self.stats.bytes_in += num_blocks * self._block_bytes
        self.stats.tokens_in += num_tokens
        self.stats.seconds_in += seconds
        recomputing = self.policy.recompute_seconds(num_tokens)
        self.stats.seconds_saved += recomputing - saved.seconds - seconds
        self.drop(request)

    def drop(self, request: Request) -> None:
        """Forget a request's KV. A no-op where there is none."""
        saved = self._saved.pop(request, None)
        if saved is not None:
            self._used -= saved.num_bytes

    def clear(self, keep: Collection[Request] = ()) -> None:
        """Forget all but the KV of the requests in ``keep``."""
        for request in [other for other in self._saved if other not in keep]:
            self.drop(request)

    def _note(self, decision: Decision) -> bool:
        self.last = decision
        if self.decisions is not None:
            self.decisions.append(decision.swaps)
        self.stats.num_recomputed += not decision.swaps
        return decision.swaps

    def _probe(self, num_blocks: int) -> None:
        """Time copies of one block and of several, out and back into the same blocks."""
        for count in sorted({1, num_blocks}):
            block_ids = list(range(1, count + 1))
            times = []
            for _ in range(PROBE_REPEATS + 1):
                ticks = [self._clock()]
                rows = self._new_rows(count)
                self._gather(block_ids, rows)
                ticks.append(self._clock())
                self._scatter(block_ids, rows)
                ticks.append(self._clock())
                times.append((ticks[1] - ticks[0], ticks[2] - ticks[1]))
            for out, back in times[1:]:  # the first touches memory for the first time
                self.policy.out.record(count, out)
                self.policy.back.record(count, back)

    def _new_rows(self, num_blocks: int) -> list[torch.Tensor]:
        is_pinned = self._device.type == "cuda"
        return [
            torch.empty(num_blocks, pool.shape[1], dtype=WORD, pin_memory=is_pinned)
            for pool in self._pools
        ]

    def _gather(self, block_ids: list[int], rows: list[torch.Tensor]) -> None:
        if self._device.type == "cpu":
            index = torch.tensor(block_ids)
            for pool, row in zip(self._pools, rows, strict=True):
                torch.index_select(pool, 0, index, out=row)
            return
        for start in range(0, len(block_ids), PIECE_BLOCKS):
            index = torch.tensor(block_ids[start : start + PIECE_BLOCKS], device=self._device)
            for pool, row in zip(self._pools, rows, strict=True):
                piece = row[start : start + PIECE_BLOCKS]
                piece.copy_(pool.index_select(0, index), non_blocking=True)
        self._wait()

    def _scatter(self, block_ids: list[int], rows: list[torch.Tensor]) -> None:
        for start in range(0, len(block_ids), PIECE_BLOCKS):
            index = torch.tensor(block_ids[start : start + PIECE_BLOCKS], device=self._device)
            for pool, row in zip(self._pools, rows, strict=True):
                piece = row[start : start + PIECE_BLOCKS]
                pool.index_copy_(0, index, piece.to(self._device, non_blocking=True))
        self._wait()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _words(pool: torch.Tensor) -> torch.Tensor:
    """A pool tensor [N, ...] seen as [N, words of a block]."""
    if pool[0].nbytes % WORD.itemsize:
        raise ValueError(
            f"caches: expected blocks of a multiple of {WORD.itemsize} bytes, got {pool[0].nbytes}"
        )
    return pool.view(pool.shape[0], -1).view(WORD)
