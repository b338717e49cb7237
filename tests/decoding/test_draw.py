"""Draws: which noise they use, and that a judged draft is drawn from the q that comes with it."""

from __future__ import annotations

import pytest
import torch

from pagedraft.decoding.draw import draw, draw_drafts, process, sample_batch
from pagedraft.decoding.logit_rules import NEUTRAL, LogitRules
from pagedraft.decoding.sequence import Sequence
from pagedraft.kernels.philox import gumbel_noise_ref
from pagedraft.kernels.verify_drafts import proposal_seed
from pagedraft.tests.inputs import CPU, randn
from pagedraft.tests.kernels.sample_inputs import Row, plain_probabilities
from pagedraft.tests.kernels.verify_inputs import chi_square

pytestmark = pytest.mark.usefixtures("cpu_path")

VOCAB_SIZE = 40
PROMPT, OUTPUT = (1, 4, 4), (11, 2)
# name: (rules of the sequence, the same in words of the plain reference)
RULES = {
    "neutral": (NEUTRAL, Row()),
    "cut": (LogitRules(top_k=9, top_p=0.8), Row(top_k=9, top_p=0.8)),
    "penalties": (
        LogitRules(repetition_penalty=1.4, frequency_penalty=0.5, bias=((3, 1.5),)),
        Row(repetition=1.4, frequency=0.5, bias={3: 1.5}, prompt=PROMPT, output=OUTPUT),
    ),
}


def _sequence(accept: str = "match", name: str = "neutral", seed: int = 7, **fields) -> Sequence:
    tokens = [*PROMPT, *OUTPUT]
    return Sequence(tokens, len(PROMPT), 0.8, seed, rules=RULES[name][0], accept=accept, **fields)


def test_samples_of_a_prompt_have_noise_of_their_own():
    logits_QV = randn(1, VOCAB_SIZE).expand(64, -1)
    rows = [_sequence(sample_index=index) for index in range(64)]
    tokens = draw(logits_QV, rows, [5] * 64)
    index_Q, position_Q = torch.arange(64), torch.full((64,), 5)
    noise_QV = gumbel_noise_ref(VOCAB_SIZE, position_Q, torch.full((64,), 7), index_Q)
    inverse = 1.0 / torch.tensor(0.8)
    assert torch.equal(tokens, (logits_QV * inverse + noise_QV).argmax(-1))
    assert len(set(tokens.tolist())) > 8


def test_one_sample_needs_no_index():
    assert sample_batch(CPU, [_sequence()] * 2, [5, 6]).sample_index_Q is None
    rows = [_sequence(), _sequence(sample_index=3)]
    assert sample_batch(CPU, rows, [5, 6]).sample_index_Q.tolist() == [0, 3]


def _draft_rows(accepts: list[str]) -> tuple[torch.Tensor, list[Sequence], list[list[int]]]:
    rows = [
        _sequence(accept, [*RULES][seed % len(RULES)], seed) for seed, accept in enumerate(accepts)
    ]
    prefixes = [[9, 4][: seed % 3] for seed in range(len(rows))]
    return randn(len(rows), VOCAB_SIZE, scale=2.0), rows, prefixes


def test_drafts_of_the_match_rule_share_the_targets_noise():
    logits_QV, rows, prefixes = _draft_rows(["match"] * 6)
    tokens, q_QV = draw_drafts(logits_QV.clone(), rows, prefixes)
    positions = [5 + len(prefix) for prefix in prefixes]
    assert tokens == draw(logits_QV, rows, positions, prefixes).tolist()
    assert q_QV is None


@pytest.mark.parametrize("name", RULES)
def test_q_is_the_processed_distribution(name):
    logits_QV = randn(2, VOCAB_SIZE, scale=2.0)
    rows = [_sequence("block", name), _sequence("rejection", name, seed=2**64 - 1)]
    _, q_QV = draw_drafts(logits_QV.clone(), rows, [[], [9, 4]])
    changes = {"temperature": 0.8, "drafts": (9, 4)}
    plain = [
        plain_probabilities(logits_QV[0], Row(**vars(RULES[name][1]) | {"temperature": 0.8})),
        plain_probabilities(logits_QV[1], Row(**vars(RULES[name][1]) | changes)),
    ]
    torch.testing.assert_close(q_QV, torch.stack(plain).float(), rtol=1e-4, atol=1e-7)


