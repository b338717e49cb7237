"""The engine: plan, draft, forward, verify, commit, emit. The only file that wires all of them.

One ``step()`` runs one forward pass of the target over whatever mix of prompt chunks, decoded
tokens and drafts the plan chose. Requests differ only in how many tokens they have to catch up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import torch

from pagedraft.decoding.controller import DraftController
from pagedraft.decoding.drafters.base import Drafter, Proposal
from pagedraft.decoding.params import check_int
from pagedraft.decoding.verify import verify_rows
from pagedraft.kernels.copy_blocks import copy_blocks
from pagedraft.model.batch import Span, build_step_batch
from pagedraft.model.block_pool import BlockPool
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.admission import check_request
from pagedraft.scheduler.logprobs import add_logprobs, raw_logits
from pagedraft.scheduler.metrics import EngineStats
from pagedraft.scheduler.output import call_back, is_in_doubt, keep
from pagedraft.scheduler.plan import StepPlan, plan_step
from pagedraft.scheduler.prefix import Prefixes
from pagedraft.scheduler.request import FinishReason, Request
from pagedraft.scheduler.speculation import NOTHING, Speculation


class Engine:
    """Continuous batching over one target model, with or without drafters.

    caches: KV pools of the same blocks, the target's first.
    prefix_cache: keep the KV of ended requests for prompts that begin the same, until its blocks
        are needed.
    token_budget: most tokens a step feeds; max_rows: most requests a step runs; chunk_tokens: most
    prompt tokens one request feeds in a step (None: the budget).
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
    ) -> None:
        for name, value in (("token_budget", token_budget), ("max_rows", max_rows)):
            check_int(name, value, 1)
        if chunk_tokens is not None:
            check_int("chunk_tokens", chunk_tokens, 1)
        self.target = target
        self.caches = list(caches)
        self.cache = self.caches[0]
        self.pool = BlockPool(self.cache.num_blocks, self.cache.block_size)
        self.prefixes = Prefixes(self.pool, prefix_cache)
        self.speculation = Speculation(
            drafters, controller or DraftController(), target.config.vocab_size, target.device
        )
        self.token_budget = token_budget
        self.max_rows = max_rows
        self.chunk_tokens = chunk_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.stats = EngineStats()
        self._live_ids: set[str] = set()
        self._num_submitted = 0
        self._is_stepping = False

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request, or raise ValueError naming what makes it impossible."""
        check_request(request, self.target.config.vocab_size, self.pool)
        if request.request_id in self._live_ids:
            raise ValueError(f"request_id: {request.request_id!r} is in use by a live request")
        self._live_ids.add(request.request_id)
        request.arrival = self._num_submitted
        self._num_submitted += 1
        self.speculation.admit(request)
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request now, wherever it stands; its blocks go back. A no-op if it has ended."""
        if not request.finished:
            self._finish(request, "abort")

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks; it runs again later and keeps its output."""
        if request not in self.running:
            raise ValueError(f"request {request.request_id!r}: expected one that runs")
        self.pool.free(request.request_id, request.block_ids)
        request.block_ids.clear()
        request.drop_kv()
        self._requeue(request)

    def abort_all(self) -> None:
        """End every request."""
        for request in [*self.running, *self.waiting]:
            self.abort(request)

    def step(self) -> list[Request]:
        """Run one pass; return the requests that got tokens or ended in it.

        Callbacks run inside; they may submit and abort requests, but not step.
        """
        if self._is_stepping:
            raise RuntimeError("step: called while a step runs, by a callback or another thread")
        self._is_stepping = True
        try:
            return self._step()
        finally:
            self._is_stepping = False

    def _step(self) -> list[Request]:
        began = time.perf_counter()
        self.speculation.decide(self.running, self._num_other_tokens())
        plan = self._plan()
        if not plan.scheduled:
            return []
        self._copy_forked_blocks(plan)
        proposals = self.speculation.propose(plan.scheduled)
        num_fed, logits_QV, sampled = self._forward(plan.scheduled, proposals)
        num_committed = self._commit_rows(logits_QV, sampled, proposals) if sampled else 0
        for request in plan.scheduled:
            if not request.finished:
                self.prefixes.publish(request)
        seconds = time.perf_counter() - began
        self.speculation.record_step(plan.scheduled, proposals, num_fed, num_committed, seconds)
        self._record(seconds, num_fed, num_committed)
        return sampled

    def check_integrity(self) -> None:
        """Raise unless every pool block is free, cached, or owned by the live requests it says."""
        live = [*self.running, *self.waiting]
        self.pool.check_integrity({request.request_id: request.block_ids for request in live})
        self.prefixes.check_integrity()

    def _num_other_tokens(self) -> int:
        """Tokens of prompts and recomputation that could fill the next step."""
        pending = sum(r.sequence.num_pending for r in self.running if r.sequence.num_pending > 1)
        for request in self.waiting:
            pending += request.sequence.num_pending
            if pending >= self.token_budget:
                break
        return min(pending, self.token_budget)

    def _plan(self) -> StepPlan[Request]:
        """Plan the step and move requests between the queues."""
        plan = plan_step(
            self.waiting,
            self.running,
            self.pool,
            self.token_budget,
            self.max_rows,
            self.chunk_tokens,
            prefixes=self.prefixes,
        )
        for request in plan.preempted:
            self._requeue(request)
        for request in plan.admitted:
            self.waiting.remove(request)
            self.running.append(request)
            request.stats.num_cached_tokens += request.num_written
        return plan

    def _requeue(self, request: Request) -> None:
        """Let a running request without KV wait again."""
        self.running.remove(request)
        self.waiting.append(request)
        self._forget(request)

    def _copy_forked_blocks(self, plan: StepPlan[Request]) -> None:
        copies = self.prefixes.take_copies()
        if not copies:
            return
        tensors = [tensor for cache in self.caches for tensor in cache.tensors]
        try:
            copy_blocks(tensors, torch.tensor(copies))
        except BaseException:  # an interrupt too: no fork may run without its copy
            for request in plan.admitted:
                self.preempt(request)
            raise

    def _forward(
        self, scheduled: dict[Request, int], proposals: dict[Request, Proposal]
    ) -> tuple[int, torch.Tensor, list[Request]]:
        """Run the target; return tokens fed, logits, and the requests these belong to in order."""
        spans, sampled = [], []
        for request, num_tokens in scheduled.items():
            sequence = request.sequence
            drafts = proposals.get(request, NOTHING).tokens
            fed = min(num_tokens, sequence.num_pending)
            start = sequence.num_written
            completes = fed == sequence.num_pending
            tokens = sequence.token_ids[start : start + fed] + drafts
            num_logits = len(drafts) + 1 if completes else 0
            spans.append(Span(tokens, start, sequence.block_ids, num_logits))
            if completes:
                sampled.append(request)
        batch = build_step_batch(
            spans,
            block_size=self.cache.block_size,
            device=self.target.device,
            row_multiple=self.target.row_multiple,
        )
        logits_QV = self.target.forward(batch, self.cache)
        for request, num_tokens in scheduled.items():
            if num_tokens < request.sequence.num_pending:  # others count when they commit
                request.sequence.num_written += num_tokens
        return sum(len(span.token_ids) for span in spans), logits_QV, sampled

    def _commit_rows(
        self,
        logits_QV: torch.Tensor,
        sampled: list[Request],
        proposals: dict[Request, Proposal],
    ) -> int:
        """Verify, keep what the output contract keeps, end what is done; return tokens kept."""
        drafts = [proposals.get(request, NOTHING) for request in sampled]
        raw = raw_logits(logits_QV, sampled, drafts)
        verified = verify_rows(logits_QV, [r.sequence for r in sampled], drafts)
        now = time.perf_counter()
        first_row = num_kept = 0
        for request, proposal, tokens in zip(sampled, drafts, verified, strict=True):
            rows_QV = raw.get(request, logits_QV[first_row : first_row + len(tokens)])
            first_row += len(proposal.tokens) + 1
            if request.finished:  # a callback of this very step aborted it
                continue
            if proposal.tokens and tokens[-1] < 0 and is_in_doubt(request, len(tokens)):
                self._retry_without_drafts(request)
                continue
            num_kept += self._emit(request, proposal, tokens, rows_QV, now)
        return num_kept

    def _emit(
        self,
        request: Request,
        proposal: Proposal,
        tokens: list[int],
        logits_QV: torch.Tensor,
        now: float,
    ) -> int:
        """Keep what the output contract keeps of ``tokens``; return how many."""
        kept = keep(request, tokens)
        count = len(kept.tokens)
        self.speculation.settle(request, proposal, tokens, count)
        if count and request.params.logprobs is not None:
            add_logprobs(request, logits_QV[:count], kept.tokens)
        if count:
            request.sequence.append(kept.tokens)
            request.stats.emissions.append((now, count))
        if kept.reason is not None:
            request.stop_reason = kept.stop_reason
            self._finish(request, kept.reason, kept.error)
        error = call_back(request, kept.tokens) if count else None
        if error is not None and not request.finished:
            self._finish(request, "error", error)
        return count

    def _retry_without_drafts(self, request: Request) -> None:
        """Decode this step's tokens again one by one: the NaN may be a rejected draft's.

        A draft's NaN keys and values reach the rows before it as 0 * NaN; plain decoding never
        sees them.
        """
        request.sequence.append([])
        self.speculation.turn_off(request, None, "NaN in a step with drafts")

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        request.finish_reason = reason
        request.error = error
        if request.block_ids and reason != "error":  # whose KV may hold what went wrong
            self.prefixes.publish(request)
        self._forget(request)
        self._live_ids.discard(request.request_id)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        if request.block_ids:
            self.pool.free(request.request_id, request.block_ids)
            request.block_ids.clear()

    def _forget(self, request: Request) -> None:
        self.speculation.forget(request)
        self.prefixes.forget(request)

    def _record(self, seconds: float, num_fed: int, num_committed: int) -> None:
        """Feed the step to the statistics."""
        used = sum(request.num_written for request in self.running)
        owned = sum(len(request.block_ids) for request in self.running) * self.pool.block_size
        self.stats.record(seconds, num_fed, num_committed, used, owned)
