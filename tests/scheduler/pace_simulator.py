"""A run of the engine without a model: the real plan and the real Pace, steps of known seconds.

Machines are functions of what a step feeds. Seconds are measured with noise and spikes, and a
machine may change its speed at any time. Nobody drafts; every request that reaches its last token
draws one more.
"""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from pagedraft.decoding.params import SamplingParams
from pagedraft.decoding.sequence import Sequence
from pagedraft.model.block_pool import BlockPool
from pagedraft.scheduler.pace import Pace, Verdict
from pagedraft.scheduler.plan import plan_step
from pagedraft.scheduler.request import Request, RequestStats
from pagedraft.scheduler.step_time import Load
from pagedraft.scheduler.waiting import WaitingQueue

Machine = Callable[[Load], float]


def cpu(load: Load) -> float:
    """Shaped like a 135M model on one core: a floor, about 3 ms a token, attention that counts."""
    tokens = 0.052 + 0.0012 * min(load.tokens, 16) + 0.003 * max(0, load.tokens - 16)
    return tokens + 9e-6 * load.context + 2e-6 * load.pairs


def gpu(load: Load) -> float:
    """5 ms until arithmetic takes longer, at about 128 tokens."""
    return max(0.005, 4e-5 * load.tokens) + 2e-8 * load.context + 5e-10 * load.pairs


def tiles(load: Load) -> float:
    """Steps of 64 tokens, 60 % of a plain step each."""
    return 0.01 * (1.0 + 0.6 * ((load.tokens - 1) // 64))


MACHINES: dict[str, Machine] = {"cpu": cpu, "gpu": gpu, "tiles": tiles}


@dataclass
class Simulator:
    """One engine. ``machine``, ``speed`` (a factor of the seconds) may be changed between steps."""

    machine: Machine
    noise: float = 0.03
    spike_share: float = 0.0
    token_budget: int = 512
    max_rows: int = 64
    seed: int = 0
    has_pace: bool = True
    num_blocks: int = 4096
    speed: float = 1.0
    now: float = 100.0
    running: list[Request] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.pool = BlockPool(self.num_blocks, 16)
        self.waiting: WaitingQueue[Request] = WaitingQueue()
        self.pace = Pace(self.token_budget, self.max_rows)
        self.num_added = 0

    def add(self, num_prompt: int, max_tokens: int = 100000, **options) -> Request:
        """Submit a request now."""
        request = Request(
            request_id=f"r{self.num_added}",
            sequence=Sequence([1] * num_prompt, num_prompt, 0.0, 0),
            params=SamplingParams(max_tokens=max_tokens),
            stop_ids=frozenset(),
            max_context=1 << 20,
            stats=RequestStats(submitted=self.now),
            **options,
        )
        request.arrival = self.num_added
        request.rank = self.waiting.rank_of(request.priority, request.arrival)
        self.num_added += 1
        self.pace.admit(request)
        self.waiting.push(request)
        return request

    def step(self) -> None:
        """Plan, let time pass, emit, record."""
        verdict = self.pace.plan(self.running, self.waiting, self.now)
        self.verdicts.append(verdict)
        if not self.has_pace:
            verdict = Verdict()
        plan = plan_step(
            self.waiting,
            self.running,
            self.pool,
            self.token_budget,
            self.max_rows,
            prompt_budget=verdict.prompt_budget,
            urgent=verdict.urgent,
        )
        for request in plan.preempted:
            self.running.remove(request)
            self.waiting.push(request)
        for request in plan.admitted:
            self.waiting.remove(request)
            insort(self.running, request, key=lambda r: (r.rank, r.arrival))
        load = Load()
        for request, span in plan.scheduled.items():
            load = load.plus(span, request.num_written + span)
        seconds = self._measured(self.machine(load)) if plan.scheduled else 0.001
        self.now += seconds
        for request, span in plan.scheduled.items():
            self._feed(request, span)
        if plan.scheduled:
            self.pace.record(plan.scheduled, seconds)

    def run(self, num_steps: int) -> None:
        """Several steps."""
        for _ in range(num_steps):
            self.step()

    def run_until(self, *requests: Request, limit: int = 20000) -> None:
        """Steps until all have their first token; AssertionError beyond ``limit``."""
        while not all(request.stats.emissions for request in requests):
            self.step()
            limit -= 1
            assert limit > 0, "a prompt starves"

    def end(self, request: Request) -> None:
        """Finish or abort a request, wherever it stands."""
        self.pace.forget(request)
        request.finish_reason = "abort"
        if request in self.running:
            self.running.remove(request)
            self.pool.free(request.request_id, request.block_ids)
            request.block_ids.clear()
        else:
            self.waiting.remove(request)
        self.ended.append(request)

    def _feed(self, request: Request, span: int) -> None:
        sequence = request.sequence
        if span < sequence.num_pending:
            sequence.num_written += span
            return
        sequence.append([1])
        request.stats.emissions.append((self.now, 1))
        if request.num_output >= request.params.max_tokens:
            self.end(request)

    def _measured(self, seconds: float) -> float:
        if self.random.random() < self.spike_share:
            seconds *= 10.0
        return self.speed * seconds * max(0.5, self.random.gauss(1.0, self.noise))


def gaps(request: Request, since: float = 0.0) -> list[float]:
    """Seconds between emissions, of those after ``since``."""
    times = [when for when, _ in request.stats.emissions]
    return [after - before for before, after in pairwise(times) if after > since]


def alone(machine: Machine, num_prompt: int, **options) -> float:
    """First-token seconds of a prompt on an idle machine."""
    simulator = Simulator(machine, noise=0.0, **options)
    request = simulator.add(num_prompt)
    simulator.run_until(request)
    return request.stats.ttft


STREAMS = Load(4, 4, 400, 400)


def streaming(machine, factor: float | None, num_streams: int = 4, **options) -> Simulator:
    """Streams that have run for a while; their target is ``factor`` plain steps (None: none)."""
    simulator = Simulator(machine, **options)
    itl_ms = None if factor is None else 1e3 * factor * machine(STREAMS)
    streams = [simulator.add(64, itl_ms=itl_ms) for _ in range(num_streams)]
    simulator.run_until(*streams)
    simulator.run(30)
    return simulator


def first_token(simulator: Simulator, num_prompt: int, **options) -> tuple[float, list[float]]:
    """A prompt's TTFT, and the gaps of the running streams meanwhile, over a plain step."""
    streams, began = list(simulator.running), simulator.now
    prompt = simulator.add(num_prompt, **options)
    simulator.run_until(prompt)
    plain = simulator.machine(STREAMS)
    return prompt.stats.ttft, [gap / plain for row in streams for gap in gaps(row, began)]
