"""logit_edits: masks, bias, bans and penalties, equal in Triton, on the CPU path and in plain
loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedraft.kernels.logit_edits import edit_logits_cost, edit_logits_ref
from pagedraft.kernels.logit_edits_cpu import edit_logits_cpu
from pagedraft.kernels.logit_edits_triton import COLUMNS, edit_logits_triton
from pagedraft.tests.compare import assert_same_bits
from pagedraft.tests.inputs import Guarded, randn
from pagedraft.tests.kernels.sample_inputs import INF, Row, plain_edited, sample_batch

NAN = float("nan")
IMPLEMENTATIONS = {"triton": edit_logits_triton, "cpu": edit_logits_cpu}
CHAT = Row(prompt=(3, 9, 9, 11), output=(4, 9, 4, 4))

# name: (vocabulary, rows)
CASES = {
    "repetition_of_prompt_and_output": (40, [replace(CHAT, repetition=1.3)]),
    "repetition_below_one": (40, [replace(CHAT, repetition=0.7)]),
    "presence_of_output_only": (40, [replace(CHAT, presence=0.6)]),
    "frequency_counts": (40, [replace(CHAT, frequency=0.3)]),
    "negative_penalties": (40, [replace(CHAT, frequency=-0.3, presence=-0.2)]),
    "neutral_row_beside_a_penalised_one": (40, [CHAT, replace(CHAT, presence=1.0)]),
    "empty_context": (40, [Row(repetition=2.0, presence=1.0, frequency=1.0)]),
    "drafts_in_and_outside_the_context": (
        40,
        [replace(CHAT, repetition=1.2, frequency=0.5, presence=0.1, drafts=(4, 7, 3, 7, 39))],
    ),
    "rows_of_one_request": (
        40,
        [replace(CHAT, frequency=0.5, drafts=(4, 8, 8)[:n]) for n in range(4)]
        + [Row(frequency=2.0, output=(1,), drafts=(2,))],
    ),
    "more_drafts_than_lanes": (64, [Row(frequency=0.1, drafts=tuple(range(40)) + (1, 39, 39))]),
    "bias": (40, [Row(bias={0: 2.5, 39: -100.0, 7: -INF}), Row()]),
    "bans": (40, [Row(banned=(0, 39)), Row(), Row(banned=(5,))]),
    "allowed": (70, [Row(allowed=(0, 31, 32, 63, 64, 69)), Row(), Row(allowed=())]),
    "one_token": (1, [replace(CHAT, prompt=(0,), output=(0,), drafts=(0,), frequency=0.5)]),
    "ids_outside_the_vocabulary": (
        9,
        [
            Row(
                **{"repetition": 2.0, "presence": 1.0, "bias": {-1: 5.0, 9: 5.0, 2: 5.0}},
                **{"banned": (-1, 9, 3), "prompt": (-1, 9, 4), "output": (400,)},
                drafts=(9, -1, 5),
            )
        ],
    ),
    "several_edits_of_one_token": (
        40,
        [
            Row(bias={2: 3.0, 4: 3.0, 5: 3.0}, allowed=(2, 4), banned=(2,)),
            replace(CHAT, bias={4: 6.0, 9: -6.0}, repetition=1.5, presence=0.5, drafts=(4, 20)),
        ],
    ),
    "two_programs_a_row": (
        COLUMNS + 5,
        [
            Row(
                bias={COLUMNS - 1: 1.0, COLUMNS: 2.0},
                banned=(COLUMNS + 4, 0),
                repetition=1.5,
                prompt=tuple(range(2, COLUMNS + 4, 11)),
                output=(1, COLUMNS + 2),
                drafts=(COLUMNS + 2, COLUMNS + 3, 17),
                frequency=0.25,
            )
        ],
    ),
}


def _edited(name: str, logits_QV: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    logits_QV = logits_QV.clone()
    IMPLEMENTATIONS[name](logits_QV, sample_batch(rows, logits_QV.shape[1], logits_QV.device))
    return logits_QV


def _plain(logits_QV: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    pairs = zip(logits_QV.cpu(), rows, strict=True)
    return torch.stack([plain_edited(logits_V, row) for logits_V, row in pairs])


@pytest.mark.parametrize("name", CASES)
def test_the_reference_agrees_with_plain_loops(name: str) -> None:
    vocab_size, rows = CASES[name]
    logits_QV = randn(len(rows), vocab_size, scale=3.0)
    before = logits_QV.clone()
    edited_QV = edit_logits_ref(logits_QV, sample_batch(rows, vocab_size))
    assert torch.equal(edited_QV, _plain(logits_QV, rows))
    assert torch.equal(logits_QV, before)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_plain_loops(name: str, implementation: str, device: torch.device) -> None:
    vocab_size, rows = CASES[name]
    logits_QV = randn(len(rows), vocab_size, scale=3.0, device=device)
    assert_same_bits(_edited(implementation, logits_QV, rows).cpu(), _plain(logits_QV, rows))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_drafts_count_as_committed_output(implementation: str, device: torch.device) -> None:
    """The row that verifies position i equals the row of plain decoding after i tokens."""
    drafts = (9, 20, 20, 3)
    penalised = replace(CHAT, repetition=1.3, presence=0.4, frequency=0.2)
    verified = [replace(penalised, drafts=drafts[:n]) for n in range(5)]
    committed = [replace(penalised, output=CHAT.output + drafts[:n]) for n in range(5)]
    logits_QV = randn(5, 40, device=device)
    assert_same_bits(
        _edited(implementation, logits_QV, verified), _edited(implementation, logits_QV, committed)
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_else_is_written(implementation: str, device: torch.device) -> None:
    """Guard regions, padding columns and the rows' gaps stay as they are."""
    guard = Guarded(2, 80, device=device)
    guard.tensor[:, :64] = randn(2, 64, device=device)
    before = guard.tensor.clone()
    row = Row(bias={1: 1.0, 70: 1.0}, banned=(2, 64), presence=1.0, output=(5, 65), drafts=(66,))
    batch = sample_batch([row, row], 80, device, vocab_size=64)
    columns_QV = guard.tensor if implementation == "triton" else guard.tensor[:, :64]
    IMPLEMENTATIONS[implementation](columns_QV, batch)
    guard.assert_untouched()
    assert_same_bits(guard.tensor[:, 64:], before[:, 64:])
    changed = (guard.tensor[:, :64] != before[:, :64]).nonzero()[:, 1]
    assert changed.tolist() == [1, 2, 5] * 2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_banned_column_may_hold_nan(implementation: str, device: torch.device) -> None:
    logits_QV = torch.tensor([[NAN, 1.0, 2.0]] * 2, device=device)
    out = _edited(implementation, logits_QV, [Row(banned=(0,)), Row(allowed=(1, 2))])
    assert out.tolist() == [[-INF, 1.0, 2.0]] * 2


