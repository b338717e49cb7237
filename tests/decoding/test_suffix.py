"""Lookup drafters: an index a sequence, caught up within a budget; outputs shared if asked for."""

from __future__ import annotations

import gc

import pytest

from pagedraft.decoding.drafters.base import is_lookup
from pagedraft.decoding.drafters.indexed import IndexedDrafter
from pagedraft.decoding.drafters.lookup import NgramDrafter
from pagedraft.decoding.drafters.suffix import RecentTexts, SuffixDrafter
from pagedraft.decoding.sequence import Sequence

LOOKUPS = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
TEXT = [11, 12, 13, 14, 15, 16]


def sequence(prompt: list[int], output: list[int] | None = None) -> Sequence:
    tokens = [*prompt, *(output or [])]
    return Sequence(token_ids=tokens, num_prompt=len(prompt), temperature=0.0, seed=0)


def propose(drafter: IndexedDrafter, *sequences: Sequence, k: int = 3) -> list[list[int]]:
    return [p.tokens for p in drafter.propose(sequences, [k] * len(sequences))]


@pytest.mark.parametrize("name", LOOKUPS)
class TestLookups:
    def test_follows_the_context(self, name):
        drafter, row = LOOKUPS[name](), sequence([*TEXT, 11, 12])
        assert is_lookup(drafter)
        assert drafter.name == name
        assert propose(drafter, row) == [[13, 14, 15]]
        row.append([90, 14, 15])
        [proposal] = drafter.propose([row], [2])
        assert (proposal.tokens, proposal.evidence, proposal.q_KV) == ([16, 11], 2, None)

    def test_rows_know_their_own_context_only(self, name):
        rows = sequence([*TEXT, 11, 12]), sequence([21, 22, 13, 14]), sequence([31, 32, 31, 32])
        assert propose(LOOKUPS[name](), *rows) == [[13, 14, 15], [], [31, 32, 31]]

    def test_no_drafts_wanted(self, name):
        assert propose(LOOKUPS[name](), sequence([1, 2, 1, 2]), k=0) == [[]]

    def test_a_long_prompt_is_indexed_in_parts(self, name):
        """The shortest first; a row that is behind proposes nothing, a short step is never late."""
        long, longer = sequence(list(range(100)) * 2), sequence(list(range(150)) * 2)
        short = sequence([1, 2, 1, 2])
        drafter = LOOKUPS[name](index_tokens=250)
        assert propose(drafter, longer, long, short) == [[], [0, 1, 2], [1, 2, 1]]
        assert propose(drafter, longer, long, short) == [[0, 1, 2], [0, 1, 2], [1, 2, 1]]

    def test_once_taught_it_looks_up_and_leaves_learning_for_later(self, name):
        drafter, row = LOOKUPS[name](), sequence([*TEXT, 11, 12])
        drafter.learn([row])
        assert propose(drafter, row) == [[13, 14, 15]]
        row.append([13, 99, 98, 15, 16])
        assert propose(drafter, row) == [[11, 12, 13]]
        assert propose(drafter, row) == [[11, 12, 13]]
        row.append([99, 98])
        assert propose(drafter, row) == [[]]
        drafter.learn([row])
        assert propose(drafter, row) == [[15, 16, 99]]

    def test_what_is_followed_row_by_row_is_learned_once(self, name):
        """As after each step: a period shorter than a step, a long one, and one token at a time."""
        text = [*range(60), *[1, 2, 3] * 12, *range(30), *[7] * 9, *range(40)]
        drafter, at_once = LOOKUPS[name](), LOOKUPS[name]()
        row, whole = sequence(text[:70]), sequence(text)
        for start in range(70, len(text), 5):
            drafter.learn([row])
            propose(drafter, row)
            row.append(text[start : start + 5])
        drafter.learn([row])
        assert propose(drafter, row) == propose(at_once, whole) == [[40, 41, 42]]
        (late, _), (early, _) = drafter._indexes[id(row)], at_once._indexes[id(whole)]
        assert vars(late) == vars(early)

    def test_a_long_prompt_is_learned_in_parts_and_drafts_when_few_tokens_are_missing(self, name):
        long, short = sequence(list(range(100)) * 2), sequence([1, 2, 1, 2])
        drafter = LOOKUPS[name](index_tokens=80)
        for expected in ([[], [1, 2, 1]], [[0, 1, 2], [1, 2, 1]], [[0, 1, 2], [1, 2, 1]]):
            drafter.learn([long, short])
            assert propose(drafter, long, short) == expected

    def test_a_long_prompt_is_not_learned_by_proposing(self, name):
        drafter, row = LOOKUPS[name](), sequence(list(range(100)) * 2)
        drafter.learn([])
        assert propose(drafter, row) == propose(drafter, row) == [[]]
        drafter.learn([row])
        assert propose(drafter, row) == [[0, 1, 2]]

    def test_freed_is_forgotten(self, name):
        drafter, kept, dropped = LOOKUPS[name](), sequence([1, 2]), sequence([3, 4])
        propose(drafter, kept, dropped)
        drafter.on_free(kept)
        assert kept not in drafter._indexes
        del dropped
        gc.collect()
        assert len(drafter._indexes) == 0
        assert propose(drafter, sequence([1, 2, 1, 2])) == [[1, 2, 1]]

    @pytest.mark.parametrize("index_tokens", [0, -3])
    def test_refused(self, name, index_tokens):
        with pytest.raises(ValueError, match=f"index_tokens: .* at least 1, got {index_tokens}"):
            LOOKUPS[name](index_tokens=index_tokens)


