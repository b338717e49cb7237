"""What an engine step asks of the host, counted: the same in every run and on every machine.

The engine beside the fake model (overhead_bed.py), under a clock that advances evenly, so that what
it learns of times is the same everywhere. What a device would run is left out: the model, and the
kernels that draw and compare (overhead_parts.py). Counted are

- python calls: of this project's functions, wherever they are called from. A generator counts each
  time that it is resumed; comprehensions do not count, since Python 3.12 makes no calls of them;
- built-in calls: of functions and methods in C (``len``, ``list.append``, numpy's) by these;
- operators: what PyTorch dispatches, views among them.

All depend on the script that numpy draws, built-in calls on Python too, operators on PyTorch.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pagedraft.bench.figures import Figure
from pagedraft.bench.overhead_bed import Bed, Case
from pagedraft.bench.overhead_parts import DEVICE_PARTS, PARTS, find

CASES = (
    Case(rows=1, context=128, k=0),
    Case(rows=1, context=128, k=4),
    Case(rows=64, context=128, k=0),
    Case(rows=64, context=128, k=4),
    Case(rows=64, context=128, k=0, answer=32),
)
NUM_STEPS = {1: 64, 64: 16}  # a row enters a block every 64 tokens
PYTHON, BUILT_IN, OPERATORS = "python calls", "built-in calls", "operators"
UNITS = {PYTHON: "calls", BUILT_IN: "calls", OPERATORS: "operators"}
TICK = 1e-6  # seconds between two looks at the clock
OURS, NOT_COUNTED = "pagedraft.", ("pagedraft.bench.", "pagedraft.tests.")
INLINED = frozenset(("<listcomp>", "<dictcomp>", "<setcomp>"))


class HostCounter(TorchDispatchMode):
    """Adds to ``counts`` inside ``counting``, but not inside functions that ``paused`` returned."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = dict.fromkeys(UNITS, 0)
        self._num_paused = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what this thread calls in the ``with`` block."""
        before = sys.getprofile()
        with self:
            sys.setprofile(self._profile)
            try:
                yield
            finally:
                sys.setprofile(before)

    def paused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, in which nothing is counted."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._num_paused += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._num_paused -= 1

        return wrapped

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if self._num_paused:
            return
        if event == "call":
            if _is_ours(frame) and frame.f_code.co_name not in INLINED:
                self.counts[PYTHON] += 1
        elif event == "c_call" and _is_ours(frame):
            self.counts[BUILT_IN] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if not self._num_paused:
            self.counts[OPERATORS] += 1
        return func(*args, **(kwargs or {}))


def _is_ours(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__") or ""
    return name.startswith(OURS) and not name.startswith(NOT_COUNTED)


@contextmanager
def even_clock() -> Iterator[None]:
    """Let ``time.perf_counter`` advance by TICK whenever it is read, and collect no garbage."""
    ticks, original, was_enabled = itertools.count(), time.perf_counter, gc.isenabled()
    gc.disable()  # finalizers would run whenever it comes to it
    time.perf_counter = lambda: next(ticks) * TICK
    try:
        yield
    finally:
        time.perf_counter = original
        if was_enabled:
            gc.enable()


@contextmanager
def _device_paused(counter: HostCounter) -> Iterator[None]:
    targets = [find(name) for name, part in PARTS.items() if part in DEVICE_PARTS]
    for owner, name, original in targets:
        setattr(owner, name, counter.paused(original))
    try:
        yield
    finally:
        for owner, name, original in targets:
            setattr(owner, name, original)


def count_case(case: Case, num_steps: int) -> dict[str, float]:
    """Mean counts of a step by what is counted; RuntimeError where an output is not the script.

    The case runs twice, and the second time counts: the first fills caches by size, whatever ran
    before in this process.
    """
    with torch.inference_mode(), even_clock():
        _count_steps(case, num_steps)
        counts = _count_steps(case, num_steps)
    return {what: count / num_steps for what, count in counts.items()}


def _count_steps(case: Case, num_steps: int) -> dict[str, int]:
    counter, bed = HostCounter(), Bed(case, num_steps)
    with _device_paused(counter):
        for _ in range(num_steps):
            bed.prepare()
            with counter.counting():
                bed.step()
    bed.check()
    return counter.counts


def host_figures(cases: Sequence[Case] = CASES) -> list[Figure]:
    """Counts a step of each case: "host/<case>/<what>"."""
    return [
        Figure(f"host/{case.name}/{what}", value, UNITS[what], "lower", "counted")
        for case in cases
        for what, value in count_case(case, NUM_STEPS.get(case.rows, 16)).items()
    ]
