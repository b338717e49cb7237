"""The model of a safetensors folder as one GGUF file, made once by llama.cpp's own converter."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from pagedraft.bench.peers.base import PeerUnavailable
from pagedraft.bench.report import ROOT

FOLDER = ROOT / "build" / "gguf"
OUT_TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
HOW_RUN: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 1800.0}


def gguf_file(
    folder: Path, dtype: torch.dtype, converter: Path, *, cache: Path | None = None
) -> Path:
    """Return the GGUF file of ``folder`` with matrices in ``dtype``, converting where it is not.

    The name holds a digest of the folder's configuration, tokenizer and the sizes and times of its
    weights, so changed weights are converted anew. The file appears by one rename when it is whole.
    Raises PeerUnavailable with what the converter said.
    """
    if dtype not in OUT_TYPES:
        raise PeerUnavailable(f"GGUF: expected a dtype of {list(OUT_TYPES)}, got {dtype}")
    out_type = OUT_TYPES[dtype]
    file = (cache or FOLDER) / f"{folder.name}-{_digest(folder, converter)}-{out_type}.gguf"
    if file.is_file():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    command = [sys.executable, str(converter), str(folder), "--outtype", out_type]
    command += ["--outfile", str(partial)]
    try:
        done = subprocess.run(command, env=_environment(converter), **HOW_RUN)
        if done.returncode != 0 or not partial.is_file():
            lines = done.stderr.strip().splitlines() or ["nothing"]
            raise PeerUnavailable(
                f"{converter.name}: status {done.returncode} for {folder.name}; it said "
                + " | ".join(lines[-3:])
            )
        partial.rename(file)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailable(f"{converter.name}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return file


def _environment(converter: Path) -> dict[str, str]:
    """The converter runs on our torch and transformers; what else it needs lies where it does."""
    folders = [path for path in converter.parents if path.name == "site-packages"][:1]
    before = os.environ.get("PYTHONPATH")
    paths = [*map(str, folders), *([before] if before else [])]
    return {**os.environ, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}


def _digest(folder: Path, converter: Path) -> str:
    """12 hex digits that change with the folder's files and with the converter's."""
    digest = hashlib.sha256(str(converter.stat().st_mtime_ns).encode())
    for path in sorted(folder.iterdir()):
        if path.suffix == ".json":
            digest.update(path.read_bytes())
        elif path.suffix == ".safetensors":
            stat = path.stat()
            digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:12]
