"""The engine: plan, draft, forward, verify, commit, emit. The only file that wires all of them.

One ``step()`` runs one forward pass of the target over whatever mix of prompt chunks, decoded
tokens and drafts the plan chose. Requests differ only in how many tokens they have to catch up.

The host reads the device once a step, after everything is launched. Until then nothing of the step
is committed, so one that fails on its way leaves every request as it was. What the next launch does
not need, callbacks and observers, can wait until that one is under way (``overlap``); so does what
drafters learn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

from pagedraft.decoding.controller import DraftController
from pagedraft.decoding.drafters.base import Drafter
from pagedraft.decoding.params import check_int
from pagedraft.model.block_pool import BlockPool
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.accounts import account
from pagedraft.scheduler.admission import check_request
from pagedraft.scheduler.committer import Committer
from pagedraft.scheduler.launch import Launched, Launcher
from pagedraft.scheduler.metrics import EngineStats
from pagedraft.scheduler.observer import Observer, StepRecord
from pagedraft.scheduler.outbox import Outbox
from pagedraft.scheduler.output import Kept
from pagedraft.scheduler.pace import Pace
from pagedraft.scheduler.plan import StepPlan, plan_step
from pagedraft.scheduler.prefix import Prefixes
from pagedraft.scheduler.request import Request
from pagedraft.scheduler.roster import Roster
from pagedraft.scheduler.rows import Rows, Step
from pagedraft.scheduler.speculation import Speculation
from pagedraft.scheduler.step_limit import StepLimit, free_device_memory, is_out_of_memory
from pagedraft.scheduler.swap import SwapSpace
from pagedraft.scheduler.warm_up import Progress, WarmUpReport


class Engine:
    """Continuous batching over one target model, with or without drafters.

    caches: KV pools of the same blocks, the target's first. prefix_cache: keep the KV of ended
        requests for prompts that begin the same, until its blocks are needed.
    token_budget: most tokens a step feeds; max_rows: most requests a step runs; chunk_tokens: most
    prompt tokens one request feeds in a step (None: the budget).
    swap_bytes: host memory for the KV of preempted requests, where copying is faster than computing
        it again (swap.py); 0: none.
    overlap: run callbacks and observers of a step while the next one is on the device; None: on a
        GPU. Where the device is the CPU nothing is gained, and tokens would be told a step late.
    observers: told of submissions, aborts, preemptions and steps (observer.py).
    waiting: requests that have yet to be admitted, or again after a preemption. running: those that
    own KV, by rank and arrival. num_steps: steps that are done.
    """

    def __init__(
        self,
        target: Transformer,
        caches: Seq[KVCache],
        *,
        drafters: Seq[Drafter] = (),
        controller: DraftController | None = None,
        token_budget: int = 512,
        max_rows: int = 64,
        chunk_tokens: int | None = None,
        prefix_cache: bool = True,
        swap_bytes: int = 0,
        overlap: bool | None = None,
        observers: Seq[Observer] = (),
    ) -> None:
        check_int("token_budget", token_budget, 1)
        check_int("max_rows", max_rows, 1)
        check_int("chunk_tokens", 1 if chunk_tokens is None else chunk_tokens, 1)
        check_int("swap_bytes", swap_bytes, 0)
        self.target = target
        self.caches = list(caches)
        self.cache = self.caches[0]
        self.pool = BlockPool(self.cache.num_blocks, self.cache.block_size)
        swap = SwapSpace(self.caches, swap_bytes) if swap_bytes else None
        self.prefixes = Prefixes(self.pool, prefix_cache, swap=swap)
        self.speculation = Speculation(
            drafters, controller or DraftController(), target.config.vocab_size, target.device
        )
        self.pace = Pace(token_budget, max_rows, chunk_tokens)
        self.token_budget = token_budget
        self.max_rows = max_rows
        self.chunk_tokens = chunk_tokens
        self.overlap = target.device.type == "cuda" if overlap is None else overlap
        self.stats = EngineStats()
        self.outbox = Outbox(observers, self._fail)
        self.observers = self.outbox.observers
        rows = Rows(
            max_rows,
            min(self.pool.num_usable, self.pool.blocks_for(target.config.max_positions)),
            block_size=self.pool.block_size,
            device=target.device,
            row_multiple=target.row_multiple,
        )
        self._roster = Roster(rows)
        self.waiting, self.running = self._roster.waiting, self._roster.running
        self.launcher = Launcher(target, self.caches, rows)
        self._committer = Committer(self, lambda request, kept: self._finish(request, kept))
        self._limit = StepLimit()
        self.num_steps = 0
        self._is_stepping = False

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs, or has tokens that its callback has yet to get."""
        return bool(self.waiting or self.running) or not self.outbox.is_empty

    def check(self, request: Request) -> None:
        """Raise ValueError or TypeError naming what makes a request impossible; any thread may."""
        check_request(request, self.target.config, self.pool)

    def add(self, request: Request) -> None:
        """Queue a request that passes ``check``."""
        self.check(request)
        self._roster.add(request)
        self.pace.admit(request)
        self.speculation.admit(request)
        self.outbox.added(request)

    def abort(self, request: Request) -> None:
        """End a request now, wherever it stands; its blocks go back. A no-op if it has ended."""
        if request.finished:
            return
        if not self._roster.holds(request):
            raise ValueError(f"request {request.request_id!r}: expected one of this engine")
        self._finish(request, Kept([], "abort"))
        self.outbox.aborted(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks; it runs again later and keeps its output."""
        if request.row < 0 or not self._roster.holds(request):
            raise ValueError(f"request {request.request_id!r}: expected one that runs here")
        self._retire(request, save=True)

    def _retire(self, request: Request, save: bool) -> None:
        self.prefixes.retire(request, save)
        self._requeue(request)
        self.outbox.preempted(request)

    def abort_all(self) -> None:
        """End every request."""
        for request in [*self.running, *self.waiting]:
            self.abort(request)

    def warm_up(self, progress: Progress | None = None) -> WarmUpReport:
        """Compile all that a load can need and, on a GPU, capture graphs; while nothing runs.

        progress: told (done, of how many, what) after each pass, draw and graph.
        """
        return self.launcher.warm_up(self, progress)

    def step(self) -> list[Request]:
        """Run one pass; return the requests that got tokens or ended in it.

        Callbacks run inside; they may submit and abort requests, but not step. With ``overlap``
        they get a step's tokens while the next one runs, or at once if there is none.
        """
        if self._is_stepping:
            raise RuntimeError("step: called while a step runs, by a callback or another thread")
        self._is_stepping = True
        try:
            return self._step()
        finally:
            self._is_stepping = False

    def check_integrity(self) -> None:
        """Raise unless every pool block is free, cached, or owned by the live requests it says."""
        live = [*self.running, *self.waiting]
        self.pool.check_integrity({request.request_id: request.block_ids for request in live})
        self.prefixes.check_integrity()

    def _step(self) -> list[Request]:
        record = StepRecord(self.num_steps, time.perf_counter())
        plan = self._plan(record)
        if not plan.scheduled:
            self.outbox.send()
            return []
        try:
            launched = self._launch(plan, record)
            self.outbox.send()  # what the step before left, while this one runs
            self.speculation.teach(plan.scheduled)
            verified = launched.read()
        except BaseException as error:
            self.outbox.failed(record, error)
            if not is_out_of_memory(error):
                raise
            return self._make_room(plan, record, error)
        self._committer.commit(launched, verified, record)
        self._end_step(launched.step, record)
        if not (self.overlap and (self.running or self.waiting)):
            self.outbox.send()
        return launched.step.sampled

    def _plan(self, record: StepRecord) -> StepPlan[Request]:
        """Plan the step and move requests between the queues."""
        self.speculation.decide(self.running, self._num_other_tokens())
        budget, urgent = self.pace.plan(self.running, self.waiting, record.began)
        try:
            plan = plan_step(
                self.waiting,
                self.running,
                self.pool,
                self._limit.cap(self.token_budget),
                min(self.max_rows, self._roster.rows.max_rows),
                self.chunk_tokens,
                self.prefixes,
                prompt_budget=budget,
                urgent=urgent,
            )
            for request in plan.preempted:
                self._requeue(request)
            self._roster.admit(plan)
        except BaseException:  # an interrupt too: a plan that is made in part is none
            self._roster.restore(self.prefixes)
            raise
        for request in plan.admitted:
            request.stats.num_cached_tokens += request.num_written
        record.planned = time.perf_counter()
        if self.observers:
            record.wanted = {r: r.num_drafts for r in plan.scheduled if r.num_drafts}
        record.scheduled, record.prompt_budget, record.urgent = plan.scheduled, budget, urgent
        record.admitted, record.preempted = plan.admitted, plan.preempted
        return plan

    def _num_other_tokens(self) -> int:
        """Tokens of prompts and recomputation that could fill the next step."""
        pending = sum(request.sequence.num_pending for request in self._roster.prompts)
        if self.waiting and len(self.running) < self.max_rows:
            pending += next(self.waiting.candidates()).sequence.num_pending
        return min(pending, self.token_budget)

    def _requeue(self, request: Request) -> None:
        """Let a running request without KV wait again."""
        self._roster.requeue(request)
        self.prefixes.forget(request)
        self.speculation.forget(request)

    def _launch(self, plan: StepPlan[Request], record: StepRecord) -> Launched:
        """Put the whole step on the device: copies, drafts, forward pass, draws and verdict."""
        copies = self.prefixes.take_copies()
        if copies or self.prefixes.swap is not None:
            try:
                self.prefixes.restore()
                if copies:
                    self.launcher.copy(copies)
            except BaseException:  # an interrupt too: no fork may run without its copy
                for request in plan.admitted:
                    self._retire(request, save=False)
                raise
        record.drafted = record.planned  # so far only copies could fail
        record.drafts = self.speculation.propose(plan.scheduled)
        record.drafted = time.perf_counter()
        launched = self.launcher.launch(plan.scheduled, record.drafts)
        record.launched = time.perf_counter()
        return launched

    def _make_room(
        self, plan: StepPlan[Request], record: StepRecord, error: BaseException
    ) -> list[Request]:
        """A step ran out of memory: the next ones feed half of it, and fewer rows run.

        Returns the request that ended: one that was alone, with a single token.
        """
        num_fed = sum(plan.scheduled.values())
        free_device_memory(self.target.device)
        self.stats.num_out_of_memory += 1
        if not record.drafted:  # copies failed, not the pass: compute what they would have brought
            for request in plan.admitted:
                self.prefixes.drop_saved(request)
            return []
        if num_fed == 1:
            [request] = plan.scheduled
            self._fail(request, f"out of memory: {error}")
            return [request]
        self._limit.shrink(num_fed)
        for request in self.running[self._limit.cap(num_fed) :]:
            self._retire(request, save=False)
        return []

    def _end_step(self, step: Step, record: StepRecord) -> None:
        """Publish what has been computed, give back what no query sees again, and learn."""
        if self._roster.prompts:
            for request in step.sampled:
                self._roster.prompts.pop(request, None)
        self.prefixes.settle(self.running)
        account(self, step, record)
        self._limit.note_step(self.token_budget)
        self.num_steps += 1
        self.outbox.close(record)

    def _fail(self, request: Request, error: str) -> None:
        if not request.finished:
            self._finish(request, Kept([], "error", error=error))

    def _finish(self, request: Request, kept: Kept) -> None:
        request.finish_reason = kept.reason
        request.stop_reason = kept.stop_reason
        request.error = kept.error
        if request.block_ids and kept.reason != "error":  # whose KV may hold what went wrong
            self.prefixes.publish(request)
        self.prefixes.forget(request)
        self.pace.forget(request)
        self._roster.remove(request)
        if request.block_ids:
            self.pool.free(request.request_id, request.block_ids)
            request.block_ids.clear()
        self.speculation.forget(request)  # last: drafters are anybody's code
