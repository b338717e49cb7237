"""The output contract: the kept tokens do not depend on how steps cut the stream."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedraft.decoding.commit import Commit, commit, max_drafts

EOS = 9
LIMITS = {"num_output": 0, "num_context": 10, "max_tokens": 100, "max_context": 100}

# tokens of a step; what differs from LIMITS; what is kept; the finish reason and the stop id.
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
    assert result == Commit(tuple(kept), reason, EOS if reason == "stop" else None)


# what ``push`` returns for each token; limits; tokens kept of three; finish and stop reason.
PUSH_CASES = {
    "nothing found": ([None, None, None], {}, 3, None, None),
    "completed by the first": (["x", None, None], {}, 1, "stop", "x"),
    "completed inside the drafts": ([None, "x", "y"], {}, 2, "stop", "x"),
    "completed by the last": ([None, None, "x"], {}, 3, "stop", "x"),
    "stop string beats max_tokens on a tie": ([None, "x"], {"max_tokens": 2}, 2, "stop", "x"),
    "stop string beats context on a tie": ([None, "x"], {"max_context": 12}, 2, "stop", "x"),
    "max_tokens before it": ([None, None, "x"], {"max_tokens": 2}, 2, "length", None),
    "stop id beats it on a tie": ([None, "x"], {"stop_ids": {2}}, 2, "stop", 2),
    "stop id before it": ([None, "x"], {"stop_ids": {1}}, 1, "stop", 1),
    "before a stop id": (["x"], {"stop_ids": {2}}, 1, "stop", "x"),
}


@pytest.mark.parametrize(
    "found, limits, num_kept, reason, stop_reason", PUSH_CASES.values(), ids=PUSH_CASES
)
def test_commit_pushes_what_it_keeps(
    found: list, limits: dict, num_kept: int, reason: str | None, stop_reason: object
) -> None:
    pushed: list[int] = []

    def push(token: int) -> str | None:
        pushed.append(token)
        return found[len(pushed) - 1]

    result = commit([1, 2, 3], push=push, **{**LIMITS, "stop_ids": {EOS}, **limits})
    assert result == Commit((1, 2, 3)[:num_kept], reason, stop_reason)
    assert pushed == [1, 2, 3][:num_kept]


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
