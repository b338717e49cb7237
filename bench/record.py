"""Record what the launchers would launch, without a GPU.

``JITFunction.run`` is replaced by a recorder that sends the arguments through Triton's own binder,
so a signature here has exactly the types, constexprs and specialisations (divisible by 16, equal to
1) that a launch of that call has on a device. Nothing runs. Only for a process in which
``TRITON_INTERPRET`` was 0 when Triton was imported: an interpreted kernel cannot be compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from pagedraft.kernels.dispatch import INTERPRETED, use_implementation


@dataclass(frozen=True)
class Call:
    """One call of a public op: ``run`` may launch any number of kernels.

    span, context: queries and context tokens of the longest row, where the op attends.
    min_kv_bytes: KV bytes a warp instruction that this call must reach on sm_90, if any.
    targets: the targets that it can run on, all if empty.
    """

    op: str
    case: str
    run: Callable[[], object]
    span: int = 1
    context: int = 0
    min_kv_bytes: float | None = None
    targets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Use:
    """One launch of a compiled kernel: the call it came from, its grid, its run-time numbers."""

    call: Call
    grid: tuple[int, ...]
    numbers: dict[str, int | float]


@dataclass
class Launch:
    """One distinct kernel launch, as one target's compiler would get it.

    uses: the launches that share it, at most one a call.
    source, options: what ``triton.compile`` takes; ``error`` instead where the target refuses the
    launch's options.
    """

    op: str
    kernel: str
    target: str
    source: ASTSource | None
    options: dict[str, Any]
    error: str | None = None
    uses: list[Use] = field(default_factory=list)

    @property
    def cases(self) -> tuple[str, ...]:
        """Names of the calls that lead to it."""
        return tuple(use.call.case for use in self.uses)

    @property
    def constants(self) -> dict[str, Any]:
        """Constexprs and specialised arguments by name."""
        if self.source is None:
            return {}
        names = self.source.fn.arg_names
        return {names[path[0]]: value for path, value in self.source.constants.items()}

    @property
    def key(self) -> str:
        """Equal for launches that share one compiled kernel."""
        if self.source is None:
            return f"{self.kernel}|{self.target}|{self.error}"
        specialisation = (self.source.signature, self.source.constants, self.source.attrs)
        options = sorted(self.options.items())
        return f"{self.kernel}|{self.target}|{specialisation}|{options}"


@functools.cache
def _binder(fn: JITFunction, target: GPUTarget) -> tuple[Any, Callable]:
    backend = make_backend(target)
    return backend, create_function_from_signature(fn.signature, fn.params, backend)


def bind_launch(
    call: Call,
    fn: JITFunction,
    target_name: str,
    target: GPUTarget,
    grid: Any,
    args: tuple,
    kwargs: dict,
) -> Launch:
    """Turn one launch into what ``target``'s compiler gets, as ``JITFunction.run`` does."""
    backend, binder = _binder(fn, target)
    bound, specialization, options = binder(*args, **kwargs)
    sizes = grid(bound) if callable(grid) else grid
    numbers = {k: v for k, v in bound.items() if isinstance(v, (int, float))}
    uses = [Use(call, tuple(sizes), numbers)]
    launch = Launch(call.op, fn.__name__, target_name, source=None, options={}, uses=uses)
    try:
        parsed, signature, constexprs, attrs = fn._pack_args(
            backend, kwargs, bound, specialization, options
        )
    except (KeyError, ValueError, AssertionError) as error:
        launch.error = f"{type(error).__name__}: {error}"
        return launch
    launch.source = ASTSource(fn, signature, constexprs, attrs)
    launch.options = dict(parsed.__dict__)
    return launch


CallOf = Callable[[JITFunction], Call]


@contextmanager
def launches_recorded(
    call_of: CallOf, targets: Mapping[str, GPUTarget], found: list[dict[str, Launch]]
) -> Iterator[None]:
    """Append every launch inside the ``with`` block to ``found``, as each target would get it.

    call_of: tells from a launched kernel which call it belongs to.
    """
    if INTERPRETED:
        raise RuntimeError(
            "TRITON_INTERPRET: expected 0, got 1 (interpreted kernels do not compile)"
        )

    def record(fn: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        call = call_of(fn)
        found.append(
            {
                name: bind_launch(call, fn, name, target, grid, args, kwargs)
                for name, target in targets.items()
            }
        )

    original = JITFunction.run
    JITFunction.run = record
    try:
        with use_implementation("triton"):
            yield
    finally:
        JITFunction.run = original


@contextmanager
def vendor_of(backend: str) -> Iterator[None]:
    """Let launchers that ask ``torch.version.hip`` see the vendor they launch for."""
    original = torch.version.hip
    torch.version.hip = "0.0" if backend == "hip" else None
    try:
        yield
    finally:
        torch.version.hip = original


def by_backend(targets: Mapping[str, GPUTarget]) -> dict[str, dict[str, GPUTarget]]:
    """Return the targets of each backend ("cuda", "hip"): launchers ask for it, not for more."""
    return {
        backend: {name: target for name, target in targets.items() if target.backend == backend}
        for backend in sorted({target.backend for target in targets.values()})
    }


def _record_call(call: Call, targets: Mapping[str, GPUTarget]) -> list[Launch]:
    found: list[dict[str, Launch]] = []
    if call.targets:
        targets = {name: target for name, target in targets.items() if name in call.targets}
    for backend, group in by_backend(targets).items():
        with vendor_of(backend), launches_recorded(lambda fn: call, group, found):
            call.run()
    return [launch for launches in found for launch in launches.values()]


def add_distinct(launch: Launch, distinct: dict[str, Launch]) -> None:
    """Add ``launch`` to those with distinct keys, as one more use where its kernel is known."""
    first = distinct.setdefault(launch.key, launch)
    if first is not launch and launch.uses[0].call.case not in first.cases:
        first.uses.extend(launch.uses)


def record_calls(
    calls: list[Call], targets: Mapping[str, GPUTarget]
) -> tuple[list[Launch], list[tuple[Call, str]]]:
    """Return the distinct launches of ``calls`` and the calls that raised or launched nothing."""
    distinct: dict[str, Launch] = {}
    failed: list[tuple[Call, str]] = []
    for call in calls:
        try:
            found = _record_call(call, targets)
        except Exception as error:
            failed.append((call, f"{type(error).__name__}: {error}"))
            continue
        if not found and (not call.targets or set(call.targets) & set(targets)):
            failed.append((call, "launched no kernel"))
        for launch in found:
            add_distinct(launch, distinct)
    return list(distinct.values()), failed
