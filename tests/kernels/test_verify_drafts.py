"""What the rejection and the block rule share: Triton and CPU path against the references, noise,
rows on their own, errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pagedraft.kernels import verify_drafts
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.kernels.philox import (
    ACCEPT,
    RESIDUAL,
    derived_seed,
    exponential,
    gumbel_noise_ref,
    philox4x32,
)
from pagedraft.kernels.sample import SampleBatch, sample_ref
from pagedraft.kernels.verify import Verified
from pagedraft.kernels.verify_block import judge_block
from pagedraft.kernels.verify_drafts import Drafts, Judgement, Row, judge_rows, proposal_seed
from pagedraft.kernels.verify_rejection import judge_tokens
from pagedraft.tests.kernels.verify_inputs import (
    CASES,
    IGNORE_INFINITY,
    INF,
    NAN,
    RULES,
    assert_same,
    make_rows,
    moved,
    repeated_rows,
)

FAST = ["triton", "cpu"]
IMPLEMENTATIONS = [*FAST, "ref"]


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(
    name: str, rule: str, implementation: str, device: torch.device
) -> None:
    verify, verify_ref = RULES[rule]
    logits_QV, drafts = make_rows(name, device)
    before = logits_QV.clone()
    with use_implementation(implementation):
        out = verify(logits_QV, drafts)
    assert_same(out, verify_ref(logits_QV, drafts))
    assert torch.equal(logits_QV, before)


def test_p_equal_to_q_accepts_all_and_disjoint_none(device: torch.device) -> None:
    outs = [
        ref(*make_rows(name, device)).num_accepted_R.tolist()
        for name in ("p_equals_q", "disjoint")
        for _, ref in RULES.values()
    ]
    # Row 0 is greedy there: its p is not q, and its q has mass where p has none.
    assert [out[1:] for out in outs] == [[2], [2], [0], [0]]


def _all_outcomes(judge: Callable[[Row], Judgement]) -> list[list[int]]:
    cpu = torch.device("cpu")
    return [
        [*out.num_accepted_R.tolist(), *out.next_token_R.tolist()]
        for out in (judge_rows(judge, *make_rows(name, cpu)) for name in CASES)
    ]


def test_the_cases_tell_the_rules_and_their_parts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: the wrong rule, a residual without its scale and other noise all fail a case."""
    tokens, blocks = _all_outcomes(judge_tokens), _all_outcomes(judge_block)
    assert tokens != blocks
    unscaled = _all_outcomes(
        lambda row: (lambda j: j if j.scale is None else Judgement(j.num_accepted, 1.0))(
            judge_block(row)
        )
    )
    assert unscaled != blocks
    monkeypatch.setattr(verify_drafts, "ACCEPT", ACCEPT + 100)
    assert _all_outcomes(judge_tokens) != tokens
    monkeypatch.undo()
    monkeypatch.setattr(verify_drafts, "RESIDUAL", RESIDUAL + 100)
    assert _all_outcomes(judge_tokens) != tokens


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rule", RULES)
@IGNORE_INFINITY
def test_a_row_without_drafts_draws_as_plain_decoding_does(
    rule: str, implementation: str, device: torch.device
) -> None:
    logits_QV = torch.randn(3, 300, generator=torch.Generator().manual_seed(3)).to(device)
    logits_QV[2, 7] = INF
    row_R = torch.arange(3, device=device)
    no_tokens_K, no_starts_R1 = row_R[:0], torch.zeros(4, dtype=torch.int32, device=device)
    drafts = Drafts(no_tokens_K, no_starts_R1, row_R - 9, row_R + 2**31, row_R)
    batch = SampleBatch(torch.ones(3, device=device), row_R - 9, row_R + 2**31, row_R)
    with use_implementation(implementation):
        out = RULES[rule][0](logits_QV, drafts)
    assert_same(out, Verified(torch.zeros(3), sample_ref(logits_QV, batch)))


@pytest.mark.parametrize("rule", RULES)
def test_after_full_acceptance_the_token_is_the_plain_draw(rule: str) -> None:
    logits_QV, drafts = make_rows("p_equals_q", torch.device("cpu"))
    out = RULES[rule][1](logits_QV, drafts)
    batch = SampleBatch(torch.ones(1), drafts.seed_R[1:], drafts.position_R[1:] + 2)
    assert out.num_accepted_R[1] == 2
    assert out.next_token_R[1:].tolist() == sample_ref(logits_QV[-1:], batch).tolist()


