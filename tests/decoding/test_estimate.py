"""Estimates: rows from counts and costs, verdicts, and errors.

That the predicted passes are those of the engine: tests/scheduler/test_estimate_cli.py.
"""

from __future__ import annotations

import json

import pytest

from pagedraft.decoding import estimate_costs
from pagedraft.decoding.drafters.draft_model import DraftModelDrafter
from pagedraft.decoding.drafters.lookup import NgramDrafter
from pagedraft.decoding.estimate import estimate
from pagedraft.decoding.estimate_costs import Costs, measure_costs
from pagedraft.decoding.estimate_text import Reader, Text
from pagedraft.model.transformer import Transformer
from pagedraft.tests.decoding.estimate_texts import PROMPT, RULES, tiny, written

pytestmark = pytest.mark.usefixtures("cpu_path")
# Of a drafter as slow as the target: no acceptance can pay.
SLOW = Costs(8, (1.0,) * 9, tuple(float(n) for n in range(9)))
FREE = Costs(8, (1.0,) * 9, (0.0,) * 9)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Transformer:
    return tiny(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Transformer:
    return tiny(tmp_path_factory.mktemp("other"), seed=1)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_a_draft_like_the_target_is_always_right(target, k, rules):
    """13 tokens, the first from the prompt's pass: 12 are a multiple of k + 1 for each k."""
    found = estimate(target, [written(target, **rules)], draft=target, max_drafts=k, repeats=1)
    assert (found.equal, found.greedy) == (1.0, 1.0)
    assert found.alpha == pytest.approx(1.0, abs=1e-5)
    assert found.of_rule("match")[-1].tokens_per_pass == k + 1
    assert found.of_rule("rejection")[-1].tokens_per_pass == pytest.approx(k + 1, abs=1e-3)


def test_speedups_follow_from_counts_and_costs(target, other, monkeypatch):
    costs = Costs(8, (1.0, 1.1, 1.3), (0.0, 0.25, 0.4), 0.05, read_seconds=0.01)
    monkeypatch.setattr("pagedraft.decoding.estimate.measure_costs", lambda *a, **k: costs)
    text = written(target, temperature=0.0)
    [one, two] = estimate(target, [text], draft=target, max_drafts=2).rows
    assert one.speedup == pytest.approx(12 / (6 * 1.35 + 5 * 0.05 + 6 * 0.01))
    assert two.speedup == pytest.approx(12 / (4 * 1.7 + 3 * 0.05 + 6 * 0.01))
    assert two.seconds_per_token == pytest.approx((4 * 1.7 + 3 * 0.05 + 6 * 0.01) / 12)
    assert two.text_speedups == (pytest.approx(two.speedup),)


def test_a_slow_draft_is_advised_against(target, other, monkeypatch):
    monkeypatch.setattr("pagedraft.decoding.estimate.measure_costs", lambda *a, **k: SLOW)
    texts = [written(target, temperature=0.8, seed=seed) for seed in range(3)]
    found = estimate(target, texts, draft=other)
    assert found.verdict() == f"don't: at best {found.best().speedup:.2f}x (k=1)"
    assert found.best().speedup < 0.75
    assert found.to_json()["best_k"] == {"match": 0, "rejection": 0}
    monkeypatch.setattr("pagedraft.decoding.estimate.measure_costs", lambda *a, **k: FREE)
    found = estimate(target, texts, draft=target)
    assert found.verdict() == "k=5: 6.00x expected (match rule, temperature 0.8)"
    assert found.verdict("rejection")[3:] == ": 6.00x expected (rejection rule, temperature 0.8)"


def test_an_estimate_is_valid_json(target):
    found = estimate(target, [written(target, temperature=0.0)], drafter="ngram", repeats=1)
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert document["drafter"] == "ngram"
    assert (document["alpha"], document["greedy"]) == (None, None)
    assert [row["k"] for row in document["rows"]] == list(range(1, 9))
    assert list(document["verdict"]) == ["match"]


def test_first_layers_are_judged_as_a_model(target):
    found = estimate(target, [written(target, temperature=0.7)], drafter="layers", repeats=1)
    assert found.alpha is not None
    assert 0 < found.alpha < 1
    assert found.rules == ["match", "rejection"]


def test_a_step_seems_no_longer_than_one_of_more_tokens():
    assert estimate_costs._rising([3.0, 2.0, 5.0, 4.0]) == (2.0, 2.0, 4.0, 4.0)


def test_costs_are_of_steps_and_proposals(target):
    text = written(target, temperature=0.0)
    costs = measure_costs(Reader(target, 64), NgramDrafter(), text, 12, 3, repeats=3)
    assert (costs.num_context, len(costs.step_seconds), len(costs.draft_seconds)) == (12, 4, 4)
    assert min(costs.step_seconds) > max(costs.draft_seconds) > 0
    assert (costs.catch_up_seconds, costs.read_seconds) == (0, 0)
    assert costs.noise >= 0


def test_a_draft_model_costs_passes_and_reading(target):
    text = written(target, temperature=0.0)
    readers = Reader(target, 64), Reader(target, 64)
    drafter = DraftModelDrafter(target, readers[1].cache, target_vocab_size=97)
    costs = measure_costs(readers[0], drafter, text, 12, 3, readers[1], repeats=3)
    assert costs.draft_seconds[0] == 0 < costs.draft_seconds[1] < costs.draft_seconds[3]
    assert 0 < costs.read_seconds < costs.draft_seconds[1]


BAD = {
    "no texts": ([], {}, "texts: expected an output of at least 2 tokens"),
    "nothing to draft": ([Text(PROMPT, (3,), 4)], {}, "texts: expected an output of at least 2"),
    "too long": ([Text(PROMPT, (3,) * 123, 123)], {}, r"texts\[0\]: 129 tokens do not fit a con"),
    "a name": ([Text(PROMPT, (3, 4), 2)], {"drafter": "orakel"}, "drafter: expected one of"),
    "no draft": ([Text(PROMPT, (3, 4), 2)], {"drafter": "draft"}, '"draft" needs a draft model'),
    "no drafts": ([Text(PROMPT, (3, 4), 2)], {"max_drafts": 0}, "max_drafts: expected an integer"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(target, name):
    texts, options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        estimate(target, texts, **options)


def test_a_draft_of_another_tokenizer_is_refused(target, tmp_path):
    draft = tiny(tmp_path, vocab_size=2000)
    with pytest.raises(ValueError, match="its vocabulary of 2000 tokens does not agree"):
        estimate(target, [Text(PROMPT, (3, 4), 2)], draft=draft)


BAD_TEXTS = {
    "no prompt": (((), (3,), 1), "prompt_ids: expected at least one token"),
    "max_tokens": ((PROMPT, (3, 4), 1), "max_tokens: expected at least the 2 tokens"),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_bad_texts_are_named(name):
    fields, message = BAD_TEXTS[name]
    with pytest.raises(ValueError, match=message):
        Text(*fields)
