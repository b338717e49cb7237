"""sample and process_logits with every parameter: alone, mixed, against the reference and plain
sorting."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagedraft.kernels.dispatch import use_implementation
from pagedraft.kernels.sample import (
    INVALID_TOKEN,
    SampleBatch,
    process_logits,
    process_logits_ref,
    sample,
    sample_ref,
)
from pagedraft.tests.compare import assert_same_bits
from pagedraft.tests.inputs import poisoned, randn
from pagedraft.tests.kernels.sample_inputs import (
    INF,
    Row,
    numbered,
    plain_probabilities,
    sample_batch,
)

NAN = float("nan")
FAST = ["triton", "cpu"]
TOKENS = tuple(range(12))

# Every parameter alone, then together; over a vocabulary of at least 12 tokens.
RULES = {
    "greedy": Row(temperature=0.0),
    "temperature": Row(temperature=0.7),
    "top_k": Row(top_k=4),
    "top_p": Row(top_p=0.8),
    "min_p": Row(min_p=0.15),
    "repetition": Row(repetition=1.6, prompt=(0, 3), output=(5, 5)),
    "presence": Row(presence=0.9, prompt=(0, 3), output=(5, 5, 7)),
    "frequency": Row(frequency=0.6, output=(5, 5, 7), drafts=(2, 5)),
    "bias": Row(bias={1: 2.0, 8: -1.0, 4: -INF}),
    "banned": Row(banned=(2, 11)),
    "allowed": Row(allowed=(0, 2, 3, 5, 7, 11)),
    "greedy_with_edits": Row(temperature=0.0, bias={9: 20.0}, banned=(9,), presence=3.0, top_k=2),
    "everything": Row(
        **{"temperature": 1.4, "top_k": 8, "top_p": 0.9, "min_p": 0.02, "repetition": 1.2},
        **{"presence": 0.3, "frequency": 0.2, "bias": {3: 1.0}, "banned": (6,)},
        **{"allowed": TOKENS[1:], "prompt": (1, 2), "output": (2, 3), "drafts": (3, 4)},
    ),
}
MIXED = numbered(list(RULES.values()))

# name: (columns, vocabulary, logit scale)
SIZES = {
    "small": (12, 12, 1.5),
    "padded": (300, 270, 1.5),
    "two_tiles": (2100, 2050, 2.0),
    "flat": (40, 40, 0.01),
}


def _logits(name: str, device: torch.device) -> torch.Tensor:
    """Rows for MIXED; padding columns hold NaN."""
    num_columns, vocab_size, scale = SIZES[name]
    logits_QV = poisoned(len(MIXED), num_columns, device=device)
    logits_QV[:, :vocab_size] = randn(len(MIXED), vocab_size, scale=scale, device=device)
    return logits_QV


def _batch(name: str, device: torch.device, rows: list[Row] = MIXED) -> SampleBatch:
    num_columns, vocab_size, _ = SIZES[name]
    return sample_batch(rows, num_columns, device, vocab_size=vocab_size)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("name", SIZES)
def test_all_parameters_in_one_batch(name: str, implementation: str, device: torch.device) -> None:
    logits_QV, batch = _logits(name, device), _batch(name, device)
    expected_Q, expected_QV = sample_ref(logits_QV, batch), process_logits_ref(logits_QV, batch)
    processed_QV = logits_QV.clone()
    with use_implementation(implementation):
        process_logits(processed_QV, batch)
        tokens_Q = sample(logits_QV, batch)
    assert torch.equal(tokens_Q, expected_Q)
    assert torch.equal(processed_QV, expected_QV)
    assert int(tokens_Q.max()) < SIZES[name][1]


@pytest.mark.parametrize("implementation", FAST)
def test_a_row_is_the_same_alone(implementation: str, device: torch.device) -> None:
    logits_QV = _logits("small", device)
    pairs = zip(logits_QV.clone().split(1), MIXED, strict=True)
    with use_implementation(implementation):
        alone = [sample(logits_1V, _batch("small", device, [row])) for logits_1V, row in pairs]
        tokens_Q = sample(logits_QV, _batch("small", device))
    assert torch.equal(torch.cat(alone), tokens_Q)


@pytest.mark.parametrize("implementation", FAST)
def test_the_order_of_rows_changes_nothing(implementation: str, device: torch.device) -> None:
    order = torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(3))
    logits_QV = _logits("small", device)
    shuffled_QV = logits_QV[order.to(device)]
    with use_implementation(implementation):
        tokens_Q = sample(logits_QV, _batch("small", device))
        again_Q = sample(shuffled_QV, _batch("small", device, [MIXED[q] for q in order]))
    assert torch.equal(again_Q, tokens_Q[order.to(device)])


@pytest.mark.parametrize("implementation", FAST)
def test_drafts_draw_as_committed_tokens_do(implementation: str, device: torch.device) -> None:
    """Verified positions draw what plain decoding draws there."""
    drafts = (4, 9, 9, 4, 30)
    row = Row(0.9, 20, 0.95, 0.01, 1.3, 0.5, 0.4, prompt=(3, 9), output=(4, 4))
    verified = [replace(row, drafts=drafts[:n], position=n) for n in range(6)]
    committed = [replace(row, output=row.output + drafts[:n], position=n) for n in range(6)]
    logits_QV = randn(6, 40, device=device)
    with use_implementation(implementation):
        verified_Q = sample(logits_QV.clone(), sample_batch(verified, 40, device))
        committed_Q = sample(logits_QV.clone(), sample_batch(committed, 40, device))
    assert torch.equal(verified_Q, committed_Q)


@pytest.mark.parametrize("implementation", [*FAST, "ref"])
@pytest.mark.parametrize("name", RULES)
def test_processed_logits_hold_the_distribution(
    name: str, implementation: str, device: torch.device
) -> None:
    logits_1V = randn(1, 12, scale=1.5, seed=2, device=device)
    expected_V = plain_probabilities(logits_1V[0].cpu(), RULES[name])
    with use_implementation(implementation):
        process_logits(logits_1V, sample_batch([RULES[name]], 12, device))
    probs_V = logits_1V[0].cpu().double().softmax(-1)
    torch.testing.assert_close(probs_V, expected_V, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("implementation", FAST)
def test_drawing_from_processed_logits_draws_the_same(
    implementation: str, device: torch.device
) -> None:
    logits_QV = _logits("padded", device)
    batch = _batch("padded", device)
    ones_Q = torch.ones_like(batch.temperature_Q)
    plain = SampleBatch(ones_Q, batch.seed_Q, batch.position_Q, batch.sample_index_Q)
    processed_QV = logits_QV.clone()
    with use_implementation(implementation):
        process_logits(processed_QV, batch)
        assert torch.equal(sample(processed_QV, plain), sample(logits_QV, batch))


# Special rows of [0, value, 2, -inf]: the token, and the processed logits (None: all NaN).
SPECIAL_ROWS = {
    "nan": (NAN, Row(top_k=1), INVALID_TOKEN, None),
    "nan_of_a_greedy_row": (NAN, Row(temperature=0.0, top_p=0.1), INVALID_TOKEN, None),
    "nan_with_penalties": (NAN, Row(presence=1.0, output=(1, 2), min_p=0.5), INVALID_TOKEN, None),
    "banned_nan": (NAN, Row(banned=(1, 2)), 0, [0.0, -INF, -INF, -INF]),
    "infinity": (INF, Row(top_p=0.5, top_k=2, min_p=0.1), 1, [-INF, 0.0, -INF, -INF]),
    "infinity_by_bias": (3.0, Row(bias={0: INF}, top_k=1), 0, [0.0, -INF, -INF, -INF]),
    "banned_infinity": (INF, Row(banned=(1,), top_k=1), 2, [-INF, -INF, 2.0, -INF]),
    "none_allowed": (1.0, Row(allowed=(), top_k=1), INVALID_TOKEN, None),
    "all_banned": (1.0, Row(banned=(0, 1, 2), top_p=0.1), INVALID_TOKEN, None),
    "only_minus_infinity_allowed": (1.0, Row(allowed=(3,), min_p=0.1), INVALID_TOKEN, None),
    "greedy": (2.0, Row(temperature=0.0, top_k=1), 1, [-INF, 0.0, -INF, -INF]),
}


@pytest.mark.parametrize("implementation", [*FAST, "ref"])
@pytest.mark.parametrize("name", SPECIAL_ROWS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_special_rows(name: str, implementation: str, device: torch.device) -> None:
    """Between two ordinary rows, which they leave alone."""
    value, row, token, processed = SPECIAL_ROWS[name]
    batch = sample_batch([Row(top_k=1), row, Row(top_k=1)], 6, device, vocab_size=4)
    logits_QV = torch.tensor([[0.0, value, 2.0, -INF, 9.0, 9.0]] * 3, device=device)
    logits_QV[::2, 1] = 7.0
    processed_QV = logits_QV.clone()
    with use_implementation(implementation):
        process_logits(processed_QV, batch)
        tokens_Q = sample(logits_QV, batch)
    assert tokens_Q.tolist() == [1, token, 1]
    expected_V = [NAN] * 6 if processed is None else [*processed, -INF, -INF]
    assert processed_QV[1].tolist() == pytest.approx(expected_V, nan_ok=True)
    assert processed_QV[::2].tolist() == [[-INF, 7.0, -INF, -INF, -INF, -INF]] * 2


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_logits_with_cuts(
    dtype: torch.dtype, implementation: str, device: torch.device
) -> None:
    rows = numbered([Row(top_k=5, top_p=0.9), Row(min_p=0.1), Row(temperature=0.0), Row()])
    logits_QV = randn(4, 300, scale=3.0, dtype=dtype, device=device)
    before_QV, batch = logits_QV.clone(), sample_batch(rows, 300, device)
    with use_implementation(implementation):
        tokens_Q = sample(logits_QV, batch)
    assert torch.equal(tokens_Q, sample_ref(logits_QV, batch))
    assert_same_bits(logits_QV, before_QV)


@pytest.mark.parametrize("implementation", [*FAST, "ref"])
def test_no_rows(implementation: str, device: torch.device) -> None:
    logits_QV = torch.zeros(0, 30, device=device)
    batch = replace(sample_batch([], 30, device), top_k_Q=torch.zeros(0).int().to(device))
    with use_implementation(implementation):
        process_logits(logits_QV, batch)
        assert sample(logits_QV, batch).shape == (0,)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_launches(num_rows: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Two for greedy and plain rows, one more for cuts, one more for edits."""
    from pagedraft.kernels import logit_edits_triton, sample_triton, truncate_triton

    launched = []

    class Counted:
        def __init__(self, name: str, kernel: object) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            launched.append(self.name)
            return self.kernel[grid]

    kernels = {
        "edit": (logit_edits_triton, "_edit_kernel"),
        "truncate": (truncate_triton, "_truncate_kernel"),
        "scan": (sample_triton, "_scan_kernel"),
        "merge": (sample_triton, "_merge_kernel"),
    }
    for name, (module, attribute) in kernels.items():
        monkeypatch.setattr(module, attribute, Counted(name, getattr(module, attribute)))
    logits_QV = randn(num_rows, 12, device=device)
    rules = [Row(), Row(top_k=3), Row(top_k=3, bias={1: 1.0})]
    with use_implementation("triton"):
        sample(logits_QV, sample_batch([rules[0]] * num_rows, 12, device))
        sample(logits_QV, sample_batch([rules[1]] * num_rows, 12, device))
        sample(logits_QV, sample_batch([rules[2]] * num_rows, 12, device))
    plain, cut = ["scan", "merge"], ["truncate", "scan", "merge"]
    assert launched == [*plain, *cut, "edit", *cut]
