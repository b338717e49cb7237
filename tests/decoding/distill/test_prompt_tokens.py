"""Tokens of prompts: the chat template stays whole, text is cut, nothing comes twice."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from pagedraft.decoding.distill.prompts import Prompt, demo_prompts, encode_prompts
from pagedraft.model.demo import FOLDER_NAME, cache_root
from pagedraft.tests.model.words import words

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
DEMO = cache_root() / FOLDER_NAME


def chat(text: str, *history: tuple[str, str]) -> Prompt:
    return Prompt(text, "chat", "here", True, history)


def raw(text: str) -> Prompt:
    return Prompt(text, "text", "here", False)


@pytest.fixture
def tokenizer():
    made = words("byte-level")
    made.chat_template = TEMPLATE
    return made


def texts(prompts, tokenizer, **options):
    found = encode_prompts(prompts, tokenizer, **options)
    return [tokenizer.decode(one.token_ids) for one in found]


def test_chat_goes_through_the_template_and_text_does_not(tokenizer):
    prompts = [chat("Why?", ("system", "Be brief.")), raw("def f(x):\n    ")]
    assert texts(prompts, tokenizer) == [
        "[system] Be brief.\n[user] Why?\n[assistant]",
        "def f(x):\n    ",
    ]
    assert [one.prompt for one in encode_prompts(prompts, tokenizer)] == prompts


def test_without_a_template_chat_is_continued(tokenizer):
    tokenizer.chat_template = None
    assert texts([chat("Why?", ("user", "Sky"))], tokenizer) == ["Sky\n\nWhy?"]


def test_chat_that_is_cut_ends_where_an_answer_begins(tokenizer):
    (cut,) = encode_prompts([chat("abcdefgh " * 50)], tokenizer, max_tokens=60)
    text = tokenizer.decode(cut.token_ids)
    assert 50 < len(cut.token_ids) <= 60
    assert text.startswith("[user] abcdefgh ")
    assert text.endswith("\n[assistant]")


def test_text_that_is_cut_keeps_its_beginning(tokenizer):
    (cut,) = encode_prompts([raw("0123456789" * 9)], tokenizer, max_tokens=25)
    assert len(cut.token_ids) == 25
    assert ("0123456789" * 9).startswith(tokenizer.decode(cut.token_ids))


def test_a_cut_character_is_dropped_whole(tokenizer):
    (cut,) = encode_prompts([chat("é" * 90)], tokenizer, max_tokens=60)
    assert "\ufffd" not in tokenizer.decode(cut.token_ids)


def test_blank_and_repeated_prompts_are_left_out(tokenizer):
    prompts = [raw(""), raw(" \n"), raw("same"), chat("same"), raw("same"), chat(" ")]
    assert texts(prompts, tokenizer) == ["same", "[user] same\n[assistant]"]


def test_prompts_that_are_equal_once_cut_come_once(tokenizer):
    long = [raw("0123456789" * 5 + end) for end in "ab"]
    assert len(encode_prompts(long, tokenizer, max_tokens=20)) == 1
    assert len(encode_prompts(long, tokenizer)) == 2


def test_no_room_beside_the_history(tokenizer):
    prompts = [raw("fine"), chat("Why?", ("system", "x" * 99))]
    with pytest.raises(
        ValueError, match=r"prompts\[1\] of here: expected room for its text in max"
    ):
        encode_prompts(prompts, tokenizer, max_tokens=40)


def test_half_a_character_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"prompts\[0\] of here: .*expected Unicode text"):
        encode_prompts([raw("\ud800")], tokenizer)


def test_bad_arguments_are_refused(tokenizer):
    with pytest.raises(ValueError, match="max_tokens: expected at least 1, got 0"):
        encode_prompts([raw("a")], tokenizer, max_tokens=0)
    with pytest.raises(ValueError, match="tokenizer: expected one"):
        encode_prompts([raw("a")], None)


@pytest.mark.demo_model
@pytest.mark.skipif(not (DEMO / "tokenizer.json").exists(), reason="demo model is not cached")
def test_demo_prompts_in_tokens():
    """Code to continue has 40 to 300 tokens, but for a few; all else fits, with little cut."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    prompts = demo_prompts(0)[:1000]
    found = encode_prompts(prompts, tokenizer)
    assert len(found) == len(prompts)
    code = [len(one.token_ids) for one in found if one.prompt.kind == "code"]
    assert sum(40 <= number <= 300 for number in code) >= 0.95 * len(code)
    full = sum(len(one.token_ids) == 512 for one in found)
    assert full <= 0.01 * len(found)
    asked = next(one for one in found if one.prompt.is_chat)
    text = tokenizer.decode(asked.token_ids)
    assert text.endswith(
        f"<|im_start|>user\n{asked.prompt.text}<|im_end|>\n<|im_start|>assistant\n"
    )
