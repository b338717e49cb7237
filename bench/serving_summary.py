"""What a run of requests says: percentiles, rates, the queue, and whether a target was kept.

ITL is counted per token: the gap between two chunks over the tokens of the later one, once for each
of them. The gap itself, what a reader waits, stands beside it. Times are milliseconds here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pagedraft.bench.latency_runs import gaps_of
from pagedraft.bench.serving_load import Load
from pagedraft.bench.serving_run import TIME_LIMIT, Answer, Run
from pagedraft.scheduler.metrics import percentile

PERCENTS = (50, 95, 99)
KEPT_PERCENT = 99  # of requests, and of tokens, that a target is for
LATE_MS = 5.0  # a request that was sent later than that after it was due counts as late


@dataclass(frozen=True)
class Missed:
    """How many of ``num`` were above the target."""

    num: int
    missed: int

    @property
    def limit(self) -> int:
        """How many may be: what the nearest-rank percentile of KEPT_PERCENT leaves out."""
        return self.num - math.ceil(KEPT_PERCENT / 100 * self.num)

    @property
    def is_kept(self) -> bool:
        """Whether the percentile is within the target."""
        return self.missed <= self.limit

    @property
    def confidence(self) -> float:
        """How surely the share above the target is below 1 % in the long run.

        One less the chance of so few misses, or fewer, at a share of 1 %, were they independent.
        They are not: a queue delays one after another, so it is less sure than this.
        """
        share = 1.0 - KEPT_PERCENT / 100
        return 1.0 - sum(_binomial(self.num, i, share) for i in range(self.missed + 1))


@dataclass(frozen=True)
class Summary:
    """One run. Of the requests that count, but for what is said to be of all.

    mean_prompt, mean_new: tokens of prompts, and tokens that came.
    offered, achieved: requests a second: due and, of all, ended within the time that counts.
    tokens_per_second: of all, within that time. tokens_a_chunk: what a step brought a request.
    ttft: of a request that was given up without a token the time until then, which is too little;
    one that failed otherwise before its first token has none, and misses the target. itl, gaps: ms.
    failures: by reason; one misses the target. late, latest: sent after they were due.
    in_flight, waiting: requests at arrivals. cut: it was given up as hopeless.
    """

    offered: float
    achieved: float
    num_requests: int
    mean_prompt: float
    mean_new: float
    failures: dict[str, int]
    ttft: list[float]
    itl: list[float]
    gaps: list[float]
    tokens_per_second: float
    tokens_a_chunk: float
    num_late: int
    latest: float
    in_flight: list[int]
    waiting: list[int]
    is_cut: bool
    counted_by: dict[str, int]
    first: Missed
    between: Missed

    @property
    def is_kept(self) -> bool:
        """Whether p99 TTFT and p99 ITL are within the target."""
        return not self.is_cut and self.first.is_kept and self.between.is_kept

    def values(self) -> dict[str, float]:
        """Its figures by name; NaN for what there is none of."""
        times = {"TTFT": self.ttft, "ITL": self.itl, "step gap": self.gaps}
        figures = {
            f"{name} p{percent}": percentile(row, percent)
            for name, row in times.items()
            for percent in PERCENTS
        }
        return figures | {
            "achieved": self.achieved,
            "tokens/s": self.tokens_per_second,
            "tokens a chunk": self.tokens_a_chunk,
            "in flight": sum(self.in_flight) / max(1, len(self.in_flight)),
            "most in flight": max(self.in_flight, default=0),
            "most waiting": max(self.waiting, default=0),
            "late": self.num_late,
            "latest": self.latest,
            "failed": sum(self.failures.values()),
        }


def summarise(run: Run, load: Load, target_ms: float) -> Summary:
    """The summary of a run that was made from ``load``."""
    counted = run.counted
    begin = run.began + load.lead
    end = begin + load.seconds
    ended = [answer for answer in run.answers if answer.failure is None]
    emissions = [one for answer in run.answers for one in answer.stats.emissions]
    lateness = [1e3 * (answer.sent - answer.stats.submitted) for answer in counted]
    late = [one for one in lateness if one > LATE_MS]
    chunks = [count for answer in counted for _, count in answer.stats.emissions[1:]]
    return Summary(
        offered=len(counted) / load.seconds,
        achieved=sum(begin <= answer.ended < end for answer in ended) / load.seconds,
        num_requests=len(counted),
        mean_prompt=fmean(answer.num_prompt or answer.job.num_prompt for answer in counted),
        mean_new=fmean(answer.num_tokens for answer in counted),
        failures=dict(Counter(str(answer.failure) for answer in counted if answer.is_failed)),
        ttft=[1e3 * ttft for answer in counted if (ttft := _ttft(answer)) is not None],
        itl=[1e3 * itl for answer in counted for itl in answer.stats.inter_token_latencies],
        gaps=[1e3 * gap for gap in gaps_of(counted)],
        tokens_per_second=sum(n for when, n in emissions if begin <= when < end) / load.seconds,
        tokens_a_chunk=sum(chunks) / len(chunks) if chunks else math.nan,
        num_late=len(late),
        latest=max((one for one in lateness if not math.isnan(one)), default=0.0),
        in_flight=run.in_flight,
        waiting=run.waiting,
        is_cut=run.is_cut,
        counted_by=dict(Counter(answer.counted_by for answer in counted)),
        first=Missed(len(counted), sum(_misses_first(answer, target_ms) for answer in counted)),
        between=Missed(*_between(counted, target_ms)),
    )


def surely_missed(answers: Sequence[Answer], jobs_counted: Sequence[int], target_ms: float) -> bool:
    """Whether the target is missed already, however the run goes on.

    jobs_counted: the tokens asked for by every request that counts, those to come among them.
    """
    counted = [answer for answer in answers if answer.job.is_counted]
    first = Missed(len(jobs_counted), sum(_misses_first(answer, target_ms) for answer in counted))
    between = Missed(sum(jobs_counted) - len(jobs_counted), _between(counted, target_ms)[1])
    return not (first.is_kept and between.is_kept)


def _ttft(answer: Answer) -> float | None:
    """Seconds until the first token, or until the request was given up."""
    if answer.stats.ttft is None and answer.failure == TIME_LIMIT:
        return answer.ended - answer.stats.submitted
    return answer.stats.ttft


def _misses_first(answer: Answer, target_ms: float) -> bool:
    """Whether a request failed, or its first token was late; what a run stopped is not known."""
    if answer.is_failed:
        return True
    ttft = answer.stats.ttft
    return ttft is not None and 1e3 * ttft > target_ms


def _between(answers: Sequence[Answer], target_ms: float) -> tuple[int, int]:
    """How many tokens came after the first ones, and how many of them late."""
    itl = [one for answer in answers for one in answer.stats.inter_token_latencies]
    return len(itl), sum(1e3 * one > target_ms for one in itl)


def _binomial(num: int, hits: int, share: float) -> float:
    """The chance of ``hits`` of ``num``."""
    ways = math.lgamma(num + 1) - math.lgamma(hits + 1) - math.lgamma(num - hits + 1)
    return math.exp(ways + hits * math.log(share) + (num - hits) * math.log1p(-share))
