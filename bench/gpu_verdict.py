"""What a run of gpu-check found, against the targets for an H200, from the JSON files it left.

    python -m pagedraft.bench.gpu_verdict FOLDER

Each target is met, missed by so much, or not measured for a reason that is said. A missed target
fails nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pagedraft.bench.attention_targets import verdicts
from pagedraft.bench.figures import Figure, read_figures

Document = dict[str, Any]
TARGET_DEVICE = "H200"
REAL_8B, REAL_1B = "real_sizes-8b-bf16.json", "real_sizes-1b-bf16.json"
KERNELS, ATTENTION = "kernels-8b-bf16.json", "attention-short.json"
SMALL_STEPS = ("decode1", "verify1", "decode8")  # of 1, 9 and 8 rows
LAYER_LINEARS = ("qkv", "gate_up_act", "o_norm", "down_norm")  # as the forward pass runs them


class Unmeasured(Exception):
    """A target's number is not there; the message says why."""


class Found(NamedTuple):
    """A number; ``note`` says of how many rows it is the worst."""

    value: float
    note: str = ""


@dataclass(frozen=True)
class Target:
    """One number that is judged.

    find: the number from the document of ``file``; raises Unmeasured. Where several rows are
    judged it is the worst. better: "higher" or "lower" than ``limit``.
    """

    name: str
    file: str
    find: Callable[[Document], Found]
    limit: float
    better: str
    unit: str


@dataclass(frozen=True)
class Judged:
    """A target and what became of it: ``value``, or ``reason`` where there is none."""

    target: Target
    value: float | None = None
    reason: str = ""
    note: str = ""

    @property
    def word(self) -> str:
        """met, MISSED or open."""
        if self.value is None:
            return "open"
        is_higher = self.target.better == "higher"
        is_met = self.value >= self.target.limit if is_higher else self.value <= self.target.limit
        return "met" if is_met else "MISSED"

    def text(self) -> str:
        """One line."""
        target = self.target
        sign = ">=" if target.better == "higher" else "<="
        line = f"{self.word:6}  {target.name}: "
        wanted = f"{sign} {target.limit:g} {target.unit}"
        if self.value is None:
            return f"{line}not measured ({wanted}): {self.reason}"
        line += f"{self.value:.4g} {target.unit} ({wanted}){self.note and ', ' + self.note}"
        if self.word == "met":
            return line
        return f"{line}, missed by {abs(self.value / target.limit - 1):.0%}"

    def figure(self) -> Figure | None:
        """The same for a document; None without a value."""
        if self.value is None:
            return None
        name, target = f"gpu_check/{self.target.name}", self.target
        return Figure(
            *(name, self.value, target.unit, target.better, "measured"), target=target.limit
        )


