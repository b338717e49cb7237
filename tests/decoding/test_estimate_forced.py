"""Agreement of two models along a text: against hand computations, and whatever the chunks."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from pagedraft.decoding import estimate_forced
from pagedraft.decoding.draw import process
from pagedraft.decoding.estimate_forced import compare
from pagedraft.decoding.estimate_text import Reader, Text
from pagedraft.decoding.logit_rules import LogitRules
from pagedraft.tests.decoding.estimate_texts import PROMPT, RULES, tiny, written

pytestmark = pytest.mark.usefixtures("cpu_path")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("other"), seed=1)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_chunks_do_not_change_what_is_compared(target, other, monkeypatch, rules):
    text = written(target, 20, **rules)
    readers = Reader(target, 64), Reader(other, 64)
    whole = compare(*readers, text)
    monkeypatch.setattr(estimate_forced, "LOGIT_ROWS", 3)
    assert compare(*readers, text) == whole
    assert 0 < sum(whole.alpha_n) < 20 or rules["temperature"] == 0


class FakeReader:
    """Reads any text; its logits are the same at each position."""

    def __init__(self, logits: list[float]) -> None:
        self.logits_V = torch.tensor(logits)
        config = SimpleNamespace(vocab_size=len(logits), max_positions=10_000)
        self.model = SimpleNamespace(config=config)

    def skip(self, token_ids) -> None:
        """Nothing is kept."""

    def read(self, token_ids, start: int) -> torch.Tensor:
        return self.logits_V.repeat(len(token_ids), 1)


def logits(*probabilities: float) -> list[float]:
    return [math.log(p) if p else -math.inf for p in probabilities]


# p, q, temperature, rules; by hand: alpha, and whether the likeliest tokens are equal.
ALPHAS = {
    "half": ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5), 1.0, LogitRules(), 0.7, False),
    "disjoint": ((0.5, 0.5, 0.0), (0.0, 0.0, 1.0), 1.0, LogitRules(), 0.0, False),
    "equal": ((0.5, 0.3, 0.2), (0.5, 0.3, 0.2), 1.0, LogitRules(), 1.0, True),
    # Squares over their sums: 25 9 4 of 38 against 4 9 25.
    "temperature": ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5), 0.5, LogitRules(), 17 / 38, False),
    # Two are left of each: 5/8 3/8 0 against 0 3/8 5/8.
    "top_k": ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5), 1.0, LogitRules(top_k=2), 3 / 8, False),
    "greedy": ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5), 0.0, LogitRules(), 0.0, False),
    "greedy, equal": ((0.5, 0.3, 0.2), (0.4, 0.3, 0.3), 0.0, LogitRules(), 1.0, True),
    "small draft": ((0.5, 0.3, 0.2), (0.6, 0.4), 1.0, LogitRules(), 0.8, True),
    "small target": ((0.5, 0.5), (0.4, 0.2, 0.4), 1.0, LogitRules(), 5 / 6, True),
    "NaN": ((0.5, 0.5), (math.nan, 1.0), 1.0, LogitRules(), 0.0, False),
}


@pytest.mark.parametrize("name", ALPHAS)
def test_alpha_is_the_overlap(name):
    p, q, temperature, rules, alpha, is_equal = ALPHAS[name]
    text = Text((0,), (0, 1), 2, temperature, 3, rules)
    found = compare(FakeReader(logits(*p)), FakeReader(logits(*q)), text)
    assert found.alpha_n == pytest.approx([alpha, alpha], abs=1e-6)
    assert found.greedy_n == [is_equal] * 2


@pytest.mark.parametrize("name", ALPHAS)
def test_acceptance_given_the_token_has_alpha_as_its_mean(name):
    p, q, temperature, rules, alpha, _ = ALPHAS[name]
    text = Text((0,), tuple(range(len(p))), len(p), temperature, 3, rules)
    found = compare(FakeReader(logits(*p)), FakeReader(logits(*q)), text)
    p_1V = torch.tensor([logits(*p)])
    process(p_1V, [text.sequence(0)], [1])
    mean = p_1V.softmax(-1)[0] @ torch.tensor(found.accept_n)
    assert mean.item() == pytest.approx(alpha, abs=1e-6)


def test_draws_agree_as_often_as_shared_noise_lets_them():
    """Of Gumbel-max draws: sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i)."""
    p, q, num_tokens = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5), 4000
    target, draft = FakeReader(logits(*p)), FakeReader(logits(*q))

    def draws(reader: FakeReader, token: int) -> torch.Tensor:
        text = Text((0,), (token,) * num_tokens, num_tokens, 1.0, 5)
        return torch.tensor(compare(target, reader, text).equal_n)

    same_3 = torch.stack([draws(target, token) & draws(draft, token) for token in range(3)])
    expected = sum(
        1 / sum(max(a / p[i], b / q[i]) for a, b in zip(p, q, strict=True)) for i in range(3)
    )
    error = math.sqrt(expected * (1 - expected) / num_tokens)
    assert same_3.sum().item() / num_tokens == pytest.approx(expected, abs=4 * error)
    assert expected == pytest.approx(0.631, abs=1e-3)  # below the 0.7 of rejection


# Draft model's changes -> output tokens that it can propose, of 20 after a prompt of 6.
READABLE = {
    "all": ({}, 20),
    "positions": ({"max_position_embeddings": 16}, 11),  # it reads 16 and proposes number 17
    "one token too few": ({"vocab_size": 96}, 5),
    "prompt unknown": ({"vocab_size": 33}, 0),
}


@pytest.mark.parametrize("name", READABLE)
def test_a_draft_proposes_as_far_as_it_can_read(target, tmp_path, name):
    changes, num_readable = READABLE[name]
    draft = tiny(tmp_path, seed=0, **changes)
    text = Text(PROMPT, (3, 4, 5, 6, 96, *range(3, 18)), 20)
    found = compare(Reader(target, 64), Reader(draft, 64), text)
    assert len(found.equal_n) == num_readable
