"""transformers in this process: a static batch, prompt lookup, an assistant, continuous batching.

The model has no end-of-sequence token here, so a fixed number of tokens is decoded whatever they
are. Prompt lookup and assisted decoding take one sequence: several prompts run one after another.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil
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
from pagedraft.bench.peers.environment import openmp_settings

NUM_LOOKED_UP = 8  # tokens a lookup proposes; generate has no default
PAGE_TOKENS = 256  # of continuous batching's cache, its own default
BATCH_TOKENS = 2048  # at most in one step of continuous batching; an unused one costs memory only
TIME_LIMIT = 600.0  # seconds without one finished request before a run of it is given up


class FirstToken:
    """What ``generate`` takes as streamer: notes when the first new tokens are there."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.when = float("nan")

    def put(self, token_ids: torch.Tensor) -> None:
        """Get the prompt first, then the new tokens of each step."""
        self.num_calls += 1
        if self.num_calls == 2:
            self.when = time.perf_counter()

    def end(self) -> None:
        """Nothing to flush."""


class TransformersPeer:
    """Greedy decoding of a model folder in ``dtype``; see Peer.

    threads: of torch, while it runs (None: as they are set). assistant: folder of a small model of
    the same tokenizer, for mode "assisted".
    """

    name = "transformers"

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        threads: int | None = None,
        assistant: Path | None = None,
    ) -> None:
        self.device = device
        self.threads = threads
        self.model: Any = _load(folder, dtype, device)
        self.assistant = _load(assistant, dtype, device) if assistant else None
        self.modes: tuple[str, ...] = ("plain", "lookup")
        if self.assistant is not None:
            self.modes += ("assisted",)
        if _has_continuous(self.model):
            self.modes += ("continuous",)
        self.facts = self._facts(dtype, assistant)

    def run(self, prompts: Sequence[list[int]], num_tokens: int, mode: str = "plain") -> PeerRun:
        """See Peer.run."""
        check_run(self, prompts, num_tokens, mode)
        with _threads(self.threads):
            if mode == "continuous":
                done = self._continuous(prompts, num_tokens)
            elif mode == "plain":
                done = self._static([list(prompts)], num_tokens, {})
            else:
                options = (
                    {"prompt_lookup_num_tokens": NUM_LOOKED_UP}
                    if mode == "lookup"
                    else {"assistant_model": self.assistant}
                )
                done = self._static([[prompt] for prompt in prompts], num_tokens, options)
        check_tokens(self.name, done.token_ids, len(prompts), num_tokens)
        return done

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[list[int]], num_tokens: int, **options: Any
    ) -> list[list[int]]:
        """New token ids of a static batch, padded on the left. ``options`` go to ``generate``."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        output = self.model.generate(
            ids,
            attention_mask=mask.to(self.device),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
        return output[:, width:].tolist()

    def close(self) -> None:
        """See Peer.close."""
        self.model = self.assistant = None

    def _static(
        self, batches: Sequence[list[list[int]]], num_tokens: int, options: dict[str, Any]
    ) -> PeerRun:
        """One ``generate`` a batch, one after another; a batch's first tokens come together."""
        token_ids: list[list[int]] = []
        first_seconds: list[float] = []
        began = time.perf_counter()
        for batch in batches:
            first = FirstToken()
            token_ids += self.generate(batch, num_tokens, streamer=first, **options)
            first_seconds += [first.when - began] * len(batch)
        return PeerRun(token_ids, time.perf_counter() - began, first_seconds)

    @torch.inference_mode()
    def _continuous(self, prompts: Sequence[list[int]], num_tokens: int) -> PeerRun:
        """All requests at once into a manager that has been started before the clock is."""
        from transformers import GenerationConfig
        from transformers.generation import ContinuousBatchingConfig

        pages = sum(ceil((len(prompt) + num_tokens) / PAGE_TOKENS) + 1 for prompt in prompts)
        with self.model.continuous_batching_context_manager(
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=num_tokens, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=pages,
                max_batch_tokens=BATCH_TOKENS,
                max_requests_per_batch=len(prompts),
                allow_block_sharing=False,
            ),
            timeout=TIME_LIMIT,
        ) as manager:
            began = time.perf_counter()
            names = manager.add_requests(
                list(prompts), max_new_tokens=num_tokens, record_timestamps=True
            )
            results = _finished(manager, len(prompts))
            seconds = time.perf_counter() - began
        ordered = [results[name] for name in names]
        return PeerRun(
            [list(result.generated_tokens) for result in ordered],
            seconds,
            [result.timestamps[0] - began for result in ordered],
        )

    def _facts(self, dtype: torch.dtype, assistant: Path | None) -> dict[str, Any]:
        import transformers

        facts: dict[str, Any] = {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "weights": str(dtype).removeprefix("torch."),
            "threads": self.threads or torch.get_num_threads(),
            "openmp": openmp_settings(),
            "attention": getattr(self.model.config, "_attn_implementation", "unknown"),
            "eos": "picked like any token and passed",
            "lookup": f"{NUM_LOOKED_UP} tokens, prompts one after another",
        }
        if assistant is not None:
            facts["assisted"] = f"{assistant.name}, generate's defaults, prompts one after another"
        if "continuous" not in self.modes:
            facts["continuous"] = "this version has no continuous batching"
        return facts


def open_peer(request: PeerRequest) -> TransformersPeer:
    """Load the model; raise PeerUnavailable where transformers cannot."""
    try:
        return TransformersPeer(
            request.folder, request.dtype, request.device, request.threads, request.assistant
        )
    except (ImportError, OSError, ValueError) as error:
        raise PeerUnavailable(f"cannot load {request.folder}: {error}") from error


def _load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    finally:
        if was_shown:
            logging.enable_progress_bar()
    model.generation_config.eos_token_id = None
    return model.to(device).eval()


def _has_continuous(model: Any) -> bool:
    """Whether this transformers has the continuous batching that is called here (since 5.17)."""
    try:
        from transformers.generation import ContinuousBatchingConfig
    except ImportError:
        return False
    settings = inspect.signature(ContinuousBatchingConfig).parameters
    return hasattr(model, "continuous_batching_context_manager") and "page_size" in settings


def _finished(manager: Any, num_requests: int) -> dict[str, Any]:
    """Wait for every request; raise PeerFailed when one fails, or the manager ends or hangs."""
    results: dict[str, Any] = {}
    last = time.monotonic()
    while len(results) < num_requests:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise PeerFailed(f"transformers: continuous batching: {result.error}")
            results[result.request_id] = result
            last = time.monotonic()
        elif not manager.is_running():
            raise PeerFailed("transformers: continuous batching ended before its requests did")
        elif time.monotonic() - last > TIME_LIMIT:
            raise PeerFailed(f"transformers: no request finished in {TIME_LIMIT:.0f} s")
    return results


@contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    """Set torch's number of threads for a while; None leaves it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
