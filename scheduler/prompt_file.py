"""Reading prompts from a text file: one prompt a line, or JSON lines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXPECTED = '"prompt" (text or token ids) or "messages" (a list of {"role", "content"})'


@dataclass(frozen=True)
class Prompt:
    """One prompt and where it comes from, for error messages.

    content: text, token ids, or a conversation.
    """

    source: str
    content: str | list[int] | list[dict[str, str]]


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of a file; blank lines are skipped.

    A file whose first line with text is a JSON object, or whose name ends in .jsonl or .json, holds
    JSON lines, each with "prompt" or "messages"; every line of another file is a prompt. Raises
    ValueError, naming file and line, for what is neither, and for a file without prompts.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"prompts: {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text: {error}") from error
    numbered = [(n, line.strip()) for n, line in enumerate(text.split("\n"), start=1)]
    lines = [(f"{path}:{n}", line) for n, line in numbered if line]
    if not lines:
        raise ValueError(f"{path}: expected a prompt on some line, got none")
    is_json = Path(path).suffix in (".jsonl", ".json")
    if not is_json and not _is_object(lines[0][1]):
        return [Prompt(source, line) for source, line in lines]
    return [Prompt(source, _content(source, line)) for source, line in lines]


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except json.JSONDecodeError:
        return False


def _content(source: str, line: str) -> Any:
    if not _is_object(line):
        raise ValueError(f"{source}: expected a JSON object with {EXPECTED}, got {_short(line)}")
    fields = json.loads(line)
    prompt, messages = fields.get("prompt"), fields.get("messages")
    is_text = isinstance(prompt, str) and bool(prompt.strip())
    if messages is None and (is_text or _are_ids(prompt)):
        return prompt
    if prompt is None and _are_messages(messages):
        return messages
    raise ValueError(f"{source}: expected {EXPECTED}, got {_short(line)}")


def _are_ids(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    )


def _are_messages(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and _is_message(message) for message in value)
    )


def _is_message(message: dict[str, Any]) -> bool:
    return all(isinstance(message.get(key), str) for key in ("role", "content"))


def _short(line: str) -> str:
    return line if len(line) <= 60 else line[:57] + "..."
