"""A tiny model and a tokenizer of single characters for the tests of the quality bench."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pagedraft.bench import quality_choice
from pagedraft.bench.quality_modes import Mode, Source
from pagedraft.bench.quality_probe import Probe
from pagedraft.bench.quality_tasks import Choice, parse
from pagedraft.decoding.params import SamplingParams
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.model.packers import SIZES
from pagedraft.tests.model.tiny import save_tiny

FIRST, FIRST_ID, NUM_CHARACTERS = ord(" "), 3, 94
DAMAGED = Mode("damaged")
NUM_TOKENS, NUM_TASKS = 200, 40


class Characters:
    """A tokenizer: ids 3 to 96 are the ASCII characters from the space on."""

    def __init__(self, chat_template: str | None = "[...]") -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [FIRST_ID + (ord(char) - FIRST) % NUM_CHARACTERS for char in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(FIRST + token - FIRST_ID) for token in token_ids if token >= FIRST_ID)

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"[{message['content']}]" for message in messages)


def save(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Save the tiny model and return transformers' one; long prompts fit."""
    sizes = {**SIZES, "max_position_embeddings": 2048}
    return save_tiny(folder, "llama-tied", dtype=dtype, **sizes)


class DamagedSource(Source):
    """A Source whose mode ``DAMAGED`` has the inputs of its layers' last products scrambled."""

    def model(self, mode: Mode) -> tuple[Transformer, str]:
        if mode != DAMAGED:
            return super().model(mode)
        weights = dict(self.weights)
        order = torch.randperm(
            SIZES["intermediate_size"], generator=torch.Generator().manual_seed(0)
        )
        for name in [name for name in weights if name.endswith(".down")]:
            weights[name] = weights[name][:, order].contiguous()
        return super(DamagedSource, replace(self, weights=weights)).model(mode)


def own_text(model: Transformer) -> list[int]:
    """Tokens that the model itself draws: nothing else is likely to a random model."""
    llm = LLM(model, speculate="off", kv_tokens=512)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=0, ignore_eos=True)
    [completion] = llm.generate([[1]], params)
    return [1, *completion.token_ids]


def own_choices(model: Transformer) -> list[Choice]:
    """Choices among four characters, of which the right one is the model's."""
    numbers = torch.Generator().manual_seed(1)
    text = Characters().decode(
        torch.randint(3, 97, (NUM_TASKS, 6), generator=numbers).flatten().tolist()
    )
    tasks = [
        Choice(f"own-{i}", "own", text[6 * i : 6 * i + 6], ("a", "Q", "7", "xy"), 0)
        for i in range(NUM_TASKS)
    ]
    scores = quality_choice.option_scores(model, tasks, Characters().encode, model.activation_dtype)
    return [
        replace(task, answer=int(values.argmax()))
        for task, values in zip(tasks, scores, strict=True)
    ]


def own_probe(model: Transformer, num_new: int = 8) -> Probe:
    """A probe at which the model itself is good."""
    tasks = [
        *own_choices(model),
        parse({"id": "w", "group": "word", "context": "one two", "words": ["three"]}),
        parse({"id": "o", "group": "order", "ask": "say x", "pattern": "(?s)."}),
    ]
    numbers = torch.Generator().manual_seed(2)
    prompt_ids = torch.randint(3, 97, (6, 12), generator=numbers).tolist()
    return Probe(own_text(model), NUM_TOKENS, prompt_ids, num_new, tasks, Characters())
