"""Where and when a measurement was made, and where its JSON goes."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def device_name(device: torch.device) -> str:
    """Return the GPU's or the processor's model name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        cpu_info = Path("/proc/cpuinfo").read_text()
    except OSError:
        cpu_info = ""
    match = re.search(r"^model name\s*:\s*(.+)$", cpu_info, re.MULTILINE)
    return match.group(1) if match else platform.machine()


def results_folder(device: torch.device) -> Path:
    """Return ``bench/results/<device>``, the device's name in lower case with dashes."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    return RESULTS / slug


def header(device: torch.device) -> dict[str, Any]:
    """Return device, clocks, versions, git sha and date."""
    facts: dict[str, Any] = {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "git": _git_sha(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    if device.type == "cuda":
        facts["clocks"] = _output(
            *("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,clocks.max.sm", "--format=csv")
        ).replace("\n", "; ")
    return facts


def print_header(facts: dict[str, Any]) -> None:
    """Print the header's facts, one a line."""
    for name, value in facts.items():
        print(f"{name:>8}  {value}")


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write ``document`` to ``path``, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def _git_sha() -> str:
    sha = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    is_dirty = bool(_output("git", "-C", str(ROOT), "status", "--porcelain", "-uno"))
    return (sha + ("-dirty" if is_dirty else "")) or "unknown"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
