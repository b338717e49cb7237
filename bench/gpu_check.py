"""Check and first timings of a CUDA machine: what ``bench/gpu_check.sh`` (``make gpu-check``) runs.

Parts are child processes with a time limit each, in stages: what is timed runs alone, what matters
most first; the checks of exactness, most of whose time is compilation, run at once and last. A part
that fails does not stop the others, and one that runs out of time keeps what it has written. Logs,
JSON and charts go to ``$OUT`` if set, else to ``bench/results/<device>/``. The verdict comes last:
exit status 1 if any part failed; a missed target of speed is printed and fails nothing. With
``DRY=1`` the same parts run tiny on the CPU, in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from pagedraft.bench.figures import as_json
from pagedraft.bench.gpu_checks import DEVICE, DRY
from pagedraft.bench.gpu_verdict import Judged, judge, report, summary
from pagedraft.bench.report import ROOT, header, print_header, results_folder, write_json

TAIL_LINES = 30
GRACE = 3.0  # seconds that an interrupted part has to say what it found
TEST_WORKERS = 10
DRY_LIMIT = 300.0  # a part takes seconds, on a machine that has them


@dataclass(frozen=True)
class Part:
    """One child process: its command and how many seconds it may take."""

    name: str
    command: list[str]
    limit: float


@dataclass(frozen=True)
class Outcome:
    """How a part ended: "ok", "FAILED" or "OUT OF TIME"; ``note`` is its last line of output."""

    name: str
    verdict: str
    seconds: float
    note: str


def stages(folder: Path) -> list[list[Part]]:
    """Return the parts, those of a stage to run at once; all together stay under 8 minutes."""
    python = sys.executable
    checks = [python, "-m", "pagedraft.bench.gpu_checks"]
    limit = DRY_LIMIT if DRY else 135
    return [
        *([part] for part in _timed_parts(folder)),
        [
            Part("tests", _tests(python), limit),
            *(Part(name, [*checks, name], limit) for name in ("rows", "engine", "warm")),
        ],
    ]


def _tests(python: str) -> list[str]:
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    if DRY:
        return [*command, "tests/kernels/test_rms_norm.py", "-k", "no_tokens or power"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(min(TEST_WORKERS, os.cpu_count() or 1))]
    return [*command, "tests/kernels"]


def _timed_parts(folder: Path) -> list[Part]:
    """The benches. ``compile`` fills Triton's cache for the two after it."""
    module = [sys.executable, "-m"]
    real = [*module, "pagedraft.bench.real_sizes", "--out", str(folder)]
    bench = [*module, "pagedraft.bench.kernels", "--out", str(folder)]
    sweep = [*bench, "--sweep", "attention", "--baselines", "sdpa"]
    if DRY:
        # Some hundred passes, each half a second in the interpreter: these run the CPU kernels.
        real = ["env", "TRITON_INTERPRET=0", *real, "--device", "cpu", "--models", "tiny"]
        bench += ["--device", "cpu", "--model", "tiny", "--dtype", "fp32", "--budget", "0.01"]
        bench += ["--steps", "decode1", "--op", "rms_norm,gated_mlp"]
        sweep += ["--device", "cpu", "--select", "trial", "--budget", "0.01"]
        parts = {"tiny": real, "bench": bench, "attention": sweep}
        return [Part(name, command, DRY_LIMIT) for name, command in parts.items()]
    bench += ["--device", "cuda", "--model", "8b", "--dtype", "bf16", "--budget", "0.1"]
    bench += ["--steps", "decode1,verify1,prefill,verify8"]
    sweep += ["--device", "cuda", "--select", "short", "--budget", "0.1", "--limit", "28"]
    one = [*real, "--workers", "0", "--models"]
    return [
        Part("compile", [*real, "--models", "8b,1b", "--compile-only"], 65),
        Part("8b", [*one, "8b", "--limit", "85"], 105),
        Part("1b", [*one, "1b", "--limit", "42"], 60),
        Part("bench", bench, 50),
        Part("attention", sweep, 40),
    ]


def run_stage(parts: Sequence[Part], folder: Path) -> list[Outcome]:
    """Run the parts of a stage at once; print the end of each one's output."""
    for part in parts:
        print(f"\n=== {part.name}: {' '.join(part.command[1:])} (limit {part.limit:.0f} s)")
    sys.stdout.flush()
    with ThreadPoolExecutor(len(parts)) as pool:
        outcomes = list(pool.map(partial(run_part, folder=folder), parts))
    for part in parts:
        print(f"\n--- {part.name}", *_lines(part, folder)[-TAIL_LINES:], sep="\n")
    return outcomes


def run_part(part: Part, folder: Path) -> Outcome:
    """Run one part, keep its output in ``gpu_check-<part>.log``."""
    start = time.monotonic()
    with _log(part, folder).open("w") as log:
        process = subprocess.Popen(
            part.command,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # else ignored in "&"
        )
        try:
            verdict = "ok" if process.wait(part.limit) == 0 else "FAILED"
        except subprocess.TimeoutExpired:
            _end(process)
            verdict = "OUT OF TIME"
    lines = _lines(part, folder)
    note = lines[-1][:160] if lines else ""
    return Outcome(part.name, verdict, time.monotonic() - start, note)


def _end(process: subprocess.Popen) -> None:
    """Interrupt a part, so that pytest names the tests that failed; then kill all that is left."""
    os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _log(part: Part, folder: Path) -> Path:
    return folder / f"gpu_check-{part.name}.log"


def _lines(part: Part, folder: Path) -> list[str]:
    """What it printed, without empty lines."""
    text = _log(part, folder).read_text(errors="replace")
    return [line for line in text.splitlines() if line.strip()]


def print_verdict(outcomes: Sequence[Outcome], judged: Sequence[Judged], device: str) -> int:
    """Print how the parts ended, the targets, and all of it in one line; return the status."""
    for outcome in outcomes:
        print(f"{outcome.name:10} {outcome.verdict:12} {outcome.seconds:4.0f} s  {outcome.note}")
    print("\n".join(report(judged, device)))
    bad = [outcome.name for outcome in outcomes if outcome.verdict != "ok"]
    verdict = f"FAILED {', '.join(bad)}" if bad else "ok"
    print(f"VERDICT: {verdict}; {'a dry run measures nothing' if DRY else summary(judged)}")
    return 1 if bad else 0


def main() -> int:
    """Run all parts and print the verdict last."""
    if not DRY and not torch.cuda.is_available():
        print("gpu-check: no CUDA device (DRY=1 tries the script on the CPU)")
        return 1
    start = time.time()
    own_folder = ROOT / "build" / "gpu-check-dry" if DRY else results_folder(DEVICE)
    folder = Path(os.environ.get("OUT") or own_folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    facts = header(DEVICE)
    print_header(facts)
    outcomes: list[Outcome] = []
    for stage in stages(folder):
        outcomes += run_stage(stage, folder)
        judged = judge(folder, since=start)
        document = {"bench": "gpu_check", **facts, "dry": DRY}
        document |= {"parts": [asdict(outcome) for outcome in outcomes]}
        document["targets"] = [one.text() for one in judged]
        document["figures"] = as_json([one.figure() for one in judged if one.value is not None])
        write_json(folder / "gpu_check.json", document)
    print(f"\n=== gpu-check on {facts['device']}, {time.time() - start:.0f} s, {folder}")
    return print_verdict(outcomes, judged, facts["device"])


if __name__ == "__main__":
    sys.exit(main())
