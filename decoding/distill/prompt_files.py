"""Prompts from a user's files."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pagedraft.decoding.distill.prompt import Prompt
from pagedraft.decoding.load import check_text

logger = logging.getLogger(__name__)

PIECE_CHARS = (160, 1000)  # of a piece of a document: from where it may end, and at most
LEAST_CHARS = 40  # what is shorter says too little to be continued
ROLES = ("system", "user", "assistant")


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of a file, or of all files below a folder, in the order of their names.

    - ``.txt``: paragraphs with blank lines between them, each a chat message.
    - ``.jsonl``: a JSON object a line, with "prompt" (text) or "messages" (a list of "role" and
      "content"; answers after the last user's message are dropped: the target writes its own).
    - ``.py``, ``.md``: pieces of some paragraphs, at most 1000 characters, to be continued.

    Paragraphs and JSON lines are prompts of their own, so each is a source, "file:line"; a document
    is one source, its path. In a folder, hidden files and files of other kinds, binary ones and
    those without a prompt are passed over, with one line to the log that counts them; a file that
    is named is not. Raises ValueError, naming file and line, for a file or folder that is missing
    or has no usable prompt, for bad UTF-8 and for bad JSON.
    """
    root = Path(path)
    if root.is_dir():
        return _read_folder(root)
    prompts = _read_file(root, root)
    if prompts is None:
        raise ValueError(f"{path}: expected {_suffixes()} with text, got another kind of file")
    if not prompts:
        raise ValueError(f"{path}: expected a prompt, got none")
    return prompts


def _read_folder(root: Path) -> list[Prompt]:
    found: list[Prompt] = []
    other, empty = 0, 0
    for file in _walk(root):
        prompts = _read_file(file, root)
        other += prompts is None
        empty += prompts == []
        found += prompts or []
    if other or empty:
        logger.warning(
            "%s: passed over %d files of other kinds or binary, %d without a prompt",
            *(root, other, empty),
        )
    if not found:
        raise ValueError(
            f"{root}: expected {_suffixes()} files with prompts, got {other} of other kinds or "
            f"binary and {empty} without a prompt"
        )
    return found


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name != "__pycache__"
        )
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def _read_file(file: Path, root: Path) -> list[Prompt] | None:
    """The prompts of a file; None for one of another kind or a binary one."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    reader = READERS.get(file.suffix)
    if reader is None or b"\0" in data:
        return None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(f"{file}:{line}: expected UTF-8 text: {error.reason}") from error
    name = file.name if file == root else file.relative_to(root).as_posix()
    lines = text.replace("\r\n", "\n").split("\n")
    return reader(lines, file, name)


def _read_paragraphs(lines: list[str], file: Path, name: str) -> list[Prompt]:
    return [
        Prompt("\n".join(paragraph), "chat", f"{name}:{first}", is_chat=True)
        for first, paragraph in _paragraphs(lines)
    ]


def _paragraphs(lines: list[str]) -> Iterator[tuple[int, list[str]]]:
    """Runs of lines with text, each with the number of its first line, from 1 on."""
    run: list[str] = []
    for number, line in enumerate([*lines, ""], start=1):
        if line.strip():
            run.append(line.rstrip())
        elif run:
            yield number - len(run), run
            run = []


def _read_json_lines(lines: list[str], file: Path, name: str) -> list[Prompt]:
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                history, text = _message(line)
                for _, content in [*history, ("user", text)]:
                    check_text(content)
            except ValueError as error:
                raise ValueError(f"{file}:{number}: {error}") from error
            found.append(Prompt(text, "chat", f"{name}:{number}", True, history))
    return found


def _message(line: str) -> tuple[tuple[tuple[str, str], ...], str]:
    """What came before, and the last user's message, of a line of JSON."""
    expected = 'expected an object with "prompt" (text) or "messages"'
    try:
        fields = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{expected}, got bad JSON: {error}") from error
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise ValueError(f"{expected}, got {_short(line)}")
    if "prompt" in fields:
        if not isinstance(fields["prompt"], str) or not fields["prompt"].strip():
            raise ValueError(f"prompt: expected text, got {_short(fields['prompt'])}")
        return (), fields["prompt"]
    messages = fields["messages"]
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        wanted = f'a list of "role" ({", ".join(ROLES)}) and "content" (text)'
        raise ValueError(f"messages: expected {wanted}, got {_short(messages)}")
    said = [(message["role"], message["content"]) for message in messages]
    while said and said[-1][0] != "user":
        said.pop()
    if not said or not said[-1][1].strip():
        raise ValueError(f"messages: expected one of a user with text, got {_short(messages)}")
    return tuple(said[:-1]), said[-1][1]


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in ROLES
        and isinstance(message.get("content"), str)
    )


def _read_pieces(kind: str) -> Callable[[list[str], Path, str], list[Prompt]]:
    """A reader of documents: whole lines, a piece ends at a blank line or where it is full."""

    def read(lines: list[str], file: Path, name: str) -> list[Prompt]:
        pieces = [piece.rstrip() for piece in _pieces(lines)]
        whole = [piece for piece in pieces if len(piece.strip()) >= LEAST_CHARS]
        return [Prompt(piece, kind, name, is_chat=False) for piece in whole]

    return read


def _pieces(lines: list[str]) -> Iterator[str]:
    least, most = PIECE_CHARS
    piece = ""
    for line in [*lines, ""]:
        is_end = not line.strip() and len(piece) >= least
        if piece and (is_end or len(piece) + 1 + len(line) > most):
            yield piece
            piece = ""
        if piece or line.strip():
            piece = (f"{piece}\n{line}" if piece else line)[:most]
    yield piece


def _suffixes() -> str:
    return ", ".join(READERS)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


READERS: Mapping[str, Callable[[list[str], Path, str], list[Prompt]]] = {
    ".txt": _read_paragraphs,
    ".jsonl": _read_json_lines,
    ".py": _read_pieces("code"),
    ".md": _read_pieces("text"),
}
