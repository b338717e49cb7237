"""Runs the fuzzer's cases: a workload through the engine, each request against the oracle."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from unittest.mock import patch

import torch

from pagedraft.decoding.load import resolve_kv_dtype
from pagedraft.decoding.params import derive_seed
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler import llm as llm_module
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.request import Request
from pagedraft.tests.scheduler.fuzz_cases import VOCAB, Case, Row
from pagedraft.tests.scheduler.fuzz_drafters import REPLAYS, Replay
from pagedraft.tests.scheduler.fuzz_models import load, load_head, tokenizer
from pagedraft.tests.scheduler.plain import Plain, decode_plainly

EVENTS = (
    *("preemption", "prefix hit", "fork", "abort", "out of memory"),
    *("full acceptance", "zero acceptance"),
)
IRRELEVANT = ("n", "k", "speculate", "accept")  # options that do not change the plain output


@dataclass
class Submitted:
    """A request of a running case and what it must become.

    index: of the submission.
    ended: "abort" or "error" where it was ended from outside; its tokens are then the first ones.
    """

    row: Row
    request: Request
    index: int
    expected: Plain
    heard: list[int] = field(default_factory=list)
    ended: str | None = None


@dataclass
class Run:
    """A case on its way through the engine; ``events``: which of EVENTS it has met."""

    case: Case
    dtype: torch.dtype
    llm: LLM
    drafter: Replay | None
    submitted: list[Submitted] = field(default_factory=list)
    events: set[str] = field(default_factory=set)


Oracle = dict[tuple, Plain]


def run_case(case: Case, dtype: torch.dtype, oracle: Oracle | None = None) -> set[str]:
    """Run ``case`` to its end, compare every request, return its events.

    oracle: results of plain decoding, kept from case to case.
    """
    oracle = {} if oracle is None else oracle
    run = _start(case, dtype)
    engine = run.llm.engine
    _watch_copies(run)
    queue = sorted(case.rows, key=lambda row: row.arrival)
    step = 0
    while queue or engine.has_work:
        while queue and queue[0].arrival <= step:
            _submit(run, queue.pop(0), oracle)
        _interfere(run, step)
        engine.step()
        engine.check_integrity()
        engine.prefixes.check_integrity()
        _note_forks(run)
        step += 1
        assert step <= _most_steps(run), f"no end after {step} steps: {case!r}"
    assert engine.pool.num_free == engine.pool.num_usable, f"blocks are lost: {case!r}"
    for row in run.submitted:
        assert_as_plain(run, row, oracle)
    num_tokens = sum(row.request.num_output for row in run.submitted)
    assert engine.stats.num_committed == num_tokens, f"tokens are miscounted: {case!r}"
    _note_events(run)
    return run.events


def _start(case: Case, dtype: torch.dtype) -> Run:
    target = load(case.model, dtype)
    names = {"self": "draft", "draft-padded": "draft"}.get(case.drafter, case.drafter)
    draft_model = {"self": case.model, "draft-padded": "draft-padded"}.get(case.drafter, "draft")
    is_head, names = "head" in names, names.replace("head", "draft")
    draft = load_head(case.model, dtype) if is_head else load(draft_model, dtype)
    replay = None
    if case.drafter in REPLAYS:
        replay = Replay(case.drafter, noise=case.noise, vocab_size=VOCAB)
    with patch.object(llm_module, "load_tokenizer", lambda target: tokenizer()):
        llm = LLM(
            target,
            draft if names == "auto" or "draft" in names else None,
            **({"speculate": names} if replay is None else {"drafter": replay}),
            k=case.k,
            block_size=case.block_size,
            kv_tokens=_pool_tokens(case, target),
            chunk_tokens=case.chunk_tokens,
            token_budget=case.token_budget,
            max_rows=case.max_rows,
            prefix_cache=case.prefix_cache,
            kv_dtype=case.kv_dtype,
            seed=case.noise,
            swap_bytes=2**24 if case.swap else 0,
        )
    llm.engine.overlap = case.overlap
    if case.swap:
        llm.engine.prefixes.swap.policy.forced = True
    _fail_passes(llm, case.fail_at)
    return Run(case, dtype, llm, replay)


def _fail_passes(llm: LLM, fail_at: Seq[int]) -> None:
    """Let passes of the target run out of memory, unless they feed one token only."""
    forward, counter = llm.target.forward, count()

    def failing(batch, cache):
        if next(counter) in fail_at and batch.num_tokens > 1:
            raise torch.OutOfMemoryError("no memory for activations")
        return forward(batch, cache)

    llm.engine.launcher.forward = failing


def _pool_tokens(case: Case, target: Transformer) -> int:
    """KV tokens of the pool: what the largest request needs, and the case's spare blocks."""
    limit = target.config.max_positions
    blocks = [
        -(-min(len(row.prompt) + row.params.max_tokens, limit) // case.block_size)
        for row in case.rows
        for _ in range(row.params.n)
    ]
    num_blocks = sum(blocks) if case.spare_blocks is None else max(blocks) + case.spare_blocks
    return num_blocks * case.block_size


def _submit(run: Run, row: Row, oracle: Oracle) -> None:
    index = sum(other.request.sequence.sample_index == 0 for other in run.submitted)
    options = {"priority": row.priority, "tenant": row.tenant, "cache_salt": row.salt}
    requests = run.llm.submit_all(row.prompt, row.params, **options)
    assert [r.sequence.sample_index for r in requests] == list(range(row.params.n))
    for sample, request in enumerate(requests):
        expected = _plain(run, row, index, sample, oracle)
        submitted = Submitted(row, request, index, expected)
        request.on_tokens = partial(_hear, run, submitted)
        run.submitted.append(submitted)
        if run.drafter is not None:
            run.drafter.outputs[request.sequence] = submitted.expected.token_ids


def _hear(run: Run, submitted: Submitted, tokens: list[int]) -> None:
    """``on_tokens`` of a request."""
    submitted.heard.extend(tokens)
    act, count = submitted.row.callback or ("listen", 0)
    if act == "listen" or len(submitted.heard) < count:
        return
    if act == "raise":
        if not submitted.request.finished:
            submitted.ended = "error"
        raise OSError("nobody listens")
    for other in run.submitted:
        if (other is submitted) == (act == "abort"):
            _abort(run, other)


def _abort(run: Run, submitted: Submitted) -> None:
    if not submitted.request.finished:
        submitted.ended = "abort"
    run.llm.engine.abort(submitted.request)


def _plain(
    run: Run, row: Row, index: int, sample: int, oracle: Oracle, forced: Seq[int] | None = None
) -> Plain:
    """The oracle's answer to a sample of submission number ``index``."""
    own_seed = row.params.seed
    own_seed = derive_seed(run.case.noise, index) if own_seed is None else own_seed
    options = {name: value for name, value in row.options.items() if name not in IRRELEVANT}
    key = (
        run.case.model,
        run.dtype,
        run.case.kv_dtype,
        *row.prompt,
        repr(options),
        own_seed,
        sample,
    )
    key += () if forced is None else ("forced", *forced)
    if key not in oracle:
        oracle[key] = decode_plainly(
            load(run.case.model, run.dtype),
            row.prompt,
            row.params,
            seed=own_seed,
            sample_index=sample,
            tokenizer=tokenizer(),
            kv_dtype=resolve_kv_dtype(run.case.kv_dtype),
            forced=forced,
        )
    return oracle[key]


def _interfere(run: Run, step: int) -> None:
    """What happens before a step from outside: aborts, a cleared cache, a lost KV."""
    case, engine = run.case, run.llm.engine
    if step == case.clear_at:
        run.llm.reset_prefix_cache()
    if step in case.preempt_at and engine.running:
        engine.preempt(engine.running[(step + case.noise) % len(engine.running)])
    for submitted in run.submitted:
        row, request = submitted.row, submitted.request
        if row.abort_after is None or step != row.arrival + row.abort_after:
            continue
        if row.abort_first_only and request.sequence.sample_index > 0:
            continue
        _abort(run, submitted)


def _most_steps(run: Run) -> int:
    """Every step advances the most important request by a token; preemption starts it again."""
    arrivals = max((row.arrival for row in run.case.rows), default=0)
    return (
        len(run.case.fail_at)
        + arrivals
        + sum(
            (len(row.row.prompt) + row.row.params.max_tokens + 2)
            * (1 + row.request.stats.num_preemptions)
            for row in run.submitted
        )
    )


def assert_as_plain(run: Run, submitted: Submitted, oracle: Oracle) -> None:
    """Everything that a request became equals what plain decoding makes of it."""
    request, row, expected = submitted.request, submitted.row, submitted.expected
    completion = run.llm.completion(request)
    where = f"{request.request_id} of {run.case!r}"
    tokens = completion.token_ids
    if row.params.accept != "match" and request.sequence.temperature > 0:
        sample = request.sequence.sample_index
        expected = _plain(run, row, submitted.index, sample, oracle, forced=tokens)
    if submitted.ended is not None:
        assert completion.finish_reason == submitted.ended, where
        want = expected.token_ids[: len(tokens)]
        assert tokens == want, f"got {tokens}, expected {want}: {where}"
    else:
        got = (tokens, completion.finish_reason, completion.stop_reason, completion.text)
        want = (expected.token_ids, expected.finish_reason, expected.stop_reason, expected.text)
        assert got == want, f"got {got}, expected {want}: {where}"
    assert submitted.heard == tokens, where
    assert sum(count for _, count in request.stats.emissions) == len(tokens), where
    assert request.sequence.token_ids == row.prompt + tokens, where
    assert (completion.error is not None) == (completion.finish_reason == "error"), where
    assert_same_logprobs(completion.logprobs, expected, len(tokens), row, where)


def assert_same_logprobs(
    logprobs: list[dict[int, float]] | None, expected: Plain, count: int, row: Row, where: str
) -> None:
    """Bit for bit, the same tokens in the same order."""
    if row.params.logprobs is None:
        assert logprobs is None, where
        return
    assert logprobs is not None, where
    want = expected.logprobs[:count]
    assert [list(entry) for entry in logprobs] == [list(entry) for entry in want], where
    got_N, want_N = (
        torch.tensor([value for entry in entries for value in entry.values()], dtype=torch.float64)
        for entries in (logprobs, want)
    )
    assert torch.equal(got_N, want_N), f"got {logprobs}, expected {want}: {where}"


def _watch_copies(run: Run) -> None:
    """A block that is copied is a fork's, too."""
    prefixes = run.llm.engine.prefixes
    take = prefixes.take_copies

    def watched() -> list[tuple[int, int]]:
        copies = take()
        run.events |= {"fork"} if copies else set()
        return copies

    prefixes.take_copies = watched


def _note_forks(run: Run) -> None:
    """A fork and its parent own a block together."""
    for submitted in run.submitted:
        request = submitted.request
        if request.parent is not None and set(request.block_ids) & set(request.parent.block_ids):
            run.events.add("fork")


def _note_events(run: Run) -> None:
    stats = [submitted.request.stats for submitted in run.submitted]
    passes = [row for one in stats for row in one.decisions if row.drafted > 0]
    is_forced = bool(run.case.preempt_at or run.case.fail_at)
    met = {
        "preemption": not is_forced and any(one.num_preemptions for one in stats),
        "prefix hit": run.llm.engine.prefixes.num_hit_tokens > 0,
        "out of memory": run.llm.engine.stats.num_out_of_memory > 0,
        "abort": any(submitted.ended == "abort" for submitted in run.submitted),
        "full acceptance": any(row.accepted == row.drafted for row in passes),
        "zero acceptance": any(row.accepted == 0 for row in passes),
    }
    run.events |= {name for name, is_met in met.items() if is_met}
