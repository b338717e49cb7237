"""Prompts from files: what each kind of file holds, what is passed over, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pagedraft.decoding.distill.prompt_files import LEAST_CHARS, PIECE_CHARS, READERS
from pagedraft.decoding.distill.prompts import Prompt, read_prompts

anew = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
lines = st.text(st.characters(categories=["L", "N", "P", "Zs"]), min_size=1, max_size=30)
printed = lines.map(str.rstrip).filter(bool)
messages = st.text(max_size=40).filter(str.strip)

TWO = "First line\nof one prompt.\n\n \nAnother prompt.  \n"


def test_paragraphs_of_a_text_file(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(TWO)
    assert read_prompts(path) == [
        Prompt("First line\nof one prompt.", "chat", "mine.txt:1", is_chat=True),
        Prompt("Another prompt.", "chat", "mine.txt:5", is_chat=True),
    ]


def test_windows_line_ends_and_a_byte_order_mark(tmp_path):
    plain, windows = tmp_path / "a.txt", tmp_path / "b.txt"
    plain.write_text(TWO)
    windows.write_bytes(b"\xef\xbb\xbf" + TWO.replace("\n", "\r\n").encode())
    texts = [[prompt.text for prompt in read_prompts(str(path))] for path in (plain, windows)]
    assert texts[0] == texts[1]


def test_json_lines(tmp_path):
    asked = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "Why?")]
    said = [{"role": role, "content": content} for role, content in asked]
    path = tmp_path / "mine.jsonl"
    rows = [
        {"prompt": "One\n\ntwo"},
        {"messages": [*said, {"role": "assistant", "content": "So."}]},
    ]
    path.write_text("\n".join(map(json.dumps, rows[:1])) + "\n\n" + json.dumps(rows[1]) + "\n")
    assert read_prompts(path) == [
        Prompt("One\n\ntwo", "chat", "mine.jsonl:1", is_chat=True),
        Prompt("Why?", "chat", "mine.jsonl:3", is_chat=True, history=tuple(asked[:3])),
    ]


@anew
@given(paragraphs=st.lists(st.lists(printed, min_size=1, max_size=3), min_size=1, max_size=5))
def test_paragraphs_come_back(paragraphs, tmp_path):
    texts = ["\n".join(paragraph) for paragraph in paragraphs]
    path = tmp_path / "mine.txt"
    path.write_text("\n\n".join(texts), encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(path)] == texts


@anew
@given(texts=st.lists(messages, min_size=1, max_size=5), ascii=st.booleans())
@example(texts=["\0 \u2028 \x85 \r\n"], ascii=True)
def test_json_prompts_come_back(texts, ascii, tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [json.dumps({"prompt": text}, ensure_ascii=ascii) for text in texts]
    path.write_bytes("\n".join(rows).encode())
    assert [prompt.text for prompt in read_prompts(path)] == texts


@anew
@given(data=st.binary(max_size=80), suffix=st.sampled_from(sorted(READERS)))
def test_any_bytes_give_prompts_or_an_error_that_names_the_file(data, suffix, tmp_path):
    path = tmp_path / f"mine{suffix}"
    path.write_bytes(data)
    error, prompts = "", []
    try:
        prompts = read_prompts(path)
    except ValueError as caught:
        error = str(caught)
    assert error.startswith(str(path)) or prompts
    assert all(prompt.text.strip() for prompt in prompts)


@anew
@given(rows=st.lists(st.sampled_from(["", "x = 1", "y" * 300, "    " + "z" * 90, "w" * 2000])))
def test_pieces_are_lines_of_the_document_in_order(rows, tmp_path):
    path = tmp_path / "mine.py"
    rows = [*rows, "", "final = 1" * 20]
    path.write_text("\n".join(rows))
    prompts = read_prompts(path)
    assert {(p.kind, p.source, p.is_chat) for p in prompts} == {("code", "mine.py", False)}
    assert all(LEAST_CHARS <= len(p.text) <= PIECE_CHARS[1] for p in prompts)
    left = iter(rows)
    cut = [line for prompt in prompts for line in prompt.text.split("\n")]
    assert all(any(line == row[: PIECE_CHARS[1]] for row in left) for line in cut)


def test_markdown_is_continued(tmp_path):
    path = tmp_path / "notes.md"
    path.write_text("# Title\n\n" + "A sentence of some words. " * 10 + "\n\n" + "More text. " * 9)
    prompts = read_prompts(path)
    assert [(p.kind, p.source, p.is_chat) for p in prompts] == [("text", "notes.md", False)] * 2
    assert prompts[0].text.startswith("# Title\n\nA sentence")


def test_folder_is_walked_in_order_and_says_what_it_passed_over(tmp_path, caplog):
    for name, text in {
        **{"b.txt": "B", "a/z.txt": "Z", "a/deep/y.txt": "Y", "a.txt": "A", "empty.txt": " \n"},
        **{"data.bin": "no", ".hidden.txt": "no", ".git/x.txt": "no", "__pycache__/x.txt": "no"},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.txt").write_bytes(b"PK\0\1")
    with caplog.at_level(logging.WARNING):
        found = [(prompt.source, prompt.text) for prompt in read_prompts(tmp_path)]
    assert found == [
        ("a.txt:1", "A"),
        ("b.txt:1", "B"),
        ("a/z.txt:1", "Z"),
        ("a/deep/y.txt:1", "Y"),
    ]
    assert "passed over 2 files of other kinds or binary, 1 without a prompt" in caplog.text


# name -> (name of the file, its bytes, what the error says after the path)
REFUSED: Mapping[str, tuple[str, bytes, str]] = {
    "empty": ("a.txt", b"", ": expected a prompt, got none"),
    "only blank lines": ("a.jsonl", b" \n\n", ": expected a prompt, got none"),
    "too little code": ("a.py", b"x = 1", ": expected a prompt, got none"),
    "another kind": ("a.pdf", b"text", ": expected .txt, .jsonl, .py, .md with text, got another"),
    "binary": ("a.txt", b"a\0b", ": expected .txt, .jsonl, .py, .md with text, got another"),
    "bad UTF-8": ("a.txt", b"fine\n\nbad \xff", ":3: expected UTF-8 text: invalid start byte"),
    "bad JSON": ("a.jsonl", b'{"prompt": "x"}\n{"prompt"', ":2: expected an object with"),
    "deep JSON": ("a.jsonl", b"[" * 100_000, ":1: expected an object with"),
    "no object": ("a.jsonl", b'["x"]', ':1: expected an object with "prompt"'),
    "neither": ("a.jsonl", b'\n{"text": "x"}', ':2: expected an object with "prompt"'),
    "both": ("a.jsonl", b'{"prompt": "x", "messages": []}', ":1: expected an object"),
    "prompt is a number": ("a.jsonl", b'{"prompt": 3}', ":1: prompt: expected text, got 3"),
    "prompt is blank": ("a.jsonl", b'{"prompt": " "}', ":1: prompt: expected text, got"),
    "half a character": ("a.jsonl", b'{"prompt": "\\ud800"}', ":1: prompt: expected Unicode"),
    "no list": ("a.jsonl", b'{"messages": {}}', ":1: messages: expected a list of"),
    "other role": (
        "a.jsonl",
        b'{"messages": [{"role": "robot", "content": "x"}]}',
        ":1: messages: expected a list of",
    ),
    "no user": (
        "a.jsonl",
        b'{"messages": [{"role": "system", "content": "x"}]}',
        ":1: messages: expected one of a user with text",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_file(name: str, tmp_path: Path) -> None:
    file, data, message = REFUSED[name]
    path = tmp_path / file
    path.write_bytes(data)
    with pytest.raises(ValueError) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}{message}")


@pytest.mark.parametrize("name", ["bad UTF-8", "bad JSON"])
def test_damaged_file_of_a_folder_is_refused(name: str, tmp_path: Path) -> None:
    file, data, message = REFUSED[name]
    (tmp_path / "fine.txt").write_text("A prompt.")
    (tmp_path / file).write_bytes(data)
    with pytest.raises(ValueError) as caught:
        read_prompts(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / file}{message}")


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.txt: No such file or directory"):
        read_prompts(tmp_path / "nowhere.txt")


def test_folder_without_prompts(tmp_path):
    with pytest.raises(ValueError, match=r"expected .*, got 0 of other kinds .* and 0 without"):
        read_prompts(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"\0")
    (tmp_path / "b.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"expected .*, got 1 of other kinds .* and 1 without"):
        read_prompts(tmp_path)
