"""truncate: exact min-p, top-k and top-p cuts, equal in Triton, on the CPU path and in a sort."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedraft.kernels import truncate_cpu as cpu
from pagedraft.kernels.sample_batch import SampleBatch
from pagedraft.kernels.sample_cpu import largest_of_chunks
from pagedraft.kernels.truncate import (
    is_sampled,
    mass_ref,
    mass_wanted,
    min_p_cut,
    truncate_cost,
    truncate_ref,
)
from pagedraft.kernels.truncate_triton import truncate_triton
from pagedraft.tests.compare import assert_same_bits
from pagedraft.tests.inputs import poisoned, randn
from pagedraft.tests.kernels.sample_inputs import Row, plain_probabilities, sample_batch

INF, NAN = float("inf"), float("nan")
FAST = ["triton", "cpu"]

RULES = {
    "min_p": Row(min_p=0.1),
    "min_p_of_one": Row(min_p=1.0),
    "top_k": Row(top_k=5),
    "top_k_of_one": Row(top_k=1),
    "top_k_of_all_but_one": Row(top_k=39),
    "top_k_beyond_the_vocabulary": Row(top_k=41),
    "top_p": Row(top_p=0.8),
    "small_top_p": Row(top_p=1e-6),
    "top_p_of_nearly_all": Row(top_p=0.9999),
    "hot_top_p": Row(top_p=0.6, temperature=4.0),
    "top_k_then_top_p": Row(top_k=6, top_p=0.7),
    "min_p_then_top_k": Row(min_p=0.3, top_k=20),
    "all": Row(min_p=0.02, top_k=9, top_p=0.9, temperature=0.7),
}


def _cuts(
    name: str, logits_QV: torch.Tensor, batch: SampleBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """(top_Q, cut_Q) of one implementation; the CPU path's other rows are filled in."""
    if name == "triton":
        return truncate_triton(logits_QV, batch)
    logits_QV = logits_QV[:, : batch.num_tokens(logits_QV.shape[1])].float()
    inverse_Q = torch.where(is_sampled(batch), 1.0 / batch.temperature_Q, 1.0)
    if name == "ref":
        return truncate_ref(logits_QV * inverse_Q[:, None], batch)
    largest_QC = largest_of_chunks(logits_QV)
    row_S = (is_sampled(batch) & largest_QC.amax(-1).isfinite()).nonzero()[:, 0]
    inverse_S, largest_SC = inverse_Q[row_S].numpy(), largest_QC[row_S].numpy()
    top_S, cut_S = cpu.truncate_cpu(logits_QV, batch, row_S.numpy(), inverse_S, largest_SC)
    top_Q = torch.zeros(len(logits_QV)).index_copy(0, row_S, torch.from_numpy(top_S))
    cut_Q = torch.full_like(top_Q, INF).index_copy(0, row_S, torch.from_numpy(cut_S))
    return top_Q, cut_Q


