"""Which function of the engine belongs to which part of a step, and what each part takes.

``PARTS`` is the only place that knows the engine's names. Functions are wrapped from outside while
``Probes.installed`` holds; a part's time is that of its functions without that of functions of
other parts that they call.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

PLAN, DRAFTS, BATCH, SAMPLING, DRAW = "plan", "drafts", "batch", "sampling", "draw"
COMMIT, REST, BEHIND, MODEL = "commit", "rest", "behind", "model"
HOST_PARTS = (PLAN, DRAFTS, BATCH, SAMPLING, COMMIT, REST)
DEVICE_PARTS = (DRAW, MODEL)  # kernels that run on the CPU here
OTHER_PARTS = (BEHIND, *DEVICE_PARTS)  # what the device does not wait for

# "module:attribute" or "module:Class.attribute" within pagedraft. What nobody claims is of the
# part of its caller, and at last of REST: statistics, publishing. BEHIND is what the engine leaves
# until a pass is under way.
PARTS: dict[str, str] = {
    "scheduler.engine:Engine._plan": PLAN,
    "scheduler.speculation:Speculation.decide": DRAFTS,
    "scheduler.speculation:Speculation.propose": DRAFTS,
    "scheduler.launch:Launcher.launch": BATCH,
    "bench.overhead_bed:FakeTarget.forward": MODEL,
    "scheduler.launch:raw_logits": SAMPLING,
    "scheduler.launch:start_verification": SAMPLING,
    "scheduler.launch:Launched.read": SAMPLING,
    "kernels.sample:sample_cpu": DRAW,
    "kernels.verify:verify_cpu": DRAW,
    "scheduler.speculation:Speculation.teach": BEHIND,
    "scheduler.outbox:Outbox.send": BEHIND,
    "scheduler.committer:Committer.commit": COMMIT,
    "scheduler.speculation:Speculation.settle": REST,
    "scheduler.engine:Engine._finish": REST,
}

_NUM_CALIBRATIONS = 2000


class Probes:
    """Measures parts in nanoseconds of thread CPU time, less what measuring takes."""

    def __init__(self, parts: Mapping[str, str] = PARTS) -> None:
        self._targets = [(*find(name), part) for name, part in parts.items()]
        self._spent: dict[str, float] = {}
        self._children: list[float] = []  # of the calls under way
        self._inside = self._outside = 0.0
        self._inside, self._outside = self._calibrate()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Wrap all functions of the table inside the ``with`` block."""
        for owner, name, original, part in self._targets:
            setattr(owner, name, self.wrap(original, part))
        try:
            yield
        finally:
            for owner, name, original, _ in self._targets:
                setattr(owner, name, original)

    def measure(self, run: Callable[[], Any]) -> dict[str, float]:
        """Call ``run``; return what it took by part."""
        self._spent = dict.fromkeys((*HOST_PARTS, *OTHER_PARTS), 0.0)
        self.wrap(run, REST)()
        return self._spent

    def wrap(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """``function``, whose time counts for ``part``."""
        children, clock = self._children, time.thread_time_ns

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            children.append(0.0)
            began = clock()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = clock() - began - self._inside
                self._spent[part] = self._spent.get(part, 0.0) + seconds - children.pop()
                if children:
                    children[-1] += seconds + self._inside + self._outside

        return wrapped

    def _calibrate(self) -> tuple[float, float]:
        """Nanoseconds that a probe adds between its two clocks, and around them."""

        def nothing() -> None:
            pass

        probed, samples = self.wrap(nothing, "nothing"), []
        for _ in range(_NUM_CALIBRATIONS // 20):
            self._spent = {}
            bare = time.thread_time_ns()
            for _ in range(20):
                nothing()
            began = time.thread_time_ns()
            for _ in range(20):
                probed()
            whole = (time.thread_time_ns() - began) / 20
            bare = (began - bare) / 20
            inside = self._spent["nothing"] / 20 - bare
            samples.append((inside, whole - inside - bare))
        return median(a for a, _ in samples), median(b for _, b in samples)


def find(name: str) -> tuple[Any, str, Any]:
    """Owner, attribute name and present value of an entry of the table.

    Raises LookupError, naming the entry, where the engine has no such function any more.
    """
    module_name, _, path = name.partition(":")
    try:
        owner: Any = importlib.import_module(f"pagedraft.{module_name}")
        *outer, attribute = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        original = inspect.getattr_static(owner, attribute)
    except (ImportError, AttributeError) as error:
        raise LookupError(
            f"{name}: expected a function to measure, found none ({error}); say in "
            "bench/overhead_parts.py, PARTS, what took its place"
        ) from error
    if not inspect.isfunction(original):
        raise LookupError(f"{name}: expected a plain function or method, got {original!r}")
    return owner, attribute, original
