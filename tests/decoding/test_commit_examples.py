"""Worked examples of the output contract: however steps cut a stream, a request ends the same."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedraft.decoding.commit import Commit, commit
from pagedraft.decoding.detokenize import OutputText
from pagedraft.tests.model.words import words

TOKENIZER = words("words")
NUM_PROMPT = 3
PLAIN_COMMIT = commit
CONTRACT: dict[str, Any] = {
    "max_tokens": 100,
    "max_context": 100,
    "stop_ids": ("</s>",),
    "stop": (),
    "include_stop": False,
    "min_tokens": 0,
}


@dataclass(frozen=True)
class Ended:
    """What a request became: all that the contract decides. Tokens as words."""

    words: tuple[str, ...]
    finish_reason: str | None
    stop_reason: str | None
    text: str


def ids(tokens: Collection[str]) -> list[int]:
    return TOKENIZER.convert_tokens_to_ids(list(tokens))


def decode(stream: Sequence[str], spans: Sequence[int], **contract: Any) -> Ended:
    """Commit ``stream`` step by step, each step as long as the next of ``spans`` (then 1)."""
    contract = CONTRACT | contract
    text = OutputText(TOKENIZER, contract["stop"], contract["include_stop"], contract["min_tokens"])
    tokens, output, result = ids(stream), [], Commit(())
    lengths = iter(spans)
    while len(output) < len(tokens) and result.finish_reason is None:
        result = commit(
            tokens[len(output) :][: next(lengths, 1)],
            num_output=len(output),
            num_context=NUM_PROMPT + len(output),
            max_tokens=contract["max_tokens"],
            max_context=contract["max_context"],
            stop_ids=set(ids(contract["stop_ids"])),
            push=text.push,
        )
        output.extend(result.tokens)
    stop = result.stop_reason
    stop = TOKENIZER.convert_ids_to_tokens(stop) if isinstance(stop, int) else stop
    kept = tuple(TOKENIZER.convert_ids_to_tokens(output))
    return Ended(kept, result.finish_reason, stop, text.text)


def every_cut(length: int) -> list[tuple[int, ...]]:
    """All ways to cut ``length`` tokens into steps, 2 ** (length - 1)."""
    return [
        tuple(end - begin for begin, end in pairwise((0, *edges, length)))
        for count in range(length)
        for edges in combinations(range(1, length), count)
    ]


# Each word is a token, with a space before it unless it is the first; "</s>" leaves no text.
STREAM = "a b ab a , b . !"
# name: what differs from CONTRACT; tokens kept of STREAM; finish reason; stop reason; text
EXAMPLES: dict[str, tuple[dict[str, Any], int, str | None, str | None, str]] = {
    "nothing ends it": ({}, 8, None, None, STREAM),
    "stop id": ({"stop_ids": [","]}, 5, "stop", ",", "a b ab a ,"),
    "the first of two stop ids": ({"stop_ids": ["!", "ab"]}, 3, "stop", "ab", "a b ab"),
    "stop string": ({"stop": [","]}, 5, "stop", ",", "a b ab a "),
    "over five tokens": ({"stop": ["b a , b ."]}, 7, "stop", "b a , b .", "a b a"),
    "and kept": ({"stop": ["b a , b"], "include_stop": True}, 6, "stop", "b a , b", "a b ab a , b"),
    "ends inside a token": ({"stop": ["b a"]}, 3, "stop", "b a", "a "),
    "and kept, not the rest": (
        {"stop": ["b a"], "include_stop": True},
        3,
        "stop",
        "b a",
        "a b a",
    ),
    "ignored within min_tokens": ({"stop": ["b"], "min_tokens": 3}, 6, "stop", "b", "a b ab a , "),
    "ends after min_tokens": ({"stop": ["b a"], "min_tokens": 2}, 3, "stop", "b a", "a "),
    "again after min_tokens": ({"stop": ["b a"], "min_tokens": 3}, 4, "stop", "b a", "a b a"),
    "string before id": ({"stop": ["ab"], "stop_ids": [","]}, 3, "stop", "ab", "a b "),
    "id before string": ({"stop": [","], "stop_ids": ["ab"]}, 3, "stop", "ab", "a b ab"),
    "id and string, tie": ({"stop": ["a"], "stop_ids": ["a"]}, 1, "stop", "a", ""),
    "id and string, tie later": (
        {"stop": [" ab a"], "stop_ids": ["ab"]},
        3,
        "stop",
        "ab",
        "a b ab",
    ),
    "id and max_tokens, tie": ({"stop_ids": ["ab"], "max_tokens": 3}, 3, "stop", "ab", "a b ab"),
    "string and max_tokens, tie": ({"stop": ["ab"], "max_tokens": 3}, 3, "stop", "ab", "a b "),
    "string and context, tie": ({"stop": ["ab"], "max_context": 6}, 3, "stop", "ab", "a b "),
    "max_tokens before id": ({"stop_ids": ["ab"], "max_tokens": 2}, 2, "length", None, "a b"),
    "max_tokens in a stop string": (
        {"stop": ["ab a"], "max_tokens": 3},
        3,
        "length",
        None,
        "a b ab",
    ),
    "context before id": ({"stop_ids": ["ab"], "max_context": 5}, 2, "length", None, "a b"),
    "both limits at once": ({"max_tokens": 4, "max_context": 7}, 4, "length", None, "a b ab a"),
}


@pytest.mark.parametrize(
    "contract, num_kept, reason, stop_reason, text", EXAMPLES.values(), ids=EXAMPLES
)
def test_examples_however_they_are_cut(
    contract: dict, num_kept: int, reason: str | None, stop_reason: str | None, text: str
) -> None:
    stream = STREAM.split()
    ends = {decode(stream, spans, **contract) for spans in every_cut(len(stream))}
    assert ends == {Ended(tuple(stream[:num_kept]), reason, stop_reason, text)}


# What ends a request at a token of choice: the word there, the contract, the text that it leaves.
MARKS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "EOS": ("</s>", {}, []),
    "stop id": ("!", {"stop_ids": ["!"]}, ["!"]),
    "stop string": ("!", {"stop": ["!"], "include_stop": True}, ["!"]),
}
PLACES = range(1, 8)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mark, contract, left", MARKS.values(), ids=MARKS)
def test_every_place_in_every_span(mark: str, contract: dict, left: list[str], place: int) -> None:
    before, after = ["a", "b", "ab", "a", "ba", "b"][: place - 1], ["a", "b"]
    stream = [*before, mark, *after]
    ends = {decode(stream, spans, **contract) for spans in every_cut(len(stream))}
    assert ends == {Ended((*before, mark), "stop", mark, " ".join([*before, *left]))}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("limit, more", [("max_tokens", 0), ("max_context", NUM_PROMPT)])
def test_limits_on_every_boundary(limit: str, more: int, place: int) -> None:
    stream = STREAM.split()
    ends = {decode(stream, spans, **{limit: place + more}) for spans in every_cut(len(stream))}
    assert ends == {Ended(tuple(stream[:place]), "length", None, " ".join(stream[:place]))}


def commit_the_last(tokens: list[int], *, push: Any, **counts: Any) -> Commit:
    """Broken: only the last token of a step can end a request."""
    result = PLAIN_COMMIT(tokens[-1:], push=push, **counts)
    return Commit((*tokens[:-1], *result.tokens), result.finish_reason, result.stop_reason)


def test_an_end_inside_a_step_that_is_not_seen_fails(monkeypatch) -> None:
    stream = STREAM.split()
    monkeypatch.setitem(decode.__globals__, "commit", commit_the_last)
    ends = {decode(stream, spans, stop_ids=[","]) for spans in every_cut(len(stream))}
    assert len(ends) > 1


@settings(max_examples=300)
@given(
    stream=st.lists(st.sampled_from([*"ab.!", "ab", "</s>"]), min_size=1, max_size=24),
    spans=st.lists(st.integers(1, 9), max_size=24),
    contract=st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, 26),
            "max_context": st.integers(NUM_PROMPT + 1, 30),
            "stop_ids": st.sampled_from([(), ("</s>",), ("</s>", ".")]),
            "stop": st.sampled_from([(), ("b a",), ("!", "a b."), ("ab ab", "b ab")]),
            "include_stop": st.booleans(),
            "min_tokens": st.integers(0, 6),
        }
    ),
)
def test_spans_do_not_show(stream: list[str], spans: list[int], contract: dict) -> None:
    assert decode(stream, spans, **contract) == decode(stream, [], **contract)
