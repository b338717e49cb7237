"""Time a call: on CUDA through a graph over rotating buffers, on a CPU with a wall clock.

Calls take turns over copies of their buffers that together exceed the last-level cache, so that
each finds its operands in memory, as a layer of a large model does.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

Run = Callable[[], object]
COLD_BYTES = {"cuda": 256 << 20, "cpu": 96 << 20}  # at the least
COLD_CACHES = 3  # how many times a CPU's last-level cache
MAX_COPY_BYTES = {"cuda": 8 << 30, "cpu": 1 << 30}
MAX_COPIES = {"cuda": 48, "cpu": 256}
MIN_CALLS_PER_GRAPH = 24


@dataclass(frozen=True)
class Timing:
    """Seconds a call.

    method: "graph" (CUDA graph replays), "events" (eager launches on CUDA) or "clock" (CPU).
    """

    median: float
    p20: float
    p80: float
    num_samples: int
    method: str

    def text(self) -> str:
        """Return microseconds as ``median [p20 p80]``."""
        return f"{self.median * 1e6:.1f} [{self.p20 * 1e6:.1f} {self.p80 * 1e6:.1f}]"


def num_copies(bytes_per_call: int, bytes_per_copy: int, device: torch.device) -> int:
    """Return how many copies of a call's buffers exceed the cache, within bounds.

    bytes_per_call: what a call moves; bytes_per_copy: what its buffers take (a pool is larger).
    """
    cold_bytes = COLD_BYTES[device.type]
    if device.type == "cpu":
        cold_bytes = max(cold_bytes, COLD_CACHES * last_cache_bytes())
    wanted = -(-cold_bytes // max(1, bytes_per_call))
    affordable = MAX_COPY_BYTES[device.type] // max(1, bytes_per_copy)
    return max(1, min(wanted, affordable, MAX_COPIES[device.type]))


@lru_cache(maxsize=1)
def last_cache_bytes() -> int:
    """Size of the processor's largest cache as Linux states it, 0 where it does not."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    texts = [path.read_text().strip() for path in sizes]
    return max((int(text[:-1]) << 10 for text in texts if text.endswith("K")), default=0)


def rotating_copies(
    inputs: dict[str, torch.Tensor], bytes_per_call: int, device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """Return ``inputs`` and as many clones of them as ``num_copies`` wants."""
    bytes_per_copy = sum(tensor.nbytes for tensor in inputs.values())
    copies = [inputs]
    for _ in range(num_copies(bytes_per_call, bytes_per_copy, device) - 1):
        copies.append({name: tensor.clone() for name, tensor in inputs.items()})
    return copies


def measure(runs: Sequence[Run], device: torch.device, *, budget: float = 0.5) -> Timing:
    """Time a call, taking ``runs`` (one for each copy of its buffers) in turn for ``budget`` s."""
    if device.type != "cuda":
        return _measure_clock(runs, budget)
    try:
        return _measure_graph(runs, budget)
    except RuntimeError:
        torch.cuda.synchronize()
        return _measure_events(runs, budget)


def _measure_clock(runs: Sequence[Run], budget: float) -> Timing:
    for run in (runs * 2)[:2]:
        run()
    samples: list[float] = []
    deadline = time.perf_counter() + budget
    for run in itertools.cycle(runs):
        start = time.perf_counter()
        run()
        end = time.perf_counter()
        samples.append(end - start)
        if (end > deadline and len(samples) >= 5) or len(samples) >= 2000:
            return _summary(samples, "clock")
    raise ValueError("runs: expected at least one call, got none")


def _measure_graph(runs: Sequence[Run], budget: float) -> Timing:
    repeats = -(-MIN_CALLS_PER_GRAPH // len(runs))
    calls = list(runs) * repeats
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and allocates what libraries keep
        for run in runs[:2]:
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in calls:
            run()
    samples = _event_samples(graph.replay, budget)
    return _summary([sample / len(calls) for sample in samples], "graph")


def _measure_events(runs: Sequence[Run], budget: float) -> Timing:
    for run in (list(runs) * 2)[:2]:
        run()
    turns = itertools.cycle(runs)
    return _summary(_event_samples(lambda: next(turns)(), budget), "events")


def _event_samples(run: Run, budget: float) -> list[float]:
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    once = max(time.perf_counter() - start, 1e-5)
    pairs = []
    for _ in range(int(min(200, max(5, budget / once)))):
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        run()
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e-3 for begin, end in pairs]


def _summary(samples: Sequence[float], method: str) -> Timing:
    ordered = sorted(samples)

    def quantile(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return Timing(quantile(0.5), quantile(0.2), quantile(0.8), len(ordered), method)
