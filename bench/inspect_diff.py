"""What an edit changed: two documents of the inspector compared, and what may not get worse.

Kernels are matched by case (step and stage), name and target, so that one whose constexprs changed
is still found. Figures of steps and targets that only one document has are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from pagedraft.bench.inspect_document import PARTS, Document
from pagedraft.bench.static_checks import SHARED_LIMITS

BASELINES = Path(__file__).resolve().parent / "baseline"
ADVICE = (
    "If this is meant, run `make static-baseline` and commit the file together with a line in "
    "CHANGELOG.md under Performance that says what is gained."
)
# Figure of a kernel's row -> whether less of it is better; None: a change is only shown.
FIGURES: Mapping[str, bool | None] = {
    "problem": None,
    "registers": True,
    "spill_bytes": True,
    "shared": True,
    "instructions": True,
    "executed": True,
    "kv_bytes": False,
    "loads": None,
    "stores": None,
    "mma": None,
    "address_products": True,
    "warps": None,
    "stages": None,
}
MARKS = {True: "worse", False: "better", None: ""}

Key = tuple[str, str, str]  # kernel, case, target
_FIELD = re.compile(r"(\w+)=([^,()]+)")  # of a dataclass as text


@dataclass(frozen=True)
class Change:
    """One figure that differs; ``is_worse`` is None where neither is better.

    is_constexpr: whether the source asks for it, not the compiler's result.
    """

    name: str
    old: Any
    new: Any
    is_worse: bool | None
    is_constexpr: bool = False

    def __str__(self) -> str:
        mark = f" ({MARKS[self.is_worse]})" if MARKS[self.is_worse] else ""
        return f"{self.name} {_shown(self.old)} -> {_shown(self.new)}{mark}"


@dataclass(frozen=True)
class Diff:
    """What differs: ``kernels`` by key, ``new`` and ``gone`` kernels, ``steps`` by step and part.

    left_out: steps and targets that only one document has.
    """

    kernels: dict[Key, list[Change]]
    new: list[Key]
    gone: list[Key]
    steps: dict[str, list[Change]]
    left_out: list[str]

    @property
    def is_empty(self) -> bool:
        return not (self.kernels or self.new or self.gone or self.steps)

    @property
    def counts(self) -> dict[str, int]:
        """How many kernels and steps have a figure that is worse, and one that is better."""
        groups = [*self.kernels.values(), *self.steps.values()]
        return {
            MARKS[mark]: sum(any(c.is_worse is mark for c in group) for group in groups)
            for mark in (True, False)
        }


def baseline_path(version: str = triton.__version__) -> Path:
    """Return where the baseline for a version of Triton lies, or would."""
    return BASELINES / f"forward-{version}.json"


def compare(base: Document, fresh: Document) -> Diff:
    """Return what differs; raise ValueError where the two are of different models or formats."""
    if base["setup"] != fresh["setup"]:
        raise ValueError(f"base: expected {fresh['setup']}, got {base['setup']}")
    old, new = _rows(base, fresh), _rows(fresh, base)
    changes = {key: list(_row_changes(old[key], new[key])) for key in new if key in old}
    steps = {
        f"{step} {part}": list(changed)
        for step, part, changed in _step_changes(base, fresh)
        if changed
    }
    return Diff(
        {key: found for key, found in changes.items() if found},
        new=[key for key in new if key not in old],
        gone=[key for key in old if key not in new],
        steps=steps,
        left_out=_left_out(base, fresh),
    )


def _rows(document: Document, other: Document) -> dict[Key, dict[str, Any]]:
    """Return a row for each kernel, case and target that both documents speak of."""
    return {
        (kernel["kernel"], case, target): {
            **figures,
            "constexprs": kernel["constexprs"],
            "executed": figures["executed"].get(case),
            "kv_bytes": figures["kv_bytes"].get(case),
        }
        for kernel in document["kernels"]
        for target, figures in kernel["targets"].items()
        for case in kernel["cases"]
        if target in other["targets"] and case.split("/")[0] in other["steps"]
    }


def _row_changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[Change]:
    for name, less_is_better in FIGURES.items():
        if old.get(name) != new.get(name):
            yield _change(name, old.get(name), new.get(name), less_is_better)
    before, after = (_fields(row["constexprs"]) for row in (old, new))
    for name in dict.fromkeys([*before, *after]):
        values = before.get(name, "absent"), after.get(name, "absent")
        if values[0] != values[1]:
            yield Change(name, *values, None, is_constexpr=True)


def _fields(constexprs: Mapping[str, Any]) -> dict[str, Any]:
    """Return constexprs by name, those that are dataclasses by their fields."""
    found: dict[str, Any] = {}
    for name, value in constexprs.items():
        fields = _FIELD.findall(value) if isinstance(value, str) else []
        found |= {f"{name}.{field}": text for field, text in fields} if fields else {name: value}
    return found


def _change(name: str, old: Any, new: Any, less_is_better: bool | None) -> Change:
    is_number = isinstance(old, (int, float)) and isinstance(new, (int, float))
    if less_is_better is None or not is_number:
        return Change(name, old, new, None)
    return Change(name, old, new, (new > old) is less_is_better)


def _step_changes(base: Document, fresh: Document) -> Iterator[tuple[str, str, list[Change]]]:
    for step in fresh["steps"]:
        for backend in fresh["steps"][step]:
            old = base["steps"].get(step, {}).get(backend)
            if old is None:
                continue
            new = fresh["steps"][step][backend]
            for part in PARTS:
                changed = [
                    _change(name, old[part][name], new[part][name], True)
                    for name in new[part]
                    if old[part][name] != new[part][name]
                ]
                changed += _kernel_changes(old["kernels"].get(part), new["kernels"].get(part))
                yield f"{step} {backend}", part, changed


def _kernel_changes(old: list[str] | None, new: list[str] | None) -> list[Change]:
    old, new = old or [], new or []
    added, gone = _without(new, old), _without(old, new)
    return [Change("kernels", " ".join(gone), " ".join(added), None)] if added or gone else []


def _without(names: list[str], others: list[str]) -> list[str]:
    """Return ``names`` less ``others``, counting how often each stands there."""
    others = list(others)
    left = []
    for name in names:
        if name in others:
            others.remove(name)
        else:
            left.append(name)
    return left


def _left_out(base: Document, fresh: Document) -> list[str]:
    return [
        f"{kind[:-1]} {name} (only in {where})"
        for kind in ("targets", "steps")
        for where, one, other in (("the base", base, fresh), ("this run", fresh, base))
        for name in one[kind]
        if name not in other[kind]
    ]


def regressions(base: Document, fresh: Document) -> list[str]:
    """Return a line for what CI does not let pass: kernels that do not compile, shared memory over
    the limit, more spills, and more launches than the base has."""
    compare(base, fresh)  # the same setup, or an error
    for name in ("steps", "targets"):
        if not set(base[name]) & set(fresh[name]):
            return [f"nothing to compare: the base has {name} {', '.join(base[name])}"]
    old = _rows(base, fresh)
    lines = []
    for key, row in _rows(fresh, base).items():
        lines += [f"{_named(key)}: {line}" for line in _faults(key[2], old.get(key), row)]
    for step, part, changed in _step_changes(base, fresh):
        more = [c for c in changed if c.name == "launches" and c.is_worse and part != "model"]
        kernels = [c for c in changed if c.name == "kernels" and c.new]
        lines += [
            f"{step}, {part.replace('_', ' ')}: {change.new} launches, the base has "
            f"{change.old}" + "".join(f"; new: {c.new}" for c in kernels)
            for change in more
        ]
    return lines


def _faults(target: str, old: dict[str, Any] | None, row: dict[str, Any]) -> Iterator[str]:
    if "registers" not in row:
        yield row["problem"]
        return
    allowed = old.get("spill_bytes", 0) if old else 0
    if row["spill_bytes"] > allowed:
        of = f"the base has {allowed}" if old else "a kernel that the base does not have"
        yield f"spills {row['spill_bytes']} bytes a thread, {of}"
    limit = SHARED_LIMITS[target]
    if row["shared"] > limit:
        yield f"takes {row['shared']} bytes of shared memory, {target} has {limit}"


def _named(key: Key) -> str:
    kernel, case, target = key
    return f"{kernel} on {target} in {case}"


def print_diff(diff: Diff, base_name: str) -> None:
    """Print what changed, equal changes of several cases and targets once."""
    print(f"\nagainst {base_name}")
    for what in diff.left_out:
        print(f"  not compared: {what}")
    for where, changes in diff.steps.items():
        print(f"  {where}: {'; '.join(map(str, changes))}")
    for kernel, text, where in _grouped(diff.kernels):
        print(f"  {kernel} {where}: {text}")
    for word, keys in (("new", diff.new), ("gone", diff.gone)):
        for kernel, _, where in _grouped(dict.fromkeys(keys, ())):
            print(f"  {word}: {kernel} {where}")
    if diff.is_empty:
        print("  nothing changed")
    else:
        counts = ", ".join(f"{number} {word}" for word, number in diff.counts.items())
        print(f"  kernels, cases and steps with a figure that is worse or better: {counts}")


def _grouped(
    kernels: Mapping[Key, Sequence[Change]],
) -> Iterator[tuple[str, str, str]]:
    """Yield (kernel, changes, where), equal changes once; what the source asks for first."""
    found: dict[tuple[str, bool, str], dict[str, list[str]]] = {}
    for (kernel, case, target), changes in kernels.items():
        for is_constexpr in (True, False):
            chosen = [change for change in changes if change.is_constexpr == is_constexpr]
            if chosen or (is_constexpr and not changes):
                text = "; ".join(map(str, chosen))
                cases = found.setdefault((kernel, not is_constexpr, text), {})
                cases.setdefault(case, []).append(target)
    for (kernel, _, text), cases in sorted(found.items()):
        places: dict[str, list[str]] = {}
        for case, targets in cases.items():
            places.setdefault(", ".join(targets), []).append(case)
        yield kernel, text, "; ".join(f"[{', '.join(c)}] {t}" for t, c in places.items())


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}:{number}" for key, number in value.items()) or "none"
    if value is None or value == "":
        return "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
