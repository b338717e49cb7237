"""Tiny models and what they write, for the tests of estimates."""

from __future__ import annotations

from typing import Any

from pagedraft.decoding.estimate_text import Text
from pagedraft.decoding.params import MODEL_DEFAULTS, SamplingParams, logit_rules
from pagedraft.decoding.single import generate_with_kv_cache
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.transformer import Transformer
from pagedraft.tests.model.tiny import save_tiny

PROMPT = (5, 9, 33, 7, 5, 9)
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8, "seed": 7},
    "cuts": {"temperature": 1.2, "seed": 8, "top_k": 20, "top_p": 0.9},
    "edits": {
        "temperature": 0.9,
        "seed": 9,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "logit_bias": {7: 2.0},
    },
}


def tiny(folder, **changes) -> Transformer:
    save_tiny(folder, "llama", **changes)
    with use_implementation("cpu"):
        return Transformer.from_folder(folder)


def written(model: Transformer, num_output: int = 13, **fields) -> Text:
    """What ``model`` writes after PROMPT."""
    params = SamplingParams(max_tokens=num_output, ignore_eos=True, **fields)
    ids = generate_with_kv_cache(model, list(PROMPT), len(PROMPT) + num_output, params=params)
    return Text(
        prompt_ids=PROMPT,
        output_ids=tuple(ids[len(PROMPT) :]),
        max_tokens=num_output,
        temperature=params.temperature,
        seed=params.seed or 0,
        rules=logit_rules(params, MODEL_DEFAULTS, ()),
    )
