"""Step times and predicted speed-ups of the engine bench, on closed forms and a tiny model."""

from __future__ import annotations

import pytest

from pagedraft.bench.engine_calibrate import WrongDrafter, step_times
from pagedraft.bench.engine_predict import NO_CUT, predict_passes, predict_set, round_seconds
from pagedraft.bench.engine_runs import run_ours
from pagedraft.bench.engine_steps import StepFacts, StepLog, StepTimes, decode_speed
from pagedraft.bench.engine_sweep import SweepPlan
from pagedraft.bench.synthetic import SyntheticDrafter
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.model.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("cpu_path")
PROMPTS = [[5, 6, 7, 8] * 3, [9, 3] * 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("engine_predict") / "model"
    save_tiny(path, "llama")
    return path


@pytest.fixture
def llm(folder):
    return LLM(folder, speculate="off", kv_tokens=512, block_size=8)


# Seconds of steps of two rows: 2, 4 and 8 tokens.
TIMES = StepTimes({2: 1.0, 4: 1.5, 8: 3.5})


def facts(drafted, accepted, drafting=0.0):
    return StepFacts(1.0, drafting, tuple(drafted), tuple(accepted))


@pytest.mark.parametrize(
    "num_tokens, seconds",
    [(1, 0.75), (2, 1.0), (3, 1.25), (4, 1.5), (5.0, 2.0), (8, 3.5), (10, 4.5)],
)
def test_step_times_are_lines_between_sizes(num_tokens, seconds):
    assert TIMES.at(num_tokens) == pytest.approx(seconds)


def test_one_step_time_is_all_there_is():
    assert StepTimes({4: 2.0}).at(100) == 2.0
    with pytest.raises(ValueError, match="expected at least one size, got none"):
        StepTimes({})


@pytest.mark.parametrize(
    "alpha, k, speedup",
    [(0.0, 1, 1 / 1.5), (1.0, 3, 4 / 3.5), (0.5, 1, 1.5 / 1.5), (0.5, 3, 1.875 / 3.5), (0.7, 0, 1)],
)
def test_prediction_at_a_set_acceptance(alpha, k, speedup):
    assert predict_set(alpha, k, 2, TIMES) == pytest.approx(speedup)


def test_prediction_is_the_formula_where_all_passes_are_alike():
    """E * v(b) / (k * c + v(b * (1 + k))) with E = 1 + 2 of 3 drafts."""
    steps = [facts([3, 3], [2, 2])] * 4
    assert predict_passes(steps, 3, TIMES, 0.1) == pytest.approx(3 * 1.0 / (3 * 0.1 + 3.5))
    assert predict_passes(steps, NO_CUT, TIMES, 0.1) == predict_passes(steps, 3, TIMES, 0.1)


def test_prediction_cuts_drafts():
    """k=1: of rows with 3, 0 and 1 drafts each keeps at most one."""
    steps = [facts([3, 0], [2, 0]), facts([1, 3], [0, 3])]
    tokens, seconds = 3 + 3, TIMES.at(3) + TIMES.at(4)
    assert predict_passes(steps, 1, TIMES, 0.0) == pytest.approx(tokens / seconds * 1.0 / 2)


def test_no_passes_no_prediction():
    assert predict_passes([], 4, TIMES, 0.0) is None


def test_drafting_seconds_are_those_of_a_round():
    steps = [facts([4, 2], [0, 0], 0.4), facts([0, 0], [0, 0], 9.0), facts([1, 0], [0, 0], 0.3)]
    assert round_seconds(steps) == pytest.approx(0.2)
    assert round_seconds([facts([0], [0], 9.0)]) == 0.0


def test_steps_of_a_full_batch_are_kept(llm):
    plain = run_ours(llm, PROMPTS, 10)
    drafter = SyntheticDrafter(zip(PROMPTS, plain.token_ids, strict=True), 1.0)
    drafting = LLM(llm.target, drafter=drafter, k=2, kv_tokens=512, block_size=8)
    log = StepLog()
    drafting.engine.observers.append(log)
    log.begin(2)
    assert run_ours(drafting, PROMPTS, 10).token_ids == plain.token_ids
    assert [(step.drafted_R, step.accepted_R) for step in log.steps] == [((2, 2), (2, 2))] * 3
    assert (log.steps[0].num_fed, log.steps[0].num_kept) == (6, 6)
    assert decode_speed(log.steps) == pytest.approx(18 / sum(step.seconds for step in log.steps))
    log.begin(3)
    run_ours(drafting, PROMPTS, 10)
    assert log.steps == []
    assert decode_speed([]) == 0.0


def test_step_times_are_of_every_length(llm):
    wrong = LLM(llm.target, drafter=WrongDrafter(0), k=0, kv_tokens=512, block_size=8)
    log = StepLog()
    wrong.engine.observers.append(log)
    times = step_times(wrong, log, PROMPTS, [0, 1, 4], 3)
    assert list(times.seconds_by_tokens) == [2, 4, 10]
    assert min(times.seconds_by_tokens.values()) > 0
    assert not wrong.engine.has_work
    wrong.engine.check_integrity()


def test_chance_hits_of_wrong_drafts_are_not_counted(llm):
    """Teeth: with the token that the model does say, no step with drafts is left."""
    [output] = run_ours(llm, PROMPTS[:1], 40).token_ids
    drafter = SyntheticDrafter([(PROMPTS[0], output)], 1.0)
    right = LLM(llm.target, drafter=drafter, k=0, kv_tokens=512, block_size=8)
    log = StepLog()
    right.engine.observers.append(log)
    assert list(step_times(right, log, PROMPTS[:1], [0, 2], 3).seconds_by_tokens) == [1]


def test_largest_steps_of_the_controller_are_timed_too():
    plan = SweepPlan([1], [0, 2, "auto"], [], [], 8, 1, 1)
    assert (plan.fixed, plan.calibrated) == ([0, 2], [0, 2, 16])
    assert SweepPlan([1], [0, 2], [], [], 8, 1, 1).calibrated == [0, 2]