def test_a_judged_draft_has_the_noise_of_its_round():
    logits_QV, rows, prefixes = _draft_rows(["block"] * 6)
    tokens, q_QV = draw_drafts(logits_QV, rows, prefixes)
    round_Q = torch.full((6,), 5)
    position_Q = torch.tensor([5 + len(prefix) for prefix in prefixes])
    seed_Q = proposal_seed(torch.arange(6), round_Q)
    noise_QV = gumbel_noise_ref(VOCAB_SIZE, position_Q, seed_Q)
    assert tokens == (q_QV.log() + noise_QV).argmax(-1).tolist()
    own_QV = gumbel_noise_ref(VOCAB_SIZE, position_Q, torch.arange(6))  # teeth
    assert tokens != (q_QV.log() + own_QV).argmax(-1).tolist()


@pytest.mark.parametrize("name", ["cut", "penalties"])
def test_judged_drafts_follow_q(name):
    """The normal approximation: 5 standard deviations are once in about 1e5 runs."""
    num_rows = 20_000
    rows = [_sequence("rejection", name, seed) for seed in range(num_rows)]
    logits_QV = randn(1, VOCAB_SIZE).repeat(num_rows, 1)
    tokens, q_QV = draw_drafts(logits_QV, rows, [[3]] * num_rows)
    counts_V = torch.bincount(torch.tensor(tokens), minlength=VOCAB_SIZE)
    assert chi_square(counts_V, num_rows * q_QV[0]) < 5
    flattened_V = q_QV[0].sqrt() / q_QV[0].sqrt().sum()
    assert chi_square(counts_V, num_rows * flattened_V) > 20  # teeth


def test_rows_of_all_rules_draw_as_they_do_alone():
    accepts = ["match", "block", "rejection", "match", "block", "match", "rejection"]
    logits_QV, rows, prefixes = _draft_rows(accepts)
    tokens, q_QV = draw_drafts(logits_QV.clone(), rows, prefixes)
    alone = [
        draw_drafts(logits_QV[r : r + 1].clone(), rows[r : r + 1], prefixes[r : r + 1])
        for r in range(len(rows))
    ]
    assert tokens == [own for [own], _ in alone]
    judged = [row for row, accept in enumerate(accepts) if accept != "match"]
    assert torch.equal(q_QV[judged], torch.cat([alone[row][1] for row in judged]))


def test_a_nan_row_has_no_draft():
    logits_QV, rows, prefixes = _draft_rows(["match", "block", "rejection"])
    logits_QV[:2, 3] = torch.nan
    tokens, _ = draw_drafts(logits_QV, rows, prefixes)
    assert tokens[:2] == [-1, -1]
    assert tokens[2] >= 0


@pytest.mark.parametrize("num_columns", [VOCAB_SIZE - 8, VOCAB_SIZE + 8])
def test_tokens_that_one_model_does_not_know_are_never_drafted(num_columns):
    logits_QV = randn(2, num_columns)
    logits_QV[:, VOCAB_SIZE:] = 50.0
    rows, shared = [_sequence("match"), _sequence("block")], min(VOCAB_SIZE, num_columns)
    tokens, q_QV = draw_drafts(logits_QV.clone(), rows, [[], []], vocab_size=VOCAB_SIZE)
    assert q_QV.shape == (2, VOCAB_SIZE)
    assert not q_QV[1, shared:].any()
    assert tokens == draw_drafts(logits_QV[:, :shared].clone(), rows, [[], []])[0]


@pytest.mark.parametrize("accept", ["match", "block"])
def test_logits_of_a_forward_pass_can_be_changed(accept):
    """Its tensors may be changed in inference mode only."""
    with torch.inference_mode():
        logits_QV = randn(2, VOCAB_SIZE) + 0
    row = _sequence(accept, "penalties", processors=(lambda ids, logits_V: logits_V + 1,))
    draw_drafts(logits_QV, [row, row], [[], []])
    process(logits_QV, [row, row], [5, 5])
    torch.testing.assert_close(logits_QV.softmax(-1).sum(-1), torch.ones(2))
