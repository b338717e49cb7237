"""What a draft learns from: texts with what the target thought at every token that it wrote.

A teacher's distribution is not stored, only what the head makes it of: the hidden state, two bytes
a feature in place of four a token of the vocabulary, and the log-sum-exp of the logits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

FORMAT = "pagedraft taught texts 2"


@dataclass(frozen=True, eq=False)
class Taught:
    """A prompt and its continuation of N tokens, which the target has read.

    token_ids: int32 [num_prompt + N] on the CPU.
    states_NE: fp16, on the CPU; after the final norm. Row i predicts token num_prompt + i. In bf16
        they would move probabilities by some percent.
    lse_N: fp32, log-sum-exp of the target's logits there.
    kind, source: of the prompt. temperature: the continuation was drawn at.
    before_PE: fp16, states at the prompt's tokens but the last [num_prompt - 1, E]; before_lse_P:
        fp32, the log-sum-exp there. Both or none.
    """

    token_ids: torch.Tensor
    num_prompt: int
    states_NE: torch.Tensor
    lse_N: torch.Tensor
    kind: str
    source: str
    temperature: float
    before_PE: torch.Tensor | None = None
    before_lse_P: torch.Tensor | None = None

    def __post_init__(self) -> None:
        num_output = len(self.token_ids) - self.num_prompt
        if self.num_prompt < 1 or num_output < 1:
            raise ValueError(
                f"taught text: expected a prompt and a continuation, got {self.num_prompt} of "
                f"{len(self.token_ids)} tokens"
            )
        if len(self.states_NE) != num_output or self.lse_N.shape != (num_output,):
            raise ValueError(
                f"taught text: expected states of {num_output} tokens, got "
                f"{tuple(self.states_NE.shape)} and {tuple(self.lse_N.shape)}"
            )
        befores = [0 if rows is None else len(rows) for rows in (self.before_PE, self.before_lse_P)]
        if (self.before_PE is None) != (self.before_lse_P is None) or (
            self.before_PE is not None and befores != 2 * [self.num_prompt - 1]
        ):
            raise ValueError(
                f"taught text: expected states and log-sum-exp of {self.num_prompt - 1} tokens of "
                f"the prompt, or neither, got {befores}"
            )

    @property
    def num_output(self) -> int:
        """N."""
        return len(self.lse_N)

    @property
    def before(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """States and log-sum-exp at the prompt's tokens but the last, if they are known."""
        if self.before_PE is None or self.before_lse_P is None:
            return None
        return self.before_PE, self.before_lse_P

    @property
    def output_ids(self) -> torch.Tensor:
        """The continuation [N]."""
        return self.token_ids[self.num_prompt :]


def num_output_tokens(texts: Sequence[Taught]) -> int:
    """Tokens that the target wrote in them."""
    return sum(text.num_output for text in texts)


def save_taught(file: str | Path, texts: Sequence[Taught]) -> None:
    """Write texts to one safetensors file, whole or not at all."""
    if not texts:
        raise ValueError(f"{file}: expected at least one text to save, got none")
    file = Path(file)
    rows = [
        [len(text.token_ids), text.num_prompt, text.kind, text.source, text.temperature]
        for text in texts
    ]
    tensors = {
        "token_ids": torch.cat([text.token_ids for text in texts]),
        "states": torch.cat([text.states_NE for text in texts]),
        "lse": torch.cat([text.lse_N for text in texts]),
    }
    befores = [text.before for text in texts if text.before is not None]
    if befores:
        if len(befores) < len(texts):
            raise ValueError(f"{file}: expected states of prompts for all texts or for none")
        tensors["before"] = torch.cat([states_PE for states_PE, _ in befores])
        tensors["before_lse"] = torch.cat([lse_P for _, lse_P in befores])
    write_tensors(file, tensors, {"format": FORMAT, "texts": json.dumps(rows)})


def write_tensors(
    file: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file, whole or not at all; OSError names it where that fails."""
    file = Path(file)
    part = file.with_name(file.name + ".part")
    try:
        save_file(dict(tensors), part, metadata=dict(metadata))
    except SafetensorError as error:
        part.unlink(missing_ok=True)
        raise OSError(f"{file}: cannot be written: {error}") from None
    part.replace(file)


def load_taught(file: str | Path) -> list[Taught]:
    """Read what ``save_taught`` wrote; ValueError names a file that is damaged or something else"""
    try:
        with safe_open(str(file), "pt") as opened:
            metadata = opened.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{file}: expected taught texts, got another file")
            names = ("token_ids", "states", "lse")
            token_ids, states, lse = (opened.get_tensor(name) for name in names)
            before, before_lse = (
                opened.get_tensor(name) if name in opened.keys() else None  # noqa: SIM118
                for name in ("before", "before_lse")
            )
        rows = json.loads(metadata["texts"])
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: cannot be read: {error}; remove it, and go on without") from None
    texts = []
    first_token = first_state = first_before = 0
    for length, num_prompt, kind, source, temperature in rows:
        last_before = first_before + num_prompt - 1
        last_token, last_state = first_token + length, first_state + length - num_prompt
        texts.append(
            Taught(
                token_ids[first_token:last_token],
                num_prompt,
                states[first_state:last_state],
                lse[first_state:last_state],
                kind,
                source,
                temperature,
                None if before is None else before[first_before:last_before],
                None if before_lse is None else before_lse[first_before:last_before],
            )
        )
        first_before = last_before
        first_token, first_state = last_token, last_state
    return texts
