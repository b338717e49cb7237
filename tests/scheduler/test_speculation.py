"""Decisions about drafts: options of one request, what the statistics say, several drafters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedraft.decoding.drafters.suffix import SuffixDrafter
from pagedraft.scheduler.launch import Launched, Launcher
from pagedraft.scheduler.llm import LLM
from pagedraft.tests.scheduler.runs import GREEDY, random_prompts, use_drafter

pytestmark = pytest.mark.usefixtures("cpu_path")
[PROMPT] = random_prompts(97, (9,))
LONG = replace(GREEDY, max_tokens=13)


class Fixed:
    """Proposes the tokens it was given, whatever they are worth."""

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.name, self.tokens = name, tokens

    def propose(self, sequences, num_drafts):
        return [self.tokens[:k] for k in num_drafts]

    def on_free(self, sequence):
        pass


@pytest.fixture
def self_draft(target) -> LLM:
    return LLM(target, target, speculate="draft", block_size=8, kv_tokens=256, k=3)


def test_every_pass_is_accounted_for(self_draft):
    stats = self_draft.generate([PROMPT], LONG)[0].stats
    assert [row.reason for row in stats.decisions] == ["prompt", "fixed", "fixed", "fixed"]
    assert [(row.drafter, row.drafted, row.accepted) for row in stats.decisions[1:]] == [
        ("draft", 3, 3)
    ] * 3
    assert stats.num_drafts == 3
    assert stats.drafters == {"draft": (9, 9)}
    assert stats.drafted == stats.accepted == [3, 3, 3]
    assert stats.tokens_per_pass == 13 / 4
    assert stats.skipped == {"prompt": 1}
    assert len(stats.token_times) == 13
    assert stats.token_times == sorted(stats.token_times)
    assert stats.token_times[0] == stats.ttft


def test_a_request_chooses_its_k(self_draft):
    params = [replace(LONG, k=k) for k in (0, 1, 2, 5)] + [replace(LONG, speculate=False)]
    completions = self_draft.generate([PROMPT] * 5, params)
    longest = [len(completion.stats.drafted) for completion in completions]
    assert longest == [0, 1, 2, 5, 0]
    assert len({tuple(completion.token_ids) for completion in completions}) == 1


def test_the_last_tokens_are_not_drafted_in_vain(self_draft):
    stats = self_draft.generate([PROMPT], replace(GREEDY, max_tokens=6))[0].stats
    assert [row.drafted for row in stats.decisions] == [0, 3, 0]
    assert stats.decisions[-1].reason == "limit"


def test_a_drafter_that_finds_nothing_is_said_to(llm):
    use_drafter(llm, Fixed("mute", []))
    stats = llm.generate([PROMPT], GREEDY)[0].stats
    assert stats.skipped["nothing found"] == 6
    assert stats.num_drafts == 0


def test_no_room_is_said_to(target):
    llm = LLM(target, target, speculate="draft", block_size=8, kv_tokens=256, k=3, token_budget=1)
    stats = llm.generate([PROMPT], GREEDY)[0].stats
    assert stats.skipped["no room"] > 0
    assert stats.num_drafts == 0


def test_several_drafters_by_name(target):
    llm = LLM(target, target, speculate="draft+ngram", block_size=8, kv_tokens=256)
    assert list(llm.engine.speculation.drafters) == ["draft", "ngram"]
    plain = LLM(target, speculate="off", block_size=8, kv_tokens=256)
    prompts = random_prompts(97, (5, 9, 30))
    assert [c.token_ids for c in llm.generate(prompts, LONG)] == [
        c.token_ids for c in plain.generate(prompts, LONG)
    ]


BAD_NAMES = {
    "unknown": ("magic", "speculate: expected .*got 'magic'"),
    "one of two": ("ngram+magic", "speculate: expected .*got 'magic'"),
    "off and more": ("off+ngram", "speculate: 'off' stands alone"),
    "none": ("", "speculate: expected .*got ''"),
    "twice": ("ngram+ngram", "expected each drafter once, got .ngram.ngram"),
    "no draft": ("ngram+draft", "needs a draft model"),
    "not text": (3, "speculate: expected"),
}


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_are_named(target, name):
    speculate, message = BAD_NAMES[name]
    with pytest.raises((ValueError, TypeError), match=message):
        LLM(target, speculate=speculate, kv_tokens=64)


def test_only_the_drafter_that_fails_is_turned_off(target):
    class Failing(Fixed):
        def propose(self, sequences, num_drafts):
            raise RuntimeError("no drafts today")

    llm = LLM(target, speculate="off", block_size=8, kv_tokens=256, k=2)
    drafters = (Failing("failing", []), Fixed("other", [5, 6]))
    llm.engine.speculation.drafters = {drafter.name: drafter for drafter in drafters}
    stats = llm.generate([PROMPT], GREEDY)[0].stats
    assert stats.drafter_errors == ["RuntimeError: no drafts today"]
    assert list(stats.drafters) == ["other"]
    assert llm.engine.speculation.num_errors == 1


def test_lookups_learn_between_launch_and_read(llm, monkeypatch):
    events = []

    def watch(owner, name: str) -> None:
        honest = getattr(owner, name)

        def watched(*args, **options):
            events.append(name)
            return honest(*args, **options)

        monkeypatch.setattr(owner, name, watched)

    watch(Launcher, "launch")
    watch(Launched, "read")
    watch(SuffixDrafter, "learn")
    watch(SuffixDrafter, "propose")
    use_drafter(llm, SuffixDrafter())
    stats = llm.generate([PROMPT], replace(GREEDY, max_tokens=4))[0].stats
    step = ["launch", "learn", "read"]
    assert events[:7] == [*step, "propose", *step]
    assert events.count("learn") == stats.num_passes


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_kept_of_what_ended_or_was_preempted_in_a_callback(llm, overlap):
    llm.engine.overlap = overlap
    drafter = SuffixDrafter()
    use_drafter(llm, drafter)
    known, requests = [], {}

    def end_others(tokens: list[int]) -> None:
        if requests["aborted"].finish_reason is None:
            llm.engine.abort(requests["aborted"])
            llm.engine.preempt(requests["preempted"])

    requests["acts"] = llm.submit(PROMPT, LONG, on_tokens=end_others)
    requests["aborted"] = llm.submit(PROMPT, LONG)
    requests["preempted"] = llm.submit(PROMPT, LONG)
    while llm.engine.has_work:
        llm.engine.step()
        known.append({name for name, r in requests.items() if id(r.sequence) in drafter._indexes})
    assert known[overlap] == {"acts"}
    assert all("aborted" not in names for names in known[overlap:])
    assert known[overlap + 1] == {"acts", "preempted"}
    assert not drafter._indexes
    assert requests["preempted"].sequence.output_ids == requests["acts"].sequence.output_ids


def test_a_drafter_that_cannot_learn_ends_no_request(llm, monkeypatch):
    [expected] = llm.generate([PROMPT], replace(LONG, speculate=False))
    monkeypatch.setattr(SuffixDrafter, "learn", lambda self, sequences: 1 // 0)
    use_drafter(llm, SuffixDrafter())
    [completion] = llm.generate([PROMPT], LONG)
    assert completion.token_ids == expected.token_ids
    assert completion.stats.drafter_errors[0].startswith("learn: ZeroDivisionError")
    assert completion.stats.num_drafts == 0


class Mute(Fixed):
    """A lookup that finds nothing, and counts how often it is asked."""

    is_lookup = True
    num_asked = 0

    def propose(self, sequences, num_drafts):
        self.num_asked += 1
        return [[] for _ in sequences]


@pytest.mark.parametrize("k, num_asked", [("auto", 15 + 6), (3, 38)])
def test_a_lookup_that_finds_nothing_is_asked_less_often(target, k, num_asked):
    """40 tokens: the first comes with the prompt, and before the last no draft can be kept."""
    llm = LLM(target, speculate="off", block_size=8, kv_tokens=256, k=k)
    drafter = Mute("mute", [])
    use_drafter(llm, drafter)
    stats = llm.generate([PROMPT], replace(GREEDY, max_tokens=40))[0].stats
    assert drafter.num_asked == stats.skipped["nothing found"] == num_asked
    assert stats.skipped.get("resting", 0) == 38 - num_asked
