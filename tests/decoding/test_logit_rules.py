"""Token counts of a growing context, and the batch that rows of one step draw with."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedraft.decoding.draw import draw, sample_batch
from pagedraft.decoding.logit_rules import LogitRules, TokenCounts
from pagedraft.decoding.params import MODEL_DEFAULTS, SamplingParams, logit_rules
from pagedraft.decoding.sequence import Sequence
from pagedraft.tests.inputs import randn

CPU = torch.device("cpu")


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6),
)
def test_counts_are_those_of_the_whole_context(prompt, steps):
    sequence = Sequence(list(prompt), len(prompt), temperature=1.0, seed=0)
    for tokens in steps:
        sequence.counts()
        sequence.append(tokens)
    counts = sequence.counts()
    output = Counter(sequence.output_ids)
    assert counts.ids_n.tolist() == sorted(set(sequence.token_ids))
    assert counts.counts_n.tolist() == [output[token] for token in counts.ids_n.tolist()]
    assert counts.ids_n.dtype == counts.counts_n.dtype == "int32"


def test_counts_of_a_context_that_was_all_prompt():
    counts = TokenCounts()
    counts.catch_up([5, 3, 5], 3)
    assert (counts.ids_n.tolist(), counts.counts_n.tolist()) == ([3, 5], [0, 0])


def test_unset_parameters_take_the_models_and_then_the_neutral_value():
    params = SamplingParams(top_p=0.5, presence_penalty=1.0, max_tokens=9, min_tokens=2)
    rules = logit_rules(params, MODEL_DEFAULTS | {"top_k": 40, "top_p": 0.9}, {7, 3})
    assert rules == LogitRules(
        top_k=40, top_p=0.5, presence_penalty=1.0, min_tokens=2, stop_ids=(3, 7)
    )
    assert not logit_rules(SamplingParams(), MODEL_DEFAULTS, ()).changes_logits
    assert not logit_rules(SamplingParams(top_k=-1), MODEL_DEFAULTS, ()).has_cut


def test_plain_rows_need_no_lists():
    batch = sample_batch(CPU, [Sequence([1, 2], 2, 0.0, 5)], [2])
    assert not batch.has_edits
    assert not batch.has_cut
    assert batch.request_Q is None


SEEN = LogitRules(repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.3)
RULES = {
    "penalties": SEEN,
    "bias": LogitRules(bias=((4, 30.0), (9, -100.0))),
    "top_k": LogitRules(top_k=2),
    "min_tokens": LogitRules(min_tokens=3, stop_ids=tuple(range(0, 40, 2))),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.usefixtures("cpu_path")
def test_a_draft_counts_as_if_it_were_committed(name, temperature):
    """Row i of a verified span draws what plain decoding draws after the same tokens."""
    drafts = [11, 4, 11]
    logits_LV = randn(4, 40, scale=3.0)
    sequence = Sequence([1, 4, 11, 2], 2, temperature, 9, rules=RULES[name])
    other = Sequence([8, 8], 1, temperature, 3, rules=LogitRules(top_p=0.8))
    rows = [sequence] * 4 + [other]
    together = draw(
        torch.cat([logits_LV, logits_LV[:1]]),
        rows,
        [4, 5, 6, 7, 2],
        [drafts[:0], drafts[:1], drafts[:2], drafts, []],
    )
    plain = Sequence([1, 4, 11, 2], 2, temperature, 9, rules=RULES[name])
    alone = []
    for row, token in enumerate([*drafts, 0]):
        alone.append(int(draw(logits_LV[row : row + 1].clone(), [plain], [plain.num_tokens])))
        plain.append([token])
    assert together[:4].tolist() == alone


@pytest.mark.usefixtures("cpu_path")
def test_min_tokens_bans_stop_ids_until_then():
    logits_1V = torch.zeros(1, 8)
    logits_1V[0, 5], logits_1V[0, 6] = 9.0, 3.0
    rules = LogitRules(min_tokens=1, stop_ids=(5,))
    sequence = Sequence([1], 1, 0.0, 0, rules=rules)
    assert draw(logits_1V.clone(), [sequence], [1]).tolist() == [6]
    sequence.append([6])
    assert draw(logits_1V.clone(), [sequence], [2]).tolist() == [5]