def _kept(name: str, logits_QV: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """Which tokens an implementation keeps, of rows without edits."""
    top_Q, cut_Q = _cuts(name, logits_QV, batch)
    x_QV = logits_QV.float() * (1.0 / batch.temperature_Q)[:, None]
    return (~(top_Q[:, None] - x_QV > cut_Q[:, None])).cpu()


def _plain_kept(logits_QV: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    pairs = zip(logits_QV.cpu(), rows, strict=True)
    return torch.stack([plain_probabilities(logits_V, row) > 0 for logits_V, row in pairs])


@pytest.mark.parametrize("implementation", [*FAST, "ref"])
@pytest.mark.parametrize("name", RULES)
def test_keeps_what_sorting_keeps(name: str, implementation: str, device: torch.device) -> None:
    rows = [RULES[name]] * 4
    logits_QV = randn(4, 40, scale=2.0, device=device)
    kept_QV = _kept(implementation, logits_QV, sample_batch(rows, 40, device))
    assert torch.equal(kept_QV, _plain_kept(logits_QV, rows))


@pytest.mark.parametrize("implementation", [*FAST, "ref"])
def test_one_token_more_or_less_is_noticed(implementation: str) -> None:
    """Teeth: the comparison above tells a top_p from one that keeps one token more."""
    logits_QV = randn(1, 40, scale=2.0)
    row = Row(top_p=0.8)
    probs_V = logits_QV[0].double().softmax(-1).sort(descending=True).values
    reached_V = probs_V.cumsum(-1)
    place = int((reached_V < row.top_p).sum())
    edges = [float(reached_V[place - 1]) - 1e-5, float(reached_V[place]) + 1e-5]
    plain_QV = _plain_kept(logits_QV, [row])
    kept = [
        _kept(implementation, logits_QV, sample_batch([replace(row, top_p=p)], 40)) for p in edges
    ]
    assert [int((k != plain_QV).sum()) for k in kept] == [1, 1]


# name: (rows, columns, vocabulary, logit scale, distinct values a unit (0: as drawn), dtype)
INPUTS = {
    "one_token": (3, 1, 1, 1.0, 0, torch.float32),
    "seven_tokens": (6, 7, 7, 2.0, 0, torch.float32),
    "part_chunk": (6, 257, 257, 3.0, 0, torch.float32),
    "ties": (6, 300, 300, 2.0, 2, torch.float32),
    "all_equal": (3, 300, 300, 0.0, 0, torch.float32),
    "flat": (6, 300, 300, 0.01, 0, torch.float32),
    "far_apart": (6, 300, 300, 1e3, 0, torch.float32),
    "overflowing": (6, 300, 300, 1e38, 0, torch.float32),
    "several_tiles": (4, 5000, 5000, 3.0, 0, torch.float32),
    "padding": (4, 600, 515, 3.0, 0, torch.float32),
    "half_precision": (4, 700, 700, 3.0, 0, torch.float16),
    "bfloat16": (4, 300, 300, 3.0, 0, torch.bfloat16),
}
MIXED = [
    Row(top_k=3, top_p=0.9),
    Row(top_p=0.95, temperature=2.0),
    Row(min_p=0.05, temperature=0.3),
    Row(),
    Row(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5),
    Row(top_k=40, top_p=0.5, min_p=1e-3),
]


def _inputs(name: str, device: torch.device) -> tuple[torch.Tensor, SampleBatch]:
    num_rows, num_columns, vocab_size, scale, steps, dtype = INPUTS[name]
    logits_QV = poisoned(num_rows, num_columns, dtype=dtype, device=device)
    drawn_QV = randn(num_rows, vocab_size, scale=scale, device=device)
    if steps:
        drawn_QV = (drawn_QV * steps).round() / steps
    logits_QV[:, :vocab_size] = drawn_QV
    return logits_QV, sample_batch(MIXED[:num_rows], num_columns, device, vocab_size=vocab_size)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_cuts_equal_those_of_the_reference(
    name: str, implementation: str, device: torch.device
) -> None:
    logits_QV, batch = _inputs(name, device)
    top_Q, cut_Q = _cuts(implementation, logits_QV, batch)
    exact_top_Q, exact_cut_Q = _cuts("ref", logits_QV, batch)
    assert torch.equal(cut_Q, exact_cut_Q)
    has_cut_Q = cut_Q < INF
    assert torch.equal(top_Q[has_cut_Q], exact_top_Q[has_cut_Q])


@pytest.mark.parametrize("implementation", FAST)
def test_a_vocabulary_of_many_tiles(implementation: str, device: torch.device) -> None:
    """More than 131072 tokens, with the nearest ones in the last tiles."""
    vocab_size = 131_072 + 300
    logits_QV = randn(1, vocab_size, scale=2.0, device=device)
    logits_QV[:, -4000:] += 8.0
    batch = sample_batch([Row(top_k=50, top_p=0.9)], vocab_size, device)
    cuts = _cuts(implementation, logits_QV, batch)
    assert_same_bits(cuts[1], _cuts("ref", logits_QV, batch)[1])


@pytest.mark.parametrize("scale", [0.5, 3.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("row", [Row(top_p=0.9), Row(top_k=300, top_p=0.99), Row(top_k=100)])
def test_the_cpu_path_looks_at_enough_chunks(row: Row, scale: float) -> None:
    logits_QV = randn(3, 49_152, scale=scale)
    batch = sample_batch([row] * 3, 49_152)
    assert_same_bits(_cuts("cpu", logits_QV, batch)[1], _cuts("ref", logits_QV, batch)[1])


def _peaked_rows() -> tuple[torch.Tensor, SampleBatch]:
    """Rows whose wanted mass is near the top in most cases, and far from it in some."""
    logits_QV = randn(32, 20_000, scale=5.0)
    rows = [Row(top_p=p) for p in (0.1, 0.5, 0.9, 0.9999)] * 8
    return logits_QV, sample_batch(rows, 20_000)


def test_an_estimate_of_the_mass_finds_the_exact_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_QV, batch = _peaked_rows()
    near_cut, found = cpu._near_cut, []
    monkeypatch.setattr(cpu, "_near_cut", lambda *args: found.append(near_cut(*args)) or found[-1])
    assert_same_bits(_cuts("cpu", logits_QV, batch)[1], _cuts("ref", logits_QV, batch)[1])
    assert 8 < sum(cut is not None for cut in found) < 32


def test_a_wrong_estimate_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: half the mass cuts rows elsewhere."""
    monkeypatch.setattr(cpu, "_UNIT", 2.0**29)
    logits_QV, batch = _peaked_rows()
    assert not torch.equal(_cuts("cpu", logits_QV, batch)[1], _cuts("ref", logits_QV, batch)[1])


@pytest.mark.parametrize("implementation", [*FAST, "ref"])
@pytest.mark.parametrize("row", [Row(top_k=2), Row(top_p=0.3), Row(top_k=2, top_p=0.7)])
def test_equal_logits_are_kept_together(
    row: Row, implementation: str, device: torch.device
) -> None:
    """The 2nd largest of these has three equals; top_p is reached by the first of them."""
    logits_QV = torch.tensor([[1.0, 0.0, 1.5, 1.0, -2.0, 1.0, 1.0]], device=device)
    kept_QV = _kept(implementation, logits_QV, sample_batch([row], 7, device))
    probs = logits_QV.softmax(-1)[0].tolist()
    is_alone = row.top_p == 0.3 and probs[2] >= 0.3
    expected = [2] if is_alone else [0, 2, 3, 5, 6]
    assert kept_QV[0].nonzero()[:, 0].tolist() == expected


SPECIAL_ROWS = {
    "nan": [1.0, NAN, 0.0],
    "infinity": [1.0, INF, 0.0],
    "only_minus_infinity": [-INF] * 3,
}


@pytest.mark.parametrize("implementation", ["triton", "ref"])
@pytest.mark.parametrize("name", SPECIAL_ROWS)
def test_rows_without_a_finite_maximum_have_no_cut(
    name: str, implementation: str, device: torch.device
) -> None:
    rows = [Row(top_k=1), Row(top_k=1, top_p=0.5, min_p=0.1)]
    logits_QV = torch.tensor([[0.0, 1.0, -1.0], SPECIAL_ROWS[name]], device=device)
    cut_Q = _cuts(implementation, logits_QV, sample_batch(rows, 3, device))[1]
    assert cut_Q.tolist() == [0.0, INF]


@pytest.mark.parametrize("implementation", FAST)
def test_a_row_does_not_depend_on_the_others(implementation: str, device: torch.device) -> None:
    logits_QV = randn(6, 300, scale=2.0, device=device)
    batch = sample_batch(MIXED, 300, device)
    alone = [
        _cuts(implementation, logits_QV[q : q + 1], sample_batch(MIXED[q : q + 1], 300, device))
        for q in (0, 1, 2, 5)
    ]
    whole_cut_Q = _cuts(implementation, logits_QV, batch)[1]
    assert_same_bits(torch.cat([cut for _, cut in alone]), whole_cut_Q[[0, 1, 2, 5]])


def test_the_mass_is_close_to_the_exponential() -> None:
    distance_n = torch.linspace(0, 24, 200_001)
    exact_n = 2.0**30 * (-distance_n.double()).exp()
    error_n = (mass_ref(distance_n) - exact_n).abs() - 1.0  # rounded down
    assert float((error_n / exact_n).max()) < 3e-7 + 2.0**-21  # and the rounding of d / log 2
    assert mass_ref(torch.tensor([0.0, 21.5, INF])).tolist() == [1073741760, 0, 0]


def test_numpy_masses_equal_torch_masses() -> None:
    distance_n = randn(50_000, scale=9.0).abs()
    mass_n = cpu._mass(distance_n.numpy(), cpu._Scratch(50_000))
    assert mass_n.tolist() == mass_ref(distance_n).tolist()


@given(st.integers(1, 2**50), st.floats(0, 1, exclude_max=True, width=32))
def test_the_wanted_mass_is_the_least_that_suffices(mass: int, top_p: float) -> None:
    share = Fraction(math.floor(top_p * 2**24), 2**24)
    wanted = mass_wanted(torch.tensor(mass), torch.tensor(top_p)).item()
    assert wanted == max(1, math.ceil(share * mass))


def test_min_p_cut_is_its_logarithm() -> None:
    min_p_n = torch.tensor([0.9, 0.5, 1e-3, 1e-30])
    torch.testing.assert_close(min_p_cut(min_p_n), -min_p_n.log(), rtol=3e-7, atol=1e-7)
    edges = torch.tensor([0.0, -1.0, 2.0**-126, NAN, 1.0, 3.0])
    assert min_p_cut(edges).tolist() == [INF] * 4 + [pytest.approx(0.0, abs=1e-7), 0.0]


@settings(max_examples=60)
@given(
    logits=st.lists(st.integers(-12, 12), min_size=1, max_size=20),
    top_k=st.integers(0, 21),
    top_p=st.floats(0, 1, width=32),
)
def test_the_kept_set_is_the_smallest_that_suffices(
    logits: list[int], top_k: int, top_p: float
) -> None:
    """Of all sets of the nearest tokens, by their exact masses."""
    logits_1V = torch.tensor([logits]).float() / 2
    batch = sample_batch([Row(top_k=top_k, top_p=top_p)], len(logits))
    kept_V = _kept("cpu", logits_1V, batch)[0].numpy() if batch.has_cut else np.ones(1, bool)
    distance_V = (logits_1V.max() - logits_1V)[0].numpy()
    values = sorted(set(distance_V.tolist()))
    limit = next((d for d in values if (distance_V <= d).sum() >= top_k >= 1), values[-1])
    mass_V = mass_ref(torch.from_numpy(distance_V)).numpy() * (distance_V <= limit)
    wanted = max(1, math.ceil(Fraction(math.floor(top_p * 2**24), 2**24) * int(mass_V.sum())))
    if top_p < 1.0:
        limit = next(d for d in values if mass_V[distance_V <= d].sum() >= wanted)
    if batch.has_cut:
        assert kept_V.tolist() == (distance_V <= limit).tolist()


def test_a_smaller_mass_range_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: chunks that are left out too early change a cut of a flat row."""
    monkeypatch.setattr(cpu, "_MASS_RANGE", np.float32(3.0))
    logits_QV = randn(1, 49_152, scale=3.0)
    batch = sample_batch([Row(top_p=0.9)], 49_152)
    assert not torch.equal(_cuts("cpu", logits_QV, batch)[1], _cuts("ref", logits_QV, batch)[1])


def test_cost_counts_rows_with_a_rule() -> None:
    assert truncate_cost(3, 100, 2).bytes == 600
