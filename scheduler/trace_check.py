"""Whether a file is a trace that can be replayed, and how far: read once before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagedraft.scheduler.trace_format import FORMAT, Event, read_events

Kinds = type | tuple[type, ...]
OPTIONAL_INT: Kinds = (int, type(None))
ACT: Mapping[str, Kinds] = {"caller": OPTIONAL_INT, "before_step": int}
STEP: Mapping[str, Kinds] = {
    "step": int,
    "rows": list,
    "admitted": list,
    "preempted": list,
    "prompt_budget": OPTIONAL_INT,
    "urgent": list,
}
# event -> the arguments that it must have, and their types
SHAPES: Mapping[str, Mapping[str, Kinds]] = {
    "settings": {"options": dict, "engine": dict, "model": dict, "is_fresh": bool},
    "submit": {
        **ACT,
        "request": int,
        "id": str,
        "prompt": list,
        "num_prompt": int,
        "temperature": (int, float),
        "seed": str,
        "rules": dict,
        "sample_index": int,
        "accept": str,
        "params": dict,
        "stop_ids": list,
        "has_stop_text": bool,
        "max_context": int,
        "parent": OPTIONAL_INT,
        "num_processors": int,
    },
    "abort": {**ACT, "request": int},
    "preempt": {**ACT, "request": int},
    "clear": ACT,
    "raise": {**ACT, "request": int, "error": str},
    "fail": {**ACT, **STEP, "error": str, "is_out_of_memory": bool},
    "step": {**STEP, "waiting": int, "running": int, "free": int, "evictable": int},
}
ROW: Mapping[str, Kinds] = {"request": int, "span": int}


@dataclass
class Outline:
    """What a trace holds: settings, complete steps, and what else to know."""

    settings: dict[str, Any]
    num_steps: int = 0
    notes: list[str] = field(default_factory=list)


def outline(path: str | Path) -> Outline:
    """Read a whole trace.

    Raises OSError for a file that cannot be read, and ValueError, naming the line, where it is no
    trace of this format or cannot be replayed.
    """
    found: Outline | None = None
    requests: set[int] = set()
    for line, event in read_events(path):
        try:
            if found is None:
                found = Outline(_settings(event))
            else:
                _take(event, found, requests)
        except ValueError as error:
            raise ValueError(f"{path}:{line}: {error}") from error
    if found is None:
        raise ValueError(f"{path}: not a trace of an engine: it has no settings")
    return found


def _settings(event: Event) -> dict[str, Any]:
    if event.kind != "settings":
        raise ValueError(f"expected the settings of a trace first, got {event.kind!r}")
    args = event.args
    if args.get("format") != FORMAT:
        raise ValueError(f"format: expected {FORMAT}, got {args.get('format')!r}: another version")
    _check_shape("settings", args, SHAPES["settings"])
    for name in ("block_size", "num_blocks"):
        _check_shape("settings.engine", args["engine"], {name: int})
    if not args["is_fresh"]:
        raise ValueError("the engine had run before: what it had cached is not in the trace")
    return args


def _take(event: Event, found: Outline, requests: set[int]) -> None:
    """Check an event that is not the first."""
    kind, args = event
    if kind == "cut":
        found.notes.append("the trace has no end: what is complete is replayed")
        return
    if kind not in SHAPES or kind == "settings":
        raise ValueError(f"expected one of {list(SHAPES)[1:]}, got {kind!r}")
    _check_shape(kind, args, SHAPES[kind])
    for row in args.get("rows", ()):
        _check_shape("row", row, ROW)
    if kind == "step":
        if args["step"] != found.num_steps:
            raise ValueError(f"step: expected {found.num_steps}, got {args['step']}")
        found.num_steps += 1
    elif args["before_step"] not in (found.num_steps, found.num_steps + 1):
        raise ValueError(f"before_step: expected {found.num_steps}, got {args['before_step']}")
    for number in _named(kind, args):
        if number not in requests:
            raise ValueError(f"{kind}: request {number} was not submitted before")
    if kind == "submit":
        _check_submission(args)
        requests.add(args["request"])


def _check_submission(args: Mapping[str, Any]) -> None:
    if args["num_processors"]:
        raise ValueError(
            f"request {args['id']!r} has logits processors: functions, which a trace cannot hold, "
            "so it cannot be replayed"
        )


def _named(kind: str, args: Mapping[str, Any]) -> list[int]:
    """The requests that an event names and that must be known."""
    named = [args.get("caller"), args.get("parent")]
    if kind in ("abort", "preempt", "raise"):
        named.append(args["request"])
    if "rows" in args:
        named += [*args["admitted"], *args["preempted"], *args["urgent"]]
        named += [row["request"] for row in args["rows"]]
    return [number for number in named if number is not None]


def _check_shape(where: str, args: Any, shape: Mapping[str, Kinds]) -> None:
    if not isinstance(args, dict):
        raise ValueError(f"{where}: expected an object, got {args!r}")
    for name, kinds in shape.items():
        if name not in args or not isinstance(args[name], kinds):
            raise ValueError(f"{where}: {name}: expected {_words(kinds)}, got {args.get(name)!r}")


def _words(kinds: Kinds) -> str:
    parts = kinds if isinstance(kinds, tuple) else (kinds,)
    return " or ".join("null" if part is type(None) else part.__name__ for part in parts)
