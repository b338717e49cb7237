"""The output contract through the engine: an end at every place inside a span of accepted drafts.

A logits processor forces each request's output, and an oracle drafts the same, so that which drafts
are accepted is known; the model, its KV and its logprobs are real.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest

from pagedraft.decoding.params import SamplingParams
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.llm import LLM, Completion
from pagedraft.scheduler.request import Request
from pagedraft.tests.model.tiny import save_tiny
from pagedraft.tests.model.words import save_words
from pagedraft.tests.scheduler.contract_examples import (
    ENDS,
    MAX_POSITIONS,
    SPANS,
    TOKENIZER,
    Example,
    Oracle,
    example,
    examples,
)

pytestmark = pytest.mark.usefixtures("cpu_path")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Transformer:
    folder = tmp_path_factory.mktemp("contract")
    save_tiny(folder, vocab_size=len(TOKENIZER), max_position_embeddings=MAX_POSITIONS)
    save_words(folder, "byte-level")
    with use_implementation("cpu"):
        return Transformer.from_folder(folder)


def make_llm(target: Transformer, **options: Any) -> LLM:
    return LLM(target, block_size=8, kv_tokens=512, **options)


class Ran(NamedTuple):
    """A request that has ended; streamed: the tokens of each step as they came."""

    request: Request
    completion: Completion
    streamed: list[list[int]]


def run(llm: LLM, rows: Sequence[Example], before_step=lambda: None) -> list[Ran]:
    """All rows in one batch; the pool is checked after every step."""
    streams: list[list[list[int]]] = [[] for _ in rows]
    requests = [
        llm.submit(row.prompt, row.params, on_tokens=stream.append)
        for row, stream in zip(rows, streams, strict=True)
    ]
    while llm.engine.has_work:
        before_step()
        llm.engine.step()
        llm.engine.check_integrity()
    return [Ran(r, llm.completion(r), s) for r, s in zip(requests, streams, strict=True)]


@pytest.fixture(scope="module")
def plain(target) -> Callable[[str], list[Completion]]:
    """The completions of an end's examples without drafts."""

    @cache
    def completions(name: str) -> list[Completion]:
        return [row.completion for row in run(make_llm(target, speculate="off"), examples(name))]

    return completions


def check_ends(ran: Sequence[Ran], rows: Sequence[Example]) -> None:
    """Raise unless ids, text and reasons are those of ``rows``."""
    got = [row.completion for row in ran]
    assert [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in got] == [
        (row.token_ids, row.text, row.end.finish_reason, row.end.stop_reason) for row in rows
    ]


def check_counts(ran: Sequence[Ran]) -> None:
    """Raise unless all that counts tokens counts those that were kept."""
    kept = [len(row.completion.token_ids) for row in ran]
    assert [row.request.num_output for row in ran] == kept
    assert [len(row.completion.logprobs or []) for row in ran] == kept
    assert [sum(map(len, row.streamed)) for row in ran] == kept
    passes = [[count for _, count in row.completion.stats.emissions] for row in ran]
    assert passes == [[len(part) for part in row.streamed] for row in ran]
    assert [row.request.num_written for row in ran] == [
        row.request.sequence.num_prompt + count - 1 for row, count in zip(ran, kept, strict=True)
    ]


def num_accepted(ran: Sequence[Ran]) -> int:
    return sum(sum(row.completion.stats.accepted) for row in ran)


@pytest.mark.parametrize("name", ENDS)
def test_without_drafts(target, name):
    ran = run(make_llm(target, speculate="off"), examples(name))
    check_ends(ran, examples(name))
    check_counts(ran)


