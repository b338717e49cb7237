"""OpenVINO GenAI, in a child process of the environment that has it, on a GGUF file.

It reads GGUF itself, but not bf16: such weights are given to it as fp16. Its batching is
continuous, so mode "plain" is that here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pagedraft.bench.peers.base import (
    PeerFailed,
    PeerRequest,
    PeerRun,
    PeerUnavailable,
    check_run,
    check_tokens,
)
from pagedraft.bench.peers.child import Child
from pagedraft.bench.peers.environment import find_converter, find_python, openmp_settings
from pagedraft.bench.peers.gguf_file import OUT_TYPES, gguf_file

PROGRAM = Path(__file__).with_name("openvino_child.py")
START_LIMIT = 300.0  # seconds until the model must be loaded and compiled
ANSWER_LIMIT = 600.0  # seconds until every prompt of a call must be answered; may load anew


class OpenVinoPeer:
    """See Peer. ``model`` is a GGUF file; ``weights`` describes them; ``kv_type`` of the cache.

    start_limit, answer_limit: seconds for the process to come up, and for a run.
    """

    name = "OpenVINO GenAI"
    modes: tuple[str, ...] = ("plain", "lookup")

    def __init__(
        self,
        python: Path,
        model: Path,
        threads: int,
        weights: str,
        kv_type: str,
        *,
        start_limit: float = START_LIMIT,
        answer_limit: float = ANSWER_LIMIT,
    ) -> None:
        self.command = [str(python), "-P", str(PROGRAM), str(model), str(threads), kv_type]
        self.start_limit, self.answer_limit = start_limit, answer_limit
        self.child: Child | None = None
        self.facts: dict[str, Any] = self._start()
        self.facts |= {
            "weights": weights,
            "threads": threads,
            "openmp": openmp_settings(),
            "eos": "picked like any token and passed",
        }

    def run(self, prompts: Sequence[list[int]], num_tokens: int, mode: str = "plain") -> PeerRun:
        """See Peer.run. The child keeps the clock: its pipe and JSON are not in the times."""
        check_run(self, prompts, num_tokens, mode)
        if self.child is None:
            self._start()
        question = {"prompts": list(prompts), "num_tokens": num_tokens, "mode": mode}
        try:
            answer = self._ask(question, self.answer_limit)
            run = PeerRun(answer["token_ids"], answer["seconds"], answer["first_seconds"])
            check_tokens(self.name, run.token_ids, len(prompts), num_tokens)
        except KeyError as error:
            self.close()
            raise PeerFailed(f"{self.name}: expected {error} in {str(answer)[:200]}") from None
        except PeerFailed:
            self.close()  # whatever state it is in: the next run gets a new one
            raise
        return run

    def close(self) -> None:
        """See Peer.close."""
        if self.child is not None:
            self.child.close()
            self.child = None

    def _start(self) -> dict[str, Any]:
        """Start the child and return its facts."""
        self.child = Child(self.command, has_pipes=True)
        try:
            return self._ask(None, self.start_limit)
        except PeerFailed:
            self.close()
            raise

    def _ask(self, question: dict[str, Any] | None, limit: float) -> dict[str, Any]:
        assert self.child is not None
        answer = self.child.exchange(question, limit)
        if "error" in answer:
            raise PeerFailed(f"{self.name}: {answer['error']}")
        return answer


def open_peer(request: PeerRequest) -> OpenVinoPeer:
    """Make the GGUF file and load it in a child process."""
    if request.device.type != "cpu":
        raise PeerUnavailable("is compared on the CPU only")
    python = find_python(request)
    dtype = torch.float16 if request.dtype == torch.bfloat16 else request.dtype
    model = gguf_file(request.folder, dtype, find_converter(request))
    weights = OUT_TYPES[dtype]
    if dtype != request.dtype:
        weights += ", of bf16: the same numbers but for those below 6e-8"
    return OpenVinoPeer(python, model, request.threads, weights, OUT_TYPES[request.dtype])
