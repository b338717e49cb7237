"""sample: greedy and Gumbel draws, equal in Triton, on the CPU path and in the reference."""

from __future__ import annotations

import pytest
import torch

from pagedraft.kernels import philox, sample_cpu
from pagedraft.kernels.dispatch import use_implementation
from pagedraft.kernels.sample import (
    INVALID_TOKEN,
    MIN_TEMPERATURE,
    SampleBatch,
    sample,
    sample_cost,
    sample_ref,
)
from pagedraft.kernels.sample_triton import sample_config
from pagedraft.tests.inputs import poisoned, randn

NAN, INF = float("nan"), float("inf")
FAST = ["triton", "cpu"]

# Special rows with the token that they must give at any temperature.
SPECIAL_ROWS = {
    "nan_at_the_end": ([0.0, 9.0, NAN], INVALID_TOKEN),
    "nan_beside_infinity": ([INF, NAN, 0.0], INVALID_TOKEN),
    "only_minus_infinity": ([-INF, -INF], INVALID_TOKEN),
    "one_finite": ([-INF, -INF, -1e30, -INF], 2),
    "infinity_wins": ([0.0, INF, 3e38], 1),
    "first_of_two_infinities": ([0.0, INF, 5.0, INF], 1),
    "single_column": ([-2.0], 0),
}

# name: (rows, vocabulary, logit scale, temperatures repeated over the rows, dtype)
CASES = {
    "greedy": (3, 50, 4.0, [0.0], torch.float32),
    "sampled": (4, 50, 1.0, [1.0], torch.float32),
    "mixed_temperatures": (6, 300, 2.0, [0.0, 0.7, 1.0, 5.0], torch.float32),
    "below_and_at_the_greedy_limit": (4, 40, 1e-4, [0.99e-5, 1e-5], torch.float32),
    "last_chunk_has_one_column": (3, 257, 1.0, [1.0, 0.0], torch.float32),
    "whole_chunks": (3, 512, 1.0, [1.0, 0.0], torch.float32),
    "many_rows": (12, 4, 1.0, [1.0], torch.float32),
    "several_splits": (3, 2500, 1.0, [1.0, 0.0, 2.0], torch.float32),
    "half_precision_ties": (4, 700, 0.01, [0.0, 1.0], torch.float16),
    "bfloat16_ties": (4, 300, 1.0, [0.0, 1.0], torch.bfloat16),
}


def _batch(temperatures: list[float], num_rows: int, device: torch.device) -> SampleBatch:
    row = torch.arange(num_rows)
    temperature_Q = torch.tensor([temperatures[r % len(temperatures)] for r in range(num_rows)])
    batch = SampleBatch(temperature_Q, row * 2**35 - 77, row + 1000)
    return _to(batch, device)


def _to(batch: SampleBatch, device: torch.device) -> SampleBatch:
    return SampleBatch(
        batch.temperature_Q.to(device),
        batch.seed_Q.to(device),
        batch.position_Q.to(device),
        None if batch.sample_index_Q is None else batch.sample_index_Q.to(device),
    )


def _chi_square(tokens_n: torch.Tensor, logits_V: torch.Tensor) -> float:
    """How many standard deviations the chi-square statistic lies above its mean."""
    expected_V = logits_V.double().softmax(-1) * len(tokens_n)
    observed_V = torch.bincount(tokens_n, minlength=len(logits_V))
    statistic = ((observed_V - expected_V) ** 2 / expected_V).sum()
    freedom = len(logits_V) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name: str, implementation: str, device: torch.device) -> None:
    num_rows, vocab_size, scale, temperatures, dtype = CASES[name]
    logits_QV = randn(num_rows, vocab_size, scale=scale, dtype=dtype, device=device)
    before = logits_QV.clone()
    batch = _batch(temperatures, num_rows, device)
    with use_implementation(implementation):
        tokens_Q = sample(logits_QV, batch)
    assert torch.equal(tokens_Q, sample_ref(logits_QV, batch))
    assert torch.equal(logits_QV, before)


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0, 50.0])
@pytest.mark.parametrize("implementation", [*FAST, "ref"])
@pytest.mark.parametrize("name", SPECIAL_ROWS)
@pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning:triton")
def test_special_rows(
    name: str, implementation: str, temperature: float, device: torch.device
) -> None:
    values, token = SPECIAL_ROWS[name]
    logits_QV = torch.tensor([values], device=device)
    with use_implementation(implementation):
        tokens_Q = sample(logits_QV, _batch([temperature], 1, device))
    assert tokens_Q.dtype == torch.int64
    assert tokens_Q.tolist() == [token]


