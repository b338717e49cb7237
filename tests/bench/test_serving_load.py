"""The load of the serving bench: arrivals, the open loop, the arithmetic of its latencies."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from pagedraft.bench.serving_load import (
    MIXES,
    Job,
    Lengths,
    Load,
    arrival_times,
    make_jobs,
    pieces_of_ids,
    pieces_of_text,
    random_ids,
    read_text,
)
from pagedraft.bench.serving_run import STOPPED, TIME_LIMIT, Answer, OpenLoop, Run
from pagedraft.bench.serving_summary import Missed, summarise, surely_missed
from pagedraft.scheduler.request import RequestStats

pytestmark = pytest.mark.usefixtures("cpu_path")
CODE = MIXES["code"]
LOAD = Load(CODE, rate=4.0, cv=1.0, seconds=5.0, lead=2.0, seed="a")


def jobs_of(load: Load) -> list[Job]:
    return make_jobs(load, random_ids(90), 2048)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_arrivals_have_the_rate_and_dispersion(cv):
    times = arrival_times(random.Random(1), 20_000, 5_000.0, cv)
    gaps = [later - before for before, later in pairwise([0.0, *times])]
    assert min(gaps) >= 0.0
    assert times[-1] < 5_000.0
    assert fmean(gaps) == pytest.approx(0.25, rel=0.02)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.06)
    # Counts in windows: variance over mean is cv squared for long windows.
    counts = Counter(int(time / 50.0) for time in times)
    rows = [counts[window] for window in range(100)]
    assert pstdev(rows) ** 2 / fmean(rows) == pytest.approx(cv**2, rel=0.4)


def test_poisson_gaps_are_exponential():
    times = arrival_times(random.Random(2), 20_000, 20_000.0, 1.0)
    gaps = [later - before for before, later in pairwise(times)]
    assert sum(gap > 1.0 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), rel=0.03)
    assert sum(gap > 3.0 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-3), rel=0.1)


def test_jobs_are_seeded():
    assert jobs_of(LOAD) == jobs_of(LOAD)
    assert jobs_of(LOAD) != jobs_of(replace(LOAD, seed="b"))


def test_as_many_jobs_count_as_the_rate_says():
    jobs = jobs_of(LOAD)
    assert [job.is_counted for job in jobs] == [False] * 8 + [True] * 20 + [False] * 20
    assert [job.when for job in jobs] == sorted(job.when for job in jobs)
    assert all(2.0 <= job.when < 7.0 for job in jobs if job.is_counted)
    assert {len(job.prompt) for job in jobs} == {128}
    assert {job.num_new for job in jobs} == {16}


def test_one_job_counts_at_the_least():
    assert sum(job.is_counted for job in jobs_of(replace(LOAD, rate=0.01))) == 1


def test_lengths_have_their_mean_and_are_cut():
    numbers = random.Random(0)
    drawn = [Lengths(160.0, 1.0).draw(numbers, 10**9) for _ in range(20_000)]
    assert fmean(drawn) == pytest.approx(160.0, rel=0.05)
    assert sorted(drawn)[10_000] == pytest.approx(160.0 / math.exp(0.5), rel=0.05)
    numbers = random.Random(0)
    assert [Lengths(160.0, 1.0).draw(numbers, 200) for _ in range(99)] == [
        min(length, 200) for length in drawn[:99]
    ]


def test_requests_fit_the_context():
    jobs = make_jobs(replace(LOAD, mix=MIXES["chat"], rate=200.0), random_ids(90), 100)
    assert max(job.num_prompt for job in jobs) == 50
    assert max(job.num_prompt + job.num_new for job in jobs) == 100


def test_prompts_are_pieces_of_a_text():
    numbers = random.Random(0)
    ids = list(range(1000, 1100))
    pieces = [pieces_of_ids(ids)(numbers, 10) for _ in range(50)]
    assert all(piece == list(range(piece[0], piece[0] + 10)) for piece in pieces)
    assert len({piece[0] for piece in pieces}) > 25
    text = read_text("code")
    piece = pieces_of_text(text)(numbers, 30)
    assert len(piece) == 120
    assert piece in text
    with pytest.raises(ValueError, match="at most the text's 100 tokens, got 101"):
        pieces_of_ids(ids)(numbers, 101)
    assert "Alice" in read_text("prose")


def answer_of(
    due: float,
    emissions: list[tuple[float, int]],
    *,
    failure: str | None = None,
    ended: float | None = None,
    sent: float | None = None,
    is_counted: bool = True,
) -> Answer:
    job = Job(due, [1], 1, 8, is_counted)
    stats = RequestStats(submitted=due, emissions=emissions)
    last = emissions[-1][0] if emissions else due
    end = last if ended is None else ended
    return Answer(job, stats, due if sent is None else sent, end, failure)


def summary_of(*answers: Answer, load: Load = LOAD, target_ms: float = 100.0, cut: bool = False):
    run = Run(0.0, list(answers), [0] * len(answers), [0] * len(answers), cut)
    return summarise(run, load, target_ms)


def test_latencies_of_hand_made_emissions():
    """A chunk of three tokens: three ITLs of a third of the gap, and one gap."""
    summary = summary_of(answer_of(2.0, [(2.05, 1), (2.08, 3), (2.28, 1)], sent=2.01))
    assert summary.ttft == pytest.approx([50.0])
    assert summary.itl == pytest.approx([10.0, 10.0, 10.0, 200.0])
    assert summary.gaps == pytest.approx([30.0, 200.0])
    assert summary.tokens_a_chunk == 2.0
    assert (summary.num_late, summary.latest) == (1, pytest.approx(10.0))
    assert summary.between == Missed(4, 1)
    assert summary.first == Missed(1, 0)
    assert not summary.is_kept


def test_rates_count_what_ends_in_the_time_of_arrivals_that_count():
    """The time is from 2 to 7; those before and after count for rates alone."""
    summary = summary_of(
        answer_of(1.0, [(1.5, 4), (3.0, 1)], is_counted=False),
        answer_of(1.0, [(1.5, 4)], is_counted=False),
        answer_of(3.0, [(3.1, 1), (6.9, 2)]),
        answer_of(6.0, [(6.1, 1), (7.1, 8)]),
        answer_of(6.5, [(6.6, 1)], failure=STOPPED, is_counted=False),
    )
    assert summary.offered == 2 / 5.0
    assert summary.achieved == 2 / 5.0
    assert summary.tokens_per_second == (1 + 1 + 2 + 1 + 1) / 5.0
    assert len(summary.ttft) == 2


def test_failures_miss_the_target():
    summary = summary_of(
        answer_of(2.0, [(2.01, 1)]),
        answer_of(2.0, [(2.01, 1)], failure="HTTP 503", ended=2.1),
        answer_of(2.0, [], failure=TIME_LIMIT, ended=5.0),
        answer_of(2.0, [], failure="HTTP 503", ended=2.1),
    )
    assert summary.failures == {"HTTP 503": 2, TIME_LIMIT: 1}
    assert summary.first == Missed(4, 3)
    assert summary.ttft == pytest.approx([10.0, 10.0, 3000.0])
    assert summary.values()["failed"] == 3


def test_a_run_that_was_given_up_keeps_nothing():
    answers = [answer_of(2.0, [(2.01, 1), (2.02, 1)])]
    assert summary_of(*answers).is_kept
    assert not summary_of(*answers, cut=True).is_kept


# requests or tokens, misses: whether the nearest-rank p99 is within the target
KEPT = {
    "one": (1, 0, True),
    "one missed": (1, 1, False),
    "the worst of 99": (99, 1, False),
    "the worst of 100": (100, 1, True),
    "two of 100": (100, 2, False),
    "three of 300": (300, 3, True),
    "none": (0, 0, True),
}


@pytest.mark.parametrize("num, missed, is_kept", KEPT.values(), ids=KEPT)
def test_what_a_percentile_keeps(num, missed, is_kept):
    assert Missed(num, missed).is_kept == is_kept


def test_confidence_grows_with_requests():
    assert Missed(300, 0).confidence == pytest.approx(1 - 0.99**300)
    by_hand = 1 - 0.99**10 - 10 * 0.01 * 0.99**9
    assert Missed(10, 1).confidence == pytest.approx(by_hand)
    assert Missed(100_000, 900).confidence > 0.99
    assert Missed(10, 10).confidence == pytest.approx(0.0, abs=1e-12)


def test_a_miss_is_sure_only_when_no_rest_can_mend_it():
    late, good = answer_of(2.0, [(2.2, 1)]), answer_of(2.0, [(2.05, 1), (2.1, 1)])
    slow = answer_of(2.0, [(2.05, 1), (2.3, 1)])
    assert surely_missed([late], [8] * 99, 100.0)
    assert not surely_missed([late], [8] * 100, 100.0)
    assert surely_missed([late, late], [8] * 100, 100.0)
    assert not surely_missed([replace_counted(late), good], [8], 100.0)
    assert surely_missed([slow], [8] * 10, 100.0)
    assert not surely_missed([slow], [8] * 20, 100.0)


def replace_counted(answer: Answer) -> Answer:
    """The same of a request that does not count."""
    return replace(answer, job=replace(answer.job, is_counted=False))


def jobs_at(*times: float, uncounted: tuple[float, ...] = ()) -> list[Job]:
    jobs = [Job(when, [1], 1, 2, when not in uncounted) for when in (*times, *uncounted)]
    return sorted(jobs, key=lambda job: job.when)


def test_arrivals_do_not_wait_for_answers():
    async def send(job, answer):
        await asyncio.sleep(0.6)
        answer.note(2)

    run = asyncio.run(OpenLoop(send, 5.0).run(jobs_at(0.0, 0.02, 0.04, 0.06)))
    assert run.in_flight == [0, 1, 2, 3]
    assert all(answer.failure is None for answer in run.answers)
    assert run.answers[-1].ended - run.began < 2.0  # one after another they would take 2.4


def test_what_holds_up_the_sender_is_charged_to_the_requests():
    async def send(job, answer):
        time.sleep(0.1)
        answer.note(1)

    run = asyncio.run(OpenLoop(send, 5.0).run(jobs_at(0.0, 0.01)))
    late = run.answers[1]
    assert late.sent - late.stats.submitted > 0.08
    assert late.stats.ttft > 0.18
    assert late.stats.ttft - (late.sent - late.stats.submitted) < 0.15


def test_the_rest_is_dropped_when_all_that_count_have_ended():
    ended = []

    async def send(job, answer):
        try:
            await asyncio.sleep(30.0 if job.when == 0.0 else 0.02)
        finally:
            ended.append(job.when)

    jobs = jobs_at(0.01, uncounted=(0.0, 20.0))
    run = asyncio.run(OpenLoop(send, 60.0).run(jobs))
    assert [answer.failure for answer in run.answers] == [STOPPED, None]
    assert ended == [0.01, 0.0]
    assert run.answers[0].ended - run.began < 5.0


def test_a_request_is_given_up_at_its_limit_and_others_go_on():
    async def send(job, answer):
        answer.note(1)
        await asyncio.sleep(30.0 if job.when == 0.0 else 0.0)

    run = asyncio.run(OpenLoop(send, 0.3).run(jobs_at(0.0, 0.01)))
    assert [answer.failure for answer in run.answers] == [TIME_LIMIT, None]


def test_a_time_limit_of_the_server_s_own_is_not_ours():
    async def send(job, answer):
        raise TimeoutError("its own")

    run = asyncio.run(OpenLoop(send, 5.0).run(jobs_at(0.0)))
    assert run.answers[0].failure == "TimeoutError: its own"


def test_a_hopeless_run_is_cut():
    async def send(job, answer):
        await asyncio.sleep(0.0 if job.when == 0.0 else 30.0)

    loop = OpenLoop(send, 60.0, is_hopeless=lambda answers: len(answers) == 2)
    run = asyncio.run(loop.run(jobs_at(0.0, 0.01, 20.0)))
    assert run.is_cut
    assert [answer.failure for answer in run.answers] == [None, STOPPED]


def test_nothing_counts():
    with pytest.raises(ValueError, match="expected at least one that counts"):
        asyncio.run(OpenLoop(None, 1.0).run(jobs_at(uncounted=(0.0,))))