@pytest.mark.parametrize("rule", RULES)
def test_a_greedy_target_yields_its_argmax_for_any_draft(rule: str) -> None:
    """Drafts equal to the argmax count, whatever their q; others do not."""
    greedy_LV = torch.full((4, 6), -INF)
    greedy_LV[torch.arange(4), torch.tensor([2, 5, 1, 3])] = 0.0
    q_KV = torch.full((3, 6), 1 / 6)
    drafts = Drafts(
        torch.tensor([2, 4, 1]), torch.tensor([0, 3], dtype=torch.int32), *torch.tensor([[5], [9]])
    )
    outs = [RULES[rule][1](greedy_LV, replace(drafts, q_KV=q)) for q in (None, q_KV)]
    assert [(int(out.num_accepted_R), int(out.next_token_R)) for out in outs] == [(1, 5), (1, 5)]


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("rule", RULES)
def test_a_row_does_not_depend_on_the_batch_and_nothing_past_the_last_is_read(
    rule: str, implementation: str, device: torch.device
) -> None:
    verify = RULES[rule][0]
    logits_QV, drafts = make_rows("ragged", device)
    row = 2  # drafts 2 to 4, logits 4 to 7
    vectors = {name: getattr(drafts, name)[row : row + 1] for name in ("seed_R", "position_R")}
    alone = Drafts(
        torch.cat([drafts.tokens_K[2:5], drafts.tokens_K[:2]]),
        torch.tensor([0, 3], dtype=torch.int32, device=device),
        **vectors,
        q_KV=torch.cat([drafts.q_KV[2:5], torch.full_like(drafts.q_KV[:2], NAN)]),
    )
    padded_QV = torch.cat([logits_QV[4:8], torch.full_like(logits_QV[:2], NAN)])
    with use_implementation(implementation):
        whole, single = verify(logits_QV, drafts), verify(padded_QV, alone)
    assert_same(single, Verified(*(result[row : row + 1] for result in whole)))


@pytest.mark.parametrize("rule", RULES)
def test_rows_may_be_further_apart_than_their_columns(rule: str, device: torch.device) -> None:
    verify, verify_ref = RULES[rule]
    logits_QV, drafts = make_rows("zeros_in_q", device)
    wide_QV = torch.cat([logits_QV, torch.full_like(logits_QV, NAN)], dim=1)
    wide_q_KV = torch.cat([drafts.q_KV, torch.full_like(drafts.q_KV, NAN)], dim=1)
    strided = replace(drafts, q_KV=wide_q_KV.narrow(1, 0, logits_QV.shape[1]))
    with use_implementation("triton"):
        out = verify(wide_QV.narrow(1, 0, logits_QV.shape[1]), strided)
    assert_same(out, verify_ref(logits_QV, drafts))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rule", RULES)
def test_no_rows(rule: str, implementation: str, device: torch.device) -> None:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    drafts = Drafts(none, torch.zeros(1, dtype=torch.int32, device=device), none, none)
    with use_implementation(implementation):
        out = RULES[rule][0](torch.zeros(0, 7, device=device), drafts)
    assert_same(out, Verified(none, none))


def _correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    """In standard deviations of a sample correlation of independent numbers."""
    pair = torch.stack([x, y]).double().flatten(1)
    return float(torch.corrcoef(pair)[0, 1]) * math.sqrt(pair.shape[1])


def test_the_streams_of_a_row_are_independent() -> None:
    """Noise of plain draws, of the drafts, of the residual; E of acceptance against each."""
    seed_R, position_R = torch.arange(4000), torch.full((4000,), 50)
    noises = [
        gumbel_noise_ref(12, position_R, seed)
        for seed in (
            seed_R,
            proposal_seed(seed_R, position_R),
            derived_seed(seed_R, position_R, RESIDUAL),
        )
    ]
    words = philox4x32((seed_R * 0, position_R, ACCEPT, 0), (seed_R, seed_R >> 32))
    e_R = exponential(words[0])
    pairs = [(noises[0], noises[1]), (noises[0], noises[2]), (noises[1], noises[2])]
    pairs += [(noise[:, 0], e_R) for noise in noises]
    assert max(abs(_correlation(*pair)) for pair in pairs) < 4
    assert _correlation(noises[0], noises[0] + noises[1]) > 20  # teeth


