"""The engine: plan, draft, forward, verify, commit, emit. The only file that wires all of them.

One ``step()`` runs one forward pass of the target over whatever mix of prompt chunks, decoded
tokens and drafts the plan chose. Requests differ only in how many tokens they have to catch up.
"""

from __future__ import annotations

import time

import torch

from pagedraft.decoding.commit import commit, max_drafts
from pagedraft.decoding.controller import DraftController
from pagedraft.decoding.drafters.base import Drafter
from pagedraft.decoding.drafters.guard import free_safely, propose_safely
from pagedraft.decoding.params import check_int
from pagedraft.decoding.verify import verify_rows
from pagedraft.model.batch import Span, build_step_batch
from pagedraft.model.block_pool import BlockPool
from pagedraft.model.kv_cache import KVCache
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.admission import check_request
from pagedraft.scheduler.logprobs import add_logprobs, raw_logits
from pagedraft.scheduler.metrics import EngineStats
from pagedraft.scheduler.plan import plan_step
from pagedraft.scheduler.request import FinishReason, Request


class Engine:
    """Continuous batching over one target model, with or without a drafter.

    token_budget: most tokens a step feeds; max_rows: most requests a step runs; chunk_tokens: most
    prompt tokens one request feeds in a step (None: the budget).
    """

    def __init__(
        self,
        target: Transformer,
        cache: KVCache,
        *,
        drafter: Drafter | None = None,
        controller: DraftController | None = None,
        token_budget: int = 512,
        max_rows: int = 64,
        chunk_tokens: int | None = None,
    ) -> None:
        for name, value in (("token_budget", token_budget), ("max_rows", max_rows)):
            check_int(name, value, 1)
        if chunk_tokens is not None:
            check_int("chunk_tokens", chunk_tokens, 1)
        self.target = target
        self.cache = cache
        self.pool = BlockPool(cache.num_blocks, cache.block_size)
        self.drafter = drafter
        self.controller = controller or DraftController()
        self.token_budget = token_budget
        self.max_rows = max_rows
        self.chunk_tokens = chunk_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.stats = EngineStats()
        self._num_submitted = 0
        self._is_stepping = False

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request, or raise ValueError naming what makes it impossible."""
        check_request(request, self.target.config.vocab_size, self.pool)
        live_ids = {other.request_id for other in (*self.running, *self.waiting)}
        if request.request_id in live_ids:
            raise ValueError(f"request_id: {request.request_id!r} is in use by a live request")
        request.arrival = self._num_submitted
        self._num_submitted += 1
        request.speculating = self.drafter is not None and request.params.speculate
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request now, wherever it stands; its blocks go back. A no-op if it has ended."""
        if not request.finished:
            self._finish(request, "abort")

    def abort_all(self) -> None:
        """End every request."""
        for request in [*self.running, *self.waiting]:
            self.abort(request)

    def step(self) -> list[Request]:
        """Run one pass; return the requests that got tokens or ended in it.

        Callbacks run inside; they may submit and abort requests, but not step.
        """
        if self._is_stepping:
            raise RuntimeError("step: called from a callback of the step that is running")
        self._is_stepping = True
        try:
            return self._step()
        finally:
            self._is_stepping = False

    def _step(self) -> list[Request]:
        began = time.perf_counter()
        for request in self.running:
            request.num_drafts = self._wanted_drafts(request)
        plan = plan_step(
            self.waiting,
            self.running,
            self.pool,
            self.token_budget,
            self.max_rows,
            self.chunk_tokens,
        )
        for request in plan.preempted:
            self.running.remove(request)
            self.waiting.append(request)
            request.num_drafts = 0
            self._forget(request)
        for request in plan.admitted:
            self.waiting.remove(request)
            self.running.append(request)
        if not plan.scheduled:
            return []
        drafts = self._propose(plan.scheduled)
        num_fed, logits_QV, sampled = self._forward(plan.scheduled, drafts)
        num_committed = self._commit_rows(logits_QV, sampled, drafts) if sampled else 0
        num_drafts = sum(map(len, drafts.values()))
        decodes_only = num_fed == len(plan.scheduled) + num_drafts
        self._record(time.perf_counter() - began, num_fed, num_committed, decodes_only)
        return sampled

    def check_integrity(self) -> None:
        """Raise unless every pool block is free or owned by exactly one live request."""
        live = [*self.running, *self.waiting]
        self.pool.check_integrity({request.request_id: request.block_ids for request in live})

    def _wanted_drafts(self, request: Request) -> int:
        """Drafts to plan for: none inside a prompt, none that could not be kept."""
        if not request.speculating or request.sequence.num_pending > 1:
            return 0
        return max_drafts(
            self.controller.choose(request.acceptance),
            num_output=request.num_output,
            max_tokens=request.params.max_tokens,
            num_context=request.num_tokens,
            max_context=request.max_context,
        )

    def _propose(self, scheduled: dict[Request, int]) -> dict[Request, list[int]]:
        """Ask the drafter for the drafts that the plan granted."""
        drafts: dict[Request, list[int]] = {request: [] for request in scheduled}
        granted = {
            request: num_tokens - request.sequence.num_pending
            for request, num_tokens in scheduled.items()
            if num_tokens > request.sequence.num_pending
        }
        if not granted or self.drafter is None:
            return drafts
        proposed, errors = propose_safely(
            self.drafter,
            [request.sequence for request in granted],
            list(granted.values()),
            self.target.config.vocab_size,
        )
        for row, (request, tokens) in enumerate(zip(granted, proposed, strict=True)):
            drafts[request] = tokens.tokens
            if row in errors:
                request.speculating = False
                request.stats.drafter_errors.append(errors[row])
                self.stats.num_drafter_errors += 1
        return drafts

    def _forward(
        self, scheduled: dict[Request, int], drafts: dict[Request, list[int]]
    ) -> tuple[int, torch.Tensor, list[Request]]:
        """Run the target; return tokens fed, logits, and the requests these belong to in order."""
        spans, sampled = [], []
        for request, num_tokens in scheduled.items():
            sequence, proposed = request.sequence, drafts[request]
            fed = min(num_tokens, sequence.num_pending)
            start = sequence.num_written
            completes = fed == sequence.num_pending
            tokens = sequence.token_ids[start : start + fed] + proposed
            num_logits = len(proposed) + 1 if completes else 0
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
        drafts: dict[Request, list[int]],
    ) -> int:
        """Verify, keep what the output contract keeps, end what is done; return tokens kept."""
        proposed = [drafts[request] for request in sampled]
        raw = raw_logits(logits_QV, sampled, proposed)
        verified = verify_rows(logits_QV, [r.sequence for r in sampled], proposed)
        now = time.perf_counter()
        first_row = num_kept = 0
        for request, row_drafts, tokens in zip(sampled, proposed, verified, strict=True):
            rows_QV = raw.get(request, logits_QV[first_row : first_row + len(tokens)])
            first_row += len(row_drafts) + 1
            if request.finished:  # a callback of this very step aborted it
                continue
            if row_drafts and tokens[-1] < 0:
                self._retry_without_drafts(request)
                continue
            request.acceptance.record(len(row_drafts), len(tokens) - 1)
            request.stats.record_drafts(len(row_drafts), len(tokens) - 1)
            kept, reason, error = self._keep(request, tokens)
            if kept and request.params.logprobs is not None:
                add_logprobs(request, rows_QV[: len(kept)], kept)
            if kept:
                request.sequence.append(kept)
                request.stats.emissions.append((now, len(kept)))
            if reason is not None:
                self._finish(request, reason, error)
            if kept and request.on_tokens is not None:
                self._call_back(request, kept)
            num_kept += len(kept)
        return num_kept

    def _retry_without_drafts(self, request: Request) -> None:
        """Decode this step's tokens again one by one: the NaN may be a rejected draft's.

        A draft's NaN keys and values reach the rows before it as 0 * NaN; plain decoding never
        sees them.
        """
        request.sequence.append([])
        request.speculating = False
        request.stats.drafter_errors.append("NaN in a step with drafts")
        self.stats.num_drafter_errors += 1

    def _call_back(self, request: Request, kept: list[int]) -> None:
        """Hand tokens to the submitter; a callback that raises ends its own request only."""
        assert request.on_tokens is not None
        try:
            request.on_tokens(kept)
        except Exception as error:  # the submitter's code, which may fail in any way
            if not request.finished:
                self._finish(request, "error", f"on_tokens: {type(error).__name__}: {error}")

    def _keep(
        self, request: Request, tokens: list[int]
    ) -> tuple[list[int], FinishReason | None, str | None]:
        """Apply the output contract; a NaN row counts only if plain decoding would reach it."""
        valid = [token for token in tokens if token >= 0]
        kept: list[int] = []
        if valid:
            result = commit(
                valid,
                num_output=request.num_output,
                num_context=request.num_tokens,
                max_tokens=request.params.max_tokens,
                max_context=request.max_context,
                stop_ids=request.stop_ids,
            )
            kept = list(result.tokens)
            if result.finish_reason is not None:
                return kept, result.finish_reason, None
        if len(valid) < len(tokens):
            position = request.num_tokens + len(kept)
            return kept, "error", f"logits: no finite maximum at position {position} (NaN?)"
        return kept, None, None

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        request.finish_reason = reason
        request.error = error
        self._forget(request)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        if request.block_ids:
            self.pool.free(request.request_id, request.block_ids)
            request.block_ids.clear()

    def _forget(self, request: Request) -> None:
        if self.drafter is None:
            return
        error = free_safely(self.drafter, request.sequence)
        if error is not None:
            request.stats.drafter_errors.append(error)
            self.stats.num_drafter_errors += 1

    def _record(self, seconds: float, num_fed: int, num_committed: int, decodes_only: bool) -> None:
        """Feed the step to the statistics, and to the controller if it held no prompt."""
        if decodes_only:
            self.controller.cost.record(num_fed, num_committed, seconds)
        used = sum(request.num_written for request in self.running)
        owned = sum(len(request.block_ids) for request in self.running) * self.pool.block_size
        self.stats.record(seconds, num_fed, num_committed, used, owned)
