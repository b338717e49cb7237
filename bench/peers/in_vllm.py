"""vLLM in this process, on CUDA, where it is installed beside us. Its batching is continuous."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from typing import Any

from pagedraft.bench.peers.base import (
    PeerRequest,
    PeerRun,
    PeerUnavailable,
    check_run,
    check_tokens,
)

MEMORY_SHARE = 0.4  # of the device; the model that it is compared with is there too


class VllmPeer:
    """See Peer."""

    name = "vLLM"
    modes: tuple[str, ...] = ("plain",)

    def __init__(self, request: PeerRequest) -> None:
        import vllm

        self.vllm: Any = vllm
        dtype = str(request.dtype).removeprefix("torch.")
        self.model: Any = vllm.LLM(
            model=str(request.folder),
            dtype=dtype,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            gpu_memory_utilization=MEMORY_SHARE,
        )
        self.facts: dict[str, Any] = {
            "version": vllm.__version__,
            "weights": dtype,
            "memory": f"{MEMORY_SHARE:.0%} of the device",
            "slots": "its defaults; no prefix cache",
            "eos": "picked like any token and passed",
        }

    def run(self, prompts: Sequence[list[int]], num_tokens: int, mode: str = "plain") -> PeerRun:
        """See Peer.run. It does not say when a first token came."""
        check_run(self, prompts, num_tokens, mode)
        params = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        began = time.perf_counter()
        outputs = self.model.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        check_tokens(self.name, token_ids, len(prompts), num_tokens)
        return PeerRun(token_ids, seconds, [])

    def close(self) -> None:
        """See Peer.close."""
        self.model = None


def open_peer(request: PeerRequest) -> VllmPeer:
    """Load the model; raise PeerUnavailable without CUDA or vLLM, or where vLLM cannot."""
    if request.device.type != "cuda":
        raise PeerUnavailable(f"needs a CUDA device, this run is on {request.device.type}")
    if importlib.util.find_spec("vllm") is None:
        raise PeerUnavailable("vllm is not installed in this environment")
    try:
        return VllmPeer(request)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise PeerUnavailable(f"cannot load {request.folder}: {error}") from error