@pytest.mark.parametrize("k, wrong", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("name", ENDS)
def test_everything_follows_the_kept_tokens(target, plain, name, k, wrong):
    llm = make_llm(target, drafter=Oracle(wrong), k=k)
    ran = run(llm, examples(name))
    check_ends(ran, examples(name))
    check_counts(ran)
    assert [row.completion.logprobs for row in ran] == [c.logprobs for c in plain(name)]
    assert [sum(row.streamed, []) for row in ran] == [c.token_ids for c in plain(name)]
    assert llm.engine.stats.num_committed == sum(len(c.token_ids) for c in plain(name))
    assert llm.engine.pool.num_free == llm.engine.pool.num_usable
    assert num_accepted(ran) > 0


@pytest.mark.parametrize("k, wrong", SPANS.values(), ids=SPANS)
def test_accepted_drafts_are_kept_tokens(target, k, wrong):
    """A draft behind the end counts for nothing, whatever the target made of it."""
    ran = run(make_llm(target, drafter=Oracle(wrong), k=k), examples("stop string"))
    stats = [row.completion.stats for row in ran]
    accepted = [decision.accepted for row in stats for decision in row.decisions]
    kept = [count for row in stats for _, count in row.emissions]
    assert all(drafts <= count for drafts, count in zip(accepted, kept, strict=True))


@pytest.mark.parametrize("accept", ["rejection", "block"])
@pytest.mark.parametrize("name", ENDS)
def test_other_rules_keep_the_same(target, name, accept):
    ran = run(make_llm(target, drafter=Oracle(), k=4), examples(name, accept))
    check_ends(ran, examples(name, accept))
    check_counts(ran)
    assert num_accepted(ran) > 0


def test_the_checks_see_an_end_that_is_missed(target, monkeypatch):
    monkeypatch.setattr("pagedraft.decoding.detokenize.OutputText.push", lambda self, token: None)
    ran = run(make_llm(target, drafter=Oracle(), k=4), examples("stop string"))
    with pytest.raises(AssertionError):
        check_ends(ran, examples("stop string"))


def test_the_checks_see_a_count_of_more_than_is_kept(target):
    ran = run(make_llm(target, drafter=Oracle(), k=4), examples("stop string"))
    ran[-1].request.sequence.num_written += 1
    with pytest.raises(AssertionError):
        check_counts(ran)


@pytest.mark.parametrize("name", ["EOS", "stop string", "max_tokens"])
def test_what_follows_an_answer_sees_its_kept_tokens_only(target, name):
    """The prefix cache holds KV of no draft behind the end: a next turn is as if it were new."""
    rows = [replace(row, prompt=[6, *[5] * 9]) for row in examples(name)]
    turns = [[*row.prompt, *row.token_ids, 7, 8] for row in rows]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=1)
    llm = make_llm(target, drafter=Oracle(), k=6)
    check_ends(run(llm, rows), rows)
    llm.engine.speculation.drafters.clear()
    warm = llm.generate(turns, params)
    cold = make_llm(target, speculate="off", prefix_cache=False).generate(turns, params)
    assert [outcome(c) for c in warm] == [outcome(c) for c in cold]
    assert max(c.stats.num_cached_tokens for c in warm) == 16  # two blocks, into the answer


def outcome(completion: Completion) -> tuple:
    """All of a completion but its statistics."""
    c = completion
    return c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs, c.error


class Replay(Oracle):
    """Drafts a known output."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids

    def row(self, sequence, k: int) -> list[int]:
        start = len(sequence.output_ids)
        return list(self.token_ids[start : start + k])


@pytest.mark.parametrize("k", range(1, 7))
def test_ends_in_what_the_model_says_itself(target, k):
    """Stop ids and strings out of a greedy output, at each of its places."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
    off = make_llm(target, speculate="off")
    [free] = off.generate([5, 6, 7], params)
    strings = [free.text[i : i + 2] for i in range(len(free.text) - 1)]
    rows = [replace(params, stop_token_ids=[token]) for token in free.token_ids]
    rows += [replace(params, stop=string) for string in strings]
    rows += [replace(row, include_stop_str_in_output=True, min_tokens=5) for row in rows]
    prompts = [[5, 6, 7]] * len(rows)
    got = make_llm(target, drafter=Replay(free.token_ids), k=k).generate(prompts, rows)
    assert [outcome(c) for c in got] == [outcome(c) for c in off.generate(prompts, rows)]
    assert sum(c.finish_reason == "stop" for c in got) > len(rows) / 2
    assert sum(sum(c.stats.accepted) for c in got) > len(rows)


def test_stop_strings_survive_preemption(target):
    """The text of a request whose KV is dropped goes on where it was."""
    llm = make_llm(target, drafter=Oracle(), k=2)
    rows = [example("over three tokens", 6)]
    ran = run(llm, rows, before_step=lambda: preempt_all(llm))
    assert ran[0].completion.stats.num_preemptions > 2
    check_ends(ran, rows)
    check_counts(ran)


def preempt_all(llm: LLM) -> None:
    """Do what a plan does that takes the blocks of all requests."""
    for request in list(llm.engine.running):
        llm.engine.preempt(request)


def test_stop_strings_need_a_tokenizer(target, monkeypatch):
    monkeypatch.setattr(target, "folder", None)
    with pytest.raises(ValueError, match="stop: text needs a tokenizer"):
        make_llm(target).generate([5, 6], SamplingParams(stop="a"))


def test_text_without_a_stop_string_is_not_made_token_by_token(target, monkeypatch):
    def fail(self, token_id):
        raise AssertionError("pushed")

    monkeypatch.setattr("pagedraft.decoding.detokenize.OutputText.push", fail)
    [completion] = make_llm(target).generate([5, 6, 7], SamplingParams(max_tokens=4, temperature=0))
    assert completion.finish_reason in ("length", "stop")
    assert completion.text == TOKENIZER.decode(completion.token_ids, skip_special_tokens=True)
