"""Token ids of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagedraft.decoding.distill.prompt import Prompt
from pagedraft.decoding.load import check_text, encode


@dataclass(frozen=True)
class Encoded:
    """A prompt and the tokens that the target reads; at least one token."""

    prompt: Prompt
    token_ids: tuple[int, ...]


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Any, max_tokens: int = 512
) -> list[Encoded]:
    """The prompts as tokens, at most ``max_tokens`` each, in their order.

    Chat goes through the tokenizer's template, where it has one, and ends where an answer begins:
    to be cut, the message loses its end, never the template. Other text is cut at the end. Prompts
    without text or tokens are left out, and those whose tokens equal an earlier one's. Raises
    ValueError, naming the prompt, where the template and the history alone are longer.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens: expected at least 1, got {max_tokens}")
    if tokenizer is None:
        raise ValueError("tokenizer: expected one to encode prompts with, got None")
    found: dict[tuple[int, ...], Encoded] = {}
    for index, prompt in enumerate(prompts):
        if not prompt.text.strip():
            continue
        try:
            token_ids = tuple(_token_ids(prompt, tokenizer, max_tokens))
        except ValueError as error:
            raise ValueError(f"prompts[{index}] of {prompt.source}: {error}") from error
        if token_ids:
            found.setdefault(token_ids, Encoded(prompt, token_ids))
    return list(found.values())


def _token_ids(prompt: Prompt, tokenizer: Any, max_tokens: int) -> list[int]:
    check_text(prompt.text)
    if not prompt.is_chat or tokenizer.chat_template is None:
        told = "\n\n".join([*(content for _, content in prompt.history), prompt.text])
        return encode(told, tokenizer)[:max_tokens]
    text = prompt.text
    token_ids = _chat_ids(prompt, text, tokenizer)
    while len(token_ids) > max_tokens and text:
        text = _shortened(text, len(token_ids) - max_tokens, tokenizer)
        token_ids = _chat_ids(prompt, text, tokenizer)
    if not text:
        raise ValueError(f"expected room for its text in max_tokens, got {max_tokens}")
    return token_ids


def _chat_ids(prompt: Prompt, text: str, tokenizer: Any) -> list[int]:
    messages = [{"role": role, "content": content} for role, content in prompt.history]
    messages.append({"role": "user", "content": text})
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    check_text(chat)
    return list(tokenizer.encode(chat, add_special_tokens=False))


def _shortened(text: str, num_tokens: int, tokenizer: Any) -> str:
    """The text without (about) its last ``num_tokens`` tokens; always shorter than it was."""
    kept = list(tokenizer.encode(text, add_special_tokens=False))[:-num_tokens]
    shorter = tokenizer.decode(kept).rstrip("\ufffd \n")
    return shorter if len(shorter) < len(text) else text[:-1]
