"""Who waits, who runs, and in which row: the one place where requests move between these."""

from __future__ import annotations

from bisect import bisect_left, insort

from pagedraft.scheduler.plan import StepPlan
from pagedraft.scheduler.prefix import Prefixes
from pagedraft.scheduler.request import Request
from pagedraft.scheduler.rows import Rows
from pagedraft.scheduler.waiting import WaitingQueue


class Roster:
    """The live requests of an engine.

    running: by rank and arrival. prompts: those of them whose prompt is not written yet, also after
    a preemption.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.waiting: WaitingQueue[Request] = WaitingQueue()
        self.running: list[Request] = []
        self.prompts: dict[Request, None] = {}
        self._ids: set[str] = set()
        self._num_submitted = 0

    def add(self, request: Request) -> None:
        """Let a new request wait."""
        if request.request_id in self._ids:
            raise ValueError(f"request_id: {request.request_id!r} is in use by a live request")
        self._ids.add(request.request_id)
        request.arrival = self._num_submitted
        request.rank = self.waiting.rank_of(request.priority, request.arrival)
        self._num_submitted += 1
        params = request.params
        num_most = request.sequence.num_prompt + params.max_tokens
        request.max_total = min(num_most, request.max_context)
        request.is_plain = request.output_text is None and params.logprobs is None
        self.waiting.push(request)

    def admit(self, plan: StepPlan[Request]) -> None:
        """Let a plan's admitted requests run."""
        for request in plan.admitted:
            self.waiting.remove(request)
            insort(self.running, request, key=_order)
            self.rows.join(request)
            self.prompts[request] = None

    def requeue(self, request: Request) -> None:
        """Let a running request, which has lost its KV, wait again."""
        self._stop(request)
        self.waiting.push(request)

    def holds(self, request: Request) -> bool:
        """Whether a request waits or runs here."""
        return request in self.waiting or self.rows.holds(request)

    def restore(self, prefixes: Prefixes) -> None:
        """Make queues and blocks agree again after a plan that failed on its way.

        Who runs owns blocks, who waits does not. O(live requests).
        """
        for request in [*self.running]:
            if not request.block_ids:
                self.requeue(request)
                prefixes.forget(request)
        for request in self.waiting:
            if request.block_ids:
                prefixes.detach(request)

    def remove(self, request: Request) -> None:
        """Drop a request that has ended."""
        self._ids.discard(request.request_id)
        if request in self.waiting:
            self.waiting.remove(request)
        elif request.row >= 0:
            self._stop(request)

    def _stop(self, request: Request) -> None:
        index = bisect_left(self.running, _order(request), key=_order)
        assert self.running[index] is request
        del self.running[index]
        self.rows.leave(request)
        self.prompts.pop(request, None)


def _order(request: Request) -> tuple[int, int]:
    return request.rank, request.arrival
