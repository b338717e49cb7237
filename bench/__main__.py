"""``python -m pagedraft.bench [PART ...] [--op NAME] [--out DIR]``: what this machine can do.

    kernels      every op, gated by a comparison with its reference, against measured ceilings
    attention    a short sweep of contexts and groups (modelled only, without a CUDA device)
    counted      launches, passes, KV slots, host operations: equal on every machine
    engine       the engine beside its peers; batches, drafters and draft lengths
    serving      latencies under load, the largest rate within 100 ms
    overhead     the engine's own host time beside a model that computes nothing
    quality      what fast and quantised modes cost in perplexity, agreement and tasks
    static, kv_waste, latency, speculation    only when named, as is
    real_sizes   1B and 8B with random weights, on CUDA only

Each part is a process of its own with a time limit; one that fails or is cut off stops no other,
and makes the exit status 1; all that run by default end within TOTAL seconds. At the end stands one
table of all figures that have a target, then one JSON line; files are in bench/results/<device>/.
``python -m pagedraft.bench.kernels --help`` has the options of one part.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pagedraft.bench.figures import Figure, read_figures
from pagedraft.bench.report import header, print_header, results_folder, write_json
from pagedraft.bench.table import print_table
from pagedraft.kernels.dispatch import OPS

TOTAL = 590.0  # seconds of all parts that run by default


@dataclass(frozen=True)
class Part:
    """One bench: its module, its arguments, the seconds that it may take.

    is_default: it runs when no part is named.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    limit: float = 600.0
    is_default: bool = True

    def command(self, folder: Path) -> list[str]:
        """What runs it, with its files in ``folder``."""
        module = f"pagedraft.bench.{self.module}"
        where = ["--out", str(folder)]
        if self.module == "static":
            where = ["--json", str(folder / "static.json")]
        return [sys.executable, "-m", module, *self.arguments, *where]


PARTS = (
    Part("kernels", "kernels", limit=90),
    Part("attention", "kernels", ("--sweep", "attention", "--select", "short"), limit=40),
    Part("counted", "counted", limit=40),
    Part("engine", "engine", ("--quick",), limit=200),
    Part("serving", "serving", ("--quick",), limit=110),
    Part("overhead", "overhead", limit=60),
    Part("quality", "quality", ("--quick",), limit=90),
    Part("static", "static", ("--quick",), is_default=False),
    Part("real_sizes", "real_sizes", is_default=False),
    Part("kv_waste", "kv_waste", is_default=False),
    Part("latency", "latency", ("--rounds", "1", "--requests", "8"), is_default=False),
    Part("speculation", "speculation", is_default=False),
)


@dataclass
class Outcome:
    """How a part ended: "ok", "FAILED" or "OUT OF TIME"; its document's figures, if any."""

    name: str
    verdict: str
    seconds: float
    figures: list[Figure] = field(default_factory=list)


def run_part(part: Part, folder: Path) -> Outcome:
    """Run one part, passing on what it prints; its document is its last line."""
    print(f"\n=== {part.name}", flush=True)
    began = time.monotonic()
    process = subprocess.Popen(
        part.command(folder), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    is_late = threading.Event()

    def stop() -> None:
        is_late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(part.limit, stop)
    timer.start()
    last = ""
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                last = line
            else:
                print(line, end="", flush=True)
        status = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        timer.cancel()
    verdict = "OUT OF TIME" if is_late.is_set() else "FAILED" if status else "ok"
    return Outcome(part.name, verdict, time.monotonic() - began, _figures(part.name, last))


def _figures(name: str, line: str) -> list[Figure]:
    """Figures of a document; none where a part has printed none, which its verdict explains."""
    try:
        document: dict[str, Any] = json.loads(line)
        return read_figures(document, name)
    except ValueError:
        return []


def judged(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """One row for each figure with a target."""
    rows = []
    for outcome in outcomes:
        for figure in outcome.figures:
            if figure.target is None:
                continue
            sign = ">=" if figure.better == "higher" else "<="
            rows.append(
                [
                    figure.name,
                    f"{figure.value:.4g} {figure.unit}",
                    "" if figure.low is None else f"{figure.low:.4g} to {figure.high:.4g}",
                    f"{sign} {figure.target:g}",
                    "met" if figure.is_met else "missed",
                    figure.how,
                ]
            )
    return rows


def choose(names: Sequence[str], op: str | None) -> list[Part]:
    """The parts that were asked for; ValueError names one that there is not."""
    if op is not None:
        unknown = [name for name in op.split(",") if name not in OPS]
        if unknown:
            raise ValueError(f"unknown ops {unknown}, expected some of {list(OPS)}")
        return [Part("kernels", "kernels", ("--op", op))]
    known = {part.name: part for part in PARTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown parts {unknown}, expected some of {list(known)}")
    if names:
        return [known[name] for name in names]
    return [part for part in PARTS if part.is_default]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named parts; return 1 if any failed or was cut off."""
    parser = argparse.ArgumentParser(
        prog="python -m pagedraft.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="by default those without a name")
    parser.add_argument("--op", default=None, help="only kernels of these ops, comma-separated")
    parser.add_argument("--out", default=None, help="folder for all files")
    options = parser.parse_args(arguments)
    try:
        parts = choose(options.parts, options.op)
    except ValueError as error:
        parser.error(str(error))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = Path(options.out) if options.out else results_folder(device)
    facts = header(device)
    print_header(facts)
    end = time.monotonic() + (math.inf if options.parts or options.op else TOTAL)
    outcomes = []
    for part in parts:
        left = end - time.monotonic()
        outcomes.append(run_part(replace(part, limit=min(part.limit, left)), folder))
    rows = judged(outcomes)
    if rows:
        headers = ("figure", "value", "p20 to p80", "target", "", "how")
        print_table("What has a target", headers, rows)
    cells = [[o.name, o.verdict, f"{o.seconds:.0f} s", str(len(o.figures))] for o in outcomes]
    print_table(f"Parts; files in {folder}", ("part", "", "time", "figures"), cells)
    document = {
        **{"bench": "all", **facts},
        "parts": [asdict(outcome) | {"figures": len(outcome.figures)} for outcome in outcomes],
        "figures": [figure.as_json() for outcome in outcomes for figure in outcome.figures],
    }
    write_json(folder / "all.json", document)
    print(json.dumps({**document, "figures": len(document["figures"])}))
    return 0 if all(outcome.verdict == "ok" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
