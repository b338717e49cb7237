"""What a verified step becomes: tokens kept by the output contract, ends, and who is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pagedraft.scheduler.launch import Launched
from pagedraft.scheduler.logprobs import add_logprobs
from pagedraft.scheduler.observer import StepRecord
from pagedraft.scheduler.output import Kept, is_in_doubt, keep
from pagedraft.scheduler.request import OFF, Request
from pagedraft.scheduler.speculation import PLAIN_PASS

if TYPE_CHECKING:
    from pagedraft.scheduler.engine import Engine


class Committer:
    """Commits the steps of one engine. finish: ends a request for a reason."""

    def __init__(self, engine: Engine, finish: Callable[[Request, Kept], None]) -> None:
        self._engine = engine
        self._finish = finish

    def commit(self, launched: Launched, verified: list[list[int]], record: StepRecord) -> None:
        """Keep what the output contract keeps of each row's tokens, and end what is done."""
        step = launched.step
        for request, num_tokens in step.unfinished:
            if request.row >= 0:  # else a callback of the step before ended or preempted it
                request.sequence.num_written += num_tokens
        now = time.perf_counter()
        emitted = record.emitted if self._engine.observers else None
        settle = self._engine.speculation.settle
        outbox, waiting = self._engine.outbox, self._engine.waiting
        is_contended, num_kept = bool(waiting), 0
        one_token = (now, 1)
        rows = zip(step.sampled, step.proposals, verified, strict=True)
        for index, (request, proposal, tokens) in enumerate(rows):
            sequence, num_new = request.sequence, len(tokens)
            if (
                request.is_plain
                and tokens[-1] >= 0
                and len(sequence.token_ids) + num_new < request.max_total
                and request.stop_ids.isdisjoint(tokens)
                and request.row >= 0
            ):  # keeps all and goes on, as nearly every row of every step
                stats = request.stats
                if request.choice is OFF and not proposal.tokens:
                    stats.passes.append(PLAIN_PASS)
                else:
                    settle(request, proposal, tokens, num_new)
                stats.emissions.append(one_token if num_new == 1 else (now, num_new))
                sequence.append(tokens)
                num_kept += num_new
                if emitted is not None:
                    emitted[request] = tokens
                if request.on_tokens is not None:
                    outbox.put(request, tokens)
                if is_contended:
                    waiting.charge(request.tenant, num_new)
            elif request.row >= 0:
                num_kept += self._commit_row(launched, index, tokens, now, record)
        record.num_kept = num_kept

    def _commit_row(
        self, launched: Launched, index: int, tokens: list[int], now: float, record: StepRecord
    ) -> int:
        """A row that may keep less, end, fail, or wants its log-probabilities; how many it kept."""
        request, proposal = launched.step.sampled[index], launched.step.proposals[index]
        if tokens[-1] < 0 and proposal.tokens and is_in_doubt(request, len(tokens)):
            self._retry_without_drafts(request)
            return 0
        kept = keep(request, tokens)
        count = len(kept.tokens)
        self._engine.speculation.settle(request, proposal, tokens, count)
        if count:
            if request.params.logprobs is not None:
                add_logprobs(request, launched.logits_of(index)[:count], kept.tokens)
            request.stats.emissions.append((now, count))
            request.sequence.append(kept.tokens)
            record.emitted[request] = kept.tokens
            self._engine.outbox.put(request, kept.tokens)
            self._engine.waiting.charge(request.tenant, count)
        if kept.reason is not None:
            self._finish(request, kept)
        return count

    def _retry_without_drafts(self, request: Request) -> None:
        """Decode this step's tokens again one by one: the NaN may be a rejected draft's.

        A draft's NaN keys and values reach the rows before it as 0 * NaN; plain decoding never
        sees them.
        """
        request.sequence.append([])
        self._engine.speculation.turn_off(request, None, "NaN in a step with drafts")
