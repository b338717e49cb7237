"""When copying KV to the host and back pays: from measured copies and steps."""

from __future__ import annotations

import re

import pytest

from pagedraft.scheduler.swap_policy import CopyTime, SwapPolicy

COPIES = {
    "none": ([], 5, 0.0),
    "one size": ([(4, 2.0), (4, 2.0)], 8, 4.0),
    "fixed and by the block": ([(1, 3.0), (8, 10.0)], 20, 22.0),
    "by the block alone": ([(1, 1.0), (8, 8.0)], 16, 16.0),
    "more than in proportion": ([(1, 0.0), (8, 8.0)], 8, 8 * 64 / 64.9),
    "a faster big one": ([(1, 4.0), (8, 1.0)], 9, (3.6 + 1) / 1.9),
    "nothing copied": ([(0, 5.0)], 3, 0.0),
}


@pytest.mark.parametrize("copies, num_blocks, seconds", COPIES.values(), ids=COPIES)
def test_copy_time(copies, num_blocks: int, seconds: float) -> None:
    time = CopyTime()
    for count, taken in copies:
        time.record(count, taken)
    assert time.seconds(num_blocks) == pytest.approx(seconds)
    assert min(time.line) >= 0


def measured(forced: bool | None = None, per_token: float = 1.0) -> SwapPolicy:
    """A block takes 1 s out and 2 s back."""
    policy = SwapPolicy(forced)
    policy.out.record(1, 1.0)
    policy.back.record(1, 2.0)
    policy.record_step(10, 10 * per_token)
    return policy


# policy, blocks, tokens -> copies out and back, back alone, why
DECISIONS = {
    "cheaper": (measured(), 2, 7, True, True, "copying is cheaper: 6000.00 ms to copy 2 blocks"),
    "as dear": (measured(), 2, 6, False, True, "recomputing is cheaper: .* recompute 6 tokens"),
    "back is dear, too": (measured(), 2, 4, False, False, "recomputing is cheaper"),
    "forced": (measured(True), 9, 1, True, True, "forced"),
    "forbidden": (measured(False), 1, 99, False, False, "forced"),
    "nothing measured": (SwapPolicy(), 1, 99, False, False, "no prompt tokens measured yet"),
}


@pytest.mark.parametrize(
    "policy, blocks, tokens, out, back, why", DECISIONS.values(), ids=DECISIONS
)
def test_decisions(policy, blocks, tokens, out, back, why) -> None:
    assert policy.decide(blocks, tokens).swaps == out
    assert policy.decide_back(blocks, tokens).swaps == back
    assert re.search(why, policy.decide(blocks, tokens).reason)


def test_prompt_measurements_fade_and_count_by_tokens() -> None:
    policy = SwapPolicy()
    assert policy.seconds_per_token is None
    policy.record_step(1, 100.0)
    for _ in range(100):
        policy.record_step(64, 6.4)
    assert policy.seconds_per_token == pytest.approx(0.1, rel=1e-3)


# steps as (prompt tokens, seconds) -> seconds a prompt token
STEPS = {
    "no plain step yet": ([(10, 5.0)], 0.5),
    "beyond a plain step": ([(0, 2.0), (10, 5.0)], 0.3),
    "plain steps are averaged": ([(0, 2.0), (0, 3.0), (10, 5.1)], 0.3),
    "no longer than a plain step": ([(0, 2.0), (10, 1.0)], 0.0),
    "plain steps alone": ([(0, 2.0)], None),
    "many plain steps later": ([(0, 1.0), (10, 5.0), *[(0, 1.0)] * 10_000], 0.4),
}


@pytest.mark.parametrize("steps, expected", STEPS.values(), ids=STEPS)
def test_prompt_tokens_cost_what_a_step_takes_longer(steps, expected) -> None:
    policy = SwapPolicy()
    for num_prompt, seconds in steps:
        policy.record_step(num_prompt, seconds)
    assert policy.seconds_per_token == (None if expected is None else pytest.approx(expected))
