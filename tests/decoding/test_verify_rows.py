"""Rows of drafts under the three rules: as plain draws, as the kernels, alone and together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagedraft.decoding.drafters.base import Proposal
from pagedraft.decoding.draw import draw, process
from pagedraft.decoding.logit_rules import NEUTRAL, LogitRules
from pagedraft.decoding.sequence import Sequence
from pagedraft.decoding.verify import verify_rows
from pagedraft.kernels.verify_drafts import Drafts
from pagedraft.tests.inputs import randn
from pagedraft.tests.kernels.verify_inputs import RULES as KERNELS

pytestmark = pytest.mark.usefixtures("cpu_path")

VOCAB_SIZE = 40
CONTEXT = [1, 4, 11, 2]
ACCEPTS = ["match", "rejection", "block"]


def _by_length(output_ids, logits_V):
    """Depends on how much output there is and on its last token."""
    logits_V[(7 * len(output_ids)) % VOCAB_SIZE] += 4.0
    logits_V[output_ids[-1]] -= 3.0
    return logits_V


EDITS = {
    "neutral": {},
    "processor": {"processors": (_by_length,)},
    "penalties": {"rules": LogitRules(repetition_penalty=1.5, frequency_penalty=0.7, top_p=0.9)},
    "min tokens": {"rules": LogitRules(min_tokens=4, stop_ids=tuple(range(0, 40, 2)))},
    "everything": {
        "processors": (_by_length,),
        "rules": LogitRules(top_k=12, presence_penalty=0.4, bias=((4, 3.0), (9, -2.0))),
    },
}


def _sequence(accept="match", name="neutral", seed=9, temperature=0.9, **fields) -> Sequence:
    return Sequence(list(CONTEXT), 2, temperature, seed, accept=accept, **{**EDITS[name], **fields})


def _plain_tokens(logits_LV: torch.Tensor, sequence: Sequence, drafts: list[int]) -> list[int]:
    """What plain decoding draws after each of the drafts, one call a token."""
    tokens = []
    for place in range(len(drafts) + 1):
        row_1V = logits_LV[place : place + 1].clone()
        tokens.append(int(draw(row_1V, [sequence], [sequence.num_tokens])))
        sequence.append(drafts[place : place + 1])
    return tokens


@pytest.mark.parametrize("num_right", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", EDITS)
def test_the_match_rule_draws_plainly_at_every_position(name, temperature, num_right):
    logits_LV = randn(4, VOCAB_SIZE, scale=2.0)
    drafts: list[int] = []
    _extend(drafts, num_right, lambda: _sequence("match", name, 9, temperature), logits_LV)
    plain = _plain_tokens(logits_LV, _sequence("match", name, 9, temperature), drafts)
    sequence = _sequence("match", name, 9, temperature)
    [tokens] = verify_rows(logits_LV.clone(), [sequence], [Proposal(drafts)])
    assert tokens == plain[: num_right + 1]
    assert sequence.token_ids == CONTEXT


def _extend(
    drafts: list[int], num_right: int, make: Callable[[], Sequence], logits_LV: torch.Tensor
) -> None:
    """Make three drafts of which the first ``num_right`` are what plain decoding draws."""
    if len(drafts) == 3:
        return
    token = _plain_tokens(logits_LV[: len(drafts) + 1], make(), drafts)[-1]
    drafts.append(token if len(drafts) < num_right else (token + 1) % VOCAB_SIZE)
    _extend(drafts, num_right, make, logits_LV)


def _q(num_drafts: int, seed: int) -> torch.Tensor:
    return randn(num_drafts, VOCAB_SIZE, seed=seed, scale=1.5).softmax(-1)


# Accept rule, edits, drafts, and whether q is dense: all kinds of rows beside each other.
MIXED = [
    ("match", "neutral", [3, 5], False),
    ("block", "penalties", [7, 7, 1], True),
    ("rejection", "everything", [2], True),
    ("rejection", "neutral", [], False),
    ("match", "processor", [9], True),
    ("block", "processor", [4, 8], False),
    ("rejection", "min tokens", [11, 30, 5], False),
    ("block", "everything", [], False),
    ("block", "neutral", [0, 39], True),
    ("match", "everything", [], False),
    ("rejection", "penalties", [12, 4], True),
]


def _mixed_rows(scale: float = 1.0) -> tuple[torch.Tensor, list[Sequence], list[Proposal]]:
    sequences, proposals = [], []
    for place, (accept, name, drafts, is_dense) in enumerate(MIXED):
        q_KV = _q(len(drafts), place) if is_dense else None
        sequences.append(_sequence(accept, name, place, sample_index=place % 2))
        proposals.append(Proposal(drafts, q_KV))
    num_rows = sum(len(drafts) + 1 for _, _, drafts, _ in MIXED)
    return randn(num_rows, VOCAB_SIZE, scale=scale), sequences, proposals


def _alone(
    logits_QV: torch.Tensor, sequences: list[Sequence], proposals: list[Proposal]
) -> list[list[int]]:
    lengths = [len(proposal.tokens) + 1 for proposal in proposals]
    return [
        verify_rows(part.clone(), [sequence], [proposal])[0]
        for part, sequence, proposal in zip(
            logits_QV.split(lengths), sequences, proposals, strict=True
        )
    ]


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_all_rules_together_are_what_they_are_alone(seed):
    logits_QV, sequences, proposals = _mixed_rows()
    logits_QV = logits_QV.roll(seed, 0)
    together = verify_rows(logits_QV.clone(), sequences, proposals)
    assert together == _alone(logits_QV, sequences, proposals)
    turned = verify_rows(logits_QV.flip(0), sequences, proposals)  # teeth
    assert together != turned


@pytest.mark.parametrize("rule", KERNELS)
@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("is_dense", [True, False])
def test_judged_rows_are_what_the_kernel_says(name, rule, is_dense):
    """For 200 seeds: processed logits, position, seed and q reach the rule as it wants them."""
    drafts, num_rows = [21, 33], 200
    logits_LV, noise_KV = randn(3, VOCAB_SIZE, scale=0.3), randn(2, VOCAB_SIZE, scale=0.3, seed=1)
    logits_LV[[0, 1], drafts] = 1.5
    noise_KV[[0, 1], drafts] = 3.0
    q_KV = noise_KV.softmax(-1) if is_dense else None
    sequences = [_sequence(rule, name, seed, sample_index=5) for seed in range(num_rows)]
    out = verify_rows(logits_LV.repeat(num_rows, 1), sequences, [Proposal(drafts, q_KV)] * num_rows)
    process(logits_LV, [sequences[0]] * 3, [4, 5, 6], [[], drafts[:1], drafts])
    counts, tokens = KERNELS[rule][1](
        logits_LV.repeat(num_rows, 1),
        Drafts(
            torch.tensor(drafts * num_rows),
            (2 * torch.arange(num_rows + 1)).int(),
            seed_R=torch.arange(num_rows),
            position_R=torch.full((num_rows,), 4),
            sample_index_R=torch.full((num_rows,), 5),
            q_KV=None if q_KV is None else q_KV.repeat(num_rows, 1),
        ),
    )
    assert [len(row) - 1 for row in out] == counts.tolist()
    assert [row[-1] for row in out] == tokens.tolist()
    assert len({*counts.tolist()}) > 1  # some are accepted


@pytest.mark.parametrize("accept", ACCEPTS)
@pytest.mark.parametrize("name", EDITS)
def test_a_row_without_drafts_draws_plainly(name, accept):
    logits_QV = randn(2, VOCAB_SIZE, scale=0.5)
    rows = [_sequence(accept, name, 2**64 - 3), _sequence("match", name, 8)]
    expected = draw(logits_QV.clone(), rows, [4, 4], [[], []]).tolist()
    out = verify_rows(logits_QV, rows, [Proposal([]), Proposal([])])
    assert out == [[token] for token in expected]


@pytest.mark.parametrize("accept", ACCEPTS)
def test_a_greedy_row_yields_its_argmax_for_any_draft(accept):
    logits_LV = randn(3, VOCAB_SIZE)
    best = logits_LV.argmax(-1).tolist()
    sequence = _sequence(accept, temperature=0.0)
    assert verify_rows(logits_LV.clone(), [sequence], [Proposal(best[:2])]) == [best]
    assert verify_rows(logits_LV.clone(), [sequence], [Proposal([best[0], 0])]) == [best[:2]]


def _fails_after(num_output: int):
    def processor(output_ids, logits_V):
        if len(output_ids) >= num_output:
            raise LookupError("no more")
        return logits_V

    return processor


FAULTS = {
    "nan": ((), 2),
    "processor": ((_fails_after(4),), None),
}


@pytest.mark.parametrize("accept", ACCEPTS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_counts_only_where_decoding_gets_to_it(name, accept):
    """The fault is at the position after two drafts; the output holds two tokens before them."""
    processors, nan_row = FAULTS[name]
    logits_LV = torch.zeros(4, VOCAB_SIZE)
    logits_LV[0, 5] = logits_LV[1, 6] = logits_LV[2, 7] = 200.0
    if nan_row is not None:
        logits_LV[nan_row, 30] = torch.nan
    sequence = _sequence(accept, rules=NEUTRAL, processors=processors)

    def verified(drafts: list[int]) -> list[int]:
        return verify_rows(logits_LV.clone(), [sequence], [Proposal(drafts)])[0]

    assert verified([5, 9, 8]) == [5, 6]
    sequence.append([])
    assert verified([5, 6, 7]) == [5, 6, -1]
    message = "_fails_after.<locals>.processor raised LookupError: no more at position 6"
    assert sequence.failures.get(6) == (f"logits_processors: {message}" if processors else None)


@pytest.mark.parametrize("accept", ["match", "block"])
def test_logits_of_a_forward_pass_can_be_changed(accept):
    """Its tensors may be changed in inference mode only."""
    with torch.inference_mode():
        logits_LV = randn(3, VOCAB_SIZE) + 0
    rows = [_sequence(accept, "everything")]
    expected = verify_rows(randn(3, VOCAB_SIZE), rows, [Proposal([4, 4])])
    assert verify_rows(logits_LV, rows, [Proposal([4, 4])]) == expected


@pytest.mark.parametrize("name", ["neutral", "min tokens"])
def test_plain_rows_of_the_match_rule_leave_logits_alone(name):
    """Their log-probabilities are read afterwards; nothing is copied for them."""
    logits_LV, sequence = randn(3, VOCAB_SIZE), _sequence("match", name)
    before = logits_LV.clone()
    verify_rows(logits_LV, [sequence], [Proposal([4, 4])])
    assert torch.equal(logits_LV, before) == (name == "neutral")


@pytest.mark.parametrize("accept", KERNELS)
def test_q_may_be_any_view(accept):
    """A drafter's tensors are its own: strided, expanded or part of a graph."""
    q_KV, drafts = _q(2, 1), [3, 5]
    views = [q_KV, q_KV.T.contiguous().T, q_KV.clone().requires_grad_()]
    out = [
        verify_rows(randn(3, VOCAB_SIZE), [_sequence(accept)], [Proposal(drafts, view)])
        for view in views
    ]
    assert out[0] == out[1] == out[2]


ERRORS = {
    "rows": ([1, 2], None, ValueError, "logits_QV: expected 3 rows, got 2"),
    "q shape": ([1], torch.zeros(1, 39), ValueError, r"proposals\[0\].q_KV: expected shape"),
    "q dtype": ([1], torch.zeros(1, 40).double(), TypeError, r"proposals\[0\].q_KV: .*float32"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name):
    drafts, q_KV, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        verify_rows(randn(2, VOCAB_SIZE), [_sequence("block")], [Proposal(drafts, q_KV)])