TOKENS = st.lists(st.integers(0, 11), max_size=12).map(tuple)


@settings(max_examples=60)
@given(
    prompt=TOKENS,
    output=TOKENS,
    drafts=TOKENS,
    bias=st.dictionaries(st.integers(0, 11), st.floats(-9, 9, width=32), max_size=4),
    penalties=st.tuples(st.floats(0.5, 2, width=32), *[st.floats(-2, 2, width=32)] * 2),
)
def test_any_history_on_the_cpu_path(
    prompt: tuple[int, ...],
    output: tuple[int, ...],
    drafts: tuple[int, ...],
    bias: dict[int, float],
    penalties: tuple[float, float, float],
) -> None:
    rows = [Row(1.0, 0, 1.0, 0.0, *penalties, bias, (), None, prompt, output, drafts), CHAT]
    logits_QV = randn(2, 12, scale=2.0)
    out = _edited("cpu", logits_QV, rows)
    assert torch.equal(out, _plain(logits_QV, rows))


def test_one_count_too_many_is_noticed() -> None:
    """Teeth: a context that counts one draft more differs from plain loops."""
    logits_QV = randn(1, 40)
    rows = [replace(CHAT, frequency=0.01, drafts=(4,))]
    more = [replace(rows[0], drafts=(4, 4))]
    with pytest.raises(AssertionError, match="bits differ"):
        assert_same_bits(_edited("cpu", logits_QV, more), _plain(logits_QV, rows))


def test_cost_counts_entries_and_masks() -> None:
    assert edit_logits_cost(2, 64, num_entries=3).bytes == 48
    assert edit_logits_cost(2, 64, num_entries=3, has_allowed=True).bytes == 48 + 16
