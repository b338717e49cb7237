"""Latency targets through the engine: they limit prompts, change no token, and leave nothing."""

from __future__ import annotations

import pytest

from pagedraft.decoding.params import SamplingParams
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.observer import StepRecord

pytestmark = pytest.mark.usefixtures("cpu_path")
STREAM = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
PROMPTS = [[(7 * i + j) % 90 + 3 for j in range(length)] for i, length in enumerate((5, 40, 9, 60))]


class Records:
    """Keeps what an engine says of its steps."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def on_add(self, request, caller) -> None: ...
    def on_abort(self, request, caller) -> None: ...
    def on_preempt(self, request, caller) -> None: ...
    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)


@pytest.fixture
def make_llm(target):
    return lambda **options: LLM(target, block_size=8, **({"kv_tokens": 512} | options))


def outputs(llm: LLM, targets: dict[str, float | None]) -> list[list[int]]:
    """Of all prompts, the later ones submitted while the first ones run."""
    requests = []
    for prompt in PROMPTS:
        requests.append(llm.submit(prompt, STREAM, **targets))
        for _ in range(5):
            llm.engine.step()
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.check_integrity()
    return [request.sequence.output_ids for request in requests]


TARGETS = {
    "between tokens": {"itl_ms": 20.0},
    "never to be kept": {"itl_ms": 1e-6, "ttft_ms": 1e-6},
    "first token": {"ttft_ms": 5.0},
    "never missed": {"itl_ms": 1e9, "ttft_ms": 1e9},
}


@pytest.mark.parametrize("options", [{}, {"kv_tokens": 160, "k": 3, "token_budget": 24}])
@pytest.mark.parametrize("name", TARGETS)
def test_targets_change_no_token(make_llm, name, options):
    expected = outputs(make_llm(), {})
    llm = make_llm(**options)
    assert outputs(llm, TARGETS[name]) == expected
    assert not llm.engine.pace.has_targets


def test_a_prompt_that_joins_paced_streams_is_fed_in_parts(make_llm):
    llm = make_llm(speculate="off")
    records = Records()
    llm.engine.observers.append(records)
    stream = llm.submit(PROMPTS[0], STREAM, itl_ms=1e-3)
    while len(stream.stats.emissions) < 5:
        llm.engine.step()
    prompt = llm.submit(PROMPTS[3], STREAM)
    while not prompt.stats.emissions:
        llm.engine.step()
    joined = [record for record in records.steps if prompt in record.scheduled]
    # The last token of a prompt, alone in its step, is fed like a decoded one: there is no budget.
    assert all(record.prompt_budget or record.scheduled[prompt] == 1 for record in joined)
    assert all(
        0 < record.scheduled[prompt] <= record.prompt_budget
        for record in joined
        if prompt not in record.emitted
    )
    assert sum(record.scheduled[prompt] for record in joined) == len(PROMPTS[3])
    assert len(joined) > 1
    llm.engine.abort_all()


def test_without_targets_the_prompt_is_fed_at_once(make_llm):
    """The control of the test before."""
    llm = make_llm(speculate="off")
    records = Records()
    llm.engine.observers.append(records)
    llm.submit(PROMPTS[0], STREAM)
    [llm.engine.step() for _ in range(5)]
    prompt = llm.submit(PROMPTS[3], STREAM)
    llm.engine.step()
    assert records.steps[-1].scheduled[prompt] == len(PROMPTS[3])
    assert records.steps[-1].prompt_budget is None
    llm.engine.abort_all()


def test_an_urgent_prompt_overtakes(make_llm):
    llm = make_llm(speculate="off", token_budget=16)
    first = llm.submit(PROMPTS[3], STREAM)
    second = llm.submit(PROMPTS[1], STREAM, ttft_ms=1e-3)
    while not first.stats.emissions:
        llm.engine.step()
    assert second.stats.emissions[0][0] < first.stats.emissions[0][0]
    llm.engine.abort_all()


@pytest.mark.parametrize("name", ["itl_ms", "ttft_ms"])
@pytest.mark.parametrize("value", [0, -3, float("nan"), "50", True])
def test_a_bad_target_is_named_and_leaves_nothing(make_llm, name, value):
    llm = make_llm()
    with pytest.raises((ValueError, TypeError), match=f"{name}: expected a number > 0, got"):
        llm.submit(PROMPTS[0], STREAM, **{name: value})
    assert not llm.engine.has_work
    assert not llm.engine.pace.has_targets
    assert len(llm.generate(PROMPTS[0], STREAM)[0].token_ids) == 60


def test_whatever_ends_a_request_its_targets_go(make_llm):
    llm = make_llm()

    def fail(tokens: list[int]) -> None:
        raise RuntimeError("no")

    ended = llm.submit(PROMPTS[0], SamplingParams(max_tokens=2), itl_ms=1.0, ttft_ms=1.0)
    failed = llm.submit(PROMPTS[1], STREAM, itl_ms=1.0, on_tokens=fail)
    aborted = llm.submit(PROMPTS[2], STREAM, itl_ms=1.0)
    waiting = llm.submit(PROMPTS[3], STREAM, ttft_ms=1.0)
    llm.engine.abort(waiting)
    while not (ended.finished and failed.finished):
        llm.engine.step()
    llm.engine.abort(aborted)
    assert (failed.finish_reason, aborted.finish_reason) == ("error", "abort")
    assert not llm.engine.pace.has_targets
    assert not llm.engine.has_work