def test_derived_seeds_change_with_every_word() -> None:
    zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    seeds = [
        derived_seed(zero, zero, RESIDUAL),
        derived_seed(one, zero, RESIDUAL),
        derived_seed(one << 32, zero, RESIDUAL),
        derived_seed(zero, one, RESIDUAL),
        derived_seed(zero, zero, ACCEPT),
        derived_seed(zero, zero, RESIDUAL, one),
    ]
    assert len({int(seed) for seed in seeds}) == len(seeds)


ERRORS = {
    "logits_dtype": ({"logits": torch.zeros(4, 5).half()}, TypeError, "logits_QV: expected dtype"),
    "logits_shape": ({"logits": torch.zeros(5)}, ValueError, "logits_QV: expected shape"),
    "no_columns": ({"logits": torch.zeros(4, 0)}, ValueError, "logits_QV: expected at least one"),
    "column_stride": ({"logits": torch.zeros(5, 4).T}, ValueError, "logits_QV: expected at least"),
    "too_few_rows": ({"logits": torch.zeros(1, 5)}, ValueError, "logits_QV: expected at least a"),
    "tokens": ({"tokens_K": torch.zeros(2)}, TypeError, "tokens_K: expected dtype int64"),
    "starts": ({"starts_R1": torch.zeros(3).long()}, TypeError, "starts_R1: expected dtype int32"),
    "no_starts": ({"starts_R1": torch.zeros(0).int()}, ValueError, r"starts_R1: expected R \+ 1"),
    "seed": ({"seed_R": torch.zeros(3).long()}, ValueError, r"seed_R: expected shape \(2\)"),
    "position": ({"position_R": torch.zeros(2).int()}, TypeError, "position_R: expected dtype"),
    "index": ({"sample_index_R": torch.zeros(2)}, TypeError, "sample_index_R: expected dtype"),
    "strided": ({"seed_R": torch.zeros(4).long()[::2]}, ValueError, "seed_R: expected a contig"),
    "q_dtype": ({"q_KV": torch.zeros(2, 5).double()}, TypeError, "q_KV: expected dtype float32"),
    "q_rows": ({"q_KV": torch.zeros(3, 5)}, ValueError, r"q_KV: expected shape \(2, 5\)"),
    "q_columns": ({"q_KV": torch.zeros(2, 4)}, ValueError, r"q_KV: expected shape \(2, 5\)"),
    "q_stride": ({"q_KV": torch.zeros(5, 2).T}, ValueError, "q_KV: expected at least one column"),
    "has_q": ({"has_q_R": torch.zeros(2)}, TypeError, "has_q_R: expected dtype bool"),
    "has_q_alone": ({"q_KV": None}, ValueError, "has_q_R: expected None without q_KV"),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str, rule: str) -> None:
    changes, error, message = ERRORS[name]
    zeros, starts_R1 = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1, 2]).int()
    arguments = {
        "tokens_K": zeros,
        "starts_R1": starts_R1,
        "seed_R": zeros,
        "position_R": zeros,
        "q_KV": torch.full((2, 5), 0.2),
        "has_q_R": torch.ones(2, dtype=torch.bool),
        **changes,
    }
    logits_QV = arguments.pop("logits", torch.zeros(4, 5))
    with pytest.raises(error, match=message):
        RULES[rule][0](logits_QV, Drafts(**arguments))


@pytest.mark.cuda
@pytest.mark.parametrize("rule", RULES)
def test_cuda_agrees_with_the_reference_at_model_size(rule: str) -> None:
    generator = torch.Generator().manual_seed(5)
    p_LV = torch.randn(6, 128_256, generator=generator).softmax(-1)
    q_KV = (p_LV[:5].log() + torch.randn(5, 128_256, generator=generator) / 2).softmax(-1)
    logits_QV, drafts = repeated_rows(p_LV, q_KV, num_rows=12)
    out = RULES[rule][0](logits_QV.cuda(), moved(drafts, torch.device("cuda")))
    assert_same(Verified(*(t.cpu() for t in out)), RULES[rule][1](logits_QV, drafts))
