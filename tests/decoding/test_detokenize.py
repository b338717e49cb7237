"""Text token by token against the whole decode, and where stop strings end it."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedraft.decoding.detokenize import HALF, Detokenizer, OutputText
from pagedraft.tests.model.words import WORDS, words

load = cache(words)
TOKENIZERS = {name: (name, False) for name in WORDS} | {"words, cleaned up": ("words", True)}
# Streams of token ids: anything, also past the vocabulary, and mostly what has to do with others.
BYTES = [3 + byte for byte in (0x0A, *"é漢🙂’".encode())]
IDS = st.lists(
    st.one_of(
        st.integers(0, 280), st.integers(0, 20), st.integers(255, 276), st.sampled_from(BYTES)
    ),
    max_size=24,
)
STOPS = st.lists(
    st.one_of(
        st.text("ab c\n", min_size=1, max_size=4), st.sampled_from(["é", "🙂a", "漢🙂", "'s"])
    ),
    max_size=3,
    unique=True,
)


def decode(tokenizer: Any, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True)


def texts_so_far(tokenizer: Any, token_ids: list[int]) -> tuple[list[str], str]:
    """Final and pending text after each token; the final text of all."""
    detokenizer, final, texts = Detokenizer(tokenizer), "", []
    for token_id in token_ids:
        final += detokenizer.push(token_id)
        texts.append(final + detokenizer.pending)
    return texts, final


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300)
@given(token_ids=IDS)
def test_text_so_far_is_the_whole_decode(name: str, token_ids: list[int]) -> None:
    tokenizer = load(*TOKENIZERS[name])
    texts, final = texts_so_far(tokenizer, token_ids)
    assert texts == [decode(tokenizer, token_ids[: i + 1]) for i in range(len(token_ids))]
    assert decode(tokenizer, token_ids).startswith(final)


def plain_stop(
    tokenizer: Any, token_ids: list[int], stop: list[str], min_tokens: int
) -> tuple[int, str | None, int | None]:
    """Tokens kept, the stop string, and where it begins: from whole decodes, token after token."""
    ignored = len(decode(tokenizer, token_ids[:min_tokens]).rstrip(HALF))
    for count in range(min_tokens + 1, len(token_ids) + 1):
        text = decode(tokenizer, token_ids[:count]).rstrip(HALF)
        found = [
            (begin, len(string), string)
            for string in stop
            for begin in range(len(text))
            if text.startswith(string, begin) and begin + len(string) > ignored
        ]
        if found:
            begin, _, string = min(found)
            return count, string, begin
    return len(token_ids), None, None


def push_all(output: OutputText, token_ids: list[int]) -> tuple[int, str | None]:
    """Push until a stop string is found; tokens pushed, and it."""
    for count, token_id in enumerate(token_ids, start=1):
        if (stop := output.push(token_id)) is not None:
            return count, stop
    return len(token_ids), None


def check_stop(output: OutputText, tokenizer: Any, token_ids: list[int], **contract: Any) -> None:
    """Raise unless ``output`` keeps what ``plain_stop`` keeps."""
    is_included = contract.pop("include_stop", False)
    count, stop, begin = plain_stop(tokenizer, token_ids, **contract)
    assert push_all(output, token_ids) == (count, stop)
    end = None if begin is None else begin + (len(stop or "") if is_included else 0)
    assert output.text == decode(tokenizer, token_ids[:count])[:end]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300)
@given(token_ids=IDS, stop=STOPS, include_stop=st.booleans(), min_tokens=st.integers(0, 5))
def test_stop_strings_as_from_whole_decodes(name: str, token_ids: list[int], **contract) -> None:
    tokenizer = load(*TOKENIZERS[name])
    check_stop(OutputText(tokenizer, **contract), tokenizer, token_ids, **contract)


def shown_after_each(output: OutputText, token_ids: list[int]) -> list[str]:
    """``settled`` after each token up to the stop string."""
    shown = []
    for token_id in token_ids:
        stop = output.push(token_id)
        shown.append(output.settled)
        if stop is not None:
            break
    return shown


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300)
@given(token_ids=IDS, stop=STOPS, include_stop=st.booleans(), min_tokens=st.integers(0, 5))
def test_settled_text_only_grows(name: str, token_ids: list[int], **contract) -> None:
    output = OutputText(load(*TOKENIZERS[name]), **contract)
    shown = shown_after_each(output, token_ids)
    output.finish()
    assert all(later.startswith(earlier) for earlier, later in pairwise([*shown, output.text]))
    assert output.settled == output.text


# Byte-level pieces of one output; stop strings; what the text becomes; pieces that it takes.
STOP_CASES = {
    "one token": (["a", "b"], ["b"], {}, ("a", "b", 2)),
    "over three tokens": (["a", "b", "a", "c"], ["bac"], {}, ("a", "bac", 4)),
    "kept when asked for": (["a", "b", "c"], ["b"], {"include_stop": True}, ("ab", "b", 2)),
    "what follows in the token is cut off": (["a", "abc", "c"], ["b"], {}, ("aa", "b", 2)),
    "also where the stop string is kept": (
        ["a", "abc"],
        ["b"],
        {"include_stop": True},
        ("aab", "b", 2),
    ),
    "starts inside a token": (["Ġa", "b"], ["ab"], {}, (" ", "ab", 2)),
    "a false start before it": (["a", "a", "b"], ["ab"], {}, ("a", "ab", 3)),
    "overlaps itself": (["a", "b", "a", "b", "c"], ["abc"], {}, ("ab", "abc", 5)),
    "the first that is complete": (["a", "b", "c"], ["abc", "b"], {}, ("a", "b", 2)),
    "of two in a token the first to begin": (["abc"], ["bc", "ab"], {}, ("", "ab", 1)),
    "also where the other is complete before": (["abc"], ["b", "abc"], {}, ("", "abc", 1)),
    "of two that begin there the shorter": (["abc"], ["abc", "ab"], {}, ("", "ab", 1)),
    "a character of several tokens": (["a", "Ã", "©", "b"], ["é"], {}, ("a", "é", 3)),
    "after half a character": (["Ã", "a"], ["a"], {}, (HALF, "a", 2)),
    "over a special token": (["a", "<s>", "b"], ["ab"], {}, ("", "ab", 3)),
    "not a special token's name": (["<s>", "a"], ["<s>"], {}, ("a", None, 2)),
    "min_tokens reached": (["a", "b", "a"], ["b"], {"min_tokens": 1}, ("a", "b", 2)),
    "ignored, and not found later": (["a", "b", "c"], ["b"], {"min_tokens": 2}, ("abc", None, 3)),
    "found again after min_tokens": (["b", "a", "b"], ["b"], {"min_tokens": 1}, ("ba", "b", 3)),
    "begun within min_tokens": (["a", "b", "c"], ["abc"], {"min_tokens": 2}, ("", "abc", 3)),
    "overlaps an ignored one": (["a", "b", "a"], ["aba", "ab"], {"min_tokens": 2}, ("", "aba", 3)),
    "half a character within min_tokens": (
        ["a", "Ã", "©"],
        ["aé"],
        {"min_tokens": 2},
        ("", "aé", 3),
    ),
}


@pytest.mark.parametrize("pieces, stop, contract, expected", STOP_CASES.values(), ids=STOP_CASES)
def test_stop_strings(pieces: list[str], stop: list[str], contract: dict, expected: tuple) -> None:
    tokenizer = load("byte-level")
    output = OutputText(tokenizer, stop, **contract)
    count, found = push_all(output, tokenizer.convert_tokens_to_ids(pieces))
    assert (output.text, found, count) == expected


def test_the_check_sees_a_stop_string_that_is_not_searched_over_tokens() -> None:
    tokenizer = load("byte-level")
    output = OutputText(tokenizer, ["ba"])
    output._num_tail = 0
    token_ids = tokenizer.convert_tokens_to_ids(["a", "b", "a"])
    with pytest.raises(AssertionError):
        check_stop(output, tokenizer, token_ids, stop=["ba"], min_tokens=0)


# name of the tokenizer; pieces; stop strings; what may be shown after each piece.
SETTLED_CASES = {
    "text at once": ("byte-level", ["a", "b", "Ġ"], [], ["a", "ab", "ab "]),
    "no half a character": ("byte-level", ["a", "Ã", "©"], [], ["a", "a", "aé"]),
    "half a character that stays one": (
        "byte-level",
        ["Ã", "©", "Ã", "a"],
        [],
        ["", "é", "é", f"é{HALF}a"],
    ),
    "nothing that may become a stop string": (
        "byte-level",
        ["a", "b", "b", "a"],
        ["aba"],
        ["", "", "abb", "abb"],
    ),
    "as little as may become one": (
        "byte-level",
        ["abc", "a", "c"],
        ["aa"],
        ["abc", "abc", "abcac"],
    ),
    "bytes only once their run has ended": (
        "llama-2",
        ["▁a", "<0x0A>", "<0xC3>", "<0xA9>", "b"],
        [],
        ["a", "a", "a", "a", "a\néb"],
    ),
    "a special token ends no run": (
        "llama-2",
        ["▁a", "<0x0A>", "<s>", "<0x85>", "b"],
        [],
        ["a", "a", "a", "a", f"a{HALF}{HALF}b"],
    ),
    "the space of a token that is not the first": (
        "llama-2",
        ["<s>", "▁a", "▁a", "<s>", "▁a"],
        [],
        ["", "a", "a a", "a a", "a a a"],
    ),
    "a space alone": ("metaspace", ["▁", "▁a", "▁", "▁a"], [], ["", " a", " a ", " a  a"]),
}


@pytest.mark.parametrize("name, pieces, stop, expected", SETTLED_CASES.values(), ids=SETTLED_CASES)
def test_settled(name: str, pieces: list[str], stop: list[str], expected: list[str]) -> None:
    tokenizer = load(name)
    token_ids = tokenizer.convert_tokens_to_ids(pieces)
    assert shown_after_each(OutputText(tokenizer, stop), token_ids) == expected


def test_all_is_settled_at_the_end() -> None:
    tokenizer = load("byte-level")
    output = OutputText(tokenizer, ["ab"])
    push_all(output, tokenizer.convert_tokens_to_ids(["c", "Ã", "a"]))
    assert output.settled == f"c{HALF}"
    output.finish()
    assert output.settled == output.text == f"c{HALF}a"


def test_a_tokenizer_that_is_no_fast_one_is_decoded_whole() -> None:
    class Slow:
        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            return bytes(token_ids).decode(errors="replace")

    output = OutputText(Slow(), ["é!"])
    assert [output.push(token_id) for token_id in "aé!".encode()] == [None, None, None, "é!"]
    assert output.settled == output.text == "a"


def test_nothing_follows_the_end() -> None:
    tokenizer = load("byte-level")
    output = OutputText(tokenizer, ["a"])
    [token_id] = tokenizer.convert_tokens_to_ids(["a"])
    assert output.push(token_id) == "a"
    with pytest.raises(ValueError, match=f"token {token_id}: the text has ended"):
        output.push(token_id)


def test_a_token_costs_the_same_whatever_came_before(monkeypatch) -> None:
    """Counted in tokens decoded, not in seconds."""
    tokenizer, decoded = load("byte-level"), []
    plain_decode = Detokenizer._decode
    monkeypatch.setattr(
        Detokenizer,
        "_decode",
        lambda self, ids: decoded.append(len(ids)) or plain_decode(self, ids),
    )
    output = OutputText(tokenizer, ["no such text"])
    push_all(output, tokenizer.convert_tokens_to_ids(["a", "Ã", "©", "<s>", "Ġb"] * 200))
    assert max(decoded) <= 6
