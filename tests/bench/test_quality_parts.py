"""Parts of the quality bench, by hand and beside oracles: losses, scores, intervals, tasks."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from pagedraft.bench import quality_choice as choice
from pagedraft.bench import quality_stats as stats
from pagedraft.bench import quality_tasks, quality_text
from pagedraft.bench.quality import DATA, TASKS
from pagedraft.bench.quality_greedy import agreement, chat_ids
from pagedraft.bench.quality_tasks import Choice, Written, every, groups, parse, read_tasks
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.model.transformer import Transformer
from pagedraft.tests.bench import toy_quality as toy

pytestmark = pytest.mark.usefixtures("cpu_path")
TOKENS = torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(0)).tolist()
TASK = Choice("t", "g", "one two", ("a", "b", "cd", "ce"), 2)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(ours, transformers')."""
    folder = tmp_path_factory.mktemp("parts") / "model"
    reference = toy.save(folder)
    with use_implementation("cpu"):
        return Transformer.from_folder(folder), reference


def _logits(reference, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0]


def test_losses_are_those_of_transformers(models):
    """Two windows: the second one's tokens see nothing of the first."""
    model, reference = models
    losses, best = quality_text.score(model, TOKENS, torch.float32, window=40, chunk=16)
    logits = torch.cat([_logits(reference, w)[:-1] for w in (TOKENS[:41], TOKENS[40:])])
    expected = F.cross_entropy(logits, torch.tensor(TOKENS[1:]), reduction="none")
    torch.testing.assert_close(losses.float(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(best, logits.argmax(-1))


def test_scores_are_those_of_transformers(models):
    """Of whole texts: what options have in common does not count in differences."""
    model, reference = models
    encode = toy.Characters().encode
    [scores] = choice.option_scores(model, [TASK], encode, torch.float32)

    def whole(option: str) -> float:
        tokens = encode(TASK.context + option)
        logprobs = _logits(reference, tokens[:-1]).double().log_softmax(-1)
        return choice.log_likelihood(logprobs, tokens[1:])

    expected = torch.tensor([whole(option) for option in TASK.options], dtype=torch.float64)
    torch.testing.assert_close(scores - scores[0], expected - expected[0], rtol=1e-4, atol=1e-4)


def test_scores_do_not_depend_on_what_else_is_scored(models):
    tasks = [Choice(f"t{i}", "g", "abcdefg"[: i + 1], ("x", "yz"), 0) for i in range(7)]
    encode = toy.Characters().encode
    together = choice.option_scores(models[0], tasks, encode, torch.float32)
    alone = choice.option_scores(models[0], tasks, encode, torch.float32, chunk=1)
    assert all(map(torch.equal, together, alone))


def test_options_of_one_token_share_a_row():
    rows = choice.rows_of(0, TASK, toy.Characters().encode)
    assert [row.tails.keys() for row in rows] == [{0, 1}, {2, 3}]
    assert [row.num_logits for row in rows] == [1, 2]
    assert rows[1].tokens[:-1] == rows[0].tokens


def test_score_arithmetic_on_hand_made_logits(monkeypatch):
    """Context "one two", options a, b, cd, ce: four rows of logits, of which three are read."""
    a, b, c, d, e = (toy.Characters().encode(char)[0] for char in "abcde")
    logits = torch.full((3, 97), -1e30)
    logits[0, [a, b, c]] = torch.tensor([0.2, 0.3, 0.5]).log()
    logits[1, [a, b, c]] = torch.tensor([0.2, 0.3, 0.5]).log()
    logits[2, [d, e]] = torch.tensor([0.9, 0.1]).log()
    monkeypatch.setattr(choice, "_forward", lambda *_: logits)
    [scores] = choice.option_scores(None, [TASK], toy.Characters().encode, torch.float32)
    torch.testing.assert_close(scores.exp().float(), torch.tensor([0.2, 0.3, 0.45, 0.05]))
    assert choice.is_right(TASK, scores)
    assert choice.right_probability(TASK, scores) == pytest.approx(0.45)
    assert not choice.is_right(TASK, torch.tensor([1.0, 0.0, 1.0, 0.0])), "equal: the first counts"


def test_nan_score_names_the_task(monkeypatch):
    monkeypatch.setattr(choice, "_forward", lambda *_: torch.full((3, 97), torch.nan))
    with pytest.raises(FloatingPointError, match="task t, option 0: expected a finite"):
        choice.option_scores(None, [TASK], toy.Characters().encode, torch.float32)


INSEPARABLE = {
    "beginning of another": ("context", ("a", "ab"), "share 8 of its 8 tokens"),
    "no context": ("", ("a", "b"), "share 0 of its 1 tokens"),
}


@pytest.mark.parametrize(("context", "options", "message"), INSEPARABLE.values(), ids=INSEPARABLE)
def test_options_that_cannot_be_compared(context, options, message):
    with pytest.raises(ValueError, match=f"task t: .*{message}"):
        choice.rows_of(0, Choice("t", "g", context, options, 0), toy.Characters().encode)


def test_agreement():
    expected = [[1, 2, 3, 4], [5, 6, 7, 8]]
    found = agreement([[1, 2, 3, 4], [5, 9, 7, 8]], [[1, 2, 3, 4], [5, 9, 9, 8]], expected)
    assert found.same_answers.value == 0.5
    assert found.prefix.value == (4 + 1) / 2
    assert found.same_best.value == 6 / 8


def test_prompts_without_a_chat_template():
    assert chat_ids(toy.Characters(None), "hi") == toy.Characters().encode("hi")
    assert chat_ids(toy.Characters(), "hi") == toy.Characters().encode("[hi]")


def test_perplexity_ratio():
    """Losses that all grow by log 2 double the perplexity, without error; a spread has one."""
    control = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    same = stats.perplexity_ratio(control + math.log(2), control)
    assert same.value == pytest.approx(2)
    assert same.error == pytest.approx(0, abs=1e-12)
    spread = stats.perplexity_ratio(control + torch.tensor([0.1, -0.1, 0.1, -0.1]), control)
    assert spread.value == pytest.approx(1)
    assert spread.error == pytest.approx(0.1 * math.sqrt(4 / 3) / 2)
    assert spread.around(1)
    assert math.log(spread.high) == pytest.approx(1.959964 * spread.error)


def test_share_has_wilson_interval():
    """8 of 10: 0.490 to 0.943, as in the literature; all of 10 is not certainty."""
    found = stats.share(torch.tensor([True] * 8 + [False] * 2))
    assert (found.value, found.error) == (0.8, pytest.approx(math.sqrt(0.016)))
    assert (found.low, found.high) == (
        pytest.approx(0.4902, abs=1e-4),
        pytest.approx(0.9433, abs=1e-4),
    )
    assert stats.share(torch.tensor([True] * 10)).low < 0.75


CHANGES = {
    "nothing": ([1, 1, 0, 0] * 25, [1, 1, 0, 0] * 25, 0, 0, 0.0),
    "lost": ([0, 1, 0, 0] * 25, [1, 1, 0, 0] * 25, 25, 0, -0.25),
    "won": ([1, 1, 1, 0] * 25, [1, 1, 0, 0] * 25, 0, 25, 0.25),
    "both": ([0, 1, 1, 0] * 25, [1, 1, 0, 0] * 25, 25, 25, 0.0),
}


@pytest.mark.parametrize(("now", "before", "lost", "won", "value"), CHANGES.values(), ids=CHANGES)
def test_change_of_share(now, before, lost, won, value):
    found = stats.change_of_share(torch.tensor(now).bool(), torch.tensor(before).bool())
    assert (found.lost, found.won, found.share.value) == (lost, won, value)
    assert found.share.low < value < found.share.high, "no interval is empty, not even of no change"
    assert found.share.around(0) == (value == 0)


def test_interval_of_a_change_is_right_about_as_often_as_it_says():
    """1000 sets of 150 tasks, 6 % lost and 2 % won: 95 % of intervals hold -4 %."""
    draws = torch.rand(1000, 150, generator=torch.Generator().manual_seed(3))
    was_right = draws < 0.6
    is_right = (draws < 0.54) | (draws > 0.98)
    found = [stats.change_of_share(*pair).share for pair in zip(is_right, was_right, strict=True)]
    share = sum(one.around(-0.04) for one in found) / len(found)
    assert 0.93 <= share <= 0.98


def test_too_few_to_tell():
    with pytest.raises(ValueError, match="expected at least 2, got 1"):
        stats.mean(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="expected at least 1, got 0"):
        stats.share(torch.tensor([]))


LINE = {"id": "a", "group": "g", "context": "c", "options": ["x", "y"], "answer": 1}
BROKEN = {
    "no JSON": ("{", "Expecting property name"),
    "no object": ("[1]", "expected the keys .* got list"),
    "a key too few": ({"id": "a", "group": "g"}, r"expected the keys .* got \['group', 'id'\]"),
    "empty id": ({**LINE, "id": ""}, "id: expected a text, got ''"),
    "no text": ({**LINE, "context": 3}, "context: expected a text, got 3"),
    "one option": ({**LINE, "options": ["x"]}, "options: expected 2 or more different texts"),
    "beginning": ({**LINE, "options": ["need", "x", "needs"]}, "options: 'need' is the beginning"),
    "equal options": ({**LINE, "options": ["x", "x"]}, "options: expected 2 or more different"),
    "answer": ({**LINE, "answer": True}, "answer: expected an index below 2, got True"),
    "no word": (
        {"id": "a", "group": "g", "context": "c", "words": []},
        "words: expected 1 or more",
    ),
    "pattern": (
        {"id": "a", "group": "g", "ask": "?", "pattern": "("},
        "pattern: expected a regular",
    ),
    "id twice": (LINE | {"id": "first"}, "id: 'first' is that of line 1 too"),
}


@pytest.mark.parametrize(("line", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_line_is_named(tmp_path, line, message):
    path = tmp_path / "some.jsonl"
    second = line if isinstance(line, str) else json.dumps(line)
    path.write_text(f"{json.dumps({**LINE, 'id': 'first'})}\n{second}\n")
    with pytest.raises(ValueError, match=f"some.jsonl:2: {message}"):
        read_tasks(path)


def test_no_tasks(tmp_path):
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(ValueError, match="tasks: expected at least one, got none"):
        read_tasks(tmp_path / "none.jsonl")


WORDS = {"id": "w", "group": "g", "context": "c", "words": ["four", "4"]}
ANSWERS = {
    "word": (WORDS, " Four, five", True),
    "other word of the line": (WORDS, "\n4", True),
    "longer word": (WORDS, " fourteen", False),
    "later": (WORDS, " maybe four", False),
    "pattern": ({"id": "o", "group": "g", "ask": "a", "pattern": "yes|no"}, " yes.", True),
    "not at its beginning": (
        {"id": "o", "group": "g", "ask": "a", "pattern": "yes"},
        "oh yes",
        False,
    ),
}


@pytest.mark.parametrize(("row", "text", "is_right"), ANSWERS.values(), ids=ANSWERS)
def test_written_answers(row, text, is_right):
    assert parse(row).is_right(text) == is_right


def test_every():
    tasks = [Choice(f"{g}{i}", g, "c", ("x", "y"), 0) for g in "ab" for i in range(5)]
    assert [task.id for task in every(tasks, 2)] == ["a0", "a2", "a4", "b0", "b2", "b4"]
    assert every(tasks, 1) == tasks
    assert groups(tasks) == {"a": [0, 1, 2, 3, 4], "b": [5, 6, 7, 8, 9]}


@pytest.fixture(scope="module")
def tasks():
    return read_tasks(TASKS)


def test_task_set(tasks):
    """Large enough, of all kinds, and without a task twice."""
    assert len(tasks) >= 120
    assert set(groups(tasks)) == {"facts", "arithmetic", "grammar", "code", "cloze", "format"}
    assert min(Counter(task.group for task in tasks).values()) >= 20
    asked = [
        t.context + "|".join(sorted(t.options)) if isinstance(t, Choice) else t.prompt
        for t in tasks
    ]
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("group", ["facts", "arithmetic", "grammar", "code"])
def test_answers_are_balanced(tasks, group):
    """No place is right more often than another, in the whole set; chance is what it says."""
    chosen = [task for task in tasks if task.group == group]
    assert all(isinstance(task, Choice) for task in chosen)
    counts = Counter(task.answer for task in chosen)
    num_options = len(chosen[0].options)
    assert {task.chance for task in chosen} == {1 / num_options}
    assert len(counts) == num_options
    assert max(counts.values()) - min(counts.values()) <= 1


def test_written_tasks(tasks):
    written = [task for task in tasks if isinstance(task, Written)]
    assert {task.is_chat for task in written if task.group == "format"} == {True}
    assert {task.num_tokens for task in written} == {
        quality_tasks.CLOZE_TOKENS,
        quality_tasks.ORDER_TOKENS,
    }
    assert not any(task.is_right("") for task in written), "no answer is no right answer"


def test_every_group_is_described():
    described = (DATA / "README.md").read_text()
    missing = [name for name in groups(read_tasks(TASKS)) if f"`{name}`" not in described]
    assert not missing
