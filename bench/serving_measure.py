"""The runs of the serving bench, in their order: an idle server, rounds over rates, the search.

With and without speculation take turns, on the same requests at the same times, so that what else a
shared machine does hits both alike.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pagedraft.bench.serving_bed import Bed
from pagedraft.bench.serving_goodput import Trial, search
from pagedraft.bench.serving_load import (
    ARRIVALS,
    MIXES,
    Job,
    Load,
    Mix,
    PromptSource,
    make_jobs,
)
from pagedraft.bench.serving_rows import Found, Row
from pagedraft.bench.serving_run import TIME_LIMIT, Answer, OpenLoop, Run, ServingError
from pagedraft.bench.serving_summary import Summary, summarise, surely_missed
from pagedraft.scheduler.metrics import percentile

NUM_IDLE = 6  # requests, one after another; the first is not counted
IDLE_SECONDS = 10.0  # after which no more of them are sent, but two
GATE_A_RUN = 2  # answers of a run that are kept for the comparison of outputs


@dataclass(frozen=True)
class Settings:
    """What is measured. Rates are requests a second, times seconds but for target_ms.

    cv: of bursty arrivals' gaps. repeat: rounds, and runs of every rate that the search tries.
    resolution: how far kept and missed rates may be apart, a factor. search_seconds: most time for
    the search of one goodput; 0: none.
    """

    arrivals: tuple[str, ...]
    mixes: tuple[str, ...]
    rates: tuple[float, ...]
    seconds: float
    lead: float
    repeat: int
    time_limit: float
    target_ms: float
    cv: float
    resolution: float
    search_seconds: float
    seed: int


@dataclass(frozen=True)
class Idle:
    """Medians of requests that were alone, in ms: no load can do better. NaN for what none had."""

    mix: str
    speculation: str
    ttft: float
    itl: float


@dataclass
class Results:
    """answers: a few of every run that were completed, to be compared."""

    idle: list[Idle] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)


class Measurement:
    """All runs on one bed."""

    def __init__(self, bed: Bed, settings: Settings) -> None:
        self.bed = bed
        self.settings = settings
        self.results = Results()
        self._sources: dict[str, PromptSource] = {}
        self._numbers = random.Random(settings.seed)
        self._num_runs = 0

    async def run(self) -> Results:
        """Everything. Raises ServingError where no request of a run could be served at all."""
        for mix in self.settings.mixes:
            self._sources[mix] = self.bed.source(MIXES[mix].text)
            for speculation in self.bed.speculations:
                self.results.idle.append(await self._idle(MIXES[mix], speculation))
            for arrivals in self.settings.arrivals:
                rows = await self._rows(arrivals, mix)
                self.results.rows += rows
                for speculation in self.bed.speculations if self.settings.search_seconds else ():
                    mine = [row for row in rows if row.speculation == speculation]
                    self.results.found.append(await self._search(mine))
        return self.results

    async def _idle(self, mix: Mix, speculation: str) -> Idle:
        load = Load(mix, 1.0, 1.0, NUM_IDLE, 0.0, f"{self.settings.seed}/idle/{mix.name}")
        jobs = [job for job in self._jobs(load) if job.is_counted]
        answers: list[Answer] = []
        began = time.monotonic()
        for job in jobs:
            if len(answers) > 1 and time.monotonic() - began > IDLE_SECONDS:
                break
            run = await self._send([replace(job, when=0.0)], speculation)
            answers += run.counted
        stats = [answer.stats for answer in answers[1:]]
        ttft = [one.ttft for one in stats if one.ttft is not None]
        itl = [latency for one in stats for latency in one.inter_token_latencies]
        _say(f"{mix.name}, speculation {speculation}: idle, done")
        return Idle(mix.name, speculation, 1e3 * percentile(ttft, 50), 1e3 * percentile(itl, 50))

    async def _rows(self, arrivals: str, mix: str) -> list[Row]:
        """Every rate with every speculation, all rounds."""
        speculations = self.bed.speculations
        rows = [
            Row(arrivals, mix, speculation, rate)
            for rate in self.settings.rates
            for speculation in speculations
        ]
        for index in range(self.settings.repeat):
            turn = rows if index % 2 == 0 else rows[::-1]
            for row in turn:
                load = self._load(row, row.rate, f"round {index}")
                row.rounds.append(await self._measure(load, row.speculation))
                _say(f"{row.name}: {row.rate:g} per s, round {index + 1}, done")
        return rows

    async def _search(self, rows: Sequence[Row]) -> Found:
        """The goodput of the speculation whose rows these are."""
        settings, row = self.settings, rows[0]
        runs: dict[float, list[Summary]] = {one.rate: list(one.rounds) for one in rows}
        lowest = min(runs)
        number = 0

        async def judge(rate: float) -> bool:
            nonlocal number
            number += 1
            for index in range(settings.repeat):
                load = self._load(row, rate, f"trial {number}.{index}")
                summary = await self._measure(load, row.speculation, may_cut=rate >= lowest)
                runs.setdefault(rate, []).append(summary)
                if not summary.is_kept:
                    return False
            return True

        trial_seconds = settings.repeat * (settings.lead + settings.seconds)
        deadline = time.monotonic() + settings.search_seconds
        goodput = await search(
            judge,
            [Trial(one.rate, one.is_kept) for one in rows],
            resolution=settings.resolution,
            has_time=lambda count: time.monotonic() + count * trial_seconds < deadline,
        )
        _say(f"{row.name}: goodput, {number} trials, done")
        return Found(row.arrivals, row.mix, row.speculation, settings.target_ms, goodput, runs)

    def _load(self, row: Row, rate: float, name: str) -> Load:
        settings = self.settings
        cv = settings.cv if row.arrivals == "bursty" else ARRIVALS[row.arrivals]
        seed = f"{settings.seed}/{row.arrivals}/{row.mix}/{rate:g}/{name}"
        return Load(MIXES[row.mix], rate, cv, settings.seconds, settings.lead, seed)

    def _jobs(self, load: Load) -> list[Job]:
        return make_jobs(load, self._sources[load.mix.name], self.bed.max_context)

    async def _measure(self, load: Load, speculation: str, may_cut: bool = False) -> Summary:
        """One run; with ``may_cut`` it is given up as soon as the target is surely missed."""
        jobs, target_ms = self._jobs(load), self.settings.target_ms
        wanted = [job.num_new for job in jobs if job.is_counted]
        run = await self._send(
            jobs,
            speculation,
            is_hopeless=lambda answers: may_cut and surely_missed(answers, wanted, target_ms),
        )
        return summarise(run, load, target_ms)

    async def _send(
        self,
        jobs: Sequence[Job],
        speculation: str,
        is_hopeless: Callable[[Sequence[Answer]], bool] = lambda answers: False,
    ) -> Run:
        self._num_runs += 1
        line = self.bed.line(speculation, f"run {self._num_runs}")
        loop = OpenLoop(
            line.send,
            self.settings.time_limit,
            num_waiting=line.num_waiting,
            is_hopeless=is_hopeless,
        )
        run = await loop.run(jobs)
        _check_any(run)
        done = [answer for answer in run.answers if answer.failure is None]
        self.results.answers += self._numbers.sample(done, min(GATE_A_RUN, len(done)))
        return run


def _check_any(run: Run) -> None:
    """Raise ServingError if every request failed for a reason that is not a slow server."""
    reasons = {answer.failure for answer in run.counted}
    if reasons and not reasons & {None, TIME_LIMIT} and all(a.is_failed for a in run.counted):
        raise ServingError(f"every request failed: {sorted(map(str, reasons))[:3]}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