def read_document(path: Path) -> Document:
    """The JSON object in ``path``. Raises Unmeasured for what is no such file."""
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        raise Unmeasured(f"{path.name} is missing: its part left nothing") from None
    except (OSError, ValueError) as error:
        raise Unmeasured(f"{path.name} cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise Unmeasured(f"{path.name}: expected a JSON object, got {type(document).__name__}")
    return document


def figure(name: str, document: Document) -> Found:
    """The value of one figure of a bench's document."""
    try:
        found = {figure.name: figure.value for figure in read_figures(document)}
    except ValueError as error:
        raise Unmeasured(str(error)) from None
    if name not in found:
        raise Unmeasured(_why_missing(name, document))
    return Found(found[name])


def _why_missing(name: str, document: Document) -> str:
    if document.get("unavailable"):
        return document["unavailable"]
    if document.get("problems"):
        return f"wrong, so it has no time: {document['problems'][0]}"
    rows = [row for key in ("rows", "answers") for row in document.get(key, ())]
    reasons = [row["left_out"] for row in rows if row.get("left_out") and row["name"] in name]
    return f"left out: {reasons[0]}" if reasons else f"no figure {name!r}, the run ended before it"


Shares = Iterator[float | None]  # of rows that are judged; None for one without a time


def worst(shares_of: Callable[[Document], Shares], document: Document) -> Found:
    """The lowest of the shares."""
    shares = list(shares_of(document))
    timed = [share for share in shares if share is not None]
    if not timed:
        raise Unmeasured(f"none of {len(shares)} rows that are judged has a time")
    return Found(min(timed), f"worst of {len(timed)} rows{_untimed(len(shares) - len(timed))}")


def _untimed(count: int) -> str:
    return f", {count} more without a time" if count else ""


def small_linears(document: Document) -> Shares:
    """% of the measured copy bandwidth of a layer's linear ops with 1 to 16 rows."""
    for row in document["rows"]:
        if row["step"] in SMALL_STEPS and row["part"] in LAYER_LINEARS:
            rate = row["bytes"] / row["time"]["median"] if "time" in row else None
            yield None if rate is None else 100 * rate / document["ceiling"]["copy_rate"]


def long_linears(document: Document) -> Shares:
    """% of the measured matmul rate of a layer's linear ops at 2048 rows."""
    for row in document["linears"]:
        rate = 1e12 * row["tflop_s"] if "tflop_s" in row else None
        yield None if rate is None else 100 * rate / document["ceiling"]["matmul_rate"]


def attention(prefix: str, is_upper: bool, scale: float, document: Document) -> Found:
    """The worst of the attention sweep's judged numbers whose names begin so."""
    judged = [verdict for verdict in verdicts(document) if verdict.name.startswith(prefix)]
    values = [verdict.value for verdict in judged if verdict.value is not None]
    if not values:
        raise Unmeasured(f"none of {len(judged)} points that are judged has a time")
    note = f"worst of {len(values)} points{_untimed(len(judged) - len(values))}"
    return Found(scale * (max(values) if is_upper else min(values)), note)


def _real(model: str, name: str) -> Callable[[Document], Found]:
    return partial(figure, f"real_sizes/{model}-bf16/{name}")


STEP = "graphs/batch 1/k 0"
TARGETS = (
    Target(
        "8B short answer, p50", REAL_8B, _real("8b", "graphs/answer/k 0/p50"), 100, "lower", "ms"
    ),
    Target(
        "8B short answer, stretch", REAL_8B, _real("8b", "graphs/answer/k 0/p50"), 75, "lower", "ms"
    ),
    Target(
        "1B short answer, p99", REAL_1B, _real("1b", "graphs/answer/k 0/p99"), 50, "lower", "ms"
    ),
    Target("8B decode step, one row", REAL_8B, _real("8b", f"{STEP}/step"), 4.4, "lower", "ms"),
    Target(
        "8B decode step, of its floor", REAL_8B, _real("8b", f"{STEP}/of floor"), 80, "higher", "%"
    ),
    Target(
        *("linear ops of 1 to 16 rows, of copy bandwidth", KERNELS),
        *(partial(worst, small_linears), 90, "higher", "%"),
    ),
    Target(
        *("exact linear ops of 2048 rows, of matmul rate", REAL_8B),
        *(partial(worst, long_linears), 50, "higher", "%"),
    ),
    Target(
        *("attention, of copy bandwidth", ATTENTION),
        *(partial(attention, "of copy bandwidth", False, 100), 85, "higher", "%"),
    ),
    Target(
        *("attention, verify / decode", ATTENTION),
        *(partial(attention, "of decode", True, 1), 1.1, "lower", "x"),
    ),
    Target(
        *("prefill attention at 8k, of matmul rate", ATTENTION),
        *(partial(attention, "of matmul rate", False, 100), 60, "higher", "%"),
    ),
)


def judge(folder: Path, *, since: float = 0.0, targets: Sequence[Target] = TARGETS) -> list[Judged]:
    """What became of every target, from the files in ``folder``.

    since: seconds of ``time.time``; a file that was last written before is of an earlier run.
    """
    return [_judge(folder, since, target) for target in targets]


def _judge(folder: Path, since: float, target: Target) -> Judged:
    path = folder / target.file
    try:
        document = read_document(path)
        if path.stat().st_mtime < since:
            raise Unmeasured(f"{target.file} is of an earlier run, this one wrote none")
        if document.get("dry"):
            raise Unmeasured(f"{target.file} is of a dry run")
        value, note = target.find(document)
        return Judged(target, value, note=note)
    except Unmeasured as reason:
        return Judged(target, reason=str(reason))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{target.file}: expected another form ({type(error).__name__}: {error})"
        return Judged(target, reason=reason)


def report(judged: Sequence[Judged], device: str) -> list[str]:
    """The verdict's lines."""
    lines = [] if TARGET_DEVICE in device else [f"targets are for an {TARGET_DEVICE}, not {device}"]
    return [*lines, *(one.text() for one in judged)]


def summary(judged: Sequence[Judged]) -> str:
    """How many targets were met, missed and not measured."""
    words = [one.word for one in judged]
    counts = (words.count(word) for word in ("met", "MISSED", "open"))
    return "targets: {} met, {} missed, {} not measured".format(*counts)


def main(arguments: list[str]) -> int:
    """Print the verdict on a folder of results."""
    if len(arguments) != 1:
        print("usage: python -m pagedraft.bench.gpu_verdict FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    judged = judge(folder)
    devices = [folder / name for name in (REAL_8B, REAL_1B, KERNELS, ATTENTION)]
    device = next((_device(path) for path in devices if _device(path)), "an unknown device")
    print("\n".join(report(judged, device)))
    print(summary(judged))
    return 0


def _device(path: Path) -> str:
    try:
        return str(read_document(path).get("device", ""))
    except Unmeasured:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