@pytest.mark.parametrize("implementation", [*FAST, "ref"])
@pytest.mark.parametrize("places", [(3, 4), (7, 256), (255, 1500), (1024, 2499)], ids=str)
def test_greedy_ties_go_to_the_lowest_id(
    places: tuple[int, int], implementation: str, device: torch.device
) -> None:
    logits_QV = randn(1, 2500, device=device)
    logits_QV[0, list(places)] = 9.0
    with use_implementation(implementation):
        assert sample(logits_QV, _batch([0.0], 1, device)).tolist() == [places[0]]


@pytest.mark.parametrize("implementation", FAST)
def test_special_rows_leave_their_neighbours_alone(
    implementation: str, device: torch.device
) -> None:
    logits_QV = randn(6, 600, device=device)
    logits_QV[1, 599], logits_QV[3], logits_QV[4, 256] = NAN, -INF, INF
    batch = _batch([1.0], 6, device)
    with use_implementation(implementation):
        tokens_Q = sample(logits_QV, batch)
    assert tokens_Q[[1, 3, 4]].tolist() == [INVALID_TOKEN, INVALID_TOKEN, 256]
    assert torch.equal(tokens_Q, sample_ref(logits_QV, batch))


@pytest.mark.parametrize("implementation", FAST)
def test_a_row_does_not_depend_on_the_others(implementation: str, device: torch.device) -> None:
    logits_QV = randn(5, 1300, device=device)
    batch = _batch([1.0, 0.0, 0.5], 5, device)
    order = torch.tensor([3, 0, 4], device=device)
    part = SampleBatch(batch.temperature_Q[order], batch.seed_Q[order], batch.position_Q[order])
    with use_implementation(implementation):
        whole_Q, part_Q = sample(logits_QV, batch), sample(logits_QV[order], part)
    assert torch.equal(part_Q, whole_Q[order])


@pytest.mark.parametrize("implementation", FAST)
def test_sample_index_selects_another_draw(implementation: str, device: torch.device) -> None:
    logits_QV = torch.zeros(4, 2000, device=device)
    same = torch.full((4,), 5, device=device)
    batch = SampleBatch(same / 5.0, same, same, torch.arange(4, device=device))
    with use_implementation(implementation):
        tokens_Q = sample(logits_QV, batch)
    assert len(set(tokens_Q.tolist())) == 4
    assert torch.equal(tokens_Q, sample_ref(logits_QV, batch))


@pytest.mark.parametrize("implementation", FAST)
def test_padded_vocabulary_and_row_stride(implementation: str, device: torch.device) -> None:
    """Columns of -inf are never drawn; what lies between the rows is never read."""
    wide_QV = poisoned(4, 700, device=device)
    logits_QV = wide_QV[:, :640]
    logits_QV[:] = randn(4, 640, device=device)
    logits_QV[:, 515:] = -INF
    batch = _batch([100.0, 0.0], 4, device)
    with use_implementation(implementation):
        tokens_Q = sample(logits_QV, batch)
        assert torch.equal(tokens_Q, sample(logits_QV[:, :515], batch))
    assert int(tokens_Q.max()) < 515


@pytest.mark.parametrize("implementation", [*FAST, "ref"])
def test_no_rows(implementation: str, device: torch.device) -> None:
    with use_implementation(implementation):
        tokens_Q = sample(torch.zeros(0, 30, device=device), _batch([1.0], 0, device))
    assert (tokens_Q.shape, tokens_Q.dtype) == ((0,), torch.int64)


