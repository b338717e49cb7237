"""Prompt files: lines, JSON lines, and errors that name file and line."""

from __future__ import annotations

import pytest

from pagedraft.scheduler.prompt_file import Prompt, read_prompts

MESSAGES = '{"messages": [{"role": "user", "content": "hi"}]}'
# contents -> (line, content) of each prompt.
FILES = {
    "lines": ("one\n\n  two three \n", [(1, "one"), (3, "two three")]),
    "no last newline": ("one", [(1, "one")]),
    "windows": ("one\r\ntwo\r\n", [(1, "one"), (2, "two")]),
    "a brace": ("{not json}\none", [(1, "{not json}"), (2, "one")]),
    "a number": ("17\n", [(1, "17")]),
    "a line separator": ("one\u2028two\n", [(1, "one\u2028two")]),
    "texts": ('{"prompt": "one"}\n\n{"prompt": "two\\nlines"}', [(1, "one"), (3, "two\nlines")]),
    "ids": ('{"prompt": [1, 2]}', [(1, [1, 2])]),
    "messages": (MESSAGES, [(1, [{"role": "user", "content": "hi"}])]),
    "other fields": ('{"prompt": "one", "id": 3}', [(1, "one")]),
}


@pytest.mark.parametrize("name", FILES)
def test_prompts_are_read(tmp_path, name):
    contents, expected = FILES[name]
    path = tmp_path / "prompts.txt"
    path.write_bytes(contents.encode())
    assert read_prompts(path) == [Prompt(f"{path}:{line}", text) for line, text in expected]


BAD = {
    "empty": ("", "prompts.txt: expected a prompt on some line, got none"),
    "blank": (" \n\n", "prompts.txt: expected a prompt on some line, got none"),
    "no JSON": ('{"prompt": "one"}\ntwo', "prompts.txt:2: expected a JSON object with .*got two"),
    "no prompt": ('{"text": "one"}', r'prompts.txt:1: expected "prompt" .*got {"text": "one"}'),
    "both": ('{"prompt": "a", ' + MESSAGES[1:], "prompts.txt:1: expected"),
    "an empty prompt": ('{"prompt": " "}', "prompts.txt:1: expected"),
    "no ids": ('{"prompt": []}', "prompts.txt:1: expected"),
    "truth as an id": ('{"prompt": [true]}', "prompts.txt:1: expected"),
    "no messages": ('{"messages": []}', "prompts.txt:1: expected"),
    "no content": ('{"messages": [{"role": "user"}]}', "prompts.txt:1: expected"),
    "latin-1": (b"caf\xe9", "prompts.txt: expected UTF-8 text"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named(tmp_path, name):
    contents, message = BAD[name]
    path = tmp_path / "prompts.txt"
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "one"}')
    assert read_prompts(path) == [Prompt(f"{path}:1", "one")]


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.json"])
def test_a_file_that_is_named_json_holds_no_plain_lines(tmp_path, name):
    path = tmp_path / name
    path.write_text('{"prompt": "one",}')
    with pytest.raises(ValueError, match=rf"{name}:1: expected a JSON object"):
        read_prompts(path)
