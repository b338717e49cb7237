"""Drafters through the front end: refused, odd, broken, your own."""

from __future__ import annotations

import pytest
import torch

from pagedraft.scheduler.llm import LLM
from pagedraft.tests.model.tiny import save_tiny
from pagedraft.tests.scheduler.runs import GREEDY, random_prompts, use_drafter

pytestmark = pytest.mark.usefixtures("cpu_path")


def test_draft_with_another_vocabulary_is_refused(target, tmp_path):
    save_tiny(tmp_path / "draft", "llama", vocab_size=2048)
    with pytest.raises(ValueError, match="vocabulary of 2048 tokens does not agree .* 97"):
        LLM(target, tmp_path / "draft", kv_tokens=64)


def test_draft_with_a_padded_vocabulary_is_welcome(target, tmp_path):
    save_tiny(tmp_path / "draft", "llama", vocab_size=128)
    llm = LLM(target, tmp_path / "draft", kv_tokens=128, k=3)
    plain = LLM(target, speculate="off", kv_tokens=128)
    prompts = random_prompts(97, (5, 9))
    assert [c.token_ids for c in llm.generate(prompts, GREEDY)] == [
        c.token_ids for c in plain.generate(prompts, GREEDY)
    ]


class BrokenDrafter:
    """Raises for sequences that start with one token, and drafts nonsense for the others."""

    name = "broken"

    def __init__(self, poison: int) -> None:
        self.poison = poison

    def propose(self, sequences, num_drafts):
        if any(sequence.token_ids[0] == self.poison for sequence in sequences):
            raise RuntimeError("no drafts today")
        return [[10**6, 3, -7][:k] for k in num_drafts]

    def on_free(self, sequence):
        pass


BROKEN_ROWS = {
    "floats": lambda k: [3.5] * k,
    "text": lambda k: "abc",
    "none": lambda k: [None],
    "no row": lambda k: None,
}


class OddDrafter(BrokenDrafter):
    """Every row of its proposals is ``make(k)``."""

    def __init__(self, make) -> None:
        self.make = make

    def propose(self, sequences, num_drafts):
        return [self.make(k) for k in num_drafts]


@pytest.mark.parametrize("name", BROKEN_ROWS)
def test_drafts_that_are_no_token_ids(llm, name):
    expected = [c.token_ids for c in llm.generate([[5, 6, 7], [8, 9]], GREEDY)]
    use_drafter(llm, OddDrafter(BROKEN_ROWS[name]))
    completions = llm.generate([[5, 6, 7], [8, 9]], GREEDY)
    assert [c.token_ids for c in completions] == expected
    assert all(len(c.stats.drafter_errors) == 1 for c in completions)


def test_your_own_drafter_by_the_front_door(target):
    class RepeatLast:
        name = "repeat-last"

        def propose(self, sequences, num_drafts):
            return [[s.token_ids[-1]] * k for s, k in zip(sequences, num_drafts, strict=True)]

        def on_free(self, sequence):
            pass

    plain = LLM(target, kv_tokens=64, speculate="off").generate([5, 6, 7], GREEDY)[0]
    own = LLM(target, kv_tokens=64, drafter=RepeatLast(), k=3).generate([5, 6, 7], GREEDY)[0]
    assert own.token_ids == plain.token_ids
    assert sum(own.stats.drafted) > 0


def test_emitted_tokens_are_plain_integers(llm):
    expected = llm.generate([5, 6, 7], GREEDY)[0].token_ids
    follow = iter([expected[1:]])
    use_drafter(llm, OddDrafter(lambda k: torch.tensor(next(follow, [])[:k])))
    completion = llm.generate([5, 6, 7], GREEDY)[0]
    assert completion.token_ids == expected
    assert sum(completion.stats.accepted) > 0
    assert {type(token) for token in completion.token_ids} == {int}


def test_a_drafter_that_cannot_let_go_leaks_nothing(llm, monkeypatch):
    def fail(sequence):
        raise RuntimeError("still needed")

    [drafter] = llm.engine.speculation.drafters.values()
    monkeypatch.setattr(drafter, "on_free", fail)
    completion = llm.generate([5, 6, 7], GREEDY)[0]
    assert completion.finish_reason == "length"
    assert completion.stats.drafter_errors == ["on_free: RuntimeError: still needed"]
    assert llm.engine.pool.num_free == llm.engine.pool.num_usable


def test_a_rejected_draft_with_nan_weights_is_not_seen(tmp_path):
    """Its keys and values are NaN, which 0 * NaN would carry into the rows before it."""
    model = save_tiny(tmp_path, "llama")
    plain = LLM(tmp_path, kv_tokens=64).generate([5, 6, 7], GREEDY)[0].token_ids
    bad = next(token for token in range(3, 97) if token not in (5, 6, 7, *plain))
    model.model.embed_tokens.weight.data[bad] = torch.nan
    model.save_pretrained(tmp_path)
    llm = LLM(tmp_path, kv_tokens=64, k=3)
    use_drafter(llm, OddDrafter(lambda k: [bad] * k))
    completion = llm.generate([5, 6, 7], GREEDY)[0]
    assert completion.token_ids == plain
    assert completion.stats.drafter_errors == ["NaN in a step with drafts"]


def test_a_failing_drafter_is_turned_off_for_that_request(llm):
    expected = [c.token_ids for c in llm.generate([[5, 6, 7], [8, 9]], GREEDY)]
    use_drafter(llm, BrokenDrafter(poison=5))
    completions = llm.generate([[5, 6, 7], [8, 9]], GREEDY)
    assert [c.token_ids for c in completions] == expected
    assert completions[0].stats.drafter_errors == ["RuntimeError: no drafts today"]
    assert completions[1].stats.drafter_errors == []
    assert llm.engine.speculation.num_errors == 1


NO_DRAFTERS = {
    "a name": "ngram",
    "a class": BrokenDrafter,
    "no methods": object(),
    "a nameless one": type("Nameless", (BrokenDrafter,), {"name": None})(5),
}


@pytest.mark.parametrize("name", NO_DRAFTERS)
def test_what_is_no_drafter_is_refused(target, name):
    with pytest.raises(TypeError, match="drafter: expected an object with a name, propose"):
        LLM(target, drafter=NO_DRAFTERS[name], kv_tokens=64)
