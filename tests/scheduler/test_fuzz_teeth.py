"""The fuzzer notices an engine that is wrong: a broken part, and a case that must show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from pagedraft.decoding import draw as draw_module
from pagedraft.decoding import verify
from pagedraft.model import prefix_cache
from pagedraft.model.block_pool import BlockPool, IntegrityError
from pagedraft.scheduler import launch, output
from pagedraft.scheduler.prefix import Prefixes
from pagedraft.tests.scheduler.fuzz import assert_all_events
from pagedraft.tests.scheduler.fuzz_cases import Case, Row
from pagedraft.tests.scheduler.fuzz_run import EVENTS, run_case

pytestmark = pytest.mark.usefixtures("cpu_path")


def noise_of_the_first_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of a verification draws with the noise of its first position."""

    def reused(logits_QV, sequences, drafts, known=None):
        rows, _, prefixes = draw_module.rows_of_logits(sequences, drafts)
        firsts = [sequence.num_tokens for sequence in rows]
        return draw_module.draw(logits_QV, rows, firsts, prefixes)

    monkeypatch.setattr(verify, "draw_spans", reused)


def penalties_that_do_not_see_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of a verification is penalised for the committed context only."""

    def blind(logits_QV, sequences, drafts, known=None):
        rows, positions, _ = draw_module.rows_of_logits(sequences, drafts)
        return draw_module.draw(logits_QV, rows, positions)

    monkeypatch.setattr(verify, "draw_spans", blind)


def a_block_that_is_never_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block of a request stays with it."""
    free = BlockPool.free
    monkeypatch.setattr(BlockPool, "free", lambda pool, owner, ids: free(pool, owner, ids[:-1]))


def hits_that_compare_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any block of the prefix cache will do that follows the right parent."""
    key = prefix_cache._key
    monkeypatch.setattr(prefix_cache, "_key", lambda parent, tokens, salt: key(parent, (), salt))


def forks_without_their_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block that a fork's prompt fills in part is left as it is."""
    monkeypatch.setattr(Prefixes, "take_copies", lambda prefixes: [])


def logprobs_of_what_was_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities after a request's rules, not before."""
    monkeypatch.setattr(launch, "raw_logits", lambda logits_QV, sampled, drafts: {})


def tokens_behind_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's accepted drafts are kept although the request has ended at one of them."""
    commit = output.commit

    def greedy(tokens, **options):
        result = commit(tokens, **options)
        return type(result)(tuple(tokens), result.finish_reason, result.stop_reason)

    monkeypatch.setattr(output, "commit", greedy)


SAMPLED = {"temperature": 0.9, "max_tokens": 10, "ignore_eos": True}
PENALISED = {"temperature": 0.0, "max_tokens": 10, "frequency_penalty": 2.0, "ignore_eos": True}
SHARED = (
    Row(length=20, options=SAMPLED | {"logprobs": 1}),
    Row(stem=1, length=20, options=SAMPLED | {"logprobs": 1}, arrival=6),
)
BROKEN: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Case]] = {
    "noise": (noise_of_the_first_draft, Case((Row(options=SAMPLED),))),
    "penalties": (penalties_that_do_not_see_drafts, Case((Row(options=PENALISED),))),
    "leak": (a_block_that_is_never_freed, Case((Row(options=SAMPLED),))),
    "wrong hit": (hits_that_compare_no_tokens, Case(SHARED)),
    "fork": (forks_without_their_copy, Case((Row(length=13, options=SAMPLED | {"n": 2}),))),
    "logprobs": (
        logprobs_of_what_was_drawn_from,
        Case((Row(options=PENALISED | {"logprobs": 2}),)),
    ),
    "stop": (
        tokens_behind_a_stop,
        Case((Row(options=SAMPLED | {"stop_token_ids": tuple(range(3, 23))}),), k=7),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_case_passes_as_it_is(name: str) -> None:
    run_case(BROKEN[name][1], torch.float32)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_engine_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it, case = BROKEN[name]
    break_it(monkeypatch)
    with pytest.raises((AssertionError, IntegrityError)):
        run_case(case, torch.float32)


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_that_is_rare_is_named(event: str) -> None:
    counts = Counter(dict.fromkeys(EVENTS, 10) | {"case": 100})
    assert_all_events(counts)
    with pytest.raises(AssertionError, match=f"'{event}': '9.0%'"):
        assert_all_events(counts - Counter([event]))