class TestSharedOutputs:
    def test_off_by_default(self):
        drafter, ended = SuffixDrafter(), sequence([1], TEXT)
        propose(drafter, ended)
        drafter.on_free(ended)
        assert propose(drafter, sequence([8, 11, 12])) == [[]]

    def test_another_request_is_continued_from_an_ended_ones_output(self):
        drafter, ended = SuffixDrafter(share_outputs=True), sequence([1], TEXT)
        row = sequence([8, 11, 12])
        assert propose(drafter, ended, row) == [[], []]
        drafter.on_free(ended)
        [proposal] = drafter.propose([row], [3])
        assert (proposal.tokens, proposal.evidence) == ([13, 14, 15], 2)

    def test_prompts_are_not_shared(self):
        drafter, ended = SuffixDrafter(share_outputs=True), sequence(TEXT, [1])
        propose(drafter, ended)
        drafter.on_free(ended)
        assert propose(drafter, sequence([8, 11, 12])) == [[]]

    def test_the_longer_match_wins_and_a_tie_is_the_own_text(self):
        drafter, ended = SuffixDrafter(share_outputs=True), sequence([1], TEXT)
        propose(drafter, ended)
        drafter.on_free(ended)
        tie = sequence([11, 12, 90, 8, 11, 12])
        longer = sequence([12, 13, 90, 11, 12, 13])
        assert propose(drafter, tie, longer, k=2) == [[90, 8], [14, 15]]

    def test_a_preempted_request_shares_each_token_once(self):
        drafter, row = SuffixDrafter(share_outputs=True), sequence([1], TEXT)
        propose(drafter, row)
        drafter.on_free(row)
        drafter.on_free(row)
        row.append([17, 18])
        propose(drafter, row)
        drafter.on_free(row)
        assert drafter._outputs.num_tokens == len(TEXT) + 1 + 2

    def test_a_request_without_drafts_shares_nothing(self):
        drafter = SuffixDrafter(share_outputs=True)
        drafter.on_free(sequence([1], TEXT))
        assert drafter._outputs.num_tokens == 0


class TestRecentTexts:
    def test_the_newest_are_kept_and_memory_is_bounded(self):
        texts = RecentTexts(max_tokens=40)
        sizes = [
            (texts.add([100 * i + j for j in range(9)]), texts.num_tokens)[1] for i in range(20)
        ]
        assert max(sizes) <= 40
        assert min(sizes[4:]) >= 20
        assert texts.propose([1901, 1902], 2).tokens == [1903, 1904]
        assert texts.propose([101, 102], 2).tokens == []

    def test_a_text_that_is_too_long_is_cut(self):
        texts = RecentTexts(max_tokens=20)
        texts.add(list(range(100)))
        assert texts.num_tokens == 10
        assert texts.propose([3, 4], 2).tokens == [5, 6]

    @pytest.mark.parametrize("max_tokens", [0, 1])
    def test_refused(self, max_tokens):
        with pytest.raises(ValueError, match="max_tokens: expected at least 2"):
            RecentTexts(max_tokens)
