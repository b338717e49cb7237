"""The output contract: the kept tokens do not depend on how steps cut the stream."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedraft.decoding.commit import commit, max_drafts

EOS = 9
LIMITS = {"num_output": 0, "num_context": 10, "max_tokens": 100, "max_context": 100}

CASES = {
    "nothing ends it": ([1, 2, 3], {}, [1, 2, 3], None),
    "stop id is kept, the rest is not": ([1, EOS, 3], {}, [1, EOS], "stop"),
    "first stop id of two": ([EOS, EOS], {}, [EOS], "stop"),
    "max_tokens inside the drafts": ([1, 2, 3], {"max_tokens": 2}, [1, 2], "length"),
    "max_tokens counts earlier outputs": ([1, 2], {"num_output": 99}, [1], "length"),
    "max_tokens reached exactly": ([1, 2], {"max_tokens": 2}, [1, 2], "length"),
    "max_tokens not yet reached": ([1, 2], {"max_tokens": 3}, [1, 2], None),
    "context limit": ([1, 2, 3], {"max_context": 12}, [1, 2], "length"),
    "context limit not yet reached": ([1, 2], {"max_context": 13}, [1, 2], None),
    "stop beats max_tokens on a tie": ([1, EOS], {"max_tokens": 2}, [1, EOS], "stop"),
    "stop beats context on a tie": ([1, EOS], {"max_context": 12}, [1, EOS], "stop"),
    "length before stop": ([1, 2, EOS], {"max_tokens": 2}, [1, 2], "length"),
}


@pytest.mark.parametrize("tokens, limits, kept, reason", CASES.values(), ids=CASES)
def test_commit(tokens: list[int], limits: dict, kept: list[int], reason: str | None) -> None:
    result = commit(tokens, stop_ids={EOS}, **{**LIMITS, **limits})
    assert (result.tokens, result.finish_reason) == (tuple(kept), reason)


ERRORS = {
    "no tokens": ([], {}, "tokens: expected at least one"),
    "negative outputs": ([1], {"num_output": -1}, "num_output: expected at least 0, got -1"),
    "negative context": ([1], {"num_context": -2}, "num_context: expected at least 0, got -2"),
    "ended by max_tokens": ([1], {"num_output": 100}, "had ended: 100 of 100 outputs"),
    "ended by context": ([1], {"num_context": 100}, "100 of 100 context tokens"),
}


@pytest.mark.parametrize("tokens, limits, message", ERRORS.values(), ids=ERRORS)
def test_commit_refuses(tokens: list[int], limits: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        commit(tokens, stop_ids={EOS}, **{**LIMITS, **limits})


DRAFT_CASES = {
    "no limit near": (4, {}, 4),
    "zero is a normal value": (0, {}, 0),
    "one output left needs no draft": (4, {"num_output": 99}, 0),
    "two outputs left need one": (4, {"num_output": 98}, 1),
    "one position left": (4, {"num_context": 99}, 0),
    "three positions left": (4, {"num_context": 97}, 2),
    "never negative": (4, {"num_output": 100, "num_context": 100}, 0),
}


@pytest.mark.parametrize("k, counts, expected", DRAFT_CASES.values(), ids=DRAFT_CASES)
def test_max_drafts(k: int, counts: dict, expected: int) -> None:
    assert max_drafts(k, **{**LIMITS, **counts}) == expected


def test_max_drafts_refuses_negative_k() -> None:
    with pytest.raises(ValueError, match="k: expected at least 0, got -1"):
        max_drafts(-1, **LIMITS)


def decode(stream: list[int], spans: list[int], limits: dict) -> tuple[list[int], str | None]:
    """Commit ``stream`` step by step, each step as long as the next of ``spans`` (then 1)."""
    output: list[int] = []
    lengths = iter(spans)
    while len(output) < len(stream):
        counts = {"num_output": len(output), "num_context": 3 + len(output)}
        step = stream[len(output) :][: next(lengths, 1)]
        result = commit(step, stop_ids={EOS, 8}, **counts, **limits)
        output.extend(result.tokens)
        if result.finish_reason:
            return output, result.finish_reason
    return output, None


@settings(max_examples=300)
@given(
    stream=st.lists(st.integers(0, EOS), min_size=1, max_size=30),
    spans=st.lists(st.integers(1, 9), max_size=30),
    limits=st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, 32),
            "max_context": st.integers(4, 36),
        }
    ),
)
def test_spans_do_not_show(stream: list[int], spans: list[int], limits: dict) -> None:
    assert decode(stream, spans, limits) == decode(stream, [], limits)


@settings(max_examples=200)
@given(
    k=st.integers(0, 9),
    num_output=st.integers(0, 20),
    max_tokens=st.integers(1, 24),
    num_context=st.integers(0, 20),
    max_context=st.integers(1, 24),
)
def test_all_accepted_drafts_can_be_kept(k: int, **limits: int) -> None:
    """With ``max_drafts`` drafts everything accepted is kept, and one draft more never is."""
    drafts = max_drafts(k, **limits)
    if limits["num_output"] >= limits["max_tokens"] or (
        limits["num_context"] >= limits["max_context"]
    ):
        assert drafts == 0
        return
    result = commit([1] * (drafts + 1), stop_ids=(), **limits)
    assert len(result.tokens) == drafts + 1
    longer = commit([1] * (drafts + 2), stop_ids=(), **limits)
    assert len(longer.tokens) == drafts + 1 or drafts == k
