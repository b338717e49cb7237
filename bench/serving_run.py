"""An open-loop load: requests are sent when they are due, whether or not others were answered.

Every latency counts from the time at which a request was due, so that one that could only be sent
late, because the machine was busy, is charged with that too (no coordinated omission). Times are
``time.perf_counter`` seconds, taken where the client gets the tokens.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pagedraft.bench.serving_load import Job
from pagedraft.decoding.failure import describe
from pagedraft.decoding.params import SamplingParams
from pagedraft.scheduler.async_engine import AsyncEngine, EngineDied
from pagedraft.scheduler.request import RequestStats
from pagedraft.scheduler.submission import Options

TIME_LIMIT, STOPPED = "time limit", "stopped"


class ServingError(RuntimeError):
    """A server's answer to one request was no good."""


@dataclass(eq=False)
class Answer:
    """What came of one request.

    stats: ``submitted`` is when it was due, ``emissions`` when how many tokens came.
    sent: when it really was. failure: None, TIME_LIMIT, STOPPED (by the run, which was over), or
    what went wrong. counted_by: how the tokens of a chunk were counted (serving_http.py).
    num_prompt: tokens of the prompt as the server counts them, if it says.
    """

    job: Job
    stats: RequestStats
    sent: float = math.nan
    ended: float = math.nan
    failure: str | None = None
    token_ids: list[int] = field(default_factory=list)
    counted_by: str = "token ids"
    num_prompt: int | None = None

    def note(self, num_tokens: int) -> None:
        """Some tokens have come, right now."""
        self.stats.emissions.append((time.perf_counter(), num_tokens))

    @property
    def num_tokens(self) -> int:
        """Tokens that have come."""
        return sum(count for _, count in self.stats.emissions)

    @property
    def is_failed(self) -> bool:
        """Whether it ended without its tokens, and not because the run was over."""
        return self.failure not in (None, STOPPED)


Send = Callable[[Job, Answer], Awaitable[None]]  # returns when all has come, raises if it does not


@dataclass(frozen=True)
class Run:
    """Answers in the order of arrival.

    began: when the clock of the jobs was 0. in_flight, waiting: requests that were not answered yet
    and that the engine had not admitted, at each arrival that counts. is_cut: it was given up.
    """

    began: float
    answers: list[Answer]
    in_flight: list[int]
    waiting: list[int]
    is_cut: bool

    @property
    def counted(self) -> list[Answer]:
        """Those that count."""
        return [answer for answer in self.answers if answer.job.is_counted]


class OpenLoop:
    """Sends jobs at their times until all that count have been answered; the rest is dropped then.

    time_limit: seconds from when a request is due to when it is given up.
    num_waiting: what ``Run.waiting`` is made of.
    is_hopeless: asked now and then; True gives the run up.
    """

    def __init__(
        self,
        send: Send,
        time_limit: float,
        *,
        num_waiting: Callable[[], int] = lambda: 0,
        is_hopeless: Callable[[Sequence[Answer]], bool] = lambda answers: False,
    ) -> None:
        self.send = send
        self.time_limit = time_limit
        self.num_waiting = num_waiting
        self.is_hopeless = is_hopeless

    async def run(self, jobs: Sequence[Job]) -> Run:
        """Raises EngineDied if the engine does, ValueError where no job counts."""
        if not any(job.is_counted for job in jobs):
            raise ValueError(f"jobs: expected at least one that counts, got {len(jobs)} others")
        self._over = asyncio.Event()
        self._num_open = sum(job.is_counted for job in jobs)
        self._num_in_flight = 0
        self._death: EngineDied | None = None
        self._is_cut = False
        run = Run(time.perf_counter(), [], [], [], False)
        tasks: list[asyncio.Task[None]] = []
        try:
            for job in jobs:
                if await self._is_over(run.began + job.when):
                    break
                tasks.append(asyncio.create_task(self._serve(self._arrived(run, job), run)))
            await self._over.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for answer in run.answers:
                if math.isnan(answer.ended):  # it was stopped before it began
                    answer.failure, answer.ended = STOPPED, time.perf_counter()
        if self._death is not None:
            raise self._death
        return Run(run.began, run.answers, run.in_flight, run.waiting, self._is_cut)

    async def _is_over(self, due: float) -> bool:
        """Wait until ``due``, or until the run is over."""
        delay = due - time.perf_counter()
        if delay <= 0.0:
            await asyncio.sleep(0)  # requests before this one get to be sent
        else:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), delay)
        return self._over.is_set()

    def _arrived(self, run: Run, job: Job) -> Answer:
        answer = Answer(job, RequestStats(submitted=run.began + job.when))
        run.answers.append(answer)
        if job.is_counted:
            run.in_flight.append(self._num_in_flight)
            run.waiting.append(self.num_waiting())
            self._look(run)
        self._num_in_flight += 1
        return answer

    async def _serve(self, answer: Answer, run: Run) -> None:
        answer.sent = time.perf_counter()
        left = self.time_limit - (answer.sent - answer.stats.submitted)
        limit = asyncio.timeout(left)
        try:
            async with limit:
                await self.send(answer.job, answer)
        except asyncio.CancelledError:
            answer.failure = STOPPED
            raise
        except EngineDied as error:
            answer.failure, self._death = describe(error), error
            self._over.set()
        except Exception as error:  # whatever a server does ends that request alone
            answer.failure = TIME_LIMIT if limit.expired() else describe(error)
        finally:
            answer.ended = time.perf_counter()
            self._num_in_flight -= 1
            self._num_open -= answer.job.is_counted
            self._look(run)

    def _look(self, run: Run) -> None:
        if self._num_open == 0:
            self._over.set()
        elif not self._over.is_set() and self.is_hopeless(run.answers):
            self._is_cut = True
            self._over.set()


class EngineClient:
    """Sends jobs to an AsyncEngine in this process; greedy, never ended by the model."""

    def __init__(self, engine: AsyncEngine, speculate: bool, options: Options) -> None:
        self.engine = engine
        self.speculate = speculate
        self.options = options

    async def send(self, job: Job, answer: Answer) -> None:
        """Read the stream to its end; whatever ends it before aborts the request."""
        params = greedy(job.num_new, self.speculate)
        stream = await self.engine.submit(job.prompt, params, **self.options)
        try:
            async for part in stream:
                if part.token_ids:
                    answer.note(len(part.token_ids))
                    answer.token_ids += part.token_ids
                if part.error is not None:
                    raise ServingError(part.error)
        finally:
            stream.abort()

    def num_waiting(self) -> int:
        """Requests that wait to be admitted."""
        return self.engine.stats().num_waiting


def greedy(num_tokens: int, speculate: bool) -> SamplingParams:
    """So many tokens, always the same."""
    return SamplingParams(
        max_tokens=num_tokens, temperature=0.0, ignore_eos=True, speculate=speculate
    )
