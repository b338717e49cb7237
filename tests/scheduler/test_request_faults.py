"""What one request's data may do: at worst it ends that request, and only where decoding gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedraft.decoding.detokenize import Detokenizer
from pagedraft.decoding.params import SamplingParams
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.model.tiny import save_tiny
from pagedraft.tests.model.words import save_words
from pagedraft.tests.scheduler.async_runs import (
    Panic,
    check_all_returned,
    outcome,
    raises,
    run_beside_another,
)
from pagedraft.tests.scheduler.contract_examples import TOKENIZER, Forced, Oracle, ids

pytestmark = pytest.mark.usefixtures("cpu_path")
PARAMS = SamplingParams(max_tokens=6, temperature=0.8, seed=4, ignore_eos=True)
VOCAB = len(TOKENIZER)


def fail_at(monkeypatch, token: int, error: BaseException) -> Callable[[], None]:
    """Let detokenizers raise at ``token``; return what ends that."""
    push = Detokenizer.push

    def failing(self: Detokenizer, token_id: int) -> str:
        if token_id == token:
            raise error
        return push(self, token_id)

    monkeypatch.setattr(Detokenizer, "push", failing)
    return monkeypatch.undo


OUTPUT = ids(["a", "Ġb", "Ã", "©", "c", "ab", "d", "e"])
TEXTS = ["", "a", "a b", "a b", "a bé", "a béc", "a bécab", "a bécabd"]


SPANS = {
    "no drafts": (0, ValueError("odd")),
    "1 draft": (1, Panic("out of range")),
    "3 drafts": (3, ValueError("odd")),
    "6 drafts": (6, Panic("out of range")),
}


@pytest.mark.parametrize("k, error", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("place", range(8))
def test_a_token_without_text_is_where_its_request_ends(make_worded, monkeypatch, place, k, error):
    """Wherever in a span of accepted drafts it is, the tokens before it are kept."""
    llm = make_worded(drafter=Oracle(), k=k)
    forced = (Forced(tuple(OUTPUT)),)
    params = replace(PARAMS, stop="zz", max_tokens=20, logprobs=1, logits_processors=forced)
    fail_at(monkeypatch, OUTPUT[place], error)
    got = run_beside_another(llm, [5, 6, 7], params)
    message = f"text of token {OUTPUT[place]}: {type(error).__name__}: {error}"
    assert (got.finish_reason, got.error, got.stop_reason) == ("error", message, None)
    assert got.token_ids == OUTPUT[:place]
    assert got.text.rstrip("\ufffd") == TEXTS[place]
    assert len(got.logprobs) == place
    assert sum(count for _, count in got.stats.emissions) == place


ENDS_BEFORE = {
    "stop id": {"stop_token_ids": (OUTPUT[4],)},
    "stop string": {"stop": "c"},
    "max_tokens": {"max_tokens": 5},
}


@pytest.mark.parametrize("fields", ENDS_BEFORE.values(), ids=ENDS_BEFORE)
def test_a_token_without_text_behind_the_end_is_not_seen(make_worded, monkeypatch, fields):
    llm = make_worded(drafter=Oracle(), k=6)
    params = replace(PARAMS, max_tokens=20, logits_processors=(Forced(tuple(OUTPUT)),))
    fail_at(monkeypatch, OUTPUT[5], ValueError("odd"))
    got = run_beside_another(llm, [5], replace(params, **{"stop": "zz"} | fields))
    assert (got.token_ids, got.error) == (OUTPUT[:5], None)


@pytest.mark.parametrize("k", [0, 6])
@pytest.mark.parametrize("first", ["text", "draw"])
def test_of_two_faults_the_first_counts(make_worded, monkeypatch, k, first):
    """A processor fails in the same span as the text, before or behind it."""
    place = {"text": 3, "draw": 5}[first]

    def processor(output_ids: Sequence[int], logits_V: torch.Tensor) -> torch.Tensor:
        if len(output_ids) == 4:
            raise ArithmeticError("no more")
        return logits_V

    forced = Forced(tuple(OUTPUT))
    llm = make_worded(drafter=Oracle(), k=k)
    fail_at(monkeypatch, OUTPUT[place], ValueError("odd"))
    params = replace(PARAMS, stop="zz", max_tokens=20, logits_processors=(forced, processor))
    got = run_beside_another(llm, [5], params)
    assert ("odd" if first == "text" else "no more") in got.error
    assert got.token_ids == OUTPUT[: min(place, 4)]


@pytest.mark.parametrize("place", [0, 3])
def test_an_interrupt_while_text_is_made_is_no_fault_of_a_request(make_worded, monkeypatch, place):
    """The step's tokens come again, and their text is made once."""
    llm = make_worded(drafter=Oracle(), k=6)
    params = replace(PARAMS, stop="zz", logits_processors=(Forced(tuple(OUTPUT)),))
    request = llm.submit([5], params)
    llm.engine.step()
    undo = fail_at(monkeypatch, OUTPUT[place + 1], KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    undo()
    while llm.engine.has_work:
        llm.engine.step()
    completion = llm.completion(request)
    assert (completion.token_ids, completion.text) == (OUTPUT[:6], "a bécab")


def test_a_tokenizer_that_cannot_decode_harms_its_completion_alone(make_worded, monkeypatch):
    llm = make_worded()
    decode = llm.tokenizer.decode

    def picky(token_ids, **options):
        if OUTPUT[0] in token_ids:
            raise OverflowError("no such token")
        return decode(token_ids, **options)

    monkeypatch.setattr(llm.tokenizer, "decode", picky)
    params = replace(PARAMS, logits_processors=(Forced(tuple(OUTPUT)),))
    bad, good = llm.generate([[5], [9, 8]], [params, replace(PARAMS, logit_bias={OUTPUT[0]: -100})])
    assert (bad.finish_reason, bad.error) == ("error", "text: OverflowError: no such token")
    assert (bad.token_ids, bad.text) == (OUTPUT[:6], "")
    assert (good.finish_reason, good.error) == ("length", None)


@pytest.mark.parametrize("params", [PARAMS, replace(PARAMS, stop="zz", logprobs=3)])
def test_ids_that_the_tokenizer_does_not_know(tmp_path, params):
    """A vocabulary padded beyond the tokenizer's: such a token has no text, and is no error."""
    save_words(tmp_path, "byte-level")
    save_tiny(tmp_path, "llama", vocab_size=VOCAB + 40, num_hidden_layers=1)
    llm = LLM(Transformer.from_folder(tmp_path), block_size=8, kv_tokens=256)
    got = run_beside_another(llm, [5], replace(params, logit_bias={VOCAB + 39: 100}))
    assert (got.token_ids, got.text, got.error) == ([VOCAB + 39] * 6, "", None)


def test_callbacks_that_do_what_they_should_not(make_worded):
    """They change what they get, raise anything, submit nonsense, abort their own request."""
    llm = make_worded(speculate="off")
    deeds: dict[str, Callable[[list[int]], Any]] = {
        "clear": lambda tokens: tokens.clear(),
        "panic": raises(Panic("x")),
        "no function": None.__class__,
        "bad submission": lambda tokens: llm.submit([], PARAMS),
        "own end": lambda tokens: llm.engine.abort(requests["own end"]),
        "nested step": lambda tokens: llm.engine.step(),
    }
    [alone] = llm.generate([[9, 8]], PARAMS)
    requests = {name: llm.submit([9, 8], PARAMS, on_tokens=deed) for name, deed in deeds.items()}
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    reasons = {name: request.finish_reason for name, request in requests.items()}
    assert reasons == dict.fromkeys(deeds, "error") | {"clear": "length", "own end": "abort"}
    assert outcome(llm.completion(requests["clear"])) == outcome(alone)
    check_all_returned(llm)


BAD_FIELDS = {
    "a salt that cannot be hashed": ({"cache_salt": []}, TypeError),
    "a tenant that cannot be hashed": ({"tenant": {}}, TypeError),
    "a target of NaN": ({"itl_ms": float("nan")}, ValueError),
    "an endless target": ({"ttft_ms": float("inf")}, ValueError),
    "a target too large for a float": ({"ttft_ms": 10**400}, ValueError),
    "no target": ({"itl_ms": 0}, ValueError),
}


@pytest.mark.parametrize("fields, kind", BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_fields_are_checked_before_anything_is_queued(make_worded, fields, kind):
    llm = make_worded()
    [name] = fields
    with pytest.raises(kind, match=f"{name}: expected"):
        llm.submit([5], PARAMS, **fields)
    assert not llm.engine.has_work
    assert len(llm.generate([[5]], PARAMS)) == 1


EXTREME_FIELDS = {
    "the last": {"priority": 10**400},
    "the first": {"priority": -(10**400)},
    "no patience": {"ttft_ms": 1e-300, "itl_ms": 1e-300},
    "all patience": {"ttft_ms": 1e308, "itl_ms": 1e308},
    "odd names": {"tenant": "", "cache_salt": "\ud800\0"},
}


@pytest.mark.parametrize("fields", EXTREME_FIELDS.values(), ids=EXTREME_FIELDS)
def test_extreme_fields_run(make_worded, fields):
    got = run_beside_another(make_worded(), [5, 6, 5, 6], PARAMS, **fields)
    assert (got.finish_reason, got.error) == ("length", None)
