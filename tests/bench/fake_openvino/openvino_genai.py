"""Stands in for OpenVINO GenAI: a token of each request a step, and ways to break (FAKE_OPENVINO).

A request's token number i is (sum of its prompt + i) % 97; two a step under prompt lookup.
"""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace

__version__ = "0.0-fake"
FAULT = os.environ.get("FAKE_OPENVINO", "")
STEP_SECONDS = 0.02
GenerationConfig = SimpleNamespace
SchedulerConfig = SimpleNamespace

if FAULT == "absent":
    raise ImportError("libopenvino_genai.so is missing")


class Handle:
    """A request: tokens wait to be read."""

    def __init__(self, prompt, config) -> None:
        self.start, self.limit, self.made, self.told = (
            int(prompt.sum()),
            config.max_new_tokens,
            0,
            0,
        )

    def can_read(self) -> bool:
        return self.told < self.made

    def read(self):
        ids = [(self.start + index) % 97 for index in range(self.told, self.made)]
        self.told = self.made
        return {0: SimpleNamespace(generated_ids=ids)}


class ContinuousBatchingPipeline:
    """Runs the requests that were added."""

    def __init__(self, model, scheduler, device, properties) -> None:
        print("a library prints to the standard output")
        if scheduler.enable_prefix_caching or device != "CPU":
            sys.exit("expected no prefix caching on the CPU")
        self.speed = 2 if properties.get("prompt_lookup") else 1
        self.open: list[Handle] = []

    def add_request(self, number, tensor, config) -> Handle:
        if not config.ignore_eos or config.do_sample:
            raise ValueError("expected greedy decoding past EOS")
        handle = Handle(tensor.data, config)
        self.open.append(handle)
        return handle

    def has_non_finished_requests(self) -> bool:
        return bool(self.open)

    def step(self) -> None:
        if FAULT == "raises":
            raise RuntimeError("cache is too small")
        if FAULT == "hangs":
            time.sleep(60)
        if FAULT == "crashes":
            os._exit(11)
        time.sleep(STEP_SECONDS)
        for handle in self.open:
            handle.made = min(handle.made + self.speed, handle.limit)
        self.open = [handle for handle in self.open if handle.made < handle.limit]
        if FAULT == "short":
            self.open = []
