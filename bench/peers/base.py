"""What the engine bench needs of another engine, and how the ones that run here are opened.

A peer is opened by its module's ``open_peer(request)``, which raises PeerUnavailable with the
reason where it cannot run. Modules are imported only when asked for: none needs another's packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

MODES = ("plain", "lookup", "assisted", "continuous")
MODULES = {
    "transformers": "pagedraft.bench.peers.in_transformers",
    "llama.cpp": "pagedraft.bench.peers.in_llama_cpp",
    "OpenVINO GenAI": "pagedraft.bench.peers.in_openvino",
    "vLLM": "pagedraft.bench.peers.in_vllm",
}


class PeerUnavailable(Exception):
    """A peer does not run here; the message is the reason, for a reader of the table."""


class PeerFailed(RuntimeError):
    """A peer was opened and then broke: died, hung, or answered what was not asked."""


@dataclass(frozen=True)
class PeerRun:
    """One call of a peer.

    token_ids: the new tokens of each prompt. seconds: wall time of the whole call.
    first_seconds: to each prompt's first token; empty where the peer cannot say.
    """

    token_ids: list[list[int]]
    seconds: float
    first_seconds: list[float]


class Peer(Protocol):
    """Another engine with a model loaded.

    name: a key of MODULES. modes: those of MODES that it can run.
    facts: JSON-ready; version, dtype of weights, threads, server settings and whatever else a
    reader must know to judge its numbers.
    """

    name: str
    modes: tuple[str, ...]
    facts: dict[str, Any]

    def run(self, prompts: Sequence[list[int]], num_tokens: int, mode: str = "plain") -> PeerRun:
        """Decode greedily, EOS ignored: exactly ``num_tokens`` new tokens for each prompt.

        ``prompts`` are token ids; several are decoded at once. Raises ValueError for a mode that
        is not in ``modes``, no prompts, an empty prompt or ``num_tokens`` < 1, and PeerFailed.
        """
        ...

    def close(self) -> None:
        """Free the model and end the peer's processes. A second call does nothing."""
        ...


@dataclass(frozen=True)
class PeerRequest:
    """What a peer is opened with.

    python: interpreter of the environment of ``make bench-peers``, or None for where that makes it.
    llama_server: the program to run, or None for one on PATH or in that environment.
    assistant: folder of a small model of the same tokenizer for mode "assisted", or None.
    """

    folder: Path
    dtype: torch.dtype
    device: torch.device
    threads: int
    python: Path | None = None
    llama_server: Path | None = None
    assistant: Path | None = None


def open_peers(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
    *,
    python: Path | None = None,
    llama_server: Path | None = None,
    assistant: Path | None = None,
    only: Sequence[str] | None = None,
) -> tuple[list[Peer], dict[str, str]]:
    """Open the peers that run here; return them, and for each other one why it does not.

    Raises ValueError for a name in ``only`` that is none of MODULES, or ``threads`` < 1.
    """
    unknown = sorted(set(only or ()) - set(MODULES))
    if unknown:
        raise ValueError(f"only: expected names of {list(MODULES)}, got {unknown}")
    if threads < 1:
        raise ValueError(f"threads: expected at least 1, got {threads}")
    request = PeerRequest(folder, dtype, device, threads, python, llama_server, assistant)
    peers: list[Peer] = []
    reasons: dict[str, str] = {}
    try:
        for name, module in MODULES.items():
            if only is not None and name not in only:
                reasons[name] = "not asked for"
                continue
            try:
                peers.append(import_module(module).open_peer(request))
            except (PeerUnavailable, PeerFailed) as error:
                reasons[name] = str(error)
    except BaseException:
        close_peers(peers)
        raise
    return peers, reasons


def close_peers(peers: Sequence[Peer]) -> None:
    """Close every peer, also where closing one fails; then raise the first failure."""
    errors = []
    for peer in peers:
        try:
            peer.close()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def check_run(peer: Peer, prompts: Sequence[list[int]], num_tokens: int, mode: str) -> None:
    """Raise ValueError for arguments of ``Peer.run`` that ask for nothing or for what is not."""
    if mode not in peer.modes:
        raise ValueError(f"{peer.name}: mode: expected one of {peer.modes}, got {mode!r}")
    if not prompts:
        raise ValueError(f"{peer.name}: prompts: expected at least one, got none")
    empty = [index for index, prompt in enumerate(prompts) if not prompt]
    if empty:
        raise ValueError(f"{peer.name}: prompts: expected token ids in each, got none in {empty}")
    if num_tokens < 1:
        raise ValueError(f"{peer.name}: num_tokens: expected at least 1, got {num_tokens}")


def check_tokens(name: str, token_ids: Sequence[list[int]], rows: int, num_tokens: int) -> None:
    """Raise PeerFailed unless there are ``num_tokens`` tokens for each of ``rows`` prompts."""
    counts = [len(tokens) for tokens in token_ids]
    if counts != [num_tokens] * rows:
        raise PeerFailed(f"{name}: expected {num_tokens} tokens for {rows} prompts, got {counts}")
