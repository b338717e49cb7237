"""The real engine over a fake model: many requests, many aborts, few blocks; nothing is lost."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from pagedraft.decoding.controller import DraftController
from pagedraft.decoding.drafters.suffix import SuffixDrafter
from pagedraft.decoding.params import SamplingParams
from pagedraft.decoding.sequence import Sequence
from pagedraft.scheduler.committer import Committer
from pagedraft.scheduler.engine import Engine
from pagedraft.scheduler.observer import Observer
from pagedraft.scheduler.request import Request
from pagedraft.scheduler.roster import Roster

pytestmark = pytest.mark.usefixtures("cpu_path")
VOCAB, BLOCK, NUM_BLOCKS = 64, 16, 64
STOP = 5


class FakeTarget:
    """The next token follows from the last one and its position; no KV is written or read."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(vocab_size=VOCAB, max_positions=512)
        self.device = torch.device("cpu")
        self.row_multiple = 1

    def forward(self, batch, cache):
        rows_Q = batch.logit_rows_Q[: batch.num_logits]
        tokens_Q = next_token(batch.tokens_T[rows_Q], batch.positions_T[rows_Q])
        logits_QV = torch.zeros(batch.num_logits, VOCAB)
        return logits_QV.scatter_(1, tokens_Q[:, None], 1.0)


def next_token(token, position):
    """Periodic, so that a lookup finds something, with a token now and then that it does not."""
    return (token * 7 + 3 + position % 11 // 10) % VOCAB


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens[-1], len(tokens) - 1))
        if tokens[-1] == STOP:
            break
    return tokens[len(prompt) :]


@dataclass
class FakeCache:
    """A pool without memory."""

    num_blocks: int = NUM_BLOCKS + 1
    block_size: int = BLOCK
    tensors: tuple[torch.Tensor, ...] = ()


def make_request(index: int, rng: random.Random) -> Request:
    stem = [rng.randrange(4)] * 17  # prompts of a stem share a block
    prompt = stem[: rng.randint(0, 17)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))]
    sequence = Sequence(prompt, len(prompt), 0.0, index)
    params = SamplingParams(max_tokens=rng.randint(1, 24))
    stop_ids = frozenset({STOP})
    options = {"priority": rng.choice((0, 0, 1)), "tenant": rng.choice((None, "a", "b"))}
    return Request(f"r{index}", sequence, params, stop_ids, 512, **options)


def make_engine(speculates: bool, overlap: bool, k: int | str = "auto") -> Engine:
    return Engine(
        FakeTarget(),
        [FakeCache()],
        drafters=[SuffixDrafter()] if speculates else [],
        controller=DraftController(k),
        overlap=overlap,
        max_rows=48,
    )


def run(num_requests: int, engine: Engine, seed: int) -> list[Request]:
    """Requests come at random, 30 % of them are aborted at a random time; returns all of them."""
    rng, requests, step = random.Random(seed), [], 0
    aborts: dict[int, list[Request]] = {}
    while len(requests) < num_requests or engine.has_work:
        for _ in range(rng.randint(0, 6)):
            if len(requests) < num_requests and len(engine.waiting) < 200:
                request = make_request(len(requests), rng)
                requests.append(request)
                engine.add(request)
                if rng.random() < 0.3:
                    aborts.setdefault(step + rng.randint(0, 40), []).append(request)
        for request in aborts.pop(step, ()):
            engine.abort(request)
        engine.step()
        if step % 50 == 0:
            engine.check_integrity()
        step += 1
        assert step < 20 * num_requests
    return requests


def check(requests: list[Request], engine: Engine) -> None:
    engine.check_integrity()
    assert engine.pool.num_free == engine.pool.num_usable
    engine.prefixes.clear()
    assert engine.pool.num_evictable == 0
    engine.check_integrity()
    for request in requests:
        output_ids = request.sequence.output_ids
        want = expected(request.sequence.token_ids[: request.sequence.num_prompt], 24)
        if request.finish_reason == "abort":
            assert output_ids == want[: len(output_ids)]
        else:
            assert output_ids == want[: request.params.max_tokens]
            assert request.finish_reason == ("stop" if output_ids[-1] == STOP else "length")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("speculates", [False, True])
def test_many_requests(speculates, overlap):
    engine = make_engine(speculates, overlap)
    requests = run(1500, engine, seed=speculates + 2 * overlap)
    check(requests, engine)
    assert any(request.stats.num_preemptions for request in requests)
    assert any(request.stats.num_cached_tokens for request in requests)
    assert any(request.finish_reason == "abort" for request in requests)


class Watcher(Observer):
    """Notes what each step emitted, as observers are told and as callbacks are."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, list[int]]]] = []
        self.calls: list[tuple[str, list[int]]] = []

    def on_step(self, record):
        emitted = {request.request_id: list(tokens) for request, tokens in record.emitted.items()}
        self.steps.append((record.num_kept, emitted))

    def on_add(self, request, caller):
        request.on_tokens = lambda tokens: self.calls.append((request.request_id, tokens))


def outcome(speculates: bool, overlap: bool) -> list[object]:
    """All that a load leaves behind but times."""
    engine, watcher = make_engine(speculates, overlap, k=4), Watcher()  # "auto" goes by the clock
    engine.outbox.observers.append(watcher)
    requests = run(150, engine, seed=7)
    check(requests, engine)
    stats = engine.stats
    ends = [
        (
            request.sequence.token_ids,
            request.finish_reason,
            request.stop_reason,
            [count for _, count in request.stats.emissions],
            request.stats.decisions,
            request.stats.num_preemptions,
        )
        for request in requests
    ]
    totals = (stats.num_steps, stats.num_fed, stats.num_committed, stats.slot_steps_used)
    return [ends, watcher.steps, watcher.calls, totals]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("speculates", [False, True])
def test_rows_that_keep_all_are_committed_as_any_row(speculates, overlap, monkeypatch):
    """The short way through ``Committer.commit`` against the one that any row can take."""
    shortly, num_rows = outcome(speculates, overlap), []
    add, commit_row = Roster.add, Committer._commit_row

    def add_as_not_plain(roster, request):
        add(roster, request)
        request.is_plain = False

    def counted(committer, *args):
        num_rows.append(1)
        return commit_row(committer, *args)

    monkeypatch.setattr(Committer, "_commit_row", counted)
    assert outcome(speculates, overlap) == shortly
    num_of_any = len(num_rows)
    monkeypatch.setattr(Roster, "add", add_as_not_plain)
    assert outcome(speculates, overlap) == shortly
    assert len(num_rows) - num_of_any > 5 * num_of_any > 0


def test_ten_thousand_requests_in_time():
    began = time.perf_counter()
    engine = make_engine(speculates=False, overlap=False)
    requests = run(10_000, engine, seed=1)
    assert time.perf_counter() - began < 120
    check(requests, engine)
    num_aborted = sum(request.finish_reason == "abort" for request in requests)
    assert 0.2 < num_aborted / len(requests) < 0.31


def test_teeth_a_block_that_is_kept_is_seen(monkeypatch):
    engine = make_engine(speculates=False, overlap=False)
    free = engine.pool.free
    monkeypatch.setattr(engine.pool, "free", lambda owner, ids: free(owner, ids[1:]))
    with pytest.raises(Exception, match="block"):
        check(run(50, engine, seed=3), engine)
