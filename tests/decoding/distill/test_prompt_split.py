"""Train and held-out prompts: apart by source, by prompt, and the same every time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedraft.decoding.distill.prompt import distinct
from pagedraft.decoding.distill.prompts import MIXTURE, Prompt, Split, demo_prompts, split

some_prompts = st.lists(
    st.builds(
        Prompt,
        text=st.sampled_from(["a", "b", "a  ", "c d", "c\nd"]) | st.text(max_size=3),
        kind=st.sampled_from(["chat", "code"]),
        source=st.sampled_from("uvwxyz"),
        is_chat=st.booleans(),
        history=st.sampled_from([(), (("user", "a"),)]),
    ),
    min_size=1,
    max_size=40,
)
shares = st.floats(0.01, 0.99)


def make(kind: str, source: str, number: int) -> list[Prompt]:
    return [Prompt(f"{source} {n}", kind, source, is_chat=True) for n in range(number)]


@given(prompts=some_prompts, share=shares, seed=st.integers(0, 9))
def test_sides_share_nothing_and_lose_nothing(prompts, share, seed):
    different = distinct(prompts)
    if len({prompt.source for prompt in different}) < 2:
        with pytest.raises(ValueError, match="expected at least two sources"):
            split(prompts, share, seed)
        return
    found = split(prompts, share, seed)
    assert found.train
    assert found.held_out
    assert not {p.source for p in found.train} & {p.source for p in found.held_out}
    assert not {p.words for p in found.train} & {p.words for p in found.held_out}
    held_out = {p.source for p in found.held_out}
    assert [p for p in different if p.source in held_out] == list(found.held_out)
    assert [p for p in different if p.source not in held_out] == list(found.train)
    assert found.num_repeated == len(prompts) - len(different)
    assert split(prompts, share, seed) == found


@given(sizes=st.lists(st.integers(1, 30), min_size=2, max_size=12), share=shares)
def test_share_is_met_but_for_one_source(sizes, share):
    prompts = [p for n, size in enumerate(sizes) for p in make("chat", f"source {n}", size)]
    number = len(split(prompts, share, 0).held_out)
    assert abs(number - share * len(prompts)) <= max(sizes)


def test_kind_of_two_sources_is_on_both_sides_however_small_the_share():
    prompts = [*make("chat", "u", 50), *make("chat", "v", 40), *make("code", "w", 9)]
    prompts += make("code", "x", 8)
    found = split(prompts, 0.01, 0)
    assert Counter(p.source for p in found.held_out) == {"v": 40, "x": 8}


def test_seed_decides_and_hashes_tell():
    prompts = [p for n in range(20) for p in make("chat", f"source {n}", 3)]
    splits = [split(prompts, 0.2, seed) for seed in range(4)]
    assert len({frozenset(p.source for p in found.held_out) for found in splits}) > 1
    assert len({found.hashes["held_out"] for found in splits}) > 1
    assert splits[0].hashes == split(prompts, 0.2, 0).hashes
    assert {len(digest) for digest in splits[0].hashes.values()} == {64}


@pytest.mark.parametrize("other", ["b", "a "])
def test_hash_is_of_every_text(other):
    one, two = (
        Split((Prompt("a", "chat", "u", True), Prompt(text, "chat", "u", True)), ())
        for text in ("c", other)
    )
    assert one.hashes["train"] != two.hashes["train"]
    assert one.hashes["held_out"] == two.hashes["held_out"]


def test_hash_is_of_the_texts_one_by_one():
    """Texts that only differ in where one ends are told apart."""
    one, two = (
        Split(tuple(Prompt(text, "chat", "u", True) for text in texts), ())
        for texts in (("ab", "c"), ("a", "bc"))
    )
    assert one.hashes != two.hashes


def test_facts_of_a_report():
    prompts = [
        *make("chat", "u", 5),
        *make("chat", "v", 2),
        *make("code", "w", 3),
        *make("chat", "v", 1),
    ]
    facts = split(prompts, 0.3, 0).facts()
    assert facts["repeated"] == 1
    sides = [Counter(facts["prompts"][side]) for side in ("train", "held_out")]
    assert sides[0] + sides[1] == {"chat": 7, "code": 3}
    assert sum(facts["sources"].values()) == 3
    assert facts["python"].count(".") == 2


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, float("nan")])
def test_share_is_checked(share):
    with pytest.raises(ValueError, match=r"held_out: expected a share between 0 and 1, got"):
        split([*make("chat", "u", 2), *make("chat", "v", 2)], share, 0)


@pytest.mark.parametrize("number, found", [(0, "none"), (3, "only 'u'")])
def test_one_source_is_refused(number, found):
    with pytest.raises(ValueError, match=f"expected at least two sources .*, got {found}"):
        split(make("chat", "u", number), 0.1, 0)


def test_demo_prompts_are_split_by_kind():
    found = split(demo_prompts(0), 0.1, 0)
    number = len(found.train) + len(found.held_out)
    counts = Counter(p.kind for p in found.held_out)
    # Chat comes in eight blocks, so its share is met to within a sixteenth of it.
    assert {
        kind: abs(counts[kind] / (share * number) - 0.1) < 0.07 for kind, share in MIXTURE.items()
    } == dict.fromkeys(MIXTURE, True)
