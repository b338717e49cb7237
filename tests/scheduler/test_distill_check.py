"""Drafts in the engine beside what was expected of them; medians, noise and errors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pagedraft.decoding.distill import judge as judging
from pagedraft.decoding.distill.judge import HeldOut, judge
from pagedraft.decoding.distill.report import verdict
from pagedraft.decoding.estimate_costs import Costs
from pagedraft.decoding.estimate_text import Text
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.transformer import Transformer
from pagedraft.scheduler.distill import check
from pagedraft.scheduler.distill.check import measure
from pagedraft.tests.decoding.distill.judged import near_model
from pagedraft.tests.decoding.estimate_texts import PROMPT, tiny, written

pytestmark = pytest.mark.usefixtures("cpu_path")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Transformer:
    return tiny(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def near(tmp_path_factory) -> Transformer:
    with use_implementation("cpu"):
        return near_model(tmp_path_factory.mktemp("near"))


@pytest.fixture(scope="module")
def held_out(target) -> list[HeldOut]:
    with use_implementation("cpu"):
        return [
            HeldOut(written(target, length, temperature=0.0), kind)
            for length, kind in ((13, "chat"), (1, "text"), (22, "code"))
        ]


def test_passes_are_those_that_were_expected(target, near, held_out, monkeypatch):
    """Also where k is more than an output has tokens; the shortest text has nothing to measure."""
    costs = Costs(8, (1.0,) * 9, (0.0,) * 9)
    monkeypatch.setattr(judging, "measure_costs", lambda *a, **k: costs)
    expected = judge(target, {"after": near}, held_out).drafters["after"]
    found = measure(target, near, held_out, (1, 3, 8), rounds=1)
    assert [row.k for row in found.total.rows] == [1, 3, 8]
    tokens = [expected.total.rows[k - 1].tokens_per_pass for k in (1, 3, 8)]
    assert [row.tokens_per_pass for row in found.total.rows] == tokens
    assert 1.2 < tokens[1] < 3.5
    chat = found.kinds["chat"].rows[1]
    assert chat.tokens_per_pass == expected.kinds["chat"].rows[2].tokens_per_pass
    assert chat.accepted_per_pass <= chat.tokens_per_pass
    assert (found.num_rewritten, found.total.num_texts, found.total.num_tokens) == (0, 2, 33)
    assert [row.num_same for row in found.total.rows] == [2, 2, 2]
    assert list(found.kinds) == ["chat", "code"]
    json.dumps(found.to_json(), allow_nan=False)


def test_the_target_as_its_own_draft_accepts_all(target, held_out):
    found = measure(target, target, held_out[:1], (3,), rounds=2)
    [row] = found.total.rows
    assert (row.tokens_per_pass, row.accepted_per_pass) == (4.0, 3.0)
    assert (len(row.round_speedups), found.rounds) == (2, 2)
    assert row.tokens_per_second > 0 < found.total.plain_tokens_per_second


def test_a_text_that_becomes_another_is_counted(target, near, held_out):
    [first, *_] = held_out
    text = first.text
    other = replace(text, output_ids=(*text.output_ids[:-1], 3 + (text.output_ids[-1] == 3)))
    found = measure(target, near, [first, HeldOut(other, "chat")], (2,), rounds=1)
    assert found.num_rewritten == 1


def run(tokens: int, seconds: float, first: int = 7) -> check._Run:
    return check._Run((first,) * (tokens + 1), tokens, 5, 3, seconds)


def trio(index: int, number: int, k: int, *seconds: float, first: int = 7) -> check._Trio:
    before, during, after = seconds
    runs = run(10, before), run(10, during, first), run(10, after)
    return check._Trio(index, number, k, *runs)


def test_speedups_are_medians_over_rounds_of_all_texts_together():
    trios = [
        trio(0, 0, 2, 1.0, 0.5, 1.0),
        trio(1, 0, 2, 3.0, 1.5, 3.0),  # round 0: 4 s against 2
        trio(0, 1, 2, 1.0, 1.0, 3.0),  # round 1: disturbed after
        trio(1, 1, 2, 3.0, 4.0, 3.0),  # 5 s against 5
        trio(0, 2, 2, 1.0, 1.5, 1.0),
        trio(1, 2, 2, 3.0, 1.0, 3.0),  # round 2: 4 s against 2.5
    ]
    found = check._group(trios, [2])
    [row] = found.rows
    assert row.round_speedups == (2.0, 1.0, 1.6)
    assert (row.speedup, row.tokens_per_second) == (1.6, 8.0)
    assert (row.tokens_per_pass, row.accepted_per_pass, row.num_same) == (2.0, 0.6, 2)
    assert found.plain_tokens_per_second == 5.0
    assert found.noise == 0.5  # 6 s after round 1's draft runs, 4 s before them


def test_noise_is_the_largest_of_four_fifths():
    differences = [1.0, 1.1, 1.2, 1.3, 9.0]
    trios = [trio(0, number, 1, 1.0, 1.0, after) for number, after in enumerate(differences)]
    assert check._group(trios, [1]).noise == pytest.approx(0.3)


def test_a_changed_output_is_a_fault(target, near, held_out, monkeypatch):
    trios = [trio(0, 0, 2, 1.0, 0.5, 1.0), trio(0, 1, 2, 1.0, 0.5, 1.0, first=8)]
    monkeypatch.setattr(check, "_trios", lambda *a: [trios[a[-1]]])
    found = measure(target, near, held_out[:1], (2,), rounds=2)
    assert found.total.rows[0].num_same == 0
    expected = judge(target, {"after": near}, held_out[:1], repeats=1)
    assert verdict(expected, found, "H") == (
        "fault: drafts changed the output at k=2, single stream on H"
    )


TEXT = HeldOut(Text(PROMPT, (3, 4), 2), "chat")
BAD = {
    "no texts": ([], {}, "held_out: expected a text of at least 2 tokens"),
    "one token": ([HeldOut(Text(PROMPT, (3,), 1), "chat")], {}, "held_out: expected a text of at"),
    "no k": ([TEXT], {"ks": []}, "ks: expected different numbers of drafts, at least one"),
    "a k twice": ([TEXT], {"ks": [2, 2]}, "ks: expected different numbers of drafts"),
    "k of 0": ([TEXT], {"ks": [0, 1]}, "ks: expected an integer >= 1, got 0"),
    "no rounds": ([TEXT], {"rounds": 0}, "rounds: expected an integer >= 1, got 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(target, near, name):
    held_out, options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        measure(target, near, held_out, **options)


def test_texts_that_end_at_once_are_refused(target, near):
    """A stop at the first token, although there was room."""
    text = written(target, 1, temperature=0.0)
    rules = replace(text.rules, stop_ids=text.output_ids)
    with pytest.raises(ValueError, match="all end at their first"):
        measure(target, near, [HeldOut(replace(text, max_tokens=9, rules=rules), "chat")], (1,))