# How the logits look decides how much the CPU path can drop.
PRUNING_CASES = {
    "flat": (0.0, 0, 1.0),
    "peaked": (4.0, 3, 1.0),
    "one_certain_token": (1.0, 40, 1.0),
    "hot": (4.0, 3, 8.0),
    "cold": (4.0, 0, 0.01),
}


@pytest.mark.parametrize("vocab_size", [20_000, 20_224], ids=["part_chunk", "whole_chunks"])
@pytest.mark.parametrize("name", PRUNING_CASES)
@pytest.mark.usefixtures("cpu_path")
def test_pruning_changes_no_token(name: str, vocab_size: int) -> None:
    scale, spike, temperature = PRUNING_CASES[name]
    logits_QV = randn(12, vocab_size, scale=scale)
    logits_QV[:, ::4999] += 5 * spike
    batch = _batch([temperature], 12, torch.device("cpu"))
    assert torch.equal(sample(logits_QV, batch), sample_ref(logits_QV, batch))


@pytest.mark.usefixtures("cpu_path")
def test_pruning_too_much_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: a bound that is too low changes tokens of the cases above."""
    monkeypatch.setattr(sample_cpu, "_SLACK", -2.0)
    logits_QV = randn(12, 20_000, scale=4.0)
    batch = _batch([8.0], 12, torch.device("cpu"))
    assert not torch.equal(sample(logits_QV, batch), sample_ref(logits_QV, batch))


@pytest.mark.usefixtures("cpu_path")
def test_greedy_rows_need_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("noise was made")

    monkeypatch.setattr(sample_cpu, "philox4x32", refuse)
    logits_QV = randn(3, 1000)
    batch = _batch([0.0, MIN_TEMPERATURE / 2], 3, torch.device("cpu"))
    assert torch.equal(sample(logits_QV, batch), logits_QV.argmax(-1))
    with pytest.raises(AssertionError, match="noise was made"):
        sample(logits_QV, _batch([0.0, 1.0], 3, torch.device("cpu")))


# name: (vocabulary, number of draws, whether they differ by seed, else by position)
DRAW_CASES = {
    "one_chunk_by_position": (12, 40_000, False),
    "one_chunk_by_seed": (12, 40_000, True),
    "three_chunks_by_position": (600, 10_000, False),
    "three_chunks_by_seed": (600, 10_000, True),
}


@pytest.mark.parametrize("name", DRAW_CASES)
@pytest.mark.usefixtures("cpu_path")
def test_draws_follow_softmax(name: str) -> None:
    vocab_size, num_draws, by_seed = DRAW_CASES[name]
    logits_V = randn(vocab_size, seed=4) * 2
    row = torch.arange(num_draws)
    batch = SampleBatch(torch.full((num_draws,), 2.0), row * by_seed, row * (not by_seed))
    tokens_n = sample(logits_V.expand(num_draws, vocab_size), batch)
    assert abs(_chi_square(tokens_n, logits_V / 2)) < 4


def test_chi_square_notices_a_temperature_of_0_9() -> None:
    """Teeth: draws from a slightly wrong distribution fail the test above."""
    logits_V = randn(12, seed=4)
    row = torch.arange(40_000)
    batch = SampleBatch(torch.full((40_000,), 0.9), row, row)
    assert _chi_square(sample_ref(logits_V.expand(40_000, 12), batch), logits_V) > 8


@pytest.mark.parametrize("num_rows", [1, 2, 16, 300, 5000])
@pytest.mark.parametrize("vocab_size", [1, 1024, 1025, 49_152, 262_144])
def test_config_covers_the_vocabulary_without_empty_splits(num_rows: int, vocab_size: int) -> None:
    config = sample_config(num_rows, vocab_size)
    columns_a_split = config.tile_chunks * philox.NOISE_CHUNK * config.num_tiles
    assert columns_a_split * config.num_splits >= vocab_size
    assert columns_a_split * (config.num_splits - 1) < vocab_size
    assert config.num_splits <= 256


def test_cost_reads_the_logits_once() -> None:
    assert sample_cost(2, 100, 4).bytes == 2 * (400 + 28)
