"""The fake engine with a sliding window and a swap space, and random workloads for it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from pagedraft.model.block_pool import BlockPool
from pagedraft.scheduler.prefix import Prefixes
from pagedraft.scheduler.swap import SwapSpace
from pagedraft.scheduler.swap_policy import Decision, SwapPolicy
from pagedraft.tests.scheduler.fake_engine import (
    BLOCK,
    FakeEngine,
    FakeKV,
    FakeRequest,
    fake_request,
)
from pagedraft.tests.scheduler.plan_checks import check_blocks


class WindowKV(FakeKV):
    """Slots that can be copied as a KVCache's tensors are; reads go no further than the window."""

    def __init__(self, pool: BlockPool, window: int | None) -> None:
        self.tensors = [torch.full((pool.num_blocks, BLOCK), -1, dtype=torch.int64)]
        self.slots = self.tensors[0].view(-1).numpy()
        self.num_blocks, self.block_size = pool.num_blocks, BLOCK
        self.window = window

    def forward(self, block_ids: list[int], tokens: list[int], start: int) -> None:
        contexts = list(accumulate(tokens, lambda before, token: hash((before, token)), initial=0))
        first = 0 if self.window is None else max(0, start - self.window + 1)
        for position in range(first, len(tokens)):
            block = block_ids[position // BLOCK]
            assert block > 0, f"null block at {position}"
            slot, context = block * BLOCK + position % BLOCK, contexts[position + 1]
            if position < start:
                assert self.slots[slot] == context, f"KV of another context at {position}"
            self.slots[slot] = context


@dataclass
class CoinPolicy(SwapPolicy):
    """Decides at random, so that all paths are taken."""

    rng: random.Random = random.Random(0)
    rate: float = 0.5

    def decide(self, num_blocks: int, num_tokens: int) -> Decision:
        return Decision(self.rng.random() < self.rate, 0.0, 0.0, "coin")

    decide_back = decide


@dataclass
class KVEngine(FakeEngine):
    """swap_blocks: host room; 0 for no swap space. has_draft: False keeps the draft model off."""

    swap_blocks: int = 0
    swap_rate: float = 1.0
    has_draft: bool = True

    def __post_init__(self) -> None:
        assert self.prefixes is not None
        window = self.prefixes.window.num_tokens
        self.target_kv, self.draft_kv = WindowKV(self.pool, window), WindowKV(self.pool, window)
        if self.swap_blocks:
            policy = CoinPolicy(rng=random.Random(1), rate=self.swap_rate)
            caches = [self.target_kv, self.draft_kv][: 1 + self.has_draft]
            block_bytes = len(caches) * BLOCK * 8
            self.prefixes.swap = SwapSpace(caches, self.swap_blocks * block_bytes, policy)

    def start_sharing(self, plan) -> None:
        super().start_sharing(plan)
        self.prefixes.restore()

    def draft(self, sequence, drafts) -> None:
        if self.has_draft:
            super().draft(sequence, drafts)

    def run(self, request: FakeRequest, span: int) -> None:
        super().run(request, span)
        if not request.finished:
            self.prefixes.release_left(request)
            self.prefixes.check_integrity()
        check_blocks(self.live, plan=_NO_PLAN, pool=self.pool)

    def finish(self, request: FakeRequest) -> None:
        super().finish(request)
        self.prefixes.forget(request)

    def preempt(self, request: FakeRequest) -> None:
        """As Engine.preempt: between steps."""
        self.prefixes.retire(request)
        self.prefixes.forget(request)
        self.running.remove(request)
        self.waiting.push(request)


class _NoPlan:
    scheduled: dict[FakeRequest, int] = {}


_NO_PLAN = _NoPlan()


def make_kv_engine(
    seed: int, window: int | None = None, swap_blocks: int = 0, swap_rate: float = 1.0
) -> KVEngine:
    """A random workload of salted prompts and forks in a small pool."""
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(3, 14), BLOCK)
    has_draft = rng.random() < 0.5
    budget, chunk = rng.randint(1, 24), rng.choice([None, 1, 3, 8])
    prefixes = Prefixes(pool, rng.random() < 0.7, window=window, has_draft=has_draft)
    longest = pool.num_usable * BLOCK
    while (
        prefixes.window.most_blocks(longest + 1, min(budget, chunk or budget) + 5)
        <= (pool.num_usable)
        and longest < 60
    ):
        longest += 1
    requests: list[FakeRequest] = []
    for arrival in range(rng.randint(1, 8)):
        parents = [request for request in requests if request.parent is None]
        parent = rng.choice(parents) if parents and rng.random() < 0.4 else None
        final = rng.randint(2, longest)
        text = [rng.randint(0, 1), *range(10, 80)]
        prompt = text[: rng.randint(1, final - 1)]
        salt = rng.choice([None, "a"])
        if parent is not None:
            prompt, salt = parent.sequence.token_ids, parent.cache_salt
            final = rng.randint(len(prompt) + 1, longest)
        fields = {"num_final": final, "parent": parent, "cache_salt": salt}
        requests.append(fake_request(arrival, prompt, priority=rng.randint(0, 2), **fields))
    sizes = {"budget": budget, "max_rows": rng.randint(1, 6), "chunk": chunk}
    swap = {"swap_blocks": swap_blocks, "swap_rate": swap_rate, "has_draft": has_draft}
    return KVEngine(pool, **sizes, rng=rng, prefixes=prefixes, coming=requests[::-1], **swap)


def run_kv(engine: KVEngine, preempt_rate: float = 0.2, abort_rate: float = 0.02) -> Iterator[None]:
    """Step until all is done; now and then a request is preempted or aborted between steps."""
    rng = engine.rng
    while engine.coming or engine.live:
        if engine.coming and (rng.random() < 0.5 or not engine.live):
            engine.waiting.push(engine.coming.pop())
        for request in engine.live:
            room = request.num_final - request.num_tokens - 1
            request.num_drafts = min(rng.randint(0, 5), room)
        engine.step()
        if engine.running and rng.random() < preempt_rate:
            engine.preempt(rng.choice(engine.running))
        if engine.live and rng.random() < abort_rate:
            engine.finish(rng.choice(engine.live))
        yield
